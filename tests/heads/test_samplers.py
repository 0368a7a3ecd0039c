"""A sampler is a function of a chain: what a chain hands to it is exact, and counts what it does."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import pytest
import torch
from distributions import normal_pvalue
from heads import CHANNELS, Case, MixtureHead, Watching, gaussian_moments
from velocity import VelocityHead

from cspd.causal.head import TIME_FACTOR
from cspd.heads import SAMPLERS, Observer, option, sampler
from cspd.heads.samplers import ancestral, by_length
from cspd.heads.speculative import speculative
from cspd.option import options_of

ROWS = 6000
RIGHT = 1e-3  # p-values of correct code are above it
Z = torch.linspace(0.5, 1.5, CHANNELS) * torch.tensor([1.0, -0.5, 0.3]).view(3, 1, 1)
HEAD = MixtureHead(torch.zeros(1, CHANNELS), (0.5,))
STEPS, TEMPERATURE = 25, 0.8
SCALES = {1: 1.0, 2: 2.5, 3: (2.5, 1.7)}  # by the number of branches
CASES = {num: Case(HEAD, Z[:num], STEPS, scale, TEMPERATURE) for num, scale in SCALES.items()}
every_guidance = pytest.mark.parametrize("branches", CASES)


def plain(chain):
    """As an author writes it, who knows `start`, `steps`, `evaluate` and `move`."""
    x = chain.start()
    for step in chain.steps:
        x = chain.move(x, step, chain.evaluate(x, step))
    return x


def is_exact(case: Case, tokens: torch.Tensor) -> bool:
    mean, variance = gaussian_moments(case)
    return normal_pvalue((tokens.double() - mean) / variance**0.5) > RIGHT


@every_guidance
def test_a_plain_function_draws_the_exact_distribution(branches):
    chain = CASES[branches].chain(ROWS, seed=1)
    assert is_exact(CASES[branches], plain(chain))
    assert chain.tally.of_rows(2).tolist() == [[STEPS] * 2, [STEPS * branches] * 2]


class Drafted:
    """The fits of a case, as a chain has them."""

    def __init__(self, case: Case) -> None:
        self.case, self.draft = case, case.calibration(frozen=True)

    def chains(self, chain, window, draft):
        return self.case.chains(self.draft, window) if window else None


class Ended(Observer):
    def verified(self, chain, ended):
        self.record = ended.record


@pytest.mark.parametrize("branches", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_speculation_draws_the_exact_distribution(branches):
    case, ended, window = CASES[branches], Ended(), 6
    chain = case.chain(ROWS, 1, ended)
    chain.fitted = Drafted(case)
    assert is_exact(case, speculative(chain, window=window))
    calls = (ended.record != 0).sum(1)
    assert calls.float().mean() < 0.6 * STEPS and len(calls.unique()) > 3
    counted = chain.tally.of_rows(ROWS)
    assert np.array_equal(counted, [calls, branches * (1 + window * (calls - 1))])
    # an image's tokens advance together, so it takes part in the calls of its slowest one
    owner = np.arange(ROWS) // 1000
    assert chain.tally.of_owners(owner, 6).tolist() == [each.max() for each in calls.split(1000)]


def test_without_a_window_speculation_is_the_full_chain():
    chain = CASES[2].chain(20, 1)
    chain.fitted = Drafted(CASES[2])
    assert torch.equal(speculative(chain, window=0), plain(CASES[2].chain(20, 1)))


def outputs_at(head, case, x, name, branches):
    """The head's outputs [G, R, 2d] by itself at a timestep of that name."""
    t_embed = head.time_embed(torch.tensor([name]))
    z = case.inputs(len(x), 1).z[:branches]
    return head.denoise(x, head.split(head.modulations(t_embed, head.cond_embed(z))))


@pytest.mark.parametrize("per_table", [1, 2**40])
def test_every_call_has_the_modulations_of_its_own_step(per_table, monkeypatch):
    """Announced or not, in any order, twice, and with other guidance than the call before."""
    monkeypatch.setattr("cspd.heads.chain.MODULATION_BYTES", per_table)
    case = CASES[2]
    chain = case.chain(4, 1)
    steps, x = chain.steps, torch.randn(4, CHANNELS, generator=torch.manual_seed(0))
    chain.expect([(steps[i], i != 9) for i in (0, 3, 7, 9, 20)])
    order = [(0, True), (3, True), (9, False), (9, True), (10, True), (12, True), (12, False), (13, False), (24, True)]
    for index, is_guided in order:
        branches = 2 if is_guided else 1
        out = chain.evaluate(x, steps[index], guided=is_guided)
        assert torch.allclose(out.raw, outputs_at(HEAD, case, x, int(steps[index].timestep), branches))
    assert chain.tally.calls == len(order) and chain.tally.evaluations == 9 + 6


