"""Scores of images from their features, and how sure they are: formulas, intervals and tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor
from torch.nn import functional
from torch_fidelity.metric_fid import fid_features_to_statistics

# 95 % intervals of values measured on few images, cut to the range of each value.

NORMAL = NormalDist().inv_cdf(0.975)  # half of a 95 % interval, in standard errors
RANGES = {
    "fid": (0.0, math.inf),
    "sfid": (0.0, math.inf),
    "fd_dinov2": (0.0, math.inf),
    "inception_score": (1.0, math.inf),
    "kid": (-math.inf, math.inf),  # unbiased: it may be negative
    "cmmd": (-math.inf, math.inf),
    "precision": (0.0, 1.0),
    "recall": (0.0, 1.0),
    "density": (0.0, math.inf),
    "coverage": (0.0, 1.0),
    "accuracy": (0.0, 1.0),
    "clip_score": (0.0, 100.0),
    "clip_difference": (-100.0, 100.0),
    "bound": (0.0, 1.0),
    "difference": (0.0, math.inf),
    "audit": (0.0, math.inf),
}


def around(name: str, value: float, error: float, degrees: int | None = None) -> list[float]:
    """The interval [low, high] of a value with a name in `RANGES`, from its standard error.

    `degrees`: of freedom of the error; None if there are so many that the value is normal.
    """
    low, high = RANGES[name]
    half = (NORMAL if degrees is None else student_limit(degrees)) * error
    return [min(max(end, low), high) for end in (value - half, value + half)]


def wilson(fraction: float, num: int) -> list[float]:
    """The interval [low, high] of a probability, from the fraction of `num` trials that succeeded.

    Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927): all probabilities whose
    distance from the fraction is at most `NORMAL` of their own standard errors. Unlike the normal interval, it keeps a
    width if all of 8 trials succeed.
    """
    weight = NORMAL**2 / num
    variance = fraction * (1 - fraction) * weight + (weight / 2) ** 2
    centre = (fraction + weight / 2) / (1 + weight)
    half = math.sqrt(variance) / (1 + weight)
    # rounding must not exclude the fraction itself, which is an end of the interval at 0 and at 1
    low = min(fraction, max(0.0, centre - half))
    high = max(fraction, min(1.0, centre + half))
    return [low, high]


def student(t: float, degrees: int) -> float:
    """The chance that Student's t is farther from 0 than t."""
    return float(2 * special.stdtr(degrees, -abs(t)))


def student_limit(degrees: int) -> float:
    """Half of a 95 % interval, in standard errors of so many degrees of freedom."""
    return float(special.stdtrit(degrees, 0.975))


# A score, and what each part of the images contributes to it. Parts are about independent, so their scatter gives the
# score's error; and that of the difference of two scores of the same seeds, which have much in common.
#
# The bootstrap would sample classes unevenly and repeat images, and either worsens FID, coverage and others.

PARTS = 25  # parts of the images, at most
LEAST_INTERVAL = 20  # images, at least
LEAST_CYCLES = 4  # cycles through the classes, for class-balanced parts


@dataclass(frozen=True)
class Score:
    """A score of images.

    Attributes:
        value: of all images.
        parts: float64 [G], pseudo-values: the score as each part of the images alone shows it, to first order; None for
            fewer than `LEAST_INTERVAL` images.
    """

    value: float
    parts: np.ndarray | None = None

    @property
    def error(self) -> float | None:
        """The standard error, given the reference; None for too few images."""
        return None if self.parts is None else standard_error(self.parts)

    @property
    def resolution(self) -> float | None:
        """The smallest difference of two such scores, of independent images, that is significant at 95 %."""
        if self.parts is None:
            return None
        return student_limit(2 * (len(self.parts) - 1)) * math.sqrt(2) * standard_error(self.parts)


def standard_error(parts: np.ndarray) -> float:
    """The standard error of the mean of independent parts."""
    return float(np.std(parts, ddof=1) / len(parts) ** 0.5)


def parts_of(num: int, cycle: int = 1) -> Tensor | None:
    """The part of each of `num` images, int64 [num]; None for too few.

    Args:
        cycle: image i has class i modulo `cycle`. A part of whole cycles has equally many images of each class, as the
            whole has: which classes are drawn is no chance. 1: the classes do not cycle.
    """
    if num < LEAST_INTERVAL:
        return None
    block = cycle if num >= LEAST_CYCLES * cycle else 1
    return torch.arange(num) // block % PARTS


