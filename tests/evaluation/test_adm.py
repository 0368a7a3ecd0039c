"""Agreement with the evaluator of ADM (openai/guided-diffusion): its formulas in numpy, on the same features."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import linalg, stats
from torch.nn import functional
from torch_fidelity.metric_isc import KEY_METRIC_ISC_MEAN, isc_features_to_metric

from cspd.evaluation import metrics, scores
from cspd.evaluation.images import ImageList, NpzImages, export_npz
from cspd.evaluation.metrics import Evaluation, Extracted, Reference, extract, load_reference, scores_of


def frechet_distance(x, y):
    """FIDStatistics.frechet_distance of compute_statistics."""
    (mu1, sigma1), (mu2, sigma2) = ((np.mean(each, axis=0), np.cov(each, rowvar=False)) for each in (x, y))
    covmean = linalg.sqrtm(sigma1.dot(sigma2))
    difference = mu1 - mu2
    return difference.dot(difference) + np.trace(sigma1) + np.trace(sigma2) - 2 * np.trace(covmean.real)


def adm_inception_score(activations, weights, split_size=5000):
    """compute_inception_score; the graph's softmax has no bias."""
    logits = activations @ weights.T
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    preds = exponentials / exponentials.sum(1, keepdims=True)
    found = []
    for i in range(0, len(preds), split_size):
        part = preds[i : i + split_size]
        kl = part * (np.log(part) - np.log(np.expand_dims(np.mean(part, 0), 0)))
        found.append(np.exp(np.mean(np.sum(kl, 1))))
    return np.mean(found)


def squared_distances(u, v):
    """_batch_pairwise_distances, in double precision."""
    return np.maximum((u**2).sum(1)[:, None] - 2 * u @ v.T + (v**2).sum(1)[None], 0.0)


def precision_and_recall(reference, sample):
    """compute_prec_recall: manifold_radii and evaluate_pr, neighbourhoods of 3."""
    radii = [np.partition(squared_distances(each, each), np.arange(4), axis=1)[:, 3] for each in (reference, sample)]
    between = squared_distances(reference, sample)
    precision = (between <= radii[0][:, None]).any(0).mean()
    return precision, (between <= radii[1][None]).any(1).mean()


