"""Metrics, their spaces, and the two-sample test."""

from __future__ import annotations

import hashlib
import itertools
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch_fidelity
from handwriting import KEYS, as_folder, drawn, saved_statistics
from scipy import stats
from torch_fidelity.metric_fid import fid_features_to_statistics
from torch_fidelity.metric_kid import KEY_METRIC_KID_MEAN, kid_features_to_metric

from cspd.evaluation.images import ImageFolder, ImageList, export_npz
from cspd.evaluation.metrics import (
    SPACES,
    Evaluation,
    Extracted,
    check,
    features,
    load_classifier,
    load_reference,
    measure,
)
from cspd.evaluation.scores import discrepancy, energy_test, polynomial
from cspd.models import bundled
from cspd.pixels import to_pil, to_uint8

OF_INCEPTION = "sfid", "fd_dinov2"  # scores that classifiers' spaces lack


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of PNGs: images to be measured, and a reference."""
    root = tmp_path_factory.mktemp("pictures")
    return [as_folder(*drawn(n, n, split), root / split) for n, split in ((60, "held-out"), (90, "train"))]


@pytest.fixture(scope="module")
def of_folders(folders):
    """The first folder measured against the second."""
    return measure(folders[0], Evaluation("digits", reference=load_reference(folders[1])))


def test_all_values_are_torch_fidelitys_of_the_same_pngs(folders, of_folders):
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folders[0]),
        input2=str(folders[1]),
        feature_extractor="cspd-digits",
        cuda=False,
        isc=True,
        isc_splits=1,
        fid=True,
        prc=True,
        save_cpu_ram=True,
        verbose=False,
        cache=False,
    )
    for name, key in KEYS.items():
        assert of_folders[name] == pytest.approx(theirs[key], rel=1e-5)
    assert of_folders["num"] == 60 and set(of_folders["missing"]) == {"accuracy", *OF_INCEPTION}
    for name, key in KEYS.items():
        low, high = of_folders[f"{name}_ci95"]
        assert low <= of_folders[name] <= high and 0 < high - low < 4 * of_folders[f"{name}_resolution"], key


def test_kid_is_torch_fidelitys_of_all_images(folders):
    x, y = (features(folder, space="digits").double() for folder in folders)
    subsets = {"kid_subsets": 2, "kid_subset_size": 60, "verbose": False}
    theirs = kid_features_to_metric(x, y[:60], **subsets)[KEY_METRIC_KID_MEAN]
    assert discrepancy(x, y[:60], polynomial).value == pytest.approx(theirs, rel=1e-6)


def test_features_are_the_classifiers_of_images_in_minus_1_to_1():
    images, _ = drawn(5, 0)
    pictures = ImageList(images)
    scaled = torch.stack([pictures[i] for i in range(5)]) / 127.5 - 1
    assert features(pictures, space="digits").allclose(load_classifier("digits").features(scaled), atol=1e-5)


def test_images_in_memory_are_measured_like_their_pngs(folders):
    images, labels = drawn(60, 60, "held-out")
    reference = load_reference(folders[1])
    ours = measure(ImageList(images), Evaluation("digits", reference=reference), labels=labels)
    of_pngs = measure(folders[0], Evaluation("digits", reference=reference), labels=ImageFolder(folders[0]).labels)
    for name in (*KEYS, "accuracy", "accuracy_ci95"):
        assert ours[name] == pytest.approx(of_pngs[name], rel=1e-6)
    assert set(ours["missing"]) == {*OF_INCEPTION} and ours["accuracy"] > 0.9
    wrong = measure(ImageList(images), Evaluation("digits"), labels=[9 - label for label in labels])
    assert wrong["accuracy"] < 0.1


def test_statistics_give_the_fid_of_their_images(folders, of_folders):
    statistics = saved_statistics(folders[1])
    assert statistics.images is None
    ours = measure(folders[0], Evaluation("digits", reference=statistics))
    assert ours["fid"] == pytest.approx(of_folders["fid"], 1e-5)
    assert "statistics" in ours["missing"]["kid"] and ours["kid"] is None
    assert ours["inception_score"] == pytest.approx(of_folders["inception_score"])


def test_fid_from_a_shifted_mean_is_the_squared_shift(folders):
    own = fid_features_to_statistics(features(folders[0], space="digits"))
    np.savez(folders[0].with_suffix(".npz"), mu=own["mu"] + 0.25, sigma=own["sigma"])
    fid = measure(folders[0], Evaluation("digits", reference=load_reference(folders[0].with_suffix(".npz"))))["fid"]
    assert fid == pytest.approx(128 * 0.25**2, rel=1e-4)


def test_statistics_and_images_in_one_file_serve_one_metric_each(folders, of_folders, tmp_path):
    export_npz(ImageFolder(folders[1]), tmp_path / "images.npz")
    images = np.load(tmp_path / "images.npz")["arr_0"]
    both = saved_statistics(folders[0], arr_0=images)  # the statistics are those of the measured images
    ours = measure(folders[0], Evaluation("digits", reference=both))
    assert ours["fid"] == pytest.approx(0, abs=1e-3)
    for name in ("kid", "precision", "recall", "density", "coverage"):
        assert ours[name] == of_folders[name]
    of_images = measure(folders[0], Evaluation("digits", reference=load_reference(tmp_path / "images.npz")))
    assert of_images["fid"] == pytest.approx(of_folders["fid"], 1e-6)


def test_adm_gets_uint8_images_without_compression(folders, tmp_path):
    pictures = ImageFolder(folders[0])
    export_npz(pictures, tmp_path / "adm.npz")
    with np.load(tmp_path / "adm.npz") as file:
        assert file.files == ["arr_0"]
        images = file["arr_0"]
    assert images.dtype == np.uint8 and images.shape == (60, 32, 32, 3)
    assert (images[17] == pictures[17].permute(1, 2, 0).numpy()).all()
    assert (tmp_path / "adm.npz").stat().st_size > images.nbytes


def test_rounding_is_that_of_the_pngs():
    values = torch.cat([torch.arange(256) / 255, (torch.arange(255) + 0.5) / 255, (torch.arange(255) + 0.499) / 255])
    image = values.repeat(3, 1).unsqueeze(1)
    assert (to_uint8(image).permute(1, 2, 0).numpy() == np.asarray(to_pil(image))).all()
    assert to_uint8(image)[0, 0, :256].tolist() == list(range(256))
    assert to_uint8(to_uint8(image)).equal(to_uint8(image))

    # to the nearest: truncation would take 254 of every 255 values one lower
    between = (torch.arange(255) + torch.tensor([[0.02], [0.48], [0.52], [0.98]])) / 255
    lower = list(range(255))
    upper = list(range(1, 256))
    assert to_uint8(between).tolist() == [lower, lower, upper, upper]


@pytest.mark.parametrize(
    "num, missing",
    [
        (1, {"fid", "inception_score", "kid", "cmmd", "precision", "recall", "density", "coverage"}),
        (3, {"precision", "recall", "density", "coverage"}),
        (5, {"density", "coverage"}),
        (19, set()),
        (20, set()),
    ],
)
def test_few_images_are_measured_as_far_as_they_can_be(num, missing):
    images, labels = drawn(num, 1)
    how = Evaluation("digits", reference=load_reference(SPACES["digits"].reference))
    values = measure(ImageList(images), how, labels=labels)
    assert set(values["missing"]) == missing | {*OF_INCEPTION}
    for name in (*KEYS, "kid", "coverage"):
        gone = name in missing
        assert (values[name] is None) == gone and (gone or np.isfinite(values[name]))
        assert (values[f"{name}_ci95"] is None) == (num < 20)


def test_the_bundled_reference_is_of_the_training_data():
    reference = load_reference(SPACES["digits"].reference)
    kept = features(reference.images, space="digits")
    assert reference.fingerprint == hashlib.sha256((bundled()["digits32"] / "reference.npz").read_bytes()).hexdigest()
    assert np.abs(kept.mean(0).numpy() - reference.statistics["mu"]).max() < 0.1
    train, other = (
        measure(ImageList(drawn(600, 7, split)[0]), Evaluation("digits", reference=reference))
        for split in ("train", "held-out")
    )
    assert train["fid"] < 0.2 < other["fid"] < 1
    assert train["kid"] < other["kid"] and train["precision"] > other["precision"] > 0.5


def test_the_script_makes_a_reference_of_a_folder(folders, tmp_path, monkeypatch, capsys):
    out = tmp_path / "made.npz"
    scripts = Path(__file__).parents[2] / "scripts" / "train"
    monkeypatch.syspath_prepend(str(scripts))
    monkeypatch.setattr(sys, "argv", ["", "--images", str(folders[1]), "--keep", "30", "--out", str(out)])
    runpy.run_path(str(scripts / "make_reference_stats.py"), run_name="__main__")
    assert "30" in capsys.readouterr().out
    made, expected = load_reference(out), fid_features_to_statistics(features(folders[1], space="digits"))
    for name in ("mu", "sigma"):
        assert np.allclose(made.statistics[name], expected[name])
    assert len({made.images[i].numpy().tobytes() for i in range(30)}) == 30


def test_a_class_without_probability_has_no_share_of_the_inception_score():
    """Its probability is 0 in double precision, where torch-fidelity's is NaN."""
    images, _ = drawn(20, 1)
    logits = torch.zeros(20, 10)
    logits[:, 3] = -2000
    values = measure(ImageList(images), Evaluation("digits"), extracted=Extracted(torch.zeros(20, 128), logits))
    assert values["inception_score"] == pytest.approx(1)


