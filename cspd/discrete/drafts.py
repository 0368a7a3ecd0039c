"""Rounds of VQ models: baseline sampling, or draft and verify; and all drafts."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from cspd.device import Report, send_integers
from cspd.discrete.batch import Batch, by_slot, packed, unpacked
from cspd.discrete.distributions import draw_siblings, likeliest, nearby, sample
from cspd.discrete.kv_cache import MOST_NODES
from cspd.discrete.prices import Verification, audited, num_draws
from cspd.discrete.rules import DIALS, MIXED, PARAMETERS, coupling_option, rule_of, rule_options
from cspd.discrete.runner import VQRunner
from cspd.discrete.trees import Shape, TreeDraws, Verified, chain_shape, grown, verify_same_image, walk
from cspd.method import Method, find
from cspd.noise import MAX_INDEX, Purpose, check_indices
from cspd.option import Option, check_integer
from cspd.request import Request, RoundStats, Sequence, Stopwatch
from cspd.transformer import steps

# A draft is a function `(runner, batch) -> Drafted` that proposes a tree of tokens for the target to verify. Siblings
# are either sampled without replacement from a distribution Q, which it returns, or chosen (Q is None) and then
# verified as point masses. Any rule can verify any draft.


class Drafted(NamedTuple):
    """A draft to verify.

    Attributes:
        shape: the shape of the tree. tokens: int64 [B, N], the root first; -1 marks a missing token.
        Q: as in `trees.walk`. draws: the tree's random numbers, if the draft has drawn them already.
    """

    shape: Shape
    tokens: Tensor
    Q: Tensor | None
    draws: TreeDraws | None = None


@dataclass(frozen=True)
class Draft:
    """A registered draft.

    Attributes:
        propose: drafts for a batch. needs: the model it needs besides the target, a key of `VQRunner.models`, or None.
        highest: the largest `gamma`: how many tokens in sequence it can draft.
    """

    propose: Callable[[VQRunner, Batch], Drafted]
    needs: str | None = None
    highest: int = MOST_NODES - 1


DRAFTS: dict[str, Draft] = {}  # by name


def draft(name: str, *, needs: str | None = None, highest: int = MOST_NODES - 1) -> Callable[[Callable], Callable]:
    """Registers a function as a draft that requests can name; the arguments are attributes of `Draft`."""

    def named(propose: Callable[[VQRunner, Batch], Drafted]) -> Callable[[VQRunner, Batch], Drafted]:
        DRAFTS[name] = Draft(propose, needs, highest)
        return propose

    return named


# How a round runs: its numbers go to the device in one copy, the work is one CUDA graph if graphs are enabled, and the
# counts for the CPU come back in one copy. On CUDA they are read one round late, so that the CPU never waits.
#
# The device knows first how many tokens are committed (`VQRunner.num_committed`); the CPU needs only an upper bound. A
# finished sequence may take part in one more round, in which it has no room for tokens.

Work = Callable[[VQRunner, Batch], Tensor]  # from a batch to its `outcome`, without reading a tensor on the CPU


class Unread(NamedTuple):
    """A round that the CPU has not counted yet: sequences, `outcome`, and the maximum of tokens that it commits."""

    sequences: list[Sequence]
    outcome: Report
    most: int


def outcome(
    runner: VQRunner,
    count: Tensor,
    bound: Tensor,
    price: Tensor,
    tried: Tensor,
    accepted: Tensor,
) -> Tensor:
    """The numbers [B, 4 + 2 height] that the CPU counts for a round.

    They include the number of the draft model's forward passes, since a replayed graph runs no Python that counts them.

    Args:
        count: int64 [B], the number of accepted tokens; one more is committed. bound: [B], the rule's local bounds.
        price: [B], see `price`.
        tried, accepted: bool [B, height], whether the token drafted at each depth was verified, and accepted.
    """
    draft_calls = steps(runner.draft_calls + 1, runner.device)[-1]
    count = count.unsqueeze(1)
    bound = bound.unsqueeze(1)
    price = price.unsqueeze(1)
    return torch.cat([count, draft_calls.expand_as(count), bound, price, tried, accepted], 1)


def price(runner: VQRunner, batch: Batch, verification: Verification | None) -> Tensor:
    """The audit of a round, nats [B]: an estimate of the sum of its tokens' divergences. NaN if there is none.

    Nothing is audited with an exact rule, nor at temperature 0, where divergences are 0 or infinite.
    """
    rule = None if verification is None else rule_of(batch.request, runner.models["tokenizer"])
    if rule is None or verification is None or rule.guarantee == "exact" or rule.greedy:
        return torch.full((len(batch),), torch.nan, device=runner.device)
    index = steps(num_draws(rule, verification), runner.device)
    u = runner.uniform(batch, Purpose.AUDIT, torch.zeros_like(index), index)
    return audited(rule, verification, u)


def run(
    runner: VQRunner, sequences: list[Sequence], watch: Stopwatch, work: Work, state: Several[Tensor] = ()
) -> list[Sequence]:
    """Runs one round of a method that drafts, and returns the sequences that are counted as finished.

    Args:
        watch: times the forward passes. state: tensors that the work both reads and changes.
    """
    shared = sequences[0].shared
    before: Unread | None = shared.pop("unread", None)
    numbers = launch(runner, sequences, watch, work, state, before)
    most = numbers.shape[1] // 2 - 1  # 4 + 2 height columns: height + 1 tokens
    now = Unread(by_slot(sequences), Report(numbers), most)
    if runner.late:
        shared["unread"] = now
        if before is not None:
            _count(runner, before)
    else:
        _count(runner, now)
    return finished(runner, sequences)


def finished(runner: VQRunner, sequences: list[Sequence]) -> list[Sequence]:
    """The sequences whose tokens are all committed."""
    return [sequence for sequence in sequences if sequence.num_committed == runner.seq_len]


def launch(
    runner: VQRunner,
    sequences: list[Sequence],
    watch: Stopwatch,
    work: Work,
    state: Several[Tensor] = (),
    before: Unread | None = None,
) -> Tensor:
    """Launches the work of a round and advances the sequences on the device. Returns the `outcome`, on the device.

    Args:
        before: the round that is not counted yet, if any; the other arguments as in `run`.
    """
    sequences = by_slot(sequences)
    first = sequences[0]
    ahead = set(before.sequences) if before else set()
    most_ahead = before.most if before else 0
    kind, numbers = packed(sequences, runner.config, ahead, most_ahead)
    if runner.graphs.enabled:
        kind = kind.bucketed()
        watch.start("backbone")  # phases of a replayed graph cannot be timed apart

    def whole(numbers: Tensor) -> Tensor:
        runner.begin(None if runner.graphs.enabled else watch)
        batch = unpacked(first.request, kind, numbers, runner.num_committed)
        result = work(runner, batch)
        num_new = result[:, 0].long() + 1
        num_committed = (batch.num_committed + num_new).clamp(max=runner.seq_len)
        runner.num_committed[batch.slot] = num_committed
        return result

    sent = send_integers(numbers.numpy(), runner.device)
    state = (runner.num_committed, *state)
    result = runner.graphs.run((first.key, kind), whole, sent, state=state)
    watch.start("other")
    return result


def _count(runner: VQRunner, unread: Unread) -> None:
    """Counts a round for each sequence that was not finished before it."""
    for sequence, numbers in zip(unread.sequences, unread.outcome.tolist()):
        num_accepted, draft_calls, bound, price, *ahead = numbers
        room = runner.seq_len - sequence.num_committed
        if room:
            count_round(sequence, min(int(num_accepted) + 1, room))
            _count_drafted(sequence.stats, int(draft_calls), bound, ahead)
            if not math.isnan(price):
                sequence.audits.append(price)
            if sequence.audits and sequence.num_committed == runner.seq_len:
                _count_audits(sequence, sequence.request.num_generated(runner.seq_len))


def count_round(sequence: Sequence, committed: int) -> None:
    """Advances a sequence by one round: one target forward pass that committed `committed` tokens."""
    sequence.iteration += 1
    sequence.num_committed += committed
    stats = sequence.stats
    stats.iterations += 1
    stats.backbone_calls += 1
    stats.committed[committed] = stats.committed.get(committed, 0) + 1


def _count_drafted(stats: RoundStats, draft_calls: int, bound: float, ahead: list[float]) -> None:
    """Adds a round's draft: the draft model's forward passes, the rule's local bounds, and the verified tokens.

    `ahead`: 0 or 1 for each depth, whether a token was verified there; then the same for accepted.
    """
    stats.draft_backbone_calls += draft_calls
    stats.bound += bound
    height = len(ahead) // 2
    tried, accepted = stats.by_lag
    stats.by_lag = [_added(tried, ahead[:height]), _added(accepted, ahead[height:])]


def _count_audits(sequence: Sequence, num_tokens: int) -> None:
    """The mean of a finished sequence's audits per generated token, if it is finite, and its standard error."""
    audits = sequence.audits
    total = sum(audits)
    if math.isfinite(total):
        spread = statistics.stdev(audits) if len(audits) > 1 else 0.0
        sequence.stats.audit = total / num_tokens
        sequence.stats.audit_error = spread * len(audits) ** 0.5 / num_tokens


