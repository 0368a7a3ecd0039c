"""Small engines that the tests of `cspd serve` share."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from stores import small_checkpoint, small_vq_checkpoint
from texts import small_text_checkpoint

import cspd
from cspd.models import bundled_folder


@pytest.fixture(scope="module")  # the text encoder is patched meanwhile
def engines(tmp_path_factory):
    """Two class-conditional models, with the class names of the digits, and a text-to-image model; each alone."""
    engines = {}
    for name, checkpoint in (("mar", small_checkpoint()), ("vq", small_vq_checkpoint())):
        folder = tmp_path_factory.mktemp(name)
        for file in Path(checkpoint).glob("*.safetensors"):
            (folder / file.name).symlink_to(file.resolve())
        shutil.copy(bundled_folder("digits32") / "cspd.json", folder)
        engines[name] = cspd.load(folder, max_batch=4, device="cpu")
    with pytest.MonkeyPatch.context() as patch:
        folder = small_text_checkpoint(tmp_path_factory.mktemp("texts"), patch)
        engines["texts"] = cspd.load(folder, max_batch=4, device="cpu")
        yield engines
