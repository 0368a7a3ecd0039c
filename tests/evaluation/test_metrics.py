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

from cspd.evaluation.images import ImageFolder, ImageList, export_npz
from cspd.evaluation.metrics import SPACES, check, energy_test, features, load_classifier, load_reference, measure
from cspd.models import bundled
from cspd.request import to_pil, to_uint8


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """PNGs to be measured, of other handwriting, and PNGs to measure against."""
    root = tmp_path_factory.mktemp("pictures")
    return [as_folder(*drawn(n, n, split), root / split) for n, split in ((60, "held-out"), (90, "train"))]


def test_all_values_are_torch_fidelitys_of_the_same_pngs(folders):
    ours = measure(folders[0], space="digits", reference=load_reference(folders[1]))
    theirs = torch_fidelity.calculate_metrics(
        input1=str(folders[0]),
        input2=str(folders[1]),
        feature_extractor="cspd-digits",
        kid_subset_size=60,
        cuda=False,
        isc=True,
        fid=True,
        kid=True,
        prc=True,
        save_cpu_ram=True,
        verbose=False,
        cache=False,
    )
    assert {name: ours[name] for name in KEYS} == pytest.approx({name: theirs[key] for name, key in KEYS.items()}, 1e-5)
    assert ours["num"] == 60 and set(ours["missing"]) == {"accuracy"}


def test_features_are_the_classifiers_of_images_in_minus_1_to_1():
    images, _ = drawn(5, 0)
    pictures = ImageList(images)
    scaled = torch.stack([pictures[i] for i in range(5)]) / 127.5 - 1
    assert features(pictures, space="digits").allclose(load_classifier("digits").features(scaled), atol=1e-5)


def test_images_in_memory_are_measured_like_their_pngs(folders):
    images, labels = drawn(60, 60, "held-out")
    reference = load_reference(folders[1])
    ours = measure(ImageList(images), space="digits", reference=reference, labels=labels)
    of_pngs = measure(folders[0], space="digits", reference=reference, labels=ImageFolder(folders[0]).labels)
    assert ours.pop("missing") == of_pngs.pop("missing") == {}
    assert ours.pop("accuracy_ci95") == of_pngs.pop("accuracy_ci95")
    assert ours == pytest.approx(of_pngs, rel=1e-6)
    assert ours["accuracy"] > 0.9
    wrong = measure(ImageList(images), space="digits", labels=[9 - label for label in labels])
    assert wrong["accuracy"] < 0.1


def test_precision_is_of_the_samples_and_recall_of_the_reference(folders, tmp_path):
    """Few samples that are in the reference are all among its images, most of which are far from them."""
    images, labels = drawn(90, 90)
    as_folder(images[:4], labels, tmp_path / "few")
    values = measure(tmp_path / "few", space="digits", reference=load_reference(folders[1]))
    assert values["precision"] == 1 and values["recall"] < 0.9


def test_stored_statistics_give_the_fid_of_the_images_they_are_of(folders):
    statistics = saved_statistics(folders[1])
    assert statistics.images is None
    ours = measure(folders[0], space="digits", reference=statistics)
    of_images = measure(folders[0], space="digits", reference=load_reference(folders[1]))
    assert ours["fid"] == pytest.approx(of_images["fid"], 1e-5)
    assert "statistics, no images" in ours["missing"]["kid"] and ours["kid"] is None
    assert ours["inception_score"] == pytest.approx(of_images["inception_score"])


def test_fid_from_a_shifted_mean_is_the_squared_shift(folders):
    own = fid_features_to_statistics(features(folders[0], space="digits"))
    np.savez(folders[0].with_suffix(".npz"), mu=own["mu"] + 0.25, sigma=own["sigma"])
    fid = measure(folders[0], space="digits", reference=load_reference(folders[0].with_suffix(".npz")))["fid"]
    assert fid == pytest.approx(128 * 0.25**2, rel=1e-4)


def test_statistics_and_images_in_one_file_serve_one_metric_each(folders, tmp_path):
    pictures = ImageFolder(folders[1])
    export_npz(pictures, tmp_path / "images.npz")
    images = np.load(tmp_path / "images.npz")["arr_0"]
    both = saved_statistics(folders[0], arr_0=images)  # statistics of others than the images
    ours = measure(folders[0], space="digits", reference=both)
    assert ours["fid"] == pytest.approx(0, abs=1e-3)  # of the very images measured
    of_images = measure(folders[0], space="digits", reference=load_reference(folders[1]))
    assert [ours[n] for n in ("kid", "precision", "recall")] == [of_images[n] for n in ("kid", "precision", "recall")]
    plain = measure(folders[0], space="digits", reference=load_reference(tmp_path / "images.npz"))
    assert plain["fid"] == pytest.approx(of_images["fid"], 1e-6)