def from_influence(value: float, influence: Tensor, part: Tensor | None) -> Score:
    """A score from the influence [N] of each image, by the infinitesimal jackknife (Jaeckel 1972).

    An image's influence is the derivative of the score with respect to the weight of this image.
    """
    if part is None:
        return Score(value)
    sums = torch.zeros(int(part.max()) + 1, dtype=torch.float64).index_add_(0, part, influence.double().cpu())
    means = sums / part.bincount()
    return Score(value, value + (means - influence.double().mean().cpu()).numpy())


def from_left_out(value: float, left_out: Tensor, part: Tensor | None) -> Score:
    """A score from its values [G] without each part: the jackknife's pseudo-values (Tukey 1958)."""
    if part is None:
        return Score(value)
    share = len(part) / part.bincount().double()
    return Score(value, (share * value - (share - 1) * left_out.double()).numpy())


# Frechet distances (FID, sFID, FD-DINOv2), and the Inception score.


def statistics_of(features: Tensor) -> dict[str, np.ndarray]:
    """The mean "mu" [D] and covariance "sigma" [D, D] of features [N, D], float64."""
    return {name: value.astype(np.float64) for name, value in fid_features_to_statistics(features).items()}


def frechet(features: Tensor, statistics: dict[str, np.ndarray], part: Tensor | None = None) -> Score:
    """The Frechet distance of features [N, D] from the "mu" and "sigma" of a reference.

    Heusel et al. (arXiv 1706.08500): |mu - mu'|^2 + tr(S + S' - 2 (S S')^(1/2)). Its derivative with respect to S is
    1 - T, where T = A (A S A)^(-1/2) A, A = S'^(1/2), is the optimal transport map to the reference's Gaussian.
    """
    own = statistics_of(features)
    mu, sigma, mu_ref, sigma_ref = map(torch.from_numpy, (*own.values(), statistics["mu"], statistics["sigma"]))
    root_ref = _power(sigma_ref, 0.5)
    roots, vectors = torch.linalg.eigh(root_ref @ sigma @ root_ref)
    roots = roots.clamp(min=0).sqrt()
    shift = mu - mu_ref
    value = shift @ shift + sigma.trace() + sigma_ref.trace() - 2 * roots.sum()
    if part is None:
        return Score(value.item())

    # fewer images than features leave directions without variance: their derivative is infinite, and left out
    inverse = torch.where(roots > 1e-5 * roots.max(), 1 / roots, 0.0)
    transport = root_ref @ (vectors * inverse) @ vectors.T @ root_ref
    centred = features.double() - mu
    influence = 2 * centred @ shift + (centred * (centred - centred @ transport)).sum(1)
    return from_influence(value.item(), influence, part)


def _power(matrix: Tensor, power: float) -> Tensor:
    """A power of a symmetric matrix that has no negative eigenvalues, up to rounding."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0) ** power) @ vectors.T


SPLIT = 5000  # images whose Inception scores are averaged, as in papers
SHUFFLING = 2020  # torch-fidelity's seed of the images' order


def num_splits(num: int) -> int:
    """The number of equal parts of about 5,000 images whose Inception scores are averaged."""
    return max(1, round(num / SPLIT))


def inception_score(logits: Tensor, part: Tensor | None = None) -> Score:
    """The Inception score of logits [N, C]: the mean over `num_splits` parts of exp(mean KL(p(y|x) || p(y))).

    Salimans et al. (arXiv 1606.03498), with torch-fidelity's parts: of equal size, in a random order. A part of images
    that are sorted by class would have few of the classes, and one of a single image has the score 1.
    """
    values = []
    influence = torch.empty(len(logits), dtype=torch.float64)
    order = torch.from_numpy(np.random.RandomState(SHUFFLING).permutation(len(logits)))
    for rows in order.tensor_split(num_splits(len(logits))):
        log_p = logits[rows].double().log_softmax(1)
        marginal = log_p.exp().mean(0)
        information = (log_p.exp() * (log_p - marginal.log())).nansum(1)  # 0 log 0 = 0
        value = information.mean().exp()
        values.append(value)
        influence[rows] = value * (information - information.mean())
    return from_influence(torch.stack(values).mean().item(), influence, part)


# Maximum mean discrepancies (KID, CMMD): unbiased, of all images.

BLOCK = 500  # rows of kernels and distances at once: memory does not grow with the square of the images
Kernel = Callable[[Tensor, Tensor], Tensor]  # [N, D], [M, D] -> [N, M]


def polynomial(x: Tensor, y: Tensor) -> Tensor:
    """KID's kernel (Binkowski et al., arXiv 1801.01401): (x . y / D + 1)^3."""
    return (x @ y.T / x.shape[1] + 1) ** 3


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    """CMMD's kernel (Jayasumana et al., arXiv 2401.09603), sigma = 10, of features of length 1, times 1000."""
    x, y = functional.normalize(x), functional.normalize(y)
    return 1000 * torch.exp((x @ y.T - 1) / 100)