def random_features(num, seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(24, 24, generator=torch.Generator().manual_seed(9)) / 5
    return torch.randn(num, 24, generator=generator).abs() @ mixing + shift


def test_scores_are_those_of_adms_formulas():
    """Of random features, to 1e-6."""
    x, y = random_features(300, 0, shift=0.1), random_features(400, 1)
    weights = torch.randn(1008, 24, generator=torch.Generator().manual_seed(2))
    spatial = [functional.relu(each[:, :20]) for each in (x, y)]
    extracted = [Extracted(each, each @ weights.T, own) for each, own in zip((x, y), spatial)]
    names = {"fid", "sfid", "inception_score", "precision", "recall"}
    found = metrics.of_features(extracted[0], names, Reference("", ""), None, None, extracted[1])
    ours = {name: score.value for name, score in found.items()}
    x, y, of_x, of_y, weights = (each.double().numpy() for each in (x, y, *spatial, weights))
    precision, recall = precision_and_recall(y, x)
    expected = {
        "fid": frechet_distance(x, y),
        "sfid": frechet_distance(of_x, of_y),
        "inception_score": adm_inception_score(x, weights),
        "precision": precision,
        "recall": recall,
    }
    assert ours == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert 0.02 < precision < 0.98 and 0.02 < recall < 0.98


def test_the_inception_score_does_not_depend_on_the_images_order():
    """torch-fidelity's, of parts of 5,000; in ADM's parts, sorted images would have half of the classes."""
    logits = 3 * torch.randn(10_000, 6, generator=torch.Generator().manual_seed(3))
    by_class = logits[logits.argmax(1).argsort()]
    theirs = isc_features_to_metric(by_class, splits=2)[KEY_METRIC_ISC_MEAN]
    assert scores.inception_score(by_class).value == pytest.approx(theirs, rel=1e-9)
    sure = scores.inception_score(logits, scores.parts_of(10_000))
    assert sure.value == pytest.approx(theirs, abs=3 * sure.error)
    assert adm_inception_score(by_class.double().numpy(), np.eye(6)) < 0.8 * theirs
    # ADM's third part would have one image, whose score is 1
    assert scores.inception_score(logits[[*range(10_000), 0]]).value == pytest.approx(theirs, abs=3 * sure.error)


def test_adms_files_are_read_as_they_are(tmp_path):
    """Images, classes and both statistics; images that are not compressed stay on the disk."""
    pixels = np.random.default_rng(0).integers(0, 256, (7, 16, 16, 3), np.uint8)
    statistics = {"mu": np.zeros(3), "sigma": np.eye(3), "mu_s": np.ones(2), "sigma_s": 2 * np.eye(2)}
    np.savez(tmp_path / "batch.npz", pixels, np.arange(7), **statistics)
    np.savez_compressed(tmp_path / "small.npz", pixels)
    for name in ("batch", "small"):
        images = NpzImages(tmp_path / f"{name}.npz")
        assert isinstance(images.pixels, np.memmap) == (name == "batch")
        assert all((images[i].permute(1, 2, 0).numpy() == pixels[i]).all() for i in range(7))
        assert len(images) == 7 and images.shape == (3, 16, 16)
        export_npz(images, tmp_path / "out.npz")
        with np.load(tmp_path / "out.npz") as file:
            assert (file["arr_0"] == pixels).all()
    assert NpzImages(tmp_path / "batch.npz").labels == [*range(7)]
    reference = load_reference(tmp_path / "batch.npz")
    assert len(reference.images) == 7
    for found, names in ((reference.statistics, ("mu", "sigma")), (reference.spatial, ("mu_s", "sigma_s"))):
        assert all((found[key] == statistics[name]).all() for key, name in zip(("mu", "sigma"), names))
    (tmp_path / "damaged.npz").write_bytes((tmp_path / "batch.npz").read_bytes()[:900])
    with pytest.raises(ValueError, match="damaged"):
        NpzImages(tmp_path / "damaged.npz")


def test_spatial_features_are_seven_channels_of_the_seventh_mixed_block(inception):
    """By hand, through torch-fidelity's layers, in ADM's order: rows, columns, channels."""
    images = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    found = extract(ImageList(images), space="inception", weights=inception)
    network = metrics.create_feature_extractor(
        "inception-v3-compat", ["2048", "logits_unbiased"], cuda=False, feature_extractor_weights_path=str(inception)
    )
    kept = []
    network.Mixed_6c.register_forward_hook(lambda module, inputs, output: kept.append(output))
    features, logits = network(images)
    branch = network.Mixed_6d.branch1x1(kept[0])
    assert branch.shape == (2, 192, 17, 17) and found.spatial.shape == (2, 2023)
    assert torch.equal(found.spatial.view(2, 17, 17, 7), branch[:, :7].permute(0, 2, 3, 1))
    assert torch.equal(found.features, features) and torch.equal(found.logits, logits)


# ---- The panel's other formulas, and how sure each score is


def by_loops(x, y):
    """Density, coverage (Naeem et al., equations 5 and 6) and two unbiased discrepancies, image by image."""
    radii = [np.sort(np.linalg.norm(y - each, axis=1))[5] for each in y]
    near = np.array([[np.linalg.norm(a - b) < radius for b, radius in zip(y, radii)] for a in x])
    found = {"density": near.sum() / (5 * len(x)), "coverage": near.any(0).mean()}

    def polynomial(a, b):
        return (a @ b / len(a) + 1) ** 3

    def gaussian(a, b):
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        return 1000 * np.exp(-((a - b) ** 2).sum() / (2 * 10**2))

    for name, kernel in (("kid", polynomial), ("cmmd", gaussian)):
        within = [np.mean([kernel(a, b) for a in each for b in each if a is not b]) for each in (list(x), list(y))]
        found[name] = sum(within) - 2 * np.mean([kernel(a, b) for a in x for b in y])
    return found


def test_density_coverage_and_discrepancies_are_their_formulas(monkeypatch):
    monkeypatch.setattr(scores, "BLOCK", 7)
    x, y = random_features(40, 3, shift=0.2), random_features(30, 4)
    found = {name: score.value for name, score in scores.manifold(x, y)._asdict().items()}
    found["kid"] = scores.discrepancy(x, y, scores.polynomial).value
    found["cmmd"] = scores.discrepancy(x, y, scores.gaussian).value
    expected = by_loops(x.double().numpy(), y.double().numpy())
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def panel(x, y, part):
    """All scores of features, the logits of the Inception score being their first channels."""
    found = scores.manifold(x, y, part)._asdict()
    found["fid"] = scores.frechet(x, scores.statistics_of(y), part)
    found["inception_score"] = scores.inception_score(2 * x[:, :6], part)
    found["kid"] = scores.discrepancy(x, y, scores.polynomial, part)
    found["cmmd"] = scores.discrepancy(x, y, scores.gaussian, part)
    return found


@pytest.mark.parametrize("num", [60, 250])
def test_errors_are_as_large_as_scores_vary(num):
    """Over 40 sets of images whose features are of 5 classes far apart, in cycles; and of differences of paired sets.

    Errors are meant to be too large rather than too small: those of FID and coverage are, near their best values.
    """
    generator = torch.Generator().manual_seed(0)
    centres = 2 * torch.randn(5, 8, generator=generator)

    def drawn(count):
        return centres[torch.arange(count) % 5] + torch.randn(count, 8, generator=generator)

    reference, part = drawn(400), scores.parts_of(num, 5)
    values, errors, differences, paired = {}, {}, {}, {}
    for _ in range(40):
        x = drawn(num)
        one, other = (panel(each, reference, part) for each in (x, x + 0.3 * torch.randn(x.shape, generator=generator)))
        for name, score in one.items():
            values.setdefault(name, []).append(score.value)
            errors.setdefault(name, []).append(score.error)
            difference, error, _ = scores.change(other[name], score, same_seeds=True)
            differences.setdefault(name, []).append(difference)
            paired.setdefault(name, []).append(error)
    for name in values:
        assert 0.75 < np.mean(errors[name]) / np.std(values[name], ddof=1) < 2.2, name
        assert 0.7 < np.mean(paired[name]) / np.std(differences[name], ddof=1) < 2.2, name
    for name in ("fid", "inception_score", "kid", "cmmd"):  # means of images, which a pair shares
        assert np.mean(paired[name]) < 0.8 * np.mean(errors[name]), name


def test_parts_are_balanced_if_classes_cycle():
    part = scores.parts_of(500, 10)
    assert part.bincount().tolist() == [20] * 25
    for each in range(25):
        assert (torch.arange(500)[part == each] % 10).bincount().tolist() == [2] * 10
    assert scores.parts_of(19) is None and len(scores.parts_of(20, 10).unique()) == 20


def test_a_resolution_is_the_smallest_difference_that_is_shown():
    """Two sets whose difference is just the resolution have p = 0.05; a few more images would do for half of it."""
    score = scores.Score(2.0, np.array([1.0, 3.0, 2.0, 2.0]))
    other = scores.Score(2.0 + score.resolution, score.parts + score.resolution)
    change = scores.change(other, score, same_seeds=False)
    assert change.degrees == 6 and change.p_value == pytest.approx(0.05)
    assert scores.change(other, score, same_seeds=True)[1] == 0
    values = metrics.told({"fid": score}, 100)
    assert values["fid_needed"] == np.ceil(100 * (score.resolution / 0.1) ** 2) and values["kid_needed"] is None


def test_few_parts_show_no_more_differences_than_chance():
    """Four parts, as of four cycles through the classes: a normal distribution would find 14 % instead of 5 %."""
    for degrees in (1, 2, 3, 4, 7, 24, 48):
        for t in (0.0, 0.3, 2.0, -4.0):
            assert scores.student(t, degrees) == pytest.approx(2 * stats.t.sf(abs(t), degrees), abs=1e-12)
        assert scores.student_limit(degrees) == pytest.approx(stats.t.isf(0.025, degrees), rel=1e-6)
    generator = np.random.default_rng(0)
    for same_seeds in (True, False):
        shown = []
        for _ in range(2000):
            one, other = (scores.Score(parts.mean(), parts) for parts in generator.normal(size=(2, 4)))
            shown.append(scores.change(one, other, same_seeds).p_value < 0.05)
        assert np.mean(shown) == pytest.approx(0.05, abs=0.015)
    parts = np.array([1.0, 2.0, 4.0, 5.0])
    low, high = metrics.told({"kid": scores.Score(3.0, parts)}, 40)["kid_ci95"]
    assert [low, high] == pytest.approx(stats.t.interval(0.95, 3, 3.0, scores.standard_error(parts)))


def test_holms_correction():
    assert scores.holm([0.01, None, 0.04, 0.03]) == pytest.approx([0.03, None, 0.06, 0.06], abs=1e-12)
    assert scores.holm([0.5, 0.9]) == [1.0, 1.0] and scores.holm([]) == []
    generator = np.random.default_rng(0)
    shown = [min(scores.holm(generator.random(12).tolist())) < 0.05 for _ in range(2000)]
    assert np.mean(shown) == pytest.approx(0.05, abs=0.015)  # of twelve true hypotheses, any rejected


def test_the_panel_of_images_without_a_network_says_why():
    images = ImageList(torch.rand(6, 3, 32, 32))
    found, missing = scores_of(images, Evaluation("digits"), labels=[0] * 6)
    assert set(found) == {"inception_score", "accuracy"}
    assert "Inception" in missing["sfid"] and "classifier" in missing["fd_dinov2"]