def test_classes_that_the_classifier_does_not_know_have_no_accuracy():
    images, labels = drawn(3, 1)
    values = measure(ImageList(images), Evaluation("digits"), labels=[*labels[:2], 10])
    assert values["accuracy"] is None and "0..9" in values["missing"]["accuracy"]


def test_images_of_another_size_or_number_are_refused(tmp_path):
    images, labels = drawn(4, 0)
    with pytest.raises(ValueError, match="32x48"):
        check(Evaluation("digits"), 48, 32)
    with pytest.raises(ValueError, match="3 labels"):
        measure(ImageList(images), Evaluation("digits"), labels=labels[:3])
    with pytest.raises(ValueError, match="vgg"):
        measure(ImageList(images), Evaluation("vgg"))
    with pytest.raises(ValueError, match="empty"):
        (tmp_path / "empty").mkdir()
        ImageFolder(tmp_path / "empty")
    as_folder(torch.zeros(2, 3, 64, 64), labels, tmp_path / "large")
    with pytest.raises(ValueError, match="64x64"):
        check(Evaluation("digits", reference=load_reference(tmp_path / "large")), 32)


def test_a_folder_is_read_without_our_overviews_and_only_of_one_size(tmp_path):
    images, labels = drawn(4, 0)
    folder = as_folder(images, labels, tmp_path / "images")
    for name in ("grid.png", "heatmap.png"):
        to_pil(torch.zeros(3, 99, 99)).save(folder / name)
    assert len(ImageFolder(folder)) == 4 and ImageFolder(folder).labels == labels
    before = load_reference(folder).fingerprint
    to_pil(torch.zeros(3, 32, 32)).save(folder / "more.png")
    assert ImageFolder(folder).labels is None
    assert load_reference(folder).fingerprint != before
    to_pil(torch.zeros(3, 48, 64)).save(folder / "large.png")
    with pytest.raises(ValueError, match=r"large\.png"):
        ImageFolder(folder)


