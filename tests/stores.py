"""Small checkpoints, for tests of folders and files: there it does not matter what the images show."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from cspd.loading import checkpoint_files

CACHE = Path(os.environ["XDG_CACHE_HOME"])


@functools.cache
def small_checkpoint() -> str:
    """A folder with a MAR of two layers and its autoencoder."""
    files = checkpoint_files("digits32")
    return _folder("small_mar", {"target": files["draft"], "vae": files["vae"]})


@functools.cache
def small_vq_checkpoint() -> str:
    """A folder with a GPT of three layers and its tokenizer."""
    files = checkpoint_files("digits32_vq")
    return _folder("small_vq", {"target": files["draft"], "tokenizer": files["tokenizer"]})


def _folder(name: str, files: dict[str, Path]) -> str:
    folder = CACHE / name
    folder.mkdir()
    for part, file in files.items():
        shutil.copy(file, folder / f"{part}.safetensors")
    return str(folder)
