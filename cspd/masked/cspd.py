"""CSpD: a smaller MAR drafts tokens, the target accepts or resamples them. Guarantee: heuristic."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.denoisers import DENOISERS, begins, of_kind
from cspd.continuous.rows import Densities, Drawn, Rows, advance
from cspd.device import send, send_integers
from cspd.heads.samplers import DIFFUSION
from cspd.heads.verify import first_accepted
from cspd.masked.runner import MARRunner
from cspd.method import Method, choices
from cspd.option import Option, check_integer
from cspd.request import Request, Sequence, Stopwatch

# CSpD's acceptance ratio (arXiv 2411.11925, section 3.2): the ratio of two denoising chains' densities at a token.

SIGMA = Option(
    "sigma",
    ("paper", "published"),
    "Sigma of the ratio: as in eq. 4, or inverted, as in the authors' released code",
    default="paper",
    implied=True,
)


class Paths(NamedTuple):
    """Tokens, and the Gaussians of the chains that drew them.

    Attributes:
        tokens: [..., d], the means of the last step, which adds no noise.
        log_sigma: [...], log sigma summed over channels and the steps T - 1 .. 1.
        log_sigma_last: [..., d], log sigma of the last step, 0: it exists, although sampling does not use it.
        log_noise: float64 [...], -|eps|^2 / 2 summed over x_T and the noise of the steps T - 1 .. 1.
    """

    tokens: Tensor
    log_sigma: Tensor
    log_sigma_last: Tensor
    log_noise: Tensor

    def at(self, *index: Tensor) -> Paths:
        return Paths(*(values[index] for values in self))


def log_ratio(x: Tensor, p: Paths, q: Paths, ratio_temperature: float, sigma: str | None = None) -> Tensor:
    """log of eq. 1's p(x) / q(x), for tokens x [R, n, d]: [R, n]. With aligned noise it is eq. 5's."""
    # Sigma = prod sigma_q / sigma_p over the steps T - 1 .. 1, eq. 4; the supplement's 14-17 drop a minus sign
    log_big_sigma = q.log_sigma - p.log_sigma
    if sigma == "published":
        log_big_sigma = p.log_sigma - q.log_sigma

    # N(x_{t-1}; mean, sigma) is exp(-|eps_t|^2 / 2) / sigma up to a constant, and N(x_T; 0, 1) likewise. If both chains
    # have the same noise, these exponents cancel exactly, which leaves Sigma
    log_path = log_big_sigma + (p.log_noise - q.log_noise).float()

    # the last step's Gaussians N(x; mean, sigma): log p - log q, in which only the z-scores are tempered
    mean_p, mean_q = p.tokens[:, None], q.tokens[:, None]
    log_sigma_p, log_sigma_q = p.log_sigma_last[:, None], q.log_sigma_last[:, None]
    z_p = (x - mean_p) * torch.exp(-log_sigma_p) / ratio_temperature
    z_q = (x - mean_q) * torch.exp(-log_sigma_q) / ratio_temperature
    last = log_sigma_q - log_sigma_p + 0.5 * (z_q - z_p) * (z_q + z_p)
    return log_path[:, None] + last.sum(-1)


# The method. Source: Continuous Speculative Decoding (arXiv 2411.11925), Algorithm 1.
#
# The acceptance ratio compares two chains that visit different states. So it is not a density ratio at one point, and
# the output's distribution is not the target's. Taken literally (ratio temperature 1) it accepts nothing, since the
# last step's sigma is far below the distance of the two models' tokens. The released code divides that step's z-scores
# by 42, which is the default here.

OPTIONS = (
    Option("gamma", int, "tokens drafted per round", default=8, low=1),
    Option(
        "verify",
        ("parallel", "sequential"),
        "verify all drafted tokens from the verified prefix, or each token after the drafted ones before it",
        default="parallel",
    ),
    Option(
        "ratio_temperature",
        float,
        "divides the last step's z-scores in the ratio; 1 is the paper's formula",
        default=42.0,
        above=0,
        metavar="X",
    ),
    SIGMA,
    Option("align", bool, "draft model and target denoise a token with the same noise", default=True),
    Option(
        "prefill",
        float,
        "fraction of the tokens that the target generates alone, before drafting begins",
        default=0.05,
        high=1,
        metavar="P",
    ),
    *(
        option
        for option in choices("chains", of_kind(DIFFUSION), "how both models denoise a token", default="ancestral")
        if option.name != "audit"  # an audit of two models' chains is not reported
    ),
)
MAX_TRIES = 100  # candidates of a rejected token, before the target's own token is taken


def _denoise(
    runner: MARRunner, model: str, request: Request, rows: Rows, z: Tensor, index: int = 0
) -> tuple[Paths, Drawn]:
    """Draws rows with a model's head by the request's chains: their paths, and their costs."""
    seen = Densities(len(rows.seed), runner.config.token_dim, runner.device)
    made = DENOISERS[request.chains].denoise(runner, model, rows, z, index=index, observers=(seen,))
    return Paths(made.tokens, seen.log_sigma, seen.log_sigma_last, seen.log_noise), made


def _draft(runner: MARRunner, batch: list[Sequence], counts: list[int], watch: Stopwatch) -> Paths:
    """Drafts counts[i] tokens of batch[i] one after the other and writes them to the slots: fields [B, gamma, ...]."""
    request = batch[0].request
    shape = len(batch), max(counts)
    channels = runner.config.token_dim
    drafted = Paths(
        tokens=torch.zeros(*shape, channels, device=runner.device),
        log_sigma=torch.zeros(shape, device=runner.device),
        log_sigma_last=torch.zeros(*shape, channels, device=runner.device),
        log_noise=torch.zeros(shape, dtype=torch.float64, device=runner.device),
    )
    watch.start("draft")
    for offset in range(max(counts)):
        index = [i for i, count in enumerate(counts) if count > offset]
        active = [batch[i] for i in index]
        num_before = [sequence.num_committed + offset for sequence in active]
        rows = runner.rows(active, num_before, [1] * len(active))
        z = runner.conditions(active, rows, "draft")
        paths, made = _denoise(runner, "draft", request, rows, z)
        runner.commit(rows, paths.tokens)
        drafting = send_integers(index, runner.device)
        for values, of_token in zip(drafted, paths):
            values[drafting, offset] = of_token
        for sequence, head_calls in zip(active, made.head_calls.tolist()):
            sequence.stats.draft_backbone_calls += 1
            sequence.stats.draft_head_calls += head_calls
    return drafted


def _resample(
    runner: MARRunner, request: Request, rows: Rows, which: Tensor, p: Paths, q: Paths
) -> tuple[Tensor, Tensor]:
    """Tokens [N, d] of norm(max(0, p - q)) for rejected rows `which` [N], by eq. 11, and the tries of each."""
    p, q = p.at(which), q.at(which)
    seed, position = rows.seed[which], rows.position[which]
    channels = p.tokens.shape[-1]

    def accept_probability(y: Tensor) -> Tensor:
        # eq. 11: alpha_s = max(0, 1 - q(y) / p(y)), Sigma included
        return -torch.expm1(-log_ratio(y, p, q, request.ratio_temperature, request.sigma).clamp(min=0))

    def draws(first: int, num: int) -> tuple[Tensor, Tensor]:
        normals, uniform = runner.noise.token_candidates(seed, position, first, num, channels)
        return normals, uniform.log()

    # candidates come from the target's own last step, tau sigma_p: only the ratio is tempered
    proposal = p.tokens[:, None], p.log_sigma_last[:, None]
    tokens, tries = first_accepted(proposal, accept_probability, draws, MAX_TRIES)
    all_rejected = (tries > MAX_TRIES).unsqueeze(-1)
    return torch.where(all_rejected, p.tokens, tokens), tries


def run_round(runner: MARRunner, batch: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Prefills sequences that are at their start; runs a round of Algorithm 1 for the others."""
    num_prefilled = math.ceil(batch[0].request.prefill * runner.seq_len)
    starting = [sequence for sequence in batch if sequence.num_committed < num_prefilled]
    drafting = [sequence for sequence in batch if sequence.num_committed >= num_prefilled]
    if starting:
        rows = runner.next_rows(starting, limit=num_prefilled)
        advance(runner, starting, rows, watch)
        runner.token_cost[rows.slot, rows.position] = torch.full_like(rows.scale[:, 0], torch.nan)  # not drafted
    if drafting:
        _speculate(runner, drafting, watch)
    return [sequence for sequence in batch if sequence.num_committed == runner.seq_len]