def test_calls_at_times_of_ones_own():
    """Also if they are made in another order, or with other guidance than was announced."""
    head = VelocityHead(torch.zeros(1, CHANNELS), (0.3,))
    case = Case(head, Z[:2], 4, 2.0)  # its own chain has other times, and fewer
    chain, x = case.chain(3, 1), torch.randn(3, CHANNELS, generator=torch.manual_seed(0))
    times = [0.0, 0.1, 0.35, 0.35, 0.5, 0.8, 0.9]
    calls = chain.calls_at(times)
    assert [call.timestep for call in calls] == [TIME_FACTOR * t for t in times]
    for call, is_guided in [*((each, True) for each in calls), (calls[6], True), (calls[2], False), (calls[4], False)]:
        out = chain.evaluate(x, call, guided=is_guided)
        assert torch.allclose(out.raw, outputs_at(head, case, x, call.timestep, 2 if is_guided else 1))
        assert torch.equal(chain.velocity(x, call, out), out.eps)
    assert (chain.tally.calls, chain.tally.evaluations) == (10, 2 * 8 + 2)


def test_the_velocity_of_a_head_that_predicts_the_clean_token():
    case = Case(VelocityHead(torch.zeros(1, CHANNELS), (0.3,), binary=True), Z[:1], 4)
    chain, x = case.chain(3, 1), torch.ones(3, CHANNELS)
    for call, to_go in zip(chain.calls_at([0.2, 0.99]), (0.8, 0.05)):  # what is left to go is 0.05 at least
        out = chain.evaluate(x, call)
        assert torch.allclose(chain.velocity(x, call, out), (out.eps - x) / to_go)


LENGTHS = np.array([4, 7, 4, 4, 7, 3])


def test_tokens_of_several_lengths_are_counted_by_themselves():
    """Each is its own chain of its length; an image takes part in the calls of the lengths that it has."""
    case = CASES[3]
    chain, parts = case.chain(6, 1), []
    chain.run = lambda part, function: parts.append(part) or function(part)
    tokens = by_length(chain, LENGTHS, 950)
    assert [(len(part), part.rows.tolist()) for part in parts] == [(3, [5]), (4, [0, 2, 3]), (7, [1, 4])]
    assert chain.tally.of_rows(6).tolist() == [LENGTHS.tolist(), (3 * LENGTHS).tolist()]
    assert chain.tally.of_owners(np.array([0, 0, 1, 1, 2, 2]), 3).tolist() == [4 + 7, 4, 7 + 3]
    for row, num_steps in enumerate(LENGTHS.tolist()):
        alone = case.chain(6, 1).part(np.array([row]), HEAD.schedule(num_steps, 950))
        assert torch.allclose(ancestral(alone)[0], tokens[row], atol=1e-5)


def test_a_part_of_a_part_knows_its_rows():
    """A sampler that first takes a call with all rows, and then calls with some of some of them."""
    chain = CASES[2].chain(6, 1)
    chain.evaluate(chain.start(), chain.steps[0], guided=False)
    some = chain.part(np.array([5, 3, 1]), chain.schedule)
    by_length(some, np.array([2, 4, 2]), 950)
    (_, of_some), seen = chain.tally.parts[0], []
    assert [rows.tolist() for rows, _ in of_some.parts] == [[0, 2], [1]]
    calls = [1, 1 + 2, 1, 1 + 4, 1, 1 + 2]
    assert chain.tally.of_rows(6).tolist() == [calls, [1 + 2 * (own - 1) for own in calls]]
    watched = (
        CASES[2]
        .chain(6, 1, Watching(lambda t, x, eps, v: seen.append(len(x))))
        .part(np.array([5, 3]), HEAD.schedule(2))
    )
    assert watched.part(np.array([1]), HEAD.schedule(3)).rows.tolist() == [3]
    plain(watched)
    assert seen == [2, 2]


def test_settings_are_read_from_the_signature():
    def own(
        chain,
        share: Annotated[float, option("a share", high=1)] = 0.5,
        how_many: Annotated[int | None, option("a number", low=2, metavar="N")] = None,
        kind: Annotated[Literal["near", "far"], option("a choice")] = "near",
        not_an_option: int = 3,
    ):
        """Only those with a help text."""

    share, how_many, kind = options_of(own)
    assert (share.name, share.kind, share.default, share.high, share.help) == ("share", float, 0.5, 1, "a share")
    assert (how_many.kind, how_many.default, how_many.low, how_many.metavar) == (int, None, 2, "N")
    assert (kind.name, kind.kind, kind.default) == ("kind", ("near", "far"), "near")


def test_a_users_sampler_does_not_replace_ours():
    before = dict(SAMPLERS)
    with pytest.raises(ValueError, match="speculative"):
        sampler("speculative")(plain)
    assert before == SAMPLERS
