"""`cspd.accelerate` in stand-ins of the public codes: their tokens, their distribution, their calls' meaning."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import pickle
import types
import warnings

import pytest
import torch
from causals import STEPS as CAUSAL_STEPS
from causals import CausalGolden
from distributions import normal_pvalue, same_law_pvalue
from golden_files import GOLDEN, relative_error
from safetensors.torch import load_file
from seams import (
    CHANNELS,
    CODES,
    COND,
    GOLDEN_RUNS,
    PARALLEL,
    AnnealedDiffLoss,
    BitDiffHead,
    DiffHead,
    DiffLoss,
    Encoder,
    FlowMatchingHead,
    Known,
    KnownNoise,
    NewerFlowMatchingHead,
    golden_inputs,
    layered,
)
from torch import Tensor, nn

import cspd
from cspd.heads import SAMPLERS, Net
from cspd.seams import Accelerated, flow

RUNS = [(code, kind) for code, runs in GOLDEN_RUNS.items() for kind in runs]
STEPS = 12


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Fits of one test are not found by another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def unchecked(handle: Accelerated, change=lambda call: call) -> Accelerated:
    """The handle with changed calls, which are not compared with the code's own first."""
    read = handle.seam.read
    handle.seam = dataclasses.replace(handle.seam, read=lambda given: change(read(given)), is_known=False)
    return handle


# The authors' tokens.


def handed_out(monkeypatch, draws: Tensor) -> None:
    """Lets torch draw these normals, one of its calls after the other."""
    left = iter(draws)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: next(left).clone().reshape(*shape))
    monkeypatch.setattr(torch, "randn_like", lambda x: next(left).clone().reshape(x.shape))


@pytest.mark.parametrize("is_accelerated", [False, True], ids=["stand-in", "accelerated"])
@pytest.mark.parametrize("code, kind", RUNS)
def test_the_authors_tokens(code, kind, is_accelerated, monkeypatch):
    head, (c, draws) = layered(code), golden_inputs(code, kind)
    if is_accelerated:
        unchecked(cspd.accelerate(head, "ancestral"))
    handed_out(monkeypatch, draws)
    tokens = head.sample(c, **GOLDEN_RUNS[code][kind])
    assert relative_error(tokens, load_file(GOLDEN / "heads.safetensors")[f"{code}.{kind}"]) < 1e-4


@pytest.mark.parametrize("kind, cfg", [("plain", 1.0), ("guided", 3.0)])
@pytest.mark.parametrize("name", ["sphere", "bitdance", "bitdance_4x", "bitdance_16x"])
def test_the_authors_tokens_of_causal_models(name, kind, cfg, monkeypatch):
    """The second token, whose guidance is linear; SphereAR's is normalised afterwards, of BitDance's the sign is taken."""
    golden = CausalGolden(name)
    sizes = {key: golden.config[key] for key in ("parallel_num",) if key in golden.config}
    channels, num_cells = golden.config["latent_dim"], sizes.get("parallel_num", 1)
    net = Encoder(channels, golden.config["dim"], golden.config["diff_dim"], (4, 2), **sizes)
    head = DiffHead(net, channels) if name == "sphere" else BitDiffHead(net, channels)
    weights = golden.model.head.state_dict()
    head.load_state_dict(weights)
    z, tokens = golden.conditions(kind)[1], golden.tokens(kind)[1]
    rows = len(z) // (2 if cfg > 1 else 1)
    z = z.unflatten(-1, (num_cells, -1)) if sizes else z
    unchecked(cspd.accelerate(head.eval(), "ancestral"))
    handed_out(monkeypatch, golden.normals(1, rows))
    scale = 1 + (cfg - 1) / golden.model.config.seq_len
    ours = head.sample(z, scale, CAUSAL_STEPS)[:rows].flatten(1)
    if name == "sphere":
        ours = ours / ours.norm(dim=-1, keepdim=True) * channels**0.5
        assert relative_error(ours, tokens[:rows]) < 1e-4
    else:
        is_clear = ours.abs() > 1e-3
        assert (ours.sign() == tokens[:rows].sign())[is_clear].all() and is_clear.float().mean() > 0.9


# Calls of the codes.


def rows_of(code: str, num: int, branches: int = 2, seed: int = 5) -> Tensor:
    """Conditions [branches * num, .., COND] of a layered head."""
    cells = {"bitdance_4x": [4], "bitdance_16x": [16]} | {name: [own[0]] for name, own in PARALLEL.items()}
    own = cells.get(code, [])
    return torch.randn(branches * num, *own, COND, generator=torch.Generator().manual_seed(seed))


