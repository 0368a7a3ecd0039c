"""The cached backbone of LazyMAR (arXiv 2503.12450): most iterations compute a part of the transformer. Heuristic."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from cspd.continuous.backbone import backbone
from cspd.continuous.buckets import by_sequence
from cspd.continuous.host import MARHost
from cspd.continuous.rows import Rows
from cspd.continuous.schedule import timetable
from cspd.machine import check_fits
from cspd.option import Option
from cspd.sequence import Request, Sequence
from cspd.transfer import send_integers
from mar.cached import Counts, Kept, bytes_kept, lazy, refresh, stretch
from mar.head import filled
from mar.model import MAR

REFRESH = Option(
    "refresh",
    int,
    "after the warm-up, evaluate the full transformer only at every N-th iteration; 1: every iteration",
    default=9,
    low=1,
    metavar="N",
)
WARMUP = Option(
    "warmup",
    int,
    "first iterations, which evaluate the full transformer",
    default=5,
    metavar="N",
)
RETAIN = Option(
    "retain",
    float,
    "fraction of the positions that the deeper decoder layers compute at first; it falls over the iterations",
    default=1.0,
    high=1,
    metavar="SHARE",
)
REUSE_NULL = Option(
    "reuse_null",
    bool,
    "evaluate the unconditional branch only with the full transformer, and reuse its difference between",
    default=True,
)
OPTIONS = (REFRESH, WARMUP, RETAIN, REUSE_NULL)
RUNS = [(1, 20), (0.6, 1), (0.5, 4), (0.4, 5), (0.15, 5), (0.12, 5), (0.05, 24)]  # shares, in how many of 64 iterations
SHARES = np.repeat(*zip(*RUNS))
SPARE = 15 / 320  # of the positions: at least so many are chosen beside those that always are


class Caches:
    """What sequences keep, in slots. Kinds of requests that keep the same share them: no two have the same slots.

    Attributes:
        shape: which requests they serve, see `_shape`.
        copies: 2 where the null class has caches of its own. kept: of the transformer, copies x slots.
        distance: float32 [slots, L + 1, D], the null class's last hidden state minus the class's, by position, with a
            place for padding; None where it is not reused.
        known: int64 [slots], on the host: how many tokens of each sequence the last evaluation knew.
    """

    def __init__(self, host: MARHost, request: Request) -> None:
        model, slots = host.target, host.num_slots
        self.shape = self.copies, has_distance = _shape(request)
        self.kept = Kept.empty(model, self.copies * slots, host.precision.dtype, host.device)
        self.distance = None
        if has_distance:
            self.distance = torch.zeros(slots, host.seq_len + 1, model.config.embed_dim, device=host.device)
        self.known = np.zeros(slots, dtype=np.int64)

    def slots(self, slots: Tensor) -> Tensor:
        """Where `kept` has sequences of these slots, the null class second."""
        return torch.cat([slots + copy * len(self.known) for copy in range(self.copies)])


def _shape(request: Request) -> tuple[int, bool]:
    """(how many classes have caches of the transformer, whether the null class's distance is kept)."""
    return (2 if request.guided and not request.reuse_null else 1), request.guided and request.reuse_null


def _model(host: MARHost) -> MAR:
    """The target as it computes."""
    return host.precision.prepare(host.target)


def bytes_per_slot(host: MARHost, request: Request) -> int:
    """Bytes of the caches that a slot adds."""
    copies, has_distance = _shape(request)
    distance = 4 * (host.seq_len + 1) * host.config.embed_dim
    return copies * bytes_kept(host.target, host.precision.dtype) + has_distance * distance


def resolve(request: Request, host: MARHost) -> Request:
    """The request as it is; raises ValueError where there are no caches for it yet, and they would not fit."""
    if _shared(host, request) is None:
        what, fix = " with backbone='cached'", "use backbone='full'"
        check_fits(bytes_per_slot(host, request), host.num_slots, what, fix, host.device)
    return request


def kind(sequence: Sequence) -> str:
    """How the next iteration of a sequence is evaluated: "full", "refresh" (full, and kept), or "lazy"."""
    request = sequence.request
    since = sequence.iteration - request.warmup
    if since >= 0 and since % request.refresh:
        return "lazy"
    is_last = sequence.iteration + 1 == request.num_iter
    return "full" if since < 0 or request.refresh == 1 or is_last else "refresh"


@backbone("cached", options=OPTIONS, resolve=resolve)
def conditions(host: MARHost, batch: list[Sequence], rows: Rows) -> Tensor:
    """z of the rows [G, R, D] as `MARHost.conditions` gives it, or near it (arXiv 2503.12450).

    Sequences that are to be evaluated in different ways are evaluated one kind after the other.
    """
    kinds = np.array([kind(sequence) for sequence in batch])
    if (kinds == kinds[0]).all():
        return EVALUATIONS[kinds[0]](host, batch, rows)
    of_row = np.repeat(kinds, rows.counts)
    parts, which = [], []
    for name in np.unique(kinds):
        members = np.flatnonzero(kinds == name)
        own, known, counts = ([each[i] for i in members] for each in (batch, rows.known, rows.counts))
        parts.append(EVALUATIONS[name](host, own, host.rows(own, known, counts)))
        which.append(np.flatnonzero(of_row == name))
    back = send_integers(np.argsort(np.concatenate(which)), host.device)
    return torch.cat(parts, dim=1)[:, back]


def _refreshed(host: MARHost, batch: list[Sequence], rows: Rows) -> Tensor:
    """By a full evaluation that keeps what later iterations need."""
    caches, copies = _caches(host, batch), 2 if batch[0].request.guided else 1
    slots, known = np.array([s.slot for s in batch]), np.array(rows.known)
    # the null class's distance is wanted wherever a token is predicted before the next refresh
    until = [_known_after(s, s.request.refresh if caches.distance is not None else 1, host.seq_len) for s in batch]
    num_ahead = np.array(until) - known
    padded, most = host.target.padded(int(known.max())), host.graphs.size(filled(int(num_ahead.max())))
    evaluate = functools.partial(_refresh, host, caches, copies, padded, most)
    numbers = send_integers(by_sequence(host, [slots, known, num_ahead]), host.device)
    z = host.graphs.run(("refresh", caches, copies, padded, most), evaluate, numbers)
    caches.known[slots] = known
    return z[:, rows.sequence, rows.offset]


def _refresh(host: MARHost, caches: Caches, copies: int, padded: int, most: int, numbers: Tensor) -> Tensor:
    """z [G, B, most, D] of the tokens after those known, by `mar.cached.refresh`.

    Args:
        numbers: int64 [3, B]: slots; how many tokens are known; how many after them are predicted before the next
            refresh.
    """
    slots, known, num_ahead = numbers
    tokens, order, embedding = _inputs(host, slots, copies)
    positions, is_padding = stretch(host.order[slots], known, num_ahead, most)
    inputs = tokens, order, known.repeat(copies), embedding, positions.repeat(copies, 1), padded
    with host.precision.fast():
        x = refresh(_model(host), caches.kept, caches.slots(slots), *inputs).unflatten(0, (copies, -1))
    if caches.distance is not None:
        where = positions.masked_fill(is_padding, host.seq_len)
        caches.distance[slots.unsqueeze(-1), where] = (x[1] - x[0]).float()
    return _conditions(host, x, positions)


def _lazy(host: MARHost, batch: list[Sequence], rows: Rows) -> Tensor:
    """By an evaluation of what is new or has changed most."""
    caches, slots = _caches(host, batch), np.array([s.slot for s in batch])
    counts = planned(host, batch, rows, caches.known[slots])
    known, *others = counts.max(axis=0).tolist()
    most = Counts(host.target.padded(known), *(host.graphs.size(filled(most)) for most in others))
    evaluate = functools.partial(_evaluate_lazily, host, caches, most)
    changed = caches.kept.decoder[0]  # what it was decides what is computed
    numbers = send_integers(by_sequence(host, [slots, *counts.T]), host.device)
    z = host.graphs.run(("lazy", caches, most), evaluate, numbers, state=[changed])
    for sequence in batch:
        sequence.stats.lazy_backbone_calls += 1
    caches.known[slots] = rows.known
    return z[:, rows.sequence, rows.offset]


def _evaluate_lazily(host: MARHost, caches: Caches, most: Counts, numbers: Tensor) -> Tensor:
    """z [G, B, M, D] of the next tokens, by `mar.cached.lazy`; numbers: int64 [5, B], slots and its four counts."""
    slots, *counts = numbers
    tokens, order, embedding = _inputs(host, slots, caches.copies)
    counts = torch.stack(counts, dim=1).repeat(caches.copies, 1)
    with host.precision.fast():
        x, positions = lazy(_model(host), caches.kept, caches.slots(slots), tokens, order, counts, embedding, most)
    x, positions = x.unflatten(0, (caches.copies, -1)), positions[: len(slots)]
    if caches.distance is not None:
        x = torch.cat([x, x + caches.distance[slots.unsqueeze(-1), positions]])
    return _conditions(host, x, positions)


EVALUATIONS = {"full": MARHost.conditions, "refresh": _refreshed, "lazy": _lazy}


def _caches(host: MARHost, batch: list[Sequence]) -> Caches:
    """The caches of a batch's kind; they go with the last kind that has them, and stay where graphs read them."""
    kept, request = host.kept[batch[0].key], batch[0].request
    if "caches" not in kept:
        kept["caches"] = _shared(host, request) or Caches(host, request)
        if host.graphs.enabled:
            host.graphs.lasting["caches", _shape(request)] = kept["caches"]
    return kept["caches"]


def _shared(host: MARHost, request: Request) -> Caches | None:
    """Caches that are there already and would do for a request."""
    there = (kept["caches"] for kept in host.kept.values() if "caches" in kept)
    in_flight = (caches for caches in there if caches.shape == _shape(request))
    return next(in_flight, host.graphs.lasting.get(("caches", _shape(request))))


def _known_after(sequence: Sequence, iterations: int, seq_len: int) -> int:
    """Tokens known after so many more iterations, or at the end."""
    masked = timetable(sequence.request, seq_len).masked
    return seq_len - int(masked[min(sequence.iteration + iterations, len(masked)) - 1])


def planned(host: MARHost, batch: list[Sequence], rows: Rows, known_before: np.ndarray) -> np.ndarray:
    """What `mar.cached.lazy` is told to compute of each sequence, of which so many tokens were known before: [B, 4]."""
    request = batch[0].request
    places = host.config.buffer_size + host.seq_len
    known, predicted = np.array(rows.known), np.array(rows.counts)
    new = known - known_before
    progress = [len(SHARES) * s.iteration // s.request.num_iter for s in batch]
    retained = np.floor(request.retain * SHARES[progress] * places).astype(np.int64)
    others = np.maximum(retained - predicted, new + math.ceil(SPARE * places))
    others = np.minimum(others, places - predicted)
    return np.stack([known, new, predicted, others], axis=1)


def _inputs(host: MARHost, slots: Tensor, copies: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, order, class embedding) of slots [B], `copies` of each, the null class second."""
    embedding = host.classes["target"][host.label[slots]]
    if copies == 2:
        embedding = torch.cat([embedding, host.target.fake_latent.expand_as(embedding)])
    return host.tokens[slots].repeat(copies, 1, 1), host.order[slots].repeat(copies, 1), embedding


def _conditions(host: MARHost, x: Tensor, positions: Tensor) -> Tensor:
    """z [G, B, M, D] of hidden states [G, B, M, D] at positions [B, M]."""
    with host.precision.fast():
        return _model(host).condition(x, positions).float()
