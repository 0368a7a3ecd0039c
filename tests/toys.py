"""Toy VQ models whose distribution over whole sequences can be written down, and runs of the methods on them."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace

import torch
from scipy import stats
from torch import Tensor

from cspd.device import Precision
from cspd.discrete.distributions import Filter, filter_numbers, guide, probabilities
from cspd.discrete.family import VQModels
from cspd.discrete.gpt import GPT, Eagle, GPTConfig, VQConfig, VQModel
from cspd.discrete.runner import VQRunner
from cspd.engine import Engine
from cspd.graphs import Graphs
from cspd.method import find
from cspd.request import Output, Request, RoundStats, Sequence, Stopwatch
from mar.model import MAR, MARConfig

CPU = torch.device("cpu")
LEAST_EXPECTED = 10  # draws per cell of a chi-square test
CODES, LENGTH, CLASSES = 4, 4, 3
SMALL = {  # values of options that only some choices have: quick, and decided without a measurement
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
    """A GPT with random weights, larger than a new GPT's so that its distributions are uneven; `more`: its sizes."""
    sizes = {"dim": 8, "n_layer": 1, "n_head": 2, "multiple_of": 8, "num_classes": CLASSES} | more
    model = GPT(GPTConfig(vocab_size=codes, block_size=length, **sizes)).eval().requires_grad_(False)
    g = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=g))
    return model


def toy_mar(depth: int = 3, head_depth: int = 2) -> MAR:
    """A MAR of 16 tokens with random weights, larger than a new MAR's so that tokens and positions differ."""
    sizes = {"embed_dim": 12, "num_heads": 2, "class_num": 4, "buffer_size": 3, "diffloss_w": 16}
    sizes["diffloss_d"] = head_depth
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
    """Target, draft, EAGLE drafter and tokenizer, as `VQRunner` and `VQModels` take them; `more`: the GPTs' sizes."""
    target = toy_gpt(0, 0.7, codes, length, **more)
    draft = toy_gpt(1, 0.5, codes, length, **more)
    torch.manual_seed(5)
    eagle = Eagle(target.config).eval().requires_grad_(False)
    sizes = {"ch": 32, "ch_mult": (1, 1), "z_channels": 32, "num_res_blocks": 1, "attention": False}
    tokenizer = VQModel(VQConfig(codebook_size=codes, codebook_dim=2, **sizes)).eval().requires_grad_(False)
    return {"target": target, "draft": draft, "eagle": eagle, "tokenizer": tokenizer}


def sequences(codes: int = CODES, length: int = LENGTH) -> Tensor:
    """All sequences, int64 [codes ** length, length]."""
    return torch.cartesian_prod(*[torch.arange(codes)] * length).view(-1, length)


def distribution(target: GPT, request: Request) -> Tensor:
    """The target sampler's probability of each of `sequences`, float64."""
    every = sequences(target.config.vocab_size, target.config.block_size)
    num = len(every)
    before = every[:, :-1]  # the last token conditions nothing
    conditional = target(torch.full((num,), request.label), before)
    unconditional = target(torch.full((num,), CLASSES), before)
    logits = guide(torch.stack([conditional, unconditional]), torch.full((num,), request.cfg))
    count, mass, most = filter_numbers([request.top_k], [request.top_p], target.config.vocab_size)
    top = Filter(torch.tensor(count), torch.tensor(mass), most) if most else None
    p = probabilities(logits, torch.full((num,), request.temperature), top)
    by_position = p.double().gather(-1, every.unsqueeze(-1)).squeeze(-1)
    return by_position.prod(1)


def runner_of(models: dict, num_slots: int, device: torch.device = CPU) -> VQRunner:
    """A runner with copies of the models, if they are not on this device; on a GPU with CUDA graphs."""
    own = models if device == CPU else {name: copy.deepcopy(model).to(device) for name, model in models.items()}
    return VQRunner(VQModels(**own), num_slots, Precision("fp32", device), graphs=Graphs(device))


def admitted(runner: VQRunner, request: Request, seeds: Iterable[int]) -> list[Sequence]:
    """Sequences of requests that differ in their seeds, about to run, in slots 0, 1, ..."""
    uses = find(request.method, "VQ").uses(request)
    started, shared = [], {}
    for slot, seed in enumerate(seeds):
        own = replace(request, seed=seed)
        started.append(Sequence(own, slot=slot, uses=uses, shared=shared))
    runner.admit(started)
    return started


def draw(
    models: dict, request: Request, num: int, batch: int = 20000, first_seed: int = 0, device: torch.device = CPU
) -> tuple[Tensor, list[RoundStats]]:
    """Tokens int64 [num, L], on the CPU, of requests that differ in their seeds, and their statistics."""
    runner = runner_of(models, batch, device)
    run_round = find(request.method, "VQ").run_round
    tokens, statistics = [], []
    every_seed = range(first_seed, first_seed + num)
    with torch.inference_mode():
        for start in range(0, num, batch):
            everyone = admitted(runner, request, every_seed[start : start + batch])
            running = everyone
            while running:
                finished = set(run_round(runner, running, Stopwatch(device)))
                running = [sequence for sequence in running if sequence not in finished]
            tokens.append(runner.results(everyone)[0].to("cpu", copy=True))
            statistics += [sequence.stats for sequence in everyone]
    return torch.cat(tokens), statistics


def counts(tokens: Tensor, vocabulary: int = CODES) -> Tensor:
    """How often each of `sequences` was drawn, float64."""
    length = tokens.shape[1]
    place_values = vocabulary ** torch.arange(length - 1, -1, -1)
    numbers = (tokens * place_values).sum(1)  # of the sequence in `sequences`
    return torch.bincount(numbers, minlength=vocabulary**length).double()


def p_value(observed: Tensor, probability: Tensor) -> float:
    """The p-value of the hypothesis that counts follow a distribution. Each draw counts, also a rare one.

    Cells of few expected draws are pooled. If few are expected in all of these together, too few for a chi-square
    test, their number is tested by a binomial test, and the other cells by a chi-square test given that number.
    """
    if observed[probability <= 0].any():
        return 0.0
    num = int(observed.sum())
    expected = num * probability
    is_rare = expected < LEAST_EXPECTED
    num_rare, expected_rare = observed[is_rare].sum(), expected[is_rare].sum()
    observed, expected = observed[~is_rare], expected[~is_rare]
    if expected_rare >= LEAST_EXPECTED:
        return _chi_square(torch.cat([observed, num_rare[None]]), torch.cat([expected, expected_rare[None]]))
    share = min(1.0, expected_rare.item() / num)
    of_rare = stats.binomtest(int(num_rare), num, share).pvalue
    of_others = _chi_square(observed, expected * observed.sum() / expected.sum())
    return min(1.0, 2 * min(of_rare, of_others))


def _chi_square(observed: Tensor, expected: Tensor) -> float:
    statistic = ((observed - expected).square() / expected).sum().item()
    return stats.chi2.sf(statistic, len(expected) - 1)


def request_of(method: str, **changes: object) -> Request:
    """A resolved request of a VQ method, with the defaults of its options filled in."""
    request = Request(**{"label": 1, "family": "VQ", "method": method, **SETTINGS, **changes})
    return find(method, "VQ").fill(request)