def test_adm_gets_whole_uint8_images_without_compression(folders, tmp_path):
    pictures = ImageFolder(folders[0])
    export_npz(pictures, tmp_path / "adm.npz")
    with np.load(tmp_path / "adm.npz") as file:
        assert file.files == ["arr_0"]
        images = file["arr_0"]
    assert images.dtype == np.uint8 and images.shape == (60, 32, 32, 3)
    assert (images[17] == pictures[17].permute(1, 2, 0).numpy()).all()
    assert (tmp_path / "adm.npz").stat().st_size > images.nbytes
    assert list(tmp_path.iterdir()) == [tmp_path / "adm.npz"]


def test_rounding_is_that_of_the_pngs():
    values = torch.cat([torch.arange(256) / 255, (torch.arange(255) + 0.5) / 255, (torch.arange(255) + 0.499) / 255])
    image = values.repeat(3, 1).unsqueeze(1)
    assert (to_uint8(image).permute(1, 2, 0).numpy() == np.asarray(to_pil(image))).all()
    assert to_uint8(image)[0, 0, :256].tolist() == list(range(256))
    assert to_uint8(to_uint8(image)).equal(to_uint8(image))


@pytest.mark.parametrize(
    "num, missing",
    [
        (1, {"fid", "inception_score", "kid", "precision", "recall"}),
        (3, {"inception_score", "precision", "recall"}),
        (19, {"inception_score"}),
        (20, set()),
    ],
)
def test_few_images_are_measured_as_far_as_they_can_be(num, missing):
    images, labels = drawn(num, 1)
    values = measure(
        ImageList(images), space="digits", reference=load_reference(SPACES["digits"].reference), labels=labels
    )
    assert set(values["missing"]) == missing
    for name in (*KEYS, "accuracy"):
        gone = name.removesuffix("_std") in missing
        assert (values[name] is None) == gone and (gone or np.isfinite(values[name]))


def test_the_bundled_reference_is_of_the_training_data():
    reference = load_reference(SPACES["digits"].reference)
    kept = features(reference.images, space="digits")
    assert reference.fingerprint == hashlib.sha256((bundled()["digits32"] / "reference.npz").read_bytes()).hexdigest()
    assert np.abs(kept.mean(0).numpy() - reference.statistics["mu"]).max() < 0.1
    train, other = (
        measure(ImageList(drawn(600, 7, split)[0]), space="digits", reference=reference)
        for split in ("train", "held-out")
    )
    assert train["fid"] < 0.2 < other["fid"] < 1
    assert train["kid"] < other["kid"] and train["precision"] > other["precision"] > 0.5


def test_the_script_makes_a_reference_of_a_folder(folders, tmp_path, monkeypatch, capsys):
    out = tmp_path / "made.npz"
    scripts = Path(__file__).parents[2] / "scripts"
    monkeypatch.syspath_prepend(str(scripts))

    def make(folder, keep):
        monkeypatch.setattr(sys, "argv", ["", "--images", str(folder), "--keep", str(keep), "--out", str(out)])
        runpy.run_path(str(scripts / "make_reference_stats.py"), run_name="__main__")

    single = as_folder(*drawn(1, 0), tmp_path / "single")
    for folder, keep in ((single, 1), (folders[1], -5)):
        with pytest.raises(SystemExit):
            make(folder, keep)
        assert str(keep) in capsys.readouterr().err and not out.exists()
    make(folders[1], 30)
    assert "30" in capsys.readouterr().out
    made, expected = load_reference(out), fid_features_to_statistics(features(folders[1], space="digits"))
    assert np.allclose(made.statistics["sigma"], expected["sigma"]) and np.allclose(
        made.statistics["mu"], expected["mu"]
    )
    assert len({made.images[i].numpy().tobytes() for i in range(30)}) == 30


def test_a_number_that_is_none_is_missing_with_a_reason():
    """Torch-fidelity's Inception score of a class whose probability is 0 in double precision."""
    images, _ = drawn(20, 1)
    logits = torch.zeros(20, 10)
    logits[:, 3] = -2000
    values = measure(ImageList(images), space="digits", extracted=(torch.zeros(20, 128), logits))
    assert values["inception_score"] is None and values["missing"]["inception_score"] == "it comes out as nan"