def _speculate(runner: MARRunner, batch: list[Sequence], watch: Stopwatch) -> None:
    """Runs a round of Algorithm 1."""
    request = batch[0].request
    committed = [sequence.num_committed for sequence in batch]
    counts = [min(request.gamma, runner.seq_len - num_committed) for num_committed in committed]
    drafted_end = np.add(committed, counts)
    # Algorithm 1 also draws the token after the drafted ones, which is the target's own if all of them are accepted
    is_sequential = request.verify == "sequential"
    has_next = is_sequential & (drafted_end < runner.seq_len)
    rows = runner.rows(batch, committed, np.add(counts, has_next).tolist())
    is_drafted = np.concatenate([np.arange(own) < count for own, count in zip(rows.counts, counts)])
    drafted = rows.at(np.flatnonzero(is_drafted))

    # draft: gamma tokens one after the other, with the same noise as the target
    q = _draft(runner, batch, counts, watch).at(drafted.sequence, drafted.offset)

    # verify: denoise the same tokens with the target, and accept with probability min(1, p / q), eq. 1
    watch.start("backbone")
    z = _target_conditions(runner, batch, rows)
    watch.start("head")
    p_and_next, made = _denoise(runner, "target", request, rows, z, index=0 if request.align else 1)
    p = p_and_next.at(send_integers(np.flatnonzero(is_drafted), runner.device))
    ratio = log_ratio(q.tokens[:, None], p, q, request.ratio_temperature, request.sigma).squeeze(-1)
    uniform = runner.noise.token_accept_uniforms(drafted.seed, drafted.position)
    watch.start("other")
    accepted = (uniform.log() < ratio).cpu().numpy()
    num_committed = _num_committed(request, rows.counts, counts, accepted)
    is_committed = np.concatenate([np.arange(own) < num for own, num in zip(rows.counts, num_committed)])
    decided = is_committed[is_drafted]

    # resample the rejected tokens, eq. 11
    tries = np.zeros(len(accepted), dtype=np.int64)
    rejected = np.flatnonzero(decided & ~accepted)
    if len(rejected):
        which = send_integers(rejected, runner.device)
        tokens, tried = _resample(runner, request, drafted, which, p, q)
        runner.tokens[drafted.slot[which], drafted.position[which]] = tokens
        tries[rejected] = tried.cpu().numpy()

    # commit: the drafted tokens are already in their slots, the target's own next ones are not
    token_cost = np.full(len(is_drafted), np.nan, dtype=np.float32)
    token_cost[is_drafted] = accepted
    here = np.flatnonzero(is_committed)
    sent = send({"rows": here, "token_cost": token_cost[here]}, runner.device)
    runner.token_cost[rows.slot[sent["rows"]], rows.position[sent["rows"]]] = sent["token_cost"]
    own = np.flatnonzero(is_committed & ~is_drafted)
    if len(own):
        which = send_integers(own, runner.device)
        runner.tokens[rows.slot[which], rows.position[which]] = p_and_next.tokens[which]
    _account(runner, batch, rows, made, counts, num_committed, accepted, tries)
    for sequence, count in zip(batch, num_committed):
        sequence.iteration += 1
        sequence.num_committed += count