def _added(before: list[int], now: list[float]) -> list[int]:
    return [total + int(one) for total, one in zip_longest(before, now, fillvalue=0)]


# Baseline sampling: one target forward pass, one token a round. Guarantee: exact.


def run_plain_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Samples the next token of every sequence and returns the finished sequences; copies nothing to the CPU."""
    return run_single_tokens(runner, sequences, watch, sample_next)


def run_single_tokens(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch, work: Work) -> list[Sequence]:
    """Runs a round whose `work` commits one token of every sequence; returns the finished sequences."""
    launch(runner, sequences, watch, work)
    for sequence in sequences:
        count_round(sequence, committed=1)
    return finished(runner, sequences)


def sample_next(runner: VQRunner, batch: Batch) -> Tensor:
    """Samples and commits the next tokens. Returns the number of accepted drafts, 0: [B, 1]."""
    last, _ = runner.last(batch, 1)
    features = runner.features(batch, last)
    if batch.request.draft in DRAFTS and DRAFTS[batch.request.draft].needs == "eagle":
        runner.past.keep(batch, features)  # a later round may draft
    P = runner.distributions(batch, features)
    here = steps(1, runner.device)
    tokens = sample(P, runner.drawn(batch, here))
    no_draft = torch.zeros_like(tokens, dtype=torch.float32)
    runner.commit(batch, tokens, no_draft)
    return no_draft


def draw_tree(runner: VQRunner, batch: Batch, shape: Shape) -> TreeDraws:
    """The uniform draws of a round that verifies a tree, by one call of the generator."""
    num_positions = 1 + shape.height
    counts = (shape.num_nodes, shape.num_nodes, num_positions)
    purpose, index, fresh = _streams(shape.num_nodes, num_positions, runner.device)
    position = steps(num_positions, runner.device)
    of_nodes = (shape.depth - 1).clamp(min=0)
    of_positions = position.expand(*shape.depth.shape[:-1], -1)
    ahead = torch.cat([of_nodes, of_nodes, of_positions], -1)
    draws = runner.uniform(batch, purpose, ahead, index, fresh)
    tokens, nodes, rejected = draws.split(counts, 1)
    return TreeDraws(tokens, nodes, runner.drawn(batch, position), rejected)


@functools.lru_cache(maxsize=64)
def _streams(num_nodes: int, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Purpose, index and `fresh` (see `VQRunner.uniform`) of each draw of `draw_tree`.

    A drafted token is committed in the round that drafts it, or dropped, so its draw may be the same in other rounds.
    """
    check_indices(num_nodes - 1, MAX_INDEX)
    streams = [(Purpose.CODE, node, 0) for node in range(num_nodes)]
    streams += [(Purpose.TOKEN_ACCEPT, node, 1) for node in range(num_nodes)]
    streams += [(Purpose.CODE_RESIDUAL, 0, 1)] * num_positions
    purpose, index, fresh = torch.tensor(streams, device=device).T.contiguous()
    return purpose, index, fresh