def discrepancy(features: Tensor, reference: Tensor, kernel: Kernel, part: Tensor | None = None) -> Score:
    """The squared maximum mean discrepancy of features [N, D] and [M, D], without bias.

    Gretton et al., A Kernel Two-Sample Test (2012), equation 3, for N and M images.
    """
    x, y = features.double(), reference.double()
    own = (_row_sums(x, x, kernel) - _diagonal(x, kernel)) / (len(x) - 1)
    theirs = (_row_sums(y, y, kernel) - _diagonal(y, kernel)) / (len(y) - 1)
    across = _row_sums(x, y, kernel) / len(y)
    value = own.mean() + theirs.mean() - 2 * across.mean()
    return from_influence(value.item(), 2 * (own - across), part)


def _row_sums(x: Tensor, y: Tensor, kernel: Kernel) -> Tensor:
    return torch.cat([kernel(block, y).sum(1) for block in x.split(BLOCK)])


def _diagonal(x: Tensor, kernel: Kernel) -> Tensor:
    """k(x, x) [N] of each row."""
    return torch.cat([kernel(block, block).diagonal() for block in x.split(BLOCK)])


# Precision and recall, density and coverage: which images lie near those of the other side.

NEIGHBOURS = 3  # of precision and recall, as in ADM's evaluator
DENSE_NEIGHBOURS = 5  # of density and coverage, as their authors recommend
SPARE = 12  # more neighbours of an image, for its radius without one of the parts


class Manifold(NamedTuple):
    """Scores by nearest neighbours, see `manifold`."""

    precision: Score
    recall: Score
    density: Score
    coverage: Score


def manifold(features: Tensor, reference: Tensor, part: Tensor | None = None) -> Manifold:
    """How features [N, D] and those of a reference [M, D] cover each other.

    Kynkaanniemi et al. (arXiv 1904.06991): precision is the fraction of images within the distance of some reference
    image's third neighbour; recall the same with the sides exchanged. Naeem et al. (arXiv 2002.09797): density is the
    mean number of reference images, in fifths, whose fifth neighbour is farther than the image; coverage the fraction
    of reference images with an image within the distance of their fifth neighbour.
    """
    num_parts = 0 if part is None else int(part.max()) + 1
    reach, _ = _nearest(reference, DENSE_NEIGHBOURS + 1)  # the first is the image itself
    radius, dense_radius = reach[:, NEIGHBOURS], reach[:, -1]
    own_radii = _radii_without(features, part, num_parts)

    precise, density = [], []
    within = torch.zeros(max(1, num_parts), len(reference))  # images within the radius of a reference image, by part
    recalled = torch.zeros(1 + num_parts, len(reference), dtype=torch.bool)  # by all, and without each part
    of_image = torch.zeros(len(features), dtype=torch.long) if part is None else part
    for rows in torch.arange(len(features)).split(BLOCK):
        distances = torch.cdist(features[rows], reference)
        precise.append((distances <= radius).any(1))
        is_dense = (distances < dense_radius).float()
        density.append(is_dense.sum(1) / DENSE_NEIGHBOURS)
        within.index_add_(0, of_image[rows], is_dense)
        for i, radii in enumerate(own_radii):
            is_kept = torch.ones(len(rows), dtype=torch.bool) if i == 0 else of_image[rows] != i - 1
            recalled[i] |= ((distances <= radii[rows, None]) & is_kept[:, None]).any(0)

    inside, dense = torch.cat(precise).double(), torch.cat(density).double()
    recalls = recalled.double().mean(1)
    total = within.sum(0)
    coverage = (total > 0).double().mean().item()
    without = (total - within > 0).double().mean(1)
    return Manifold(
        precision=from_influence(inside.mean().item(), inside, part),
        recall=from_left_out(recalls[0].item(), recalls[1:], part),
        density=from_influence(dense.mean().item(), dense, part),
        coverage=from_left_out(coverage, without, part),
    )


