"""Toy VQ models whose distribution over whole sequences can be written down, and runs of the methods on them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from scipy import stats
from torch import Tensor

from cspd.device import Precision
from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQConfig, VQModel
from cspd.discrete.rules import Filter, filter_numbers, guide, probabilities
from cspd.discrete.runner import VQRunner
from cspd.engine import Engine
from cspd.method import find
from cspd.request import Output, Request, RoundStats, Sequence, Stopwatch
from mar.model import MAR, MARConfig

CPU = torch.device("cpu")
LEAST_EXPECTED = 10  # draws a cell of a chi-square test; rarer sequences are pooled
CODES, LENGTH, CLASSES = 4, 4, 3
SMALL = {  # of options that some choices have: quick, and decided without a measurement
    "first_timestep": 950,
    "upper": 5,
    "lower": 3,
    "head_calls": 3,
    "window": 3,
    "draft": "frozen",
    "warmup": 1,
    "refresh": 2,
}
SETTINGS = {"cfg": 1.5, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def toy_gpt(seed: int, scale: float = 0.7, codes: int = CODES, length: int = LENGTH, **more: int) -> GPT:
    """A GPT with random weights, larger than a new one's so that its distributions are uneven; `more` of its sizes."""
    sizes = {"dim": 8, "n_layer": 1, "n_head": 2, "multiple_of": 8, "num_classes": CLASSES} | more
    model = GPT(GPTConfig(vocab_size=codes, block_size=length, **sizes)).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=g))
    return model


def toy_mar(depth: int = 3, head_depth: int = 2) -> MAR:
    """A MAR of 16 tokens with random weights, larger than a new one's so that tokens and positions differ."""
    sizes = dict(embed_dim=12, num_heads=2, class_num=4, buffer_size=3, diffloss_w=16, diffloss_d=head_depth)
    torch.manual_seed(depth)
    model = MAR(MARConfig(img_size=16, vae_stride=4, vae_embed_dim=3, depth=depth, **sizes))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    torch.nn.init.normal_(model.head.final_layer.linear.weight, std=0.05)  # or chains explode
    return model.eval().requires_grad_(False)


def staggered(engine: Engine, requests: list[Request]) -> list[Output]:
    """Outputs of requests that join one step after the other, so that they are at different iterations."""
    outputs, tickets = {}, []
    for request in requests:
        tickets.append(engine.add_request(request))
        outputs |= engine.step()
    while len(outputs) < len(requests):
        outputs |= engine.step()
    return [outputs[ticket] for ticket in tickets]


def toy_models(codes: int = CODES, length: int = LENGTH, **more: int) -> dict:
    """Target, draft, EAGLE drafter and tokenizer, as `VQRunner` and `VQModels` take them; `more` of the GPTs' sizes."""
    target, draft = toy_gpt(0, 0.7, codes, length, **more), toy_gpt(1, 0.5, codes, length, **more)
    torch.manual_seed(5)
    eagle = Eagle(target.config).eval().requires_grad_(False)
    sizes = {"ch": 32, "ch_mult": (1, 1), "z_channels": 32, "num_res_blocks": 1, "attention": False}
    tokenizer = VQModel(VQConfig(codebook_size=codes, codebook_dim=2, **sizes)).eval().requires_grad_(False)
    return {"target": target, "draft": draft, "eagle": eagle, "tokenizer": tokenizer}


def sequences(codes: int = CODES, length: int = LENGTH) -> Tensor:
    """Every sequence there is, int64 [codes ** length, length]."""
    return torch.tensor(list(itertools.product(range(codes), repeat=length)))


def distribution(target: GPT, request: Request) -> Tensor:
    """The target sampler's probability of each of `sequences`, float64."""
    every = sequences(target.config.vocab_size, target.config.block_size)
    labels = torch.full((len(every),), request.label)
    halves = [target(labels, every[:, :-1]), target(torch.full_like(labels, CLASSES), every[:, :-1])]
    logits = guide(torch.stack(halves), torch.full((len(every),), request.cfg))
    count, mass, most = filter_numbers([request.top_k], [request.top_p], target.config.vocab_size)
    kept = Filter(torch.tensor(count), torch.tensor(mass), most) if most else None
    p = probabilities(logits, torch.full((len(every),), request.temperature), kept)
    return p.double().gather(-1, every.unsqueeze(-1)).squeeze(-1).prod(1)


def runner_of(models: dict, num_slots: int) -> VQRunner:
    models = dict(models)
    return VQRunner(models.pop("target"), num_slots, CPU, Precision("fp32", CPU), **models)


def admitted(runner: VQRunner, request: Request, seeds: Iterable[int]) -> list[Sequence]:
    """Sequences of requests that differ in their seeds, about to run, in slots 0, 1, ..."""
    started, uses = [], find(request.method, "VQ").uses(request)
    for slot, seed in enumerate(seeds):
        started.append(Sequence(replace(request, seed=seed), 0, slot=slot, uses=uses, stats=RoundStats()))
    runner.admit(started)
    return started


def draw(
    models: dict, request: Request, num: int, batch: int = 20000, first_seed: int = 0
) -> tuple[Tensor, list[RoundStats]]:
    """Codes int64 [num, L] of requests that differ in their seeds, and their statistics."""
    runner = runner_of(models, batch)
    run_round = find(request.method, "VQ").run_round
    made, statistics = [], []
    with torch.inference_mode():
        for start in range(0, num, batch):
            seeds = range(first_seed + start, first_seed + min(start + batch, num))
            everyone = admitted(runner, request, seeds)
            running = list(everyone)
            while running:
                finished = set(run_round(runner, running, Stopwatch(CPU)))
                running = [s for s in running if s not in finished]
            made.append(runner.results(everyone)[0].clone())
            statistics += [s.stats for s in everyone]
    return torch.cat(made), statistics


def counts(codes: Tensor, vocabulary: int = CODES) -> Tensor:
    """How often each of `sequences` was drawn, float64."""
    weights = vocabulary ** torch.arange(codes.shape[1] - 1, -1, -1)
    return torch.bincount((codes * weights).sum(1), minlength=vocabulary ** codes.shape[1]).double()


def p_value(observed: Tensor, probability: Tensor) -> float:
    """Of a chi-square test that counts follow a distribution; cells of few expected draws are pooled."""
    expected = observed.sum() * probability
    large = expected >= LEAST_EXPECTED
    pool: Callable[[Tensor], Tensor] = lambda x: torch.cat([x[large], x[~large].sum().unsqueeze(0)])  # noqa: E731
    observed, expected = pool(observed), pool(expected)
    if expected[-1] < LEAST_EXPECTED:
        observed, expected = observed[:-1], expected[:-1] * observed[:-1].sum() / expected[:-1].sum()
    statistic = ((observed - expected).square() / expected).sum().item()
    return stats.chi2.sf(statistic, len(expected) - 1)


def request_of(method: str, **changes: object) -> Request:
    """A resolved request of a VQ method, its options' defaults filled in."""
    request = Request(**{"label": 1, "family": "VQ", "method": method, **SETTINGS, **changes})
    return find(method, "VQ").fill(request)
