"""CSpD: a draft MAR proposes tokens, the target accepts or resamples them. Guarantee: heuristic.

Source: Continuous Speculative Decoding (arXiv 2411.11925). The acceptance ratio compares two chains that visit other
states, so it is no density ratio at one point: the law of the output is not the target's. Taken literally (ratio
temperature 1) it accepts nothing, since the last step's sigma is far below the distance of the two models' tokens. The
authors' code divides that step's z-scores by 42, which is the default here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cspd.continuous import ar
from cspd.continuous.ancestral import ancestral
from cspd.continuous.chains import Chains
from cspd.continuous.gaussian import first_kept
from cspd.continuous.host import MARHost, Rows
from cspd.continuous.speculative import make_chains
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence
from mar.diffusion import schedule

VERIFY = ("parallel", "sequential")
CHAINS = ("ancestral", "speculative")
MAX_TRIES = 100


PER_ROW = ("tokens", "log_sigma", "log_sigma_last", "calls")


@dataclass(frozen=True)
class Denoised:
    """Tokens, and the Gaussians of the chains that made them.

    Attributes:
        tokens: [R, d], which are the means of the last step. log_sigma: [R], summed over channels and steps T - 1 .. 1.
        log_sigma_last: [R, d], at step 0, where sampling adds no noise but a sigma exists.
        head_calls: sequential ones, of all together. calls: int64 [R], of each token. window: W of the chains, 1 if
            ancestral.
    """

    tokens: Tensor
    log_sigma: Tensor
    log_sigma_last: Tensor
    head_calls: int
    calls: Tensor
    window: int = 1

    def at(self, *index: Tensor) -> Denoised:
        return replace(self, **{name: getattr(self, name)[index] for name in PER_ROW})


def log_ratio(x: Tensor, p: Denoised, q: Denoised, ratio_temperature: float) -> Tensor:
    """log of eq. 4's p(x) / q(x), Sigma included, for tokens x [R, n, d]: [R, n].

    Sigma = prod sigma_q / sigma_p over the steps T - 1 .. 1 (as in eq. 4; the supplement's 14-17 drop a minus sign).
    """
    z_p, z_q = ((x - m.tokens[:, None]) * torch.exp(-m.log_sigma_last[:, None]) / ratio_temperature for m in (p, q))
    last = (q.log_sigma_last - p.log_sigma_last)[:, None] + 0.5 * (z_q - z_p) * (z_q + z_p)
    return (q.log_sigma - p.log_sigma)[:, None] + last.sum(-1)


def _denoise(host: MARHost, model: str, request: Request, rows: Rows, z: Tensor, index: int = 0) -> Denoised:
    """Denoises rows with a model's head; `index` of the noise as in `cspd.noise.initial`."""
    if request.chains == "speculative" and request.window:
        return _denoise_speculatively(_chains(host, model, request), rows, z, index)
    head, channels, num_steps = host.models[model].head, host.config.token_dim, request.num_sampling_steps
    s, log_sigma = schedule(num_steps), []

    def trace(t: int, x: Tensor, eps: Tensor, v: Tensor) -> None:
        log_sigma.append(s.log_sigma_base[t] + rows.temperature.log() + s.log_sigma_slope[t] * v)

    tokens = ancestral(
        head,
        z,
        rows.scale,
        rows.temperature,
        host.noise.initial(rows.seed, rows.position, channels, index),
        lambda t: host.noise.steps(rows.seed, rows.position, t, channels, index),
        num_steps,
        host.precision,
        trace,
    )
    *path, last = log_sigma
    calls = torch.full((len(tokens),), num_steps, device=tokens.device)
    return Denoised(tokens, torch.stack(path).sum((0, 2)), last, num_steps, calls)


class _Running:
    """What requests of one kind share while they run: speculative chains by model, and each sequence's counts."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.chains: dict[str, Chains] = {}
        self.by_lag: dict[Sequence, np.ndarray] = {}
        self.by_rank: dict[Sequence, np.ndarray] = {}

    def count(self, sequence: Sequence, accepted: np.ndarray) -> None:
        """Adds a round's decisions on a sequence's next tokens."""
        gamma, known, num = sequence.request.gamma, sequence.num_known, len(accepted)
        for counts, size, start in ((self.by_lag, gamma, 0), (self.by_rank, self.length, known)):
            table = counts.setdefault(sequence, np.zeros((2, size), dtype=np.int64))
            table[0, start : start + num] += 1
            table[1, start : start + num] += accepted


def _running(host: MARHost, request: Request) -> _Running:
    if request.round_key not in host.running:
        host.running[request.round_key] = _Running(host.config.seq_len)
    return host.running[request.round_key]


def _chains(host: MARHost, model: str, request: Request) -> Chains:
    chains = _running(host, request).chains
    if model not in chains:
        chains[model] = make_chains(host, model, request, trace_sigma=True)
    return chains[model]


def _denoise_speculatively(chains: Chains, rows: Rows, z: Tensor, index: int) -> Denoised:
    num = len(rows.seed)
    chains.start(list(range(num)), rows.seed, rows.position, z, rows.scale, rows.temperature, index)
    parts, calls = [], 1
    while chains.owners:
        finished, calls = chains.advance(), calls + 1
        if finished:
            parts.append(finished)
    back = torch.tensor(np.argsort([owner for part in parts for owner in part.owners]), device=z.device)
    fields = ("tokens", "log_sigma", "log_sigma_last", "record")
    tokens, log_sigma, last, record = (torch.cat([getattr(part, name) for part in parts])[back] for name in fields)
    return Denoised(tokens, log_sigma, last, calls, (record != 0).sum(1), chains.window)


def _draft(host: MARHost, batch: list[Sequence], counts: list[int], watch: Stopwatch) -> Denoised:
    """Drafts counts[i] tokens of batch[i] one after the other and writes them to the slots: fields [B, gamma, ...]."""
    request, channels = batch[0].request, host.config.token_dim
    shape = (len(batch), max(counts))
    device = host.device
    drafted = Denoised(
        tokens=torch.zeros(*shape, channels, device=device),
        log_sigma=torch.zeros(shape, device=device),
        log_sigma_last=torch.zeros(*shape, channels, device=device),
        head_calls=0,
        calls=torch.zeros(shape, dtype=torch.int64, device=device),
    )
    watch.start("draft")
    for j in range(max(counts)):
        index = [i for i, count in enumerate(counts) if count > j]
        active = [batch[i] for i in index]
        rows = host.rows(active, [s.num_known + j for s in active], [1] * len(active))
        made = _denoise(host, "draft", request, rows, host.conditions(active, rows, "draft"))
        host.commit(rows, made.tokens)
        where = torch.tensor(index, device=host.device)
        for name in PER_ROW:
            getattr(drafted, name)[where, j] = getattr(made, name)
        for sequence in active:
            sequence.stats.draft_backbone_calls += 1
            sequence.stats.draft_head_calls += made.head_calls
    return drafted


def _resample(host: MARHost, request: Request, rows: Rows, which: Tensor, p: Denoised, q: Denoised) -> tuple:
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
        rows = host.next_rows(starting, prefill)
        ar.advance(host, starting, rows, watch)
        host.heat[rows.slot, rows.position] = torch.nan
    going = [s for s in batch if s not in starting]
    if going:
        _speculate(host, going, watch)
    finished = [s for s in batch if s.num_known == length]
    running = _running(host, batch[0].request)
    for sequence in finished:
        for name in ("by_lag", "by_rank"):
            counts = getattr(running, name).pop(sequence, None)
            if counts is not None:
                setattr(sequence.stats, name, counts.tolist())
    if len(finished) == len(batch):
        del host.running[batch[0].request.round_key]
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
    p = _denoise(host, "target", request, rows, z, index=0 if request.align else 1)
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

    calls = p.calls.cpu().numpy()
    evaluations = (1 + (calls - 1) * p.window) * (2 if request.guided else 1)
    running = _running(host, request)
    for i, sequence in enumerate(batch):
        mine = slice(starts[i], starts[i] + committed[i])
        running.count(sequence, accepted[mine])
        sequence.stats.resample_tries += int(np.minimum(tries[mine], MAX_TRIES).sum())
        sequence.stats.fallbacks += int((tries[mine] > MAX_TRIES).sum())
        sequence.iteration += 1
        sequence.num_known += committed[i]
        sequence.stats.iterations += 1
        sequence.stats.backbone_calls += 1
        sequence.stats.head_calls += p.head_calls
        sequence.stats.head_calls_per_token += calls[mine].sum().item() / length
        sequence.stats.head_evaluations += evaluations[starts[i] : starts[i] + counts[i]].sum().item()
