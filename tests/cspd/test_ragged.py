"""Sequences of one batch that have ended an iteration do not wait for the slowest of them before they go on."""

from __future__ import annotations

import copy

import torch

from cspd import Engine, MARModels, Request, noise
from mar.model import MAR

BATCH, IN_FIRST_ITERATION = 8, 5  # tokens: MAR's cosine schedule leaves floor(64 cos(pi / 8)) = 59 of 64 masked
SETTINGS = {
    "method": "speculative",
    "num_iter": 4,
    "num_sampling_steps": 40,
    "window": 4,
    "draft": "frozen",
    "cfg": 1.0,
}


def test_a_round_ends_when_three_in_four_have_ended_their_iteration(small_mar: MAR, monkeypatch):
    """The first step of the engine takes as many head calls as its sixth fastest sequence, not as its slowest."""
    model, calls = copy.deepcopy(small_mar), []
    denoise = model.head.denoise

    def counted(*args):
        calls.append(args)
        return denoise(*args)

    monkeypatch.setattr(model.head, "denoise", counted)
    engine = Engine(MARModels(model), max_batch=BATCH, device="cpu")
    for i in range(BATCH):
        engine.add_request(Request(i, seed=i, **SETTINGS))
    finished = engine.step()
    calls_of_first_step = len(calls)
    while len(finished) < BATCH:
        finished |= engine.step()

    needed = []  # head calls that each sequence's first iteration takes: those of its slowest token
    for output in finished.values():
        order = noise.order(torch.tensor([output.request.seed]), len(output.token_cost))[0]
        needed.append(output.token_cost[order[:IN_FIRST_ITERATION]].max().item())
    needed.sort()
    assert calls_of_first_step == needed[BATCH * 3 // 4 - 1] < needed[-1]
