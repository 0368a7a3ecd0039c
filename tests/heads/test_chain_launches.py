"""Launches of several rounds, whose reports are read one late, make the tokens that single rounds make."""

from __future__ import annotations

import pytest
import torch
from graphs import replayed
from heads import Case, MixtureHead, finish, merge

from cspd.heads import verify
from cspd.heads.speculative import Finished
from cspd.heads.verify import Slots

CENTRES = torch.tensor([[0.9, -0.6, 0.2], [-0.4, 0.7, 1.0], [0.1, -0.2, -1.1]])
HEAD = MixtureHead(CENTRES, (0.05, 0.1, 0.2), (0.5, 0.3, 0.2), wobble=0.3)
NULL_CLASS = torch.tensor([[[0.0, 0.0, 0.0]], [[0.3, -0.2, 0.1]]])
CASE = Case(HEAD, NULL_CLASS, 30, 2.0)
WINDOW, NUM_CHAINS = 5, 23


def staggered(draft, graphs=None) -> Finished:
    """Chains that join while others are under way: some at once, then a few at a time, in slots that others left."""
    chains, ended = CASE.chains(draft, WINDOW, graphs=graphs), []
    for first, last in ((0, 3), (3, 4), (4, 21), (21, NUM_CHAINS)):  # more than slots at first
        CASE.start(chains, NUM_CHAINS, 4, slice(first, last))
        for _ in range(3):
            ended += filter(None, [chains.advance() if chains.owners else None])
    return merge(ended + finish(chains))


@pytest.mark.parametrize("first_block", [32, 2])  # candidates of the residual before it is searched for
def test_replayed_launches_make_the_same_tokens(first_block, monkeypatch):
    monkeypatch.setattr(verify, "FIRST_BLOCK", first_block)
    draft = CASE.calibration(frozen=True)
    eager, graphed = staggered(draft), staggered(draft, replayed())
    assert torch.equal(graphed.record, eager.record) and torch.equal(graphed.row, eager.row)
    assert graphed.tries == eager.tries and sum(eager.tries) > 0
    assert (graphed.tokens - eager.tokens).abs().max() < 1e-3
    assert (graphed.log_sigma - eager.log_sigma).abs().max() < 1e-2


@pytest.mark.parametrize("failing", ["take", "adopt", "write_modulations"])
def test_what_failed_to_start_takes_no_slot(failing, monkeypatch):
    draft = CASE.calibration(frozen=True)
    expected, chains = staggered(draft), CASE.chains(draft, WINDOW)
    CASE.start(chains, NUM_CHAINS, 4, slice(0, 3))
    with monkeypatch.context() as patch:
        patch.setattr(Slots, failing, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            CASE.start(chains, NUM_CHAINS, 4, slice(3, NUM_CHAINS))
    chains.clear()
    CASE.start(chains, NUM_CHAINS, 4)
    assert torch.allclose(merge(finish(chains)).tokens, expected.tokens, atol=1e-3)


@pytest.mark.parametrize("graphs", [None, replayed()], ids=["as they are", "replayed"])
def test_memory_of_free_slots_may_hold_anything(graphs):
    """The table of modulations is not zeroed, and chains that stand still, or are near step 0, read beyond theirs."""
    draft = CASE.calibration(frozen=True)
    expected = staggered(draft, graphs)
    torch.use_deterministic_algorithms(True)  # which fills it with NaN
    try:
        assert torch.empty(1).isnan()
        made = staggered(draft, graphs)
    finally:
        torch.use_deterministic_algorithms(False)
    for name in ("record", "tokens", "log_sigma", "log_sigma_last"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name


@pytest.mark.slow  # tracing takes seconds
def test_a_launch_and_the_residual_are_each_one_program():
    """No graph break: nothing in them is read on the CPU."""
    torch.compiler.reset()
    chains = CASE.chains(CASE.calibration(frozen=True), WINDOW)
    chains.passes = 2
    CASE.start(chains, 5, 4)
    rows = chains._padded(chains._chains)
    for function in (chains._run_passes, chains._residual(0, verify.FIRST_BLOCK)):
        torch.compile(function, fullgraph=True, backend="eager")(rows)