# ---- The two-sample test: p-values are uniform if the distributions are equal, and small if they differ


def pairs(num, seed, channels=6, shared=1.0):
    """x, y [num, channels] of one distribution with a common part, like two methods' images of the same seeds."""
    generator = torch.Generator().manual_seed(seed)
    common, x, y = torch.randn(3, num, channels, generator=generator)
    return shared * common + x, shared * common + y


@pytest.mark.parametrize("shared", [0.0, 3.0])
def test_p_values_are_uniform_if_the_distributions_are_equal(shared):
    p = np.array([energy_test(*pairs(12, seed, shared=shared), permutations=99) for seed in range(400)])
    assert stats.kstest(p, "uniform").pvalue > 0.01
    assert (p <= 0.05).mean() < 0.05 + 3 * (0.05 * 0.95 / 400) ** 0.5


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y + 0.4,
        lambda y: y * 1.5,
        lambda y: y + 1.5 * y[:, :1].roll(1, 0),  # channels move together
        lambda y: y.sign() * (y.abs() + 0.7),  # the same mean, another shape
    ],
    ids=["mean", "variance", "correlation", "shape"],
)
def test_p_values_are_small_if_they_differ(change):
    p = [energy_test(x, change(y)) for x, y in (pairs(100, seed) for seed in range(5))]
    assert max(p) <= 0.01


def test_pairs_are_kept_together():
    """A shift far below the spread of the images is found, since the images of a pair share most of it."""
    x, y = pairs(100, 0, shared=20.0)
    assert energy_test(x, y + 1) <= 0.01
    assert energy_test(x, (y + 1)[torch.randperm(100, generator=torch.Generator().manual_seed(1))]) > 0.01


def test_agrees_with_all_permutations_of_a_small_sample():
    """With 8 pairs, the p-value is the fraction of the 2^8 swaps whose energy distance is as large."""

    def energy(x, y):
        between, within_x, within_y = ((a[:, None] - b).norm(dim=-1).mean() for a, b in ((x, y), (x, x), (y, y)))
        return 2 * between - within_x - within_y

    for seed, shift in ((0, 0.0), (1, 0.8), (2, 0.3)):
        x, y = (part.double() for part in pairs(8, seed, channels=3))
        y = y + shift
        swaps = torch.tensor(list(itertools.product([False, True], repeat=8)))[:, :, None]
        distances = torch.stack([energy(torch.where(s, y, x), torch.where(s, x, y)) for s in swaps])
        exact = (distances >= energy(x, y) - 1e-12).double().mean().item()
        assert energy_test(x, y, permutations=9999) == pytest.approx(exact, abs=0.02)


@pytest.mark.parametrize("unit", [1e-15, 1.0, 1e6])
def test_it_is_reproducible_and_symmetric_in_any_unit(unit):
    x, y = (unit * part for part in pairs(20, 3))
    p = energy_test(x, y)
    torch.manual_seed(7)
    assert p == energy_test(x, y) == energy_test(y, x) == energy_test(x.view(20, 2, 3), y.view(20, 2, 3))
    assert p != energy_test(x, y, seed=1) and p == energy_test(*pairs(20, 3))
    assert energy_test(x, x) == 1
    assert energy_test(x, y + 100 * unit) == pytest.approx(1 / 1000)  # never 0: the sample itself counts


def test_unsuitable_samples_are_refused():
    x, y = pairs(8, 0)
    assert 0 < energy_test(x, y) <= 1
    for few, others in ((x[:7], y[:7]), (x, torch.cat([y, y[:1]]))):
        with pytest.raises(ValueError, match="samples"):
            energy_test(few, others)
    y[3, 1] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        energy_test(x, y)
