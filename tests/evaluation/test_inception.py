"""The Inception space: features from a file of weights, values equal to torch-fidelity's, errors for other files."""

from __future__ import annotations

import os

import pytest
import torch
import torch_fidelity
from handwriting import KEYS, as_folder, drawn, saved_statistics
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from cspd.evaluation.images import ImageList
from cspd.evaluation.metrics import SPACES, check, features, load_reference, measure


@pytest.fixture(scope="module")
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


def test_inception_from_a_file_of_weights(inception):
    images, _ = drawn(2, 3)
    options = {"space": "inception", "weights": inception}
    assert features(ImageList(images), **options).shape == (2, 2048)
    check(32, **options)
    with pytest.raises(ValueError):
        check(32, reference=load_reference(SPACES["digits"].reference), **options)


@pytest.mark.slow
def test_inception_values_are_torch_fidelitys(inception, tmp_path):
    images, labels = drawn(20, 3)
    folder = as_folder(torch.nn.functional.interpolate(images, size=(64, 64)), labels, tmp_path / "images")
    statistics = saved_statistics(folder, space="inception", weights=inception)
    ours = measure(folder, space="inception", weights=inception, reference=statistics)
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folder),
        feature_extractor_weights_path=str(inception),
        cuda=False,
        isc=True,
        save_cpu_ram=True,
        verbose=False,
        cache=False,
    )
    for name in ("inception_score", "inception_score_std"):
        assert ours[name] == pytest.approx(theirs[KEYS[name]], rel=1e-5)
    assert ours["fid"] == pytest.approx(0, abs=1e-3) and "classifier" in ours["missing"]["accuracy"]


def test_code_in_a_weights_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save(Evil(), tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth"):
        check(64, space="inception", weights=tmp_path / "evil.pth")
    assert not (tmp_path / "was run").exists()


def test_other_weights_than_inceptions_are_refused(tmp_path):
    path = tmp_path / "other.pth"
    with pytest.raises(ValueError, match=r"other\.pth"):
        check(64, space="inception", weights=path)
    torch.save({"fc.weight": torch.zeros(1008, 2048)}, path)
    with pytest.raises(ValueError, match=r"other\.pth"):
        check(64, space="inception", weights=path)


@pytest.mark.slow
def test_weights_with_nan_are_refused(inception, tmp_path):
    weights = torch.load(inception)
    weights["fc.weight"][5, 7] = torch.nan
    torch.save(weights, tmp_path / "damaged.pth")
    with pytest.raises(ValueError, match=r"damaged\.pth"):
        check(64, space="inception", weights=tmp_path / "damaged.pth")
