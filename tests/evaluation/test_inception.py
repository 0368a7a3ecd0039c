"""The Inception space: features from a file of weights, values equal to torch-fidelity's, errors for other files."""

from __future__ import annotations

import os

import pytest
import torch
import torch_fidelity
from handwriting import KEYS, as_folder, drawn, saved_statistics

from cspd.evaluation import metrics
from cspd.evaluation.images import ImageList
from cspd.evaluation.metrics import SPACES, Evaluation, check, load_reference, measure


def test_inception_from_a_file_of_weights(inception):
    images, _ = drawn(2, 3)
    how = Evaluation("inception", inception)
    assert how.extract(ImageList(images)).features.shape == (2, 2048)
    check(how, 32)
    with pytest.raises(ValueError):
        check(how._replace(reference=load_reference(SPACES["digits"].reference)), 32)


@pytest.mark.slow
def test_inception_values_are_torch_fidelitys(inception, tmp_path):
    images, labels = drawn(20, 3)
    folder = as_folder(torch.nn.functional.interpolate(images, size=(64, 64)), labels, tmp_path / "images")
    statistics = saved_statistics(folder, space="inception", weights=inception)
    ours = measure(folder, Evaluation("inception", inception, statistics))
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folder),
        feature_extractor_weights_path=str(inception),
        cuda=False,
        isc=True,
        isc_splits=1,
        save_cpu_ram=True,
        verbose=False,
        cache=False,
    )
    assert ours["inception_score"] == pytest.approx(theirs[KEYS["inception_score"]], rel=1e-5)
    assert ours["fid"] == pytest.approx(0, abs=1e-3) and "classifier" in ours["missing"]["accuracy"]


def test_code_in_a_weights_file_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "was run"),)

    torch.save(Evil(), tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=r"evil\.pth"):
        check(Evaluation("inception", tmp_path / "evil.pth"), 64)
    assert not (tmp_path / "was run").exists()


def test_other_weights_than_inceptions_are_refused(tmp_path):
    path = tmp_path / "other.pth"
    with pytest.raises(ValueError, match=r"other\.pth"):
        check(Evaluation("inception", path), 64)
    torch.save({"fc.weight": torch.zeros(1008, 2048)}, path)
    with pytest.raises(ValueError, match=r"other\.pth"):
        check(Evaluation("inception", path), 64)


def test_features_resume_where_they_were_interrupted(tmp_path, monkeypatch):
    """Chunk by chunk from the user's cache, which is empty in the end; other pixels or weights are computed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(metrics, "CHUNK", 2)
    images, _ = drawn(7, 3)
    computed = []

    def network(batch):
        if len(computed) == 3:
            raise KeyboardInterrupt
        computed.append(len(batch))
        pixels = batch.double().flatten(1)
        return pixels.mean(1), pixels[:, :3]

    def run(about):
        return metrics.run_over(ImageList(images), network, torch.device("cpu"), about)

    for about in ({"weights": "a"}, {"weights": "b"}):
        computed.clear()
        with pytest.raises(KeyboardInterrupt):
            run(about)
        computed.clear()
        mean, three = run(about)
        assert computed == [1] and mean.shape == (7,) and three.shape == (7, 3)
        pixels = torch.stack([ImageList(images)[i] for i in range(7)]).double().flatten(1)
        assert torch.equal(mean, pixels.mean(1)) and torch.equal(three, pixels[:, :3])
        assert not [*(tmp_path / "cspd" / "features").iterdir()]


@pytest.mark.slow
def test_weights_with_nan_are_refused(inception, tmp_path):
    weights = torch.load(inception)
    weights["fc.weight"][5, 7] = torch.nan
    torch.save(weights, tmp_path / "damaged.pth")
    with pytest.raises(ValueError, match=r"damaged\.pth"):
        check(Evaluation("inception", tmp_path / "damaged.pth"), 64)