@pytest.mark.parametrize("label", [-1, 10, 10**22])
def test_classes_that_the_classifier_does_not_know_have_no_accuracy(label):
    images, labels = drawn(3, 1)
    values = measure(ImageList(images), space="digits", labels=[*labels[:2], label])
    assert values["accuracy"] is None and "knows classes 0..9" in values["missing"]["accuracy"]


def test_what_does_not_fit_is_rejected(tmp_path):
    images, labels = drawn(4, 0)
    with pytest.raises(ValueError):
        check(64, space="digits")
    with pytest.raises(ValueError):
        check(48, 32, space="digits")
    with pytest.raises(ValueError):
        measure(ImageList(images), space="digits", labels=labels[:3])
    with pytest.raises(ValueError):
        measure(ImageList(images), space="vgg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError):
        ImageFolder(tmp_path / "empty")
    as_folder(torch.zeros(2, 3, 64, 64), labels, tmp_path / "large")
    with pytest.raises(ValueError):
        check(32, space="digits", reference=load_reference(tmp_path / "large"))


def test_a_folder_is_read_without_our_overviews_and_only_of_one_size(folders, tmp_path):
    images, labels = drawn(4, 0)
    folder = as_folder(images, labels, tmp_path / "images")
    to_pil(torch.zeros(3, 99, 99)).save(folder / "grid.png")
    to_pil(torch.zeros(3, 32, 32)).save(folder / "heatmap.png")
    found = ImageFolder(folder)
    assert len(found) == 4 and found.labels == labels
    to_pil(torch.zeros(3, 32, 32)).save(folder / "comparison.png")  # a name that no command of ours gives beside images
    assert len(ImageFolder(folder)) == 5
    (folder / "comparison.png").unlink()
    before = load_reference(folder).fingerprint
    to_pil(torch.zeros(3, 32, 32)).save(folder / "more.png")
    assert ImageFolder(folder).labels is None
    assert load_reference(folder).fingerprint != before
    to_pil(torch.zeros(3, 48, 64)).save(folder / "large.png")
    with pytest.raises(ValueError, match=r"large\.png"):
        ImageFolder(folder)


# ---- The two-sample test: p-values are uniform where distributions are equal, and small where they differ


def pairs(num, seed, channels=6, shared=1.0):
    """x, y [num, channels] of one distribution, with a common part as two methods' images of one seed have."""
    generator = torch.Generator().manual_seed(seed)
    common, x, y = torch.randn(3, num, channels, generator=generator)
    return shared * common + x, shared * common + y


@pytest.mark.parametrize("shared", [0.0, 3.0])
def test_p_values_are_uniform_where_the_distributions_are_equal(shared):
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
def test_p_values_are_small_where_they_differ(change):
    p = [energy_test(x, change(y)) for x, y in (pairs(100, seed) for seed in range(5))]
    assert max(p) <= 0.01


def test_pairs_are_kept_together():
    """A shift far below the spread of the images shows, since both images of a seed have the same spread."""
    x, y = pairs(100, 0, shared=20.0)
    assert energy_test(x, y + 1) <= 0.01
    assert energy_test(x, (y + 1)[torch.randperm(100, generator=torch.Generator().manual_seed(1))]) > 0.01


def test_agrees_with_all_permutations_of_a_small_sample():
    """With 8 pairs the p-value is the share of the 2^8 swaps whose energy distance is as large."""

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


def test_is_reproducible_symmetric_and_takes_tokens():
    x, y = pairs(20, 3)
    p = energy_test(x, y)
    torch.manual_seed(7)
    assert p == energy_test(x, y) == energy_test(y, x) == energy_test(x.view(20, 2, 3), y.view(20, 2, 3))
    assert p != energy_test(x, y, seed=1)
    assert energy_test(x, x) == 1
    assert energy_test(x, y + 100) == pytest.approx(1 / 1000)  # never 0: the sample itself counts


@pytest.mark.parametrize("num, other", [(7, 7), (0, 0), (8, 9)])
def test_too_few_or_unpaired_samples_are_rejected(num, other):
    with pytest.raises(ValueError):
        energy_test(torch.randn(num, 2), torch.randn(other, 2))
    assert 0 < energy_test(*pairs(8, 0)) <= 1


@pytest.mark.parametrize("unit", [1e-15, 1.0, 1e6])
def test_the_unit_does_not_matter(unit):
    x, y = pairs(100, 0)
    assert energy_test(unit * x, unit * x) == 1
    assert energy_test(unit * x, unit * (y + 0.4)) == energy_test(x, y + 0.4) <= 0.01


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_no_numbers_have_no_p_value(value):
    x, y = pairs(8, 0)
    y[3, 1] = value
    with pytest.raises(ValueError, match="NaN"):
        energy_test(x, y)
