"""CSpD: a draft MAR proposes tokens, the target accepts or resamples them. Guarantee: heuristic.

Source: Continuous Speculative Decoding (arXiv 2411.11925). The acceptance ratio compares two chains that visit other
states, so it is no density ratio at one point: the law of the output is not the target's. Taken literally (ratio
temperature 1) it accepts nothing, since the last step's sigma is far below the distance of the two models' tokens. The
authors' code divides that step's z-scores by 42, which is the default here.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cspd.continuous import ar, speculative
from cspd.continuous.denoiser import DENOISERS, Denoised
from cspd.continuous.gaussian import first_kept
from cspd.continuous.host import MARHost, Rows
from cspd.method import Method
from cspd.option import Option, check_integer
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence

OPTIONS = (
    Option("gamma", int, "tokens that the draft model drafts a round", default=8, low=1),
    Option(
        "verify",
        ("parallel", "sequential"),
        "judge all drafted tokens from the verified prefix, or each one after those before it",
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
    Option("align", bool, "draft and target denoise a token with the same noise", default=True),
    Option("prefill", float, "share of the tokens that the target makes first", default=0.05, high=1, metavar="P"),
    Option("chains", DENOISERS, "how both models denoise", default="ancestral"),
    speculative.WINDOW.but(only_with=("chains", ("speculative",))),
    speculative.DRAFT,
)
MAX_TRIES = 100


class Paths(NamedTuple):
    """Tokens, and the Gaussians of the chains that made them; indexed, those of some.

    Attributes:
        tokens: [..., d], which are the means of the last step. log_sigma: [...], summed over channels and the steps
            T - 1 .. 1. log_sigma_last: [..., d], at step 0, where sampling adds no noise but a sigma exists.
    """

    tokens: Tensor
    log_sigma: Tensor
    log_sigma_last: Tensor

    def at(self, *index: Tensor) -> Paths:
        return Paths(*(values[index] for values in self))


def _denoise(
    host: MARHost, model: str, request: Request, rows: Rows, z: Tensor, index: int = 0
) -> tuple[Paths, Denoised]:
    """Rows by a model's head, as the request's chains are: their paths, and what they cost."""
    made = DENOISERS[request.chains](host, model, rows, z, index=index, densities=True)
    return Paths(made.tokens, made.log_sigma, made.log_sigma_last), made


def log_ratio(x: Tensor, p: Paths, q: Paths, ratio_temperature: float) -> Tensor:
    """log of eq. 4's p(x) / q(x), Sigma included, for tokens x [R, n, d]: [R, n].

    Sigma = prod sigma_q / sigma_p over the steps T - 1 .. 1 (as in eq. 4; the supplement's 14-17 drop a minus sign).
    """
    z_p, z_q = ((x - m.tokens[:, None]) * torch.exp(-m.log_sigma_last[:, None]) / ratio_temperature for m in (p, q))
    last = (q.log_sigma_last - p.log_sigma_last)[:, None] + 0.5 * (z_q - z_p) * (z_q + z_p)
    return (q.log_sigma - p.log_sigma)[:, None] + last.sum(-1)


class _Running:
    """How many of each sequence's drafts were judged and accepted, by how far ahead and by rank."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.by_lag: dict[Sequence, np.ndarray] = {}
        self.by_rank: dict[Sequence, np.ndarray] = {}

    def count(self, sequence: Sequence, accepted: np.ndarray) -> None:
        """Adds a round's decisions on a sequence's next tokens."""
        gamma, known, num = sequence.request.gamma, sequence.num_known, len(accepted)
        for counts, size, start in ((self.by_lag, gamma, 0), (self.by_rank, self.length, known)):
            table = counts.setdefault(sequence, np.zeros((2, size), dtype=np.int64))
            table[0, start : start + num] += 1
            table[1, start : start + num] += accepted


def _running(host: MARHost, sequence: Sequence) -> _Running:
    kept = host.kept[sequence.key]
    if "counts" not in kept:
        kept["counts"] = _Running(host.seq_len)
    return kept["counts"]


def _draft(host: MARHost, batch: list[Sequence], counts: list[int], watch: Stopwatch) -> Paths:
    """Drafts counts[i] tokens of batch[i] one after the other and writes them to the slots: fields [B, gamma, ...]."""
    request, channels = batch[0].request, host.config.token_dim
    shape = (len(batch), max(counts))
    device = host.device
    drafted = Paths(
        tokens=torch.zeros(*shape, channels, device=device),
        log_sigma=torch.zeros(shape, device=device),
        log_sigma_last=torch.zeros(*shape, channels, device=device),
    )
    watch.start("draft")
    for j in range(max(counts)):
        index = [i for i, count in enumerate(counts) if count > j]
        active = [batch[i] for i in index]
        rows = host.rows(active, [s.num_known + j for s in active], [1] * len(active))
        paths, made = _denoise(host, "draft", request, rows, host.conditions(active, rows, "draft"))
        host.commit(rows, paths.tokens)
        where = torch.tensor(index, device=host.device)
        for values, of_step in zip(drafted, paths):
            values[where, j] = of_step
        for sequence in active:
            sequence.stats.draft_backbone_calls += 1
            sequence.stats.draft_head_calls += made.head_calls
    return drafted


def _resample(host: MARHost, request: Request, rows: Rows, which: Tensor, p: Paths, q: Paths) -> tuple:
    """Tokens [N, d] of norm(max(0, p - q)) for rejected rows `which` [N], by eq. 11, and the tries of each."""
    p, q, seed, position = p.at(which), q.at(which), rows.seed[which], rows.position[which]

    def keep(y: Tensor) -> Tensor:
        return -torch.expm1(-log_ratio(y, p, q, request.ratio_temperature).clamp(min=0))

    def draws(first: int, num: int) -> tuple[Tensor, Tensor]:
        normals, coins = host.noise.token_candidates(seed, position, first, num, p.tokens.shape[-1])
        return normals, coins.log()

    # proposals have the target's own tau sigma_p: only the ratio is tempered
    tokens, tries = first_kept((p.tokens[:, None], p.log_sigma_last[:, None]), keep, draws, MAX_TRIES)
    return torch.where((tries > MAX_TRIES).unsqueeze(-1), p.tokens, tokens), tries


def run_round(host: MARHost, batch: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Prefills sequences that are at their start; drafts, judges and commits a round of the others."""
    length = host.config.seq_len
    prefill = math.ceil(batch[0].request.prefill * length)
    starting = [s for s in batch if s.num_known < prefill]
    if starting:
        rows = host.next_rows(starting, limit=prefill)
        ar.advance(host, starting, rows, watch)
        host.heat[rows.slot, rows.position] = torch.nan
    going = [s for s in batch if s not in starting]
    if going:
        _speculate(host, going, watch)
    finished = [s for s in batch if s.num_known == length]
    running = _running(host, batch[0])
    for sequence in finished:
        for name in ("by_lag", "by_rank"):
            counts = getattr(running, name).pop(sequence, None)
            if counts is not None:
                setattr(sequence.stats, name, counts.tolist())
    return finished


def _speculate(host: MARHost, batch: list[Sequence], watch: Stopwatch) -> None:
    request, length = batch[0].request, host.config.seq_len
    known = [s.num_known for s in batch]
    counts = [min(request.gamma, length - n) for n in known]
    drafted = _draft(host, batch, counts, watch)

    rows = host.rows(batch, known, counts)
    watch.start("backbone")
    if request.verify == "parallel":
        z = host.conditions(batch, rows)
    else:  # a context a drafted token, the tokens drafted before it included
        owners = [s for s, count in zip(batch, counts) for _ in range(count)]
        contexts = [n + j for n, count in zip(known, counts) for j in range(count)]
        z = host.conditions(owners, host.rows(owners, contexts, [1] * len(owners)))
    watch.start("head")
    p, made = _denoise(host, "target", request, rows, z, index=0 if request.align else 1)
    q = drafted.at(rows.sequence, rows.offset)
    coins = host.noise.token_coins(rows.seed, rows.position).log()
    watch.start("other")
    accepted = (coins < log_ratio(q.tokens[:, None], p, q, request.ratio_temperature).squeeze(-1)).cpu().numpy()

    # every round commits all it drafted, or up to the first rejection
    starts = np.cumsum(counts) - counts
    committed = list(counts)
    if request.verify == "sequential":
        for i, (start, count) in enumerate(zip(starts, counts)):
            committed[i] = min(int(accepted[start : start + count].cumprod().sum()) + 1, count)
    offset = np.arange(len(accepted)) - np.repeat(starts, counts)
    judged = offset < np.repeat(committed, counts)
    tries = np.zeros(len(accepted), dtype=np.int64)
    rejected = np.flatnonzero(judged & ~accepted)
    if len(rejected):
        which = torch.as_tensor(rejected, device=host.device)
        tokens, tried = _resample(host, request, rows, which, p, q)
        host.tokens[rows.slot[which], rows.position[which]] = tokens
        tries[rejected] = tried.cpu().numpy()
    index = torch.as_tensor(np.flatnonzero(judged), device=host.device)
    host.heat[rows.slot[index], rows.position[index]] = torch.as_tensor(accepted[judged], device=host.device).float()

    calls, evaluations = made.calls, made.evaluations * len(z)
    running = _running(host, batch[0])
    for i, sequence in enumerate(batch):
        mine = slice(starts[i], starts[i] + committed[i])
        running.count(sequence, accepted[mine])
        sequence.stats.resample_tries += int(np.minimum(tries[mine], MAX_TRIES).sum())
        sequence.stats.fallbacks += int((tries[mine] > MAX_TRIES).sum())
        sequence.iteration += 1
        sequence.num_known += committed[i]
        sequence.stats.iterations += 1
        sequence.stats.backbone_calls += 1
        sequence.stats.head_calls += made.head_calls
        sequence.stats.head_calls_per_token += calls[mine].sum().item() / length
        sequence.stats.head_evaluations += evaluations[starts[i] : starts[i] + counts[i]].sum().item()


def check(request: Request, host: MARHost) -> None:
    """Raises ValueError where more is drafted than there is, or there is no noise to compare densities by."""
    check_integer("gamma", request.gamma, 1, host.seq_len, "a round drafts at most all of the sequence's tokens")
    if request.temperature == 0:
        raise ValueError("temperature=0: method 'cspd' compares densities, which need noise; give one above 0")
    speculative.check(request, host)


def resolve(request: Request, host: MARHost) -> Request:
    """The request with the window of its chains, where they have one."""
    if request.chains != "speculative":
        return dataclasses.replace(request, window=0)
    return speculative.resolve(request, host)


METHOD = Method(
    name="cspd",
    family="MAR",
    guarantee="heuristic",
    summary="a draft MAR proposes tokens, the target accepts or resamples",
    papers={"2411.11925": "Continuous Speculative Decoding for Autoregressive Image Generation"},
    run_round=run_round,
    needs="draft model",
    options=OPTIONS,
    mixed=("num_iter",),
    check=check,
    resolve=resolve,
    uses=lambda request: {"draft"},
)