def drawn_by(head: nn.Module, z: Tensor, cfg: float = 3.0, seed: int | None = 0, **more) -> Tensor:
    """Tokens by `head.sample`, with the arguments that its code has."""
    if seed is not None:
        torch.manual_seed(seed)
    if isinstance(head, DiffLoss):
        return head.sample(z, cfg=cfg, **more)
    if isinstance(head, DiffHead):
        return head.sample(z, cfg, **{"num_sampling_steps": STEPS, **more})
    return head.sample(c=z, cfg=cfg, **{"num_sampling_steps": STEPS, **more})


@pytest.mark.parametrize("code", CODES)
def test_the_full_chain_is_the_codes_own(code):
    """Also of the next call: the generator is where their code would leave it."""
    head = layered(code)
    more = {"step": 3, "ar_num_iter": 8} if code == "disa" else {}
    cfg = torch.tensor([3.0]) if code == "mar" else 3.0
    z = rows_of(code, 3)
    theirs = [drawn_by(head, z, cfg, seed, **more)[:3] for seed in (0, None)]
    handle = cspd.accelerate(head, "ancestral")
    ours = [drawn_by(head, z, cfg, seed, **more) for seed in (0, None)]
    assert all(relative_error(a[:3], b) < 1e-3 for a, b in zip(ours, theirs))
    assert len(ours[0]) == len(z) or code.startswith("nextstep")
    assert handle.stats.tokens == 6 and handle.stats.others == 0
    handle.restore()
    assert torch.equal(drawn_by(head, z, cfg, 0, **more)[:3], theirs[0])


@pytest.mark.parametrize("code", CODES)
def test_heads_are_found(code):
    head = layered(code)
    inside = nn.ModuleDict({"backbone": nn.Linear(2, 2), "head": head})
    pipeline = types.SimpleNamespace(name="a pipeline", model=inside, settings=3)
    for model in (head, inside, pipeline):
        handle = cspd.accelerate(model)
        assert handle.seam.module is head
        handle.restore()


def test_models_without_one_head_are_refused():
    two = nn.ModuleList([layered("mar"), layered("sphere")])
    for model in (two, nn.Linear(2, 2), types.SimpleNamespace(size=3), 3):
        with pytest.raises(ValueError, match="head"):
            cspd.accelerate(model)
    assert "sample" not in vars(two[0])


def test_unknown_methods_and_settings_are_refused():
    head = layered("mar")
    for method, settings in (("faster", {}), ("speculative", {"windows": 4}), ("speculative", {"window": -1})):
        with pytest.raises(ValueError, match="faster|window"):
            cspd.accelerate(head, method, **settings)
    assert "sample" not in vars(head)


def test_samplers_without_noise_are_refused():
    with pytest.raises(ValueError, match="LazyMAR"):
        cspd.accelerate(layered("lazymar"))
    with pytest.raises(ValueError, match="DDIM"):
        cspd.accelerate(AnnealedDiffLoss(layered("mar").net, CHANNELS, 10, 12, sampler="DDIM"))


# The distribution of tokens.

SCALE = torch.tensor([0.15, 0.3, 0.5])
CELLS = torch.tensor([[0.15, 0.3], [0.5, 0.25], [0.3, 0.2], [0.1, 0.4]])
BRANCHES = torch.tensor([[0.5, -0.3, 0.2], [0.1, 0.2, -0.1], [-0.2, 0.3, 0.4]])
LAWS = {  # code: head of a net of known distribution, number of branches, settings of a call
    "mar": (lambda m: DiffLoss(KnownNoise("noise", SCALE, m), 3, STEPS), 2, {"cfg": 2.0}),
    "sphere": (lambda m: DiffHead(Known("velocity", SCALE, m), 3), 2, {"cfg": 2.0}),
    "bitdance_4x": (lambda m: BitDiffHead(Known("clean", CELLS, m), 2), 2, {"cfg": 2.0}),
    "nextstep": (lambda m: FlowMatchingHead(Known("velocity", SCALE, m), 3), 3, {"cfg": 2.0, "cfg2": 1.5}),
    "nextstep_1_1": (lambda m: NewerFlowMatchingHead(Known("velocity", SCALE, m), 3), 3, {"cfg": 2.0, "cfg_img": 1.5}),
}
ROWS = 1200