# Speculative sampling (Leviathan et al., arXiv 2211.17192): a round drafts tokens, verifies them, and commits some.
#
# 1. Draft: a chain of tokens by a smaller model, or a tree by EAGLE's drafter.
# 2. Verify: one forward pass of the target gives P after every drafted token; the rule verifies them from the root.
# 3. Commit: the accepted path, and one more token, sampled after it.
#
# With same-image coupling the target samples a token after every node, by the request's own draws, and only drafted
# tokens that equal its samples are accepted: the images are those of `ar`.
#
# Guarantee: that of the rule (`cspd.discrete.rules`), whatever the draft.


def run_drafted_round(runner: VQRunner, sequences: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Runs one round of drafting, verifying and committing; returns the finished sequences."""
    return run(runner, sequences, watch, _draft_and_verify)


def _draft_and_verify(runner: VQRunner, batch: Batch) -> Tensor:
    """The round on the device; returns its `outcome`."""
    draft = DRAFTS[batch.request.draft]
    drafted = draft.propose(runner, batch)
    shape = drafted.shape
    features = runner.features(batch, drafted.tokens, depth=shape.depth, seen=shape.seen)
    verified = _verify(runner, batch, drafted, features)
    commit(runner, batch, drafted, verified)
    if draft.needs == "eagle":
        runner.past.keep(batch, _pick(features, verified.path))
    accepted = steps(shape.height, runner.device) < verified.count.unsqueeze(1)
    audit = price(runner, batch, verified.verification)
    return outcome(runner, verified.count, verified.bound, audit, verified.tried, accepted)


def _verify(runner: VQRunner, batch: Batch, drafted: Drafted, features: Tensor) -> Verified:
    """Verifies a tree by the target's features [branches, B, N, dim] after its tokens."""
    shape, tokens, Q, draws = drafted
    room = runner.seq_len - batch.num_committed
    if batch.same_image:
        P = runner.distributions(batch, features)
        drawn = sample(P, runner.drawn(batch, shape.depth))
        return verify_same_image(shape, tokens, drawn, room)
    rule = rule_of(batch.request, runner.models["tokenizer"])
    P = runner.distributions(batch, features, soft=rule.pools)
    if draws is None:
        draws = draw_tree(runner, batch, shape)
    return walk(rule, shape, tokens, P, Q, draws, room)


def commit(runner: VQRunner, batch: Batch, drafted: Drafted, verified: Verified) -> None:
    """Commits the accepted tokens and the one sampled after them."""
    shape, tokens = drafted.shape, drafted.tokens
    level = steps(shape.height + 1, runner.device)
    count = verified.count.unsqueeze(1)
    after_root = verified.path.roll(-1, 1)
    accepted = tokens.gather(1, after_root)
    committed = torch.where(level == count, verified.last.unsqueeze(1), accepted)
    runner.commit(batch, committed, token_cost=(level < count).float())
    if not shape.chain:
        path = torch.where(level <= count, verified.path, level)
        runner.compact(batch, path)


DRAFT = Option("draft", DRAFTS, "what drafts the tokens")
GAMMA = Option("gamma", int, "number of tokens drafted in a chain, or the height of a tree", low=1, high=MOST_NODES - 1)
NODES = 60  # EAGLE-2: candidates that survive reranking
WINDOW = Option(
    "window",
    int,
    "tokens in EAGLE-2's tree",
    default=NODES,
    implied=True,
    low=1,
    high=MOST_NODES - 1,
    only_with=("draft", ("eagle-dynamic",)),
    metavar="W",
)
NEEDS = {None: "-", "draft": "draft model", "eagle": "EAGLE drafter"}


def prepare(request: Request, runner: VQRunner) -> Request:
    """As `by_budget`; raises ValueError also if `gamma` is above the draft's maximum, or the rule is invalid."""
    highest = DRAFTS[request.draft].highest
    check_integer("gamma", request.gamma, 1, highest, f"it is how far draft={request.draft!r} drafts ahead")
    check_rule(request, runner)
    return by_budget(request, runner)


def check_rule(request: Request, runner: VQRunner) -> None:
    """Raises ValueError if the rule is invalid. Computes its neighbour table now, so that no round waits for it."""
    rule = rule_of(request)
    if rule.pools and runner.models["tokenizer"] is None:
        raise ValueError(
            f"rule={request.rule!r} needs the tokenizer's codes, and this engine has no tokenizer: give it one"
        )
    rule_of(request, runner.models["tokenizer"])


def by_budget(request: Request, runner: VQRunner) -> Request:
    """The request with the parameter of its rule that its budget allows, or with the exact rule.

    Raises:
        ValueError: another value of this parameter is given.
    """
    if request.budget is None or request.rule == "exact":
        return request
    name, _ = DIALS[request.rule]
    method = find(str(request.method), "VQ")
    chosen, given = runner.tuning.dial(request), getattr(request, name)
    default = getattr(method.fill(request.but(**{name: None})), name)
    if given not in (default, chosen.get(name)):
        raise ValueError(f"budget={request.budget:g} chooses {name}: leave {name}={given:g} out, or budget")
    if "rule" in chosen:  # the exact rule has none of these parameters
        chosen = dict.fromkeys(option.name for option in PARAMETERS[request.rule]) | chosen
        if method.fill(request.but(rule=None)).rule == "exact":  # see `rule_options`
            chosen["budget"] = None
    return request.but(**chosen)


def explain(request: Request, runner: VQRunner) -> str | None:
    """What the budget of a resolved request chose, and the price that is predicted; None without a budget."""
    if request.budget is None:
        return None
    chosen = f"budget {request.budget:g}: rule {request.rule}"
    if request.rule == "exact":
        return chosen
    name, _ = DIALS[request.rule]
    price = runner.tuning.price(request)
    predicted = f"predicted {price.divergence:.3g} +- {price.error:.2g} nats per token"
    return f"{chosen}, {name}={getattr(request, name):g}; {predicted}"


def drafting(
    name: str,
    summary: str,
    papers: dict[str, str],
    draft: str,
    gamma: int,
    rule: str = "exact",
    coupling: str = "maximal",
    **parameters: object,
) -> Method:
    """A method that drafts and verifies. The arguments are defaults: requests may name any draft and rule.

    Args:
        draft, gamma: a name of `DRAFTS`, and how far it drafts. rule, parameters: see `rule_options`.
        coupling: of the exact rule, see `COUPLING`.
    """
    of_draft = (DRAFT.but(default=draft), GAMMA.but(default=gamma), WINDOW)
    return Method(
        name=name,
        family="VQ",
        guarantee="exact" if rule == "exact" else "bounded",
        summary=summary,
        papers=papers,
        run_round=run_drafted_round,
        needs=NEEDS[DRAFTS[draft].needs],
        options=(*of_draft, *rule_options(rule, **parameters), coupling_option(coupling)),
        mixed=lambda request: MIXED,
        prepare=prepare,
        explain=explain,
        of_request=lambda request: rule_of(request).guarantee,
        uses=lambda request: set(filter(None, [DRAFTS[request.draft].needs])),
    )


# The drafts. Tokens are sampled from the draft model's own guided and filtered distribution, siblings without
# replacement. Those of EAGLE-2, and all at temperature 0, are chosen instead, and verified as point masses.
#
# Sources:
#     chain: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192.
#     eagle-static: Li et al., "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", arXiv 2401.15077.
#     eagle-dynamic: Li et al., "EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees", arXiv
#                    2406.16858.

# EAGLE-1's tree of 25 tokens: the number of children of each node, named by the ranks on the path to it
EAGLE_TREE = {
    (): 4,
    (0,): 3,
    (1,): 2,
    (2,): 2,
    (3,): 1,
    (0, 0): 3,
    (0, 1): 2,
    (0, 2): 2,
    (1, 0): 1,
    (0, 0, 0): 3,
    (0, 0, 0, 0): 2,
}
BRANCHES = 10  # EAGLE-2: nodes expanded at a depth, and children tried of each
MIN_LOG = -1e4  # of a draft's probability


def _pick(features: Tensor, index: Tensor) -> Tensor:
    """Selects features[:, b, index[b, n]] [branches, B, n, dim] from features [branches, B, N, dim]."""
    each = steps(len(index), index.device).unsqueeze(1)
    return features[:, each, index]


def _expected(batch: Batch, q: Tensor, u: Tensor) -> Tensor:
    """The predicted probability that the target commits each token: [B, N, V].

    Args:
        q: [B, N, V], the draft's distributions. u: [B, 1], the draw by which the target samples with same-image
            coupling.
    """
    return nearby(q, u) if batch.same_image and not batch.greedy else q


@draft("chain", needs="draft")
def chain(runner: VQRunner, batch: Batch) -> Drafted:
    """A chain of `gamma` tokens sampled by the draft model."""
    gamma = batch.request.gamma
    # the last two inputs: if the last round accepted everything, the draft has not seen the last but one
    recent, start = runner.last(batch, 2)
    features = runner.features(batch, recent, start, "draft")
    at_root = (batch.num_committed - start).unsqueeze(1)
    features = _pick(features, at_root)
    draws = runner.drawn(batch, steps(gamma, runner.device)).split(1, 1)
    root, _ = runner.last(batch, 1)
    tokens = [root]
    Q = []
    for i, u in enumerate(draws):
        if i > 0:
            features = runner.features(batch, tokens[-1], i, "draft")
        q = runner.distributions(batch, features, "draft")
        Q.append(q)
        if batch.same_image:
            expected = _expected(batch, q, u)
            tokens.append(likeliest(expected, 1).squeeze(-1))
        else:
            tokens.append(sample(q, u))
    return Drafted(chain_shape(gamma, runner.device), torch.cat(tokens, 1), torch.cat(Q, 1))


def _eagle_root(runner: VQRunner, batch: Batch, height: int) -> Tensor:
    """EAGLE's feature at the root [branches, B, 1, dim]. Its inputs include the tokens committed in the last round."""
    recent, start = runner.last(batch, height + 1)
    position = start.unsqueeze(1) + steps(height + 1, runner.device)
    past = runner.past.before(batch, position)
    features = runner.features(batch, recent, start, "eagle", past=past)
    root = (batch.num_committed - start).unsqueeze(1)
    return _pick(features, root)


class TreeLevel(NamedTuple):
    """The n nodes of a static tree that have children, at one depth.

    Attributes:
        nodes, depth: int64 [n]. seen: bool [n, N + 2], see `trees.Shape.seen`.
        children: int64 [n, K], the nodes of their children, 0 if a node has fewer than K.
        present: int64 [m], indices of the existing children in the flattened `children`.
        inner: int64 [n'], indices in the flattened `children` of those that have children too.
        parents: int64 [n'], for each of these, the index of its parent among the n.
    """

    nodes: Tensor
    depth: Tensor
    seen: Tensor
    children: Tensor
    present: Tensor
    inner: Tensor
    parents: Tensor


@functools.lru_cache(maxsize=64)
def _static_tree(height: int, device: torch.device) -> tuple[Shape, list[TreeLevel], Tensor]:
    """EAGLE-1's tree down to a height, its levels, and the indices of its inner nodes in all levels, int64 [M]."""
    # nodes are numbered depth by depth
    num_children = {path: count for path, count in EAGLE_TREE.items() if len(path) < height}
    paths: list[tuple[int, ...]] = [()]
    for parent, count in num_children.items():
        paths += [(*parent, rank) for rank in range(count)]
    paths.sort(key=lambda path: (len(path), path))
    number = {path: i for i, path in enumerate(paths)}
    parents = [number[path[:-1]] if path else -1 for path in paths]

    counts = num_children.values()
    sizes = []
    for rank in range(max(counts)):
        sizes.append(sum(count > rank for count in counts))
    shape = Shape(torch.tensor(parents, device=device), len(paths[-1]), sizes)
    levels = []
    for depth in range(shape.height):
        inner = [path for path in paths if len(path) == depth and path in num_children]
        width = max(num_children[path] for path in inner)
        nodes = torch.tensor([number[path] for path in inner], device=device)
        levels.append(_level(shape, nodes, width))
    of_levels = torch.cat([level.nodes for level in levels])
    return shape, levels, torch.searchsorted(of_levels, shape.inner)


def _level(shape: Shape, nodes: Tensor, width: int) -> TreeLevel:
    """The level of these nodes, which have at most `width` children each."""
    rows = (shape.inner == nodes.unsqueeze(1)).int().argmax(1)
    children = shape.children[rows, :width]
    flat = children.flatten()
    is_present = flat >= 0
    is_inner = is_present & torch.isin(flat, shape.inner)
    inner = torch.where(is_inner)[0]
    return TreeLevel(
        nodes,
        shape.depth[nodes],
        shape.seen[nodes],
        children.clamp(min=0),
        torch.where(is_present)[0],
        inner,
        inner // width,
    )


@draft("eagle-static", needs="eagle", highest=1 + max(map(len, EAGLE_TREE)))
def eagle_static(runner: VQRunner, batch: Batch) -> Drafted:
    """EAGLE-1: a fixed tree with siblings sampled without replacement; `gamma` is its height, at most 5."""
    shape, levels, inner = _static_tree(batch.request.gamma, runner.device)
    is_chosen = batch.greedy or batch.same_image
    draws = None if is_chosen else draw_tree(runner, batch, shape)
    u = runner.drawn(batch, steps(shape.height, runner.device)).split(1, 1)
    features = _eagle_root(runner, batch, shape.height)
    root, _ = runner.last(batch, 1)
    tokens = [root]
    Q = []
    for depth, level in enumerate(levels):
        q = runner.distributions(batch, features, "eagle", soft=batch.greedy)
        Q.append(q)
        if draws is None:
            expected = _expected(batch, q, u[depth])
            drafted = likeliest(expected, level.children.shape[1])
        else:
            drafted = draw_siblings(q, draws.tokens[:, level.children])
        drafted = drafted.flatten(1)
        tokens.append(drafted[:, level.present])
        if depth + 1 == len(levels):
            break

        # the features after children that have children themselves; each looks at its ancestors and itself
        below = levels[depth + 1]
        features = runner.features(
            batch,
            drafted[:, level.inner],
            model="eagle",
            depth=below.depth,
            seen=below.seen,
            columns=below.nodes,
            past=features[:, :, level.parents],
        )
    Q_inner = None if is_chosen else torch.cat(Q, 1)[:, inner]
    return Drafted(shape, torch.cat(tokens, 1), Q_inner, draws)


class Candidates(NamedTuple):
    """Nodes of EAGLE-2's tree before reranking. They are numbered from 1, depth by depth; 0 is the root.

    Attributes:
        tokens: int64 [B, n]. parent: int64 [B, n], the number of its parent. depth: int64 [n].
        confidence: float64 [B, n], log of the product of the draft's probabilities along the path to a node.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    confidence: Tensor


@draft("eagle-dynamic", needs="eagle", highest=8)
def eagle_dynamic(runner: VQRunner, batch: Batch) -> Drafted:
    """EAGLE-2: expands the likeliest nodes of every depth, then keeps the likeliest of all; `gamma` is the height."""
    height = batch.request.gamma
    nodes = batch.request.window or NODES
    branches = min(BRANCHES, nodes, runner.config.vocab_size)
    candidates = _expand(runner, batch, height, branches)
    parent, tokens = _rerank(candidates, nodes)
    num_expanded = 1 + branches * (height - 1)
    shape = grown(parent, height, num_expanded, branches)
    root, _ = runner.last(batch, 1)
    return Drafted(shape, torch.cat([root, tokens], 1), None)


def _expand(runner: VQRunner, batch: Batch, height: int, branches: int) -> Candidates:
    """EAGLE-2's expansion phase: at every depth the most confident nodes get `branches` children each."""
    size, device = len(batch), runner.device
    each = steps(size, device).unsqueeze(1)
    width = 1 + (height - 1) * branches  # cache columns from the root on: the root's, and one for each expanded node
    column = steps(width + 2, device)  # see `seen_of`: 0 stands for all before the root, 1 is the root's
    seen = (column <= 1).expand(size, 1, width + 2)
    number = torch.zeros(size, 1, dtype=torch.int64, device=device)  # of the nodes expanded at this depth
    confidence = torch.zeros(size, 1, dtype=torch.float64, device=device)
    features = _eagle_root(runner, batch, height)
    u = runner.drawn(batch, steps(height, device)).split(1, 1)
    levels = []
    first = 1  # the number of the first node at this depth
    for depth in range(1, height + 1):
        # children, each as confident as its path: the product of the draft's probabilities
        q = runner.distributions(batch, features, "eagle", soft=True)
        q, tokens = _expected(batch, q, u[depth - 1]).topk(branches)  # [B, n, branches]
        log_q = q.double().log().clamp(min=MIN_LOG)
        log_q = log_q.nan_to_num(nan=MIN_LOG)  # NaN would come before its parent
        confidence = (confidence.unsqueeze(-1) + log_q).flatten(1)
        parent = number.unsqueeze(-1).expand_as(tokens).flatten(1)
        tokens = tokens.flatten(1)
        levels.append((tokens, parent, confidence))
        if depth == height:
            break

        # the most confident ones are expanded next
        confidence, best = confidence.topk(branches)
        number = first + best
        first += tokens.shape[1]

        # their features; each looks at its ancestors and itself
        above = best // branches  # its parent's index among the nodes expanded last
        start = 1 + (depth - 1) * branches
        own_column = column[start + 1 : start + 1 + branches].unsqueeze(1)
        seen = seen[each, above] | (column == own_column)
        features = runner.features(
            batch,
            tokens.gather(1, best),
            model="eagle",
            depth=_depths(depth, branches, device)[-branches:],
            seen=seen,
            columns=column[start : start + branches],
            past=_pick(features, above),
        )
    tokens, parent, confidence = (torch.cat(parts, -1) for parts in zip(*levels))
    return Candidates(tokens, parent, _depths(height, branches, device), confidence)


@functools.lru_cache(maxsize=64)
def _depths(height: int, branches: int, device: torch.device) -> Tensor:
    """The depth of each candidate: `branches` at depth 1, then `branches` for each of `branches` nodes per depth."""
    counts = torch.full((height,), branches * branches, device=device)
    counts[0] = branches
    return torch.arange(1, height + 1, device=device).repeat_interleave(counts)


def _rerank(candidates: Candidates, most: int) -> tuple[Tensor, Tensor]:
    """EAGLE-2's reranking phase: parents int64 [B, 1 + n] and tokens [B, n] of the `most` most confident nodes."""
    # a child is never more confident than its parent; at equal confidence the parent must come first
    score = candidates.confidence - 1e-9 * candidates.depth
    best = score.topk(min(most, score.shape[1])).indices
    selected = best.sort().values

    # selected nodes are renumbered without gaps: a parent's new number is its index among the selected numbers
    root = selected.new_zeros(len(selected), 1)
    numbers = torch.cat([root, selected + 1], 1)
    old_parent = candidates.parent.gather(1, selected)
    parent = torch.searchsorted(numbers, old_parent)
    return torch.cat([root - 1, parent], 1), candidates.tokens.gather(1, selected)