def _nearest(features: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Distances and indices [N, count] of each row's nearest rows, or fewer; the nearest first: itself."""
    count = min(count, len(features))
    found = [torch.cdist(block, features).topk(count, largest=False) for block in features.split(BLOCK)]
    return torch.cat([each.values for each in found]), torch.cat([each.indices for each in found])


def _radii_without(features: Tensor, part: Tensor | None, num_parts: int) -> list[Tensor]:
    """The distance [N] of each image's third neighbour: among all images, and among those outside each part."""
    distances, indices = _nearest(features, NEIGHBOURS + 1 + SPARE)
    radii = [distances[:, NEIGHBOURS]]
    if part is None:
        return radii
    for i in range(num_parts):
        assert part is not None  # there are parts
        is_left = part[indices] != i
        # the last of them if so many neighbours are in the part
        position = (is_left.cumsum(1) <= NEIGHBOURS).sum(1).clamp(max=indices.shape[1] - 1)
        radii.append(distances.gather(1, position[:, None]).squeeze(1))
    return radii


# Tests of whether two samplers differ.

LEAST_PAIRS = 8  # fewer have too few permutations


def energy_test(x: Tensor, y: Tensor, permutations: int = 999, seed: int = 0) -> float:
    """p-value of the hypothesis that paired samples x, y [N, D] have one distribution.

    A permutation test on the energy distance (Szekely & Rizzo 2013). Row i of x and of y have the same seed, so each
    pair is swapped or not; p is uniform if swapping changes nothing. Swapping independent samples changes nothing. That
    of coupled ones, which share their noise, may: then p is approximate. A small p says that the distributions differ;
    a large p of few samples says little.

    Raises:
        ValueError: the samples' shapes differ, there are fewer than 8 pairs, or a value is not finite.
    """
    num = len(x)
    size = permutations + 1, num
    if x.shape != y.shape or num < LEAST_PAIRS:
        shapes = f"{list(x.shape)} and {list(y.shape)}"
        raise ValueError(f"samples of shapes {shapes}: give pairs of one size, {LEAST_PAIRS} or more")
    pooled = torch.cat([x.flatten(1), y.flatten(1)]).double()
    if not pooled.isfinite().all():
        raise ValueError("samples have NaN or infinite values: leave them out")
    distances = torch.cdist(pooled, pooled)

    # each row of `labels` assigns +1 to the images that count as x, -1 to those of y; the first row swaps no pair
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, size, generator=generator) * 2.0 - 1
    signs[0] = 1
    labels = torch.cat([signs, -signs], dim=1).double()

    # 2 E|x - y| - E|x - x'| - E|y - y'| is, up to a factor, this quadratic form in the labels
    statistic = -((labels @ distances) * labels).sum(1)
    rounding = 1e-12 * distances.sum()  # equal samples have p = 1 in any unit
    as_large = (statistic >= statistic[0] - rounding).sum()
    return (as_large / (permutations + 1)).item()


class Change(NamedTuple):
    """The difference of a score from another one's, its standard error and the error's degrees of freedom.

    Both are None for too few images.
    """

    difference: float
    error: float | None = None
    degrees: int | None = None

    @property
    def t(self) -> float | None:
        """Student's: the difference in standard errors; None if the error is unknown or 0."""
        return self.difference / self.error if self.error else None

    @property
    def p_value(self) -> float | None:
        """That of no difference: by Student's t, two-sided.

        Few parts estimate the error badly: the normal distribution would find a difference too often.
        """
        if self.error is None or self.degrees is None:
            return None
        if self.t is None:
            return 1.0 if self.difference == 0 else 0.0
        return student(self.t, self.degrees)


def change(score: Score, base: Score, same_seeds: bool) -> Change:
    """How a score differs from another one.

    Args:
        same_seeds: part i of both has the same seeds: what they share is no error of their difference.
    """
    difference = score.value - base.value
    own, others = score.parts, base.parts
    if own is None or others is None:
        return Change(difference)
    if same_seeds and len(own) == len(others):
        return Change(difference, standard_error(own - others), len(own) - 1)
    # independent: Welch (1947)
    error = math.hypot(standard_error(own), standard_error(others))
    spread = sum(standard_error(parts) ** 4 / (len(parts) - 1) for parts in (own, others))
    degrees = math.floor(error**4 / spread + 1e-9) if spread else len(own) + len(others) - 2
    return Change(difference, error, degrees)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for their number by Holm's method (1979); None stays None.

    The chance that any of them is below 0.05 although its hypothesis is true is at most 0.05.
    """
    given = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, i) in enumerate(given):
        largest = max(largest, min(1.0, (len(given) - rank) * p))
        corrected[i] = largest
    return corrected