def known(code: str, split: float = 0.0) -> tuple[nn.Module, Tensor, dict]:
    """A head, conditions [branches * ROWS, ..] that are equal in all rows, and the settings of its calls."""
    make, num_branches, settings = LAWS[code]
    z = torch.cat([BRANCHES, BRANCHES.flip(1)], dim=1)[:, :3][:num_branches]
    if code == "bitdance_4x":
        z = torch.linspace(-0.5, 0.5, num_branches * 8).view(num_branches, 4, 2)
    more = {"noise_repeat": ROWS} if code.startswith("nextstep") else {}
    return make(split), z.repeat_interleave(ROWS, 0), settings | more


def gaussian_of(code: str, monkeypatch) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [d] of the code's own tokens by a linear net: they are linear in each draw."""
    head, z, settings = known(code)
    few = z[::ROWS]
    settings = settings | ({"noise_repeat": 1} if "noise_repeat" in settings else {})

    def own(which: int) -> Tensor:
        """The token if all draws are 0 but that of an index, which is 1."""
        values = (float(index == which) for index in itertools.count())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(*shape) + next(values))
            patch.setattr(torch, "randn_like", lambda x: torch.zeros_like(x) + next(values))
            return drawn_by(head, few, seed=None, **settings)[0].flatten().double()

    mean = own(-1)
    return mean, sum((own(index) - mean).square() for index in range(STEPS + 2)).sqrt()


def tokens_of(code: str, times: int, change=lambda call: call, split: float = 0.0, **settings) -> tuple[Tensor, Tensor]:
    """Tokens [ROWS * times, d] of calls that were learned from, and of calls afterwards."""
    head, z, own = known(code, split)
    handle = unchecked(cspd.accelerate(head, **settings), change)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = [drawn_by(head, z, seed=i, **own)[:ROWS].flatten(1) for i in range(3 + times)]
    assert handle.stats.learned == 3 * ROWS and handle.stats.tokens == times * ROWS
    assert handle.stats.acceptance > 0.2
    return torch.cat(calls[:3]), torch.cat(calls[3:])


@pytest.mark.parametrize("code", LAWS)
def test_tokens_have_the_codes_distribution(code, monkeypatch):
    mean, deviation = gaussian_of(code, monkeypatch)
    for tokens in tokens_of(code, 3, window=4, draft="frozen"):
        assert normal_pvalue((tokens - mean) / deviation) > 1e-3


@functools.cache
def without_last_noise(chain):
    return dataclasses.replace(chain, end_sigma=0.0)


BUGS = {
    "scale": lambda call: dataclasses.replace(call, scale=tuple(1.1 * s for s in call.scale)),
    "branches": lambda call: dataclasses.replace(call, z=call.z.flip(0)),
    "temperature": lambda call: dataclasses.replace(call, temperature=0.9),
    "noise": lambda call: dataclasses.replace(call, chain=without_last_noise(call.chain)),
}
PLANTED = [("mar", "temperature"), ("sphere", "scale"), ("bitdance_4x", "branches"), ("nextstep", "branches")]
PLANTED += [("nextstep", "scale"), ("nextstep_1_1", "noise"), ("nextstep", "accepts")]


@pytest.mark.parametrize("code, bug", PLANTED)
def test_a_wrong_call_changes_the_distribution(code, bug, monkeypatch):
    """The test above would find it, and so does the comparison with the code's own chain that each handle makes."""
    mean, deviation = gaussian_of(code, monkeypatch)
    change = BUGS.get(bug, lambda call: call)
    if bug == "accepts":
        monkeypatch.setattr("cspd.heads.net.TorchNoise._uniform", lambda self, *shape: torch.full(shape, 1e-30))
    before, after = tokens_of(code, 3, change, window=4, draft="frozen")
    assert normal_pvalue((after - mean) / deviation) < 1e-6
    if bug == "accepts":
        return
    assert normal_pvalue((before - mean) / deviation) < 1e-6
    head, z, settings = known(code)
    handle = cspd.accelerate(head)
    read = handle.seam.read
    handle.seam = dataclasses.replace(handle.seam, read=lambda given: change(read(given)))
    with pytest.warns(UserWarning, match="not accelerated"):
        drawn_by(head, z, **settings)
    assert handle.stats.others == ROWS


@pytest.mark.parametrize("code", LAWS)
def test_tokens_of_a_mixture_have_the_codes_distribution(code):
    """Guidance makes it no mixture of Gaussians: the code's own tokens are what it is compared with."""
    head, z, settings = known(code, split=0.6)
    theirs = torch.cat([drawn_by(head, z, seed=100 + i, **settings)[:ROWS].flatten(1) for i in range(3)])
    for tokens in tokens_of(code, 3, split=0.6, window=6):
        assert same_law_pvalue(tokens, theirs) > 1e-3