def _target_conditions(runner: MARRunner, batch: list[Sequence], rows: Rows) -> Tensor:
    """The target's z of these tokens: from the verified prefix, or each from all tokens before it."""
    if batch[0].request.verify == "parallel":
        return runner.conditions(batch, rows)
    # a context for each token
    owners: list[Sequence] = []
    num_before: list[int] = []
    for sequence, num_committed, count in zip(batch, rows.committed, rows.counts):
        owners += [sequence] * count
        num_before += range(num_committed, num_committed + count)
    return runner.conditions(owners, runner.rows(owners, num_before, [1] * len(owners)))


def _num_committed(request: Request, most: list[int], counts: list[int], accepted: np.ndarray) -> list[int]:
    """The number of tokens that each sequence commits: all drafted ones, or the accepted prefix and one more.

    Args:
        most: of each sequence, the tokens that the target drew: the drafted ones, and maybe the next.
        counts: its drafted tokens. accepted: bool, of all drafted tokens, sequence by sequence.
    """
    if request.verify == "parallel":
        return counts
    by_sequence = np.split(accepted, np.cumsum(counts)[:-1])
    prefixes = [own.cumprod().sum().item() for own in by_sequence]
    return [min(prefix + 1, own) for prefix, own in zip(prefixes, most)]


