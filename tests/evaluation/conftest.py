"""Inception-v3 with random weights, for tests of several files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3


def random_inception(path: Path) -> None:
    """Writes a file like torch-fidelity's, with random weights."""
    torch.manual_seed(0)
    # its constructor would download the published ones
    extractor = FeatureExtractorInceptionV3.__new__(FeatureExtractorInceptionV3)
    torch.nn.Module.load_state_dict, own = lambda *_, **__: None, torch.nn.Module.load_state_dict
    try:
        with tempfile.TemporaryDirectory() as folder:
            empty = Path(folder) / "empty.pth"
            torch.save({}, empty)
            extractor.__init__("inception-v3-compat", ["2048"], str(empty))
    finally:
        torch.nn.Module.load_state_dict = own
    torch.save(extractor.state_dict(), path)


@pytest.fixture(scope="session")
def inception(tmp_path_factory):
    """A file like torch-fidelity's, with random weights."""
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    random_inception(path)
    return path
