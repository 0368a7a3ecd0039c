"""What tests of the command line and of comparisons share."""

from __future__ import annotations

import json

import pytest
from comparisons import run
from texts import small_text_checkpoint

import cspd


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """A finished comparison: its folder and its report."""
    out = tmp_path_factory.mktemp("comparison")
    assert run(out) == 0
    return out, json.loads((out / "comparison.json").read_text(), parse_constant=pytest.fail)


@pytest.fixture(scope="session")
def digits():
    """An engine of the bundled MAR pair."""
    return cspd.load("digits32", max_batch=8, device="cpu")


@pytest.fixture(scope="module")
def text_checkpoint(tmp_path_factory):
    """The folder of a small model of texts."""
    with pytest.MonkeyPatch.context() as patch:
        yield small_text_checkpoint(tmp_path_factory.mktemp("pretrained_models"), patch)
