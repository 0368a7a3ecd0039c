"""Inception-v3 with random weights, for tests of several files."""

from __future__ import annotations

import pytest
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3


@pytest.fixture(scope="session")
def inception(tmp_path_factory):
    """A file like torch-fidelity's, with random weights."""
    torch.manual_seed(0)
    shell = FeatureExtractorInceptionV3.__new__(FeatureExtractorInceptionV3)
    with pytest.MonkeyPatch.context() as patch:  # its constructor would download weights
        patch.setattr("torch_fidelity.feature_extractor_inceptionv3.load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: None)
        shell.__init__("inception-v3-compat", ["2048"])
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(shell.state_dict(), path)
    return path