def _account(
    runner: MARRunner,
    batch: list[Sequence],
    rows: Rows,
    made: Drawn,
    counts: list[int],
    num_committed: list[int],
    accepted: np.ndarray,
    tries: np.ndarray,
) -> None:
    """Adds a round to the statistics; `made` is of all rows, `accepted` and `tries` of the drafted ones."""
    ends, drafted_ends = np.cumsum(rows.counts)[:-1], np.cumsum(counts)[:-1]
    by_sequence = zip(
        batch,
        num_committed,
        made.head_calls.tolist(),
        np.split(made.calls, ends),
        np.split(made.evaluations, ends),
        np.split(accepted, drafted_ends),
        np.split(tries, drafted_ends),
    )
    for sequence, num, head_calls, own_calls, own_evaluations, own_accepted, own_tries in by_sequence:
        stats, decided = sequence.stats, own_accepted[:num]
        stats.iterations += 1
        stats.backbone_calls += 1
        stats.head_calls += head_calls
        stats.head_calls_per_token += own_calls[:num].sum().item() / sequence.request.num_generated(runner.seq_len)
        stats.head_evaluations += own_evaluations.sum().item()
        stats.resample_tries += int(np.minimum(own_tries[:num], MAX_TRIES).sum())
        stats.fallbacks += int((own_tries[:num] > MAX_TRIES).sum())
        stats.by_lag = _added(stats.by_lag, sequence.request.gamma, 0, decided)
        stats.by_rank = _added(stats.by_rank, runner.seq_len, sequence.num_committed, decided)


def _added(counts: list[list[int]], length: int, first: int, accepted: np.ndarray) -> list[list[int]]:
    """Numbers of verified and of accepted drafts, [2][length], plus decisions `accepted`, bool [n], from `first` on."""
    total = np.array(counts) if counts[0] else np.zeros((2, length), dtype=np.int64)
    total[:, first : first + len(accepted)] += np.stack([np.ones_like(accepted), accepted])
    return total.tolist()


def prepare(request: Request, runner: MARRunner) -> Request:
    """The request with the settings that its chains fill in.

    Raises ValueError if gamma is above the length, temperature is 0, or the chains do not fit the settings.
    """
    check_integer("gamma", request.gamma, 1, runner.seq_len, "a round drafts at most all of the sequence's tokens")
    if request.temperature == 0:
        raise ValueError(
            "temperature=0: method 'mar-draft' compares densities, which need noise: give a temperature above 0"
        )
    if request.align is False and request.chains == "speculative" and request.window != 0:
        raise ValueError(
            "align=False: the ratio has the noise of every step, which is not known of chains=speculative: give other"
            " chains, or window=0"
        )
    if request.prefill:
        begins("num_sampling_steps")(request, runner)  # the prefill uses ancestral chains
    return DENOISERS[request.chains].prepare(request, runner)


CSPD = Method(
    name="mar-draft",
    family="MAR",
    guarantee="heuristic",
    summary="a smaller MAR drafts tokens, the target accepts or resamples them",
    papers={"2411.11925": "Continuous Speculative Decoding for Autoregressive Image Generation"},
    run_round=run_round,
    needs="draft model",
    options=OPTIONS,
    mixed=lambda request: ("num_iter",),
    prepare=prepare,
    advice=lambda request: DENOISERS[request.chains].advice(request),
    uses=lambda request: {"draft"},
)
