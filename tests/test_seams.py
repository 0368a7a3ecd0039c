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
    filled,
    golden_inputs,
    layered,
)
from torch import Tensor, nn

import cspd
from cspd.heads import SAMPLERS, Net
from cspd.seams import Accelerated, flow

RUNS = [(code, kind) for code, runs in GOLDEN_RUNS.items() for kind in runs]
STEPS = 12
CALLS, FEW = 9, 11  # calls that are learned from, and tokens of each, in place of 24 and 22
SEEN = CALLS * FEW


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Fits of one test are not found by another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("cspd.heads.learned.TOKENS", SEEN)
    monkeypatch.setattr("cspd.heads.learned.CALLS", CALLS)


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
    """The second token. SphereAR's is normalised afterwards, and of BitDance's the sign is taken."""
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
        with pytest.raises(ValueError, match=r"faster|window"):
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
    """A head, conditions [branches, ..] of one row, and the settings of its calls."""
    make, num_branches, settings = LAWS[code]
    z = BRANCHES[:num_branches]
    if code == "bitdance_4x":
        z = torch.linspace(-0.5, 0.5, num_branches * 8).view(num_branches, 4, 2)
    return make(split), z, settings


def known_tokens(head: nn.Module, z: Tensor, settings: dict, num: int, seed: int | None) -> Tensor:
    """Tokens [num, d] of equal conditions z [branches, ..], each with its own noise."""
    more = {"noise_repeat": num} if isinstance(head, FlowMatchingHead) else {}
    return drawn_by(head, z.repeat_interleave(num, 0), seed=seed, **settings, **more)[:num].flatten(1)


def gaussian_of(code: str, monkeypatch) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [d] of the code's own tokens by a linear net: they are linear in each draw."""

    def own(which: int) -> Tensor:
        """The token if all draws are 0 but that of an index, which is 1."""
        values = (float(index == which) for index in itertools.count())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "randn", lambda *shape, **_: torch.zeros(*shape) + next(values))
            patch.setattr(torch, "randn_like", lambda x: torch.zeros_like(x) + next(values))
            return known_tokens(*known(code), 1, seed=None)[0].double()

    mean = own(-1)
    return mean, sum((own(index) - mean).square() for index in range(STEPS + 2)).sqrt()


def tokens_of(code: str, change=lambda call: call, split: float = 0.0, **settings) -> tuple[Tensor, Tensor]:
    """Tokens [3 ROWS, d] of calls that were learned from, and of calls afterwards."""
    head, z, own = known(code, split)
    handle = unchecked(cspd.accelerate(head, **settings), change)
    sizes = [3 * ROWS // CALLS] * CALLS + [ROWS] * 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = [known_tokens(head, z, own, num, seed) for seed, num in enumerate(sizes)]
    assert handle.stats.learned == handle.stats.tokens == 3 * ROWS
    assert handle.stats.acceptance > 0.2
    return torch.cat(calls[:CALLS]), torch.cat(calls[CALLS:])


@pytest.mark.parametrize("code", LAWS)
def test_tokens_have_the_codes_distribution(code, monkeypatch):
    mean, deviation = gaussian_of(code, monkeypatch)
    for tokens in tokens_of(code, window=4, draft="frozen"):
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
    before, after = tokens_of(code, change, window=4, draft="frozen")
    assert normal_pvalue((after - mean) / deviation) < 1e-6
    if bug == "accepts":
        return
    assert normal_pvalue((before - mean) / deviation) < 1e-6
    head, z, settings = known(code)
    handle = cspd.accelerate(head)
    read = handle.seam.read
    handle.seam = dataclasses.replace(handle.seam, read=lambda given: change(read(given)))
    with pytest.warns(UserWarning, match="not accelerated"):
        known_tokens(head, z, settings, 8, seed=0)
    assert handle.stats.others == 8


@pytest.mark.parametrize("code", LAWS)
def test_tokens_of_a_mixture_have_the_codes_distribution(code):
    """Guidance makes it no mixture of Gaussians: the code's own tokens are what it is compared with."""
    head, z, settings = known(code, split=0.6)
    theirs = known_tokens(head, z, settings, 3 * ROWS, seed=100)
    for tokens in tokens_of(code, split=0.6, window=6):
        assert same_law_pvalue(tokens, theirs) > 1e-3


# Calls and models that change.


@pytest.fixture(name="quiet")
def without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def learned(code: str, method: str = "speculative", **settings) -> tuple[nn.Module, Accelerated]:
    """An accelerated head with layers that has learned from calls with guidance 3, and drawn one token afterwards."""
    head = layered(code)
    settings = settings or {"window": 4}
    handle = cspd.accelerate(head, method, **settings)
    learn(head, code)
    assert handle.stats.tokens and not handle.stats.others
    return head, handle


def learn(head: nn.Module, code: str, **more) -> None:
    """Calls that a fit learns from, and one more."""
    for seed, num in enumerate([FEW] * CALLS + [1]):
        drawn_by(head, rows_of(code, num, seed=seed), seed=seed, **more)


def test_an_approximate_method_learns_for_each_guidance(quiet):
    """The error of a fit is that of its own guidance."""
    head, handle = learned("mar", "calibrated", head_calls=5)
    seen = handle.stats.learned
    drawn_by(head, rows_of("mar", 2), 3.3)
    assert handle.stats.learned == seen
    drawn_by(head, rows_of("mar", 2), 1.2)
    assert handle.stats.learned == seen + 2


def test_guidance_may_change_from_call_to_call(quiet):
    head, handle = learned("mar")
    before = handle.stats
    for cfg in torch.linspace(1.1, 3.0, 8):
        drawn_by(head, rows_of("mar", 2), cfg)
    assert handle.stats.learned == before.learned and handle.stats.tokens == before.tokens + 16
    drawn_by(head, rows_of("mar", 2), 1.0)  # another number of branches
    assert handle.stats.learned == before.learned + 4


@pytest.mark.parametrize("code, more", [("mar", {"temperature": 0.9}), ("sphere", {"num_sampling_steps": 9})])
def test_other_chains_are_learned_again(code, more, quiet):
    head, handle = learned(code)
    before = handle.stats
    drawn_by(head, rows_of(code, 2), **more)
    assert handle.stats.learned == before.learned + 2
    learn(head, code, **more)
    assert handle.stats.tokens == before.tokens + 1
    drawn_by(head, rows_of(code, 2))
    assert handle.stats.tokens == before.tokens + 3


@pytest.mark.parametrize("method, settings", [("speculative", {"window": 16}), ("calibrated", {"head_calls": 10})])
def test_chains_may_be_shorter_than_the_settings(method, settings, quiet):
    """DiSA's, whose numbers of steps fall from image to image's end."""
    head = filled(AnnealedDiffLoss(layered("mar").net, CHANNELS, 4, 12))
    handle = cspd.accelerate(head, method, **settings)
    for step in (0, 7):
        learn(head, "disa", step=step, ar_num_iter=8)
    assert handle.stats.tokens == 2 and handle.stats.calls_per_token <= (12 + 4) / 2


def test_temperature_0_is_the_codes_own(quiet):
    head, z = layered("mar"), rows_of("mar", 2)
    theirs = drawn_by(head, z, temperature=0)
    handle = cspd.accelerate(head)
    assert torch.equal(drawn_by(head, z, temperature=0), theirs)
    assert handle.stats.others == 2 and "temperature 0" in repr(handle)


def test_without_a_window_the_times_decide(quiet):
    head = layered("mar")
    handle = cspd.accelerate(head)
    learn(head, "mar")
    for num in (1, 130):
        assert len(drawn_by(head, rows_of("mar", num))) == 2 * num
    assert 1 <= handle.stats.calls_per_token <= STEPS


@pytest.mark.parametrize(
    "code, when",
    [
        ("mar", "before"),
        ("bitdance_4x", "before"),
        ("nextstep_1_1", "before"),
        ("nextstep_1_1", "after"),
        pytest.param("mar", "after", marks=pytest.mark.slow),
        pytest.param("bitdance_4x", "after", marks=pytest.mark.slow),
    ],
)
def test_half_precision_weights(code, when, quiet):
    """Under autocast, as these codes run; NextStep-1 casts by itself."""
    head = layered(code)
    if when == "before":
        head.bfloat16()
    handle = cspd.accelerate(head, window=4)
    if when == "after":
        drawn_by(head, rows_of(code, 2))
        head.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=not code.startswith("nextstep")):
        for num in [FEW] * CALLS + [3]:
            made = drawn_by(head, rows_of(code, num).bfloat16())
    assert made.isfinite().all() and handle.stats.others == 0 and handle.stats.tokens
    assert made.dtype == (torch.bfloat16 if code == "nextstep_1_1" else torch.float32)


@pytest.mark.parametrize("code", ["mar", "sphere", "nextstep"])
def test_autocast(code, quiet):
    head = layered(code)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        handle = cspd.accelerate(head, window=4)
        learn(head, code)
    assert handle.stats.tokens and handle.stats.others == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_tokens_may_be_written_to(mode, quiet):
    """Also those that were learned from, outside of the mode they were drawn in."""
    head = layered("mar")
    cspd.accelerate(head, window=4)
    for num in [FEW] * CALLS + [2]:
        with mode():
            made = drawn_by(head, rows_of("mar", num))
            made[0] = 1.0
        if mode is not torch.inference_mode:
            made.mul_(2.0)
        assert (made[0] == (1.0 if mode is torch.inference_mode else 2.0)).all()


def other_weights(head: nn.Module) -> dict[str, Tensor]:
    return {name: 0.9 * value for name, value in head.state_dict().items()}


SWAPS = {
    "in place": lambda head: head.load_state_dict(other_weights(head)),
    "assigned": lambda head: head.load_state_dict(other_weights(head), assign=True),
    "data": lambda head: [setattr(each, "data", 0.9 * each.data) for each in head.parameters()],
    "a layer": lambda head: setattr(head.net, "input_proj", copy.deepcopy(head.net.input_proj).requires_grad_(False)),
    "the net": lambda head: setattr(head, "net", copy.deepcopy(head.net)),
    "hooks": lambda head: head.net.input_proj.register_forward_hook(lambda layer, given, out: 1.1 * out),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("code", ["mar", "sphere"])
def test_other_weights_are_used_and_learned_anew(code, swap, quiet):
    head, handle = learned(code)
    SWAPS[swap](head)
    if swap in ("a layer", "the net"):
        torch.nn.init.ones_(head.net.input_proj.weight)
    z = rows_of(code, 3)
    torch.manual_seed(0)
    theirs = type(head).sample(head, *([z, 1.0, 3.0] if code == "mar" else [z, 3.0, STEPS]))
    before = handle.stats.learned
    ours = drawn_by(head, z)
    assert relative_error(ours[:3], theirs[:3]) < 1e-3  # the full chain, until it has learned
    assert handle.stats.learned == before + 3


def test_moved_weights_are_the_same_ones(quiet):
    head, handle = learned("mar")
    before = handle.stats
    for each in head.parameters():
        each.data = each.data.clone()
    drawn_by(head, rows_of("mar", 2))
    assert handle.stats.learned == before.learned and handle.stats.tokens == before.tokens + 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_codes_own_sampler(copied, quiet):
    model = nn.ModuleDict({"head": layered("sphere")})
    handle = cspd.accelerate(model, "ancestral")
    other = copied(model)
    z = rows_of("sphere", 2)
    theirs = drawn_by(other["head"], z)
    assert handle.stats.tokens == 0
    assert other["head"].sample.__self__ is other["head"]
    assert relative_error(drawn_by(model["head"], z), theirs) < 1e-3 and handle.stats.tokens == 2
    assert list(other.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("code", ["mar", "nextstep"])
def test_compiled_nets(code, quiet):
    head, z = layered(code), rows_of(code, 2)
    theirs = drawn_by(head, z)
    head.net = torch.compile(head.net, backend="eager")
    handle = cspd.accelerate(head, "ancestral")
    assert relative_error(drawn_by(head, z)[:2], theirs[:2]) < 1e-3 and handle.stats.tokens == 2


def test_the_last_call_of_accelerate_counts(quiet):
    head, z = layered("mar"), rows_of("mar", 2)
    first = cspd.accelerate(head, "ancestral")
    second = cspd.accelerate(head, "ancestral")
    drawn_by(head, z)
    assert (first.stats.tokens, second.stats.tokens) == (0, 2)
    first.restore()  # is not in place any more
    drawn_by(head, z)
    assert second.stats.tokens == 4
    second.restore()
    second.restore()
    assert "sample" not in vars(head)


class Fork(DiffLoss):
    """Its loop is not the one that its classes' names promise."""

    def drawn(self, z, temperature, cfg, chain):
        return 0.7 * super().drawn(z, temperature, cfg, chain)


def test_a_fork_keeps_its_own_sampler():
    head, z = Fork(layered("mar").net, CHANNELS, STEPS), rows_of("mar", 3)
    theirs = drawn_by(head, z)
    handle = cspd.accelerate(head)
    with pytest.warns(UserWarning, match="head="):
        assert torch.equal(drawn_by(head, z), theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(drawn_by(head, z), theirs)
    assert handle.stats.others == 6 and handle.stats.tokens == 0


class Unknown(nn.Module):
    """A code that nobody knows."""

    def __init__(self) -> None:
        super().__init__()
        self.velocity = layered("sphere").net

    def sample(self, conditions, num_sampling_steps, cfg=1.0):
        raise NotImplementedError


def test_a_network_of_ones_own(quiet):
    model = Unknown()
    net = Net(model.velocity, lambda num: flow(num, False, 1.0, 1.0), [CHANNELS])
    handle = cspd.accelerate(model, head=net, window=4)
    for num in [FEW] * CALLS + [5]:
        assert len(model.sample(rows_of("sphere", num), STEPS, cfg=3.0)) == 2 * num
    assert handle.stats.tokens == 5


@pytest.mark.parametrize("code", ["mar", "nextstep"])
def test_seeds_reproduce(code, quiet):
    """Once fitted, also by a second handle, which has the fits from the cache."""
    head, _ = learned(code)
    z = rows_of(code, 2)
    own = [drawn_by(head, z, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(own[0], own[1]) and not torch.equal(own[0], own[2])
    second = cspd.accelerate(head, window=4)
    assert torch.equal(drawn_by(head, z, seed=1), own[0]) and second.stats.learned == 0
    generator = torch.Generator()
    third = cspd.accelerate(head, window=4, generator=generator)
    made = []
    for global_seed in (3, 4):
        generator.manual_seed(7)
        made.append(drawn_by(head, z, seed=global_seed))
    assert torch.equal(*made) and third.stats.tokens == 4


def test_repeated_noise_stays_repeated(quiet):
    """Rows of equal conditions and noise have one token, as in NextStep-1's code."""
    head, handle = learned("nextstep")
    z = rows_of("nextstep", 1).repeat_interleave(4, 0)
    made = drawn_by(head, z, noise_repeat=2)
    assert handle.stats.tokens == 5
    assert relative_error(made[:2], made[2:]) < 1e-4 < relative_error(made[0], made[1])


def test_memory_is_bounded(quiet, monkeypatch):
    monkeypatch.setattr("cspd.heads.learned.MOST_NUMBERS", 4 * 60 * STEPS * CHANNELS)
    head = layered("mar")
    handle = cspd.accelerate(head, window=4)
    for _ in range(CALLS + 1):
        drawn_by(head, rows_of("mar", 50))
    (own,) = handle._learned.values()
    assert own.num_seen < 60 + FEW and handle.stats.tokens
    monkeypatch.setattr("cspd.files.REMEMBERED", 3)
    for step in range(5):
        drawn_by(head, rows_of("mar", 1), temperature=0.5 + 0.1 * step)
    assert len(handle._learned) == 3


class Broken(KnownNoise):
    """Some rows are not finite."""

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        out = super().forward(x, t, c)
        return torch.where(c[:, :1] > 100, torch.nan, out.repeat(1, 1))


def test_nothing_is_learned_from_chains_that_are_not_finite(quiet):
    head = DiffLoss(Broken("noise", SCALE), 3, STEPS)
    handle = cspd.accelerate(head, window=4)
    z = BRANCHES[:2].repeat_interleave(4, 0)
    bad = z.clone()
    bad[0] = 1000.0
    assert drawn_by(head, bad)[0].isnan().all() and handle.stats.others == 4  # nothing to compare our chain with
    drawn_by(head, z)
    (own,) = handle._learned.values()
    seen = own.num_seen
    made = drawn_by(head, bad)
    assert made[0].isnan().all() and made[1:4].isfinite().all()
    assert own.num_seen == seen and handle.stats.learned == 8 and handle.stats.others == 4


def test_stats_count_the_nets_calls(quiet):
    head, z, settings = known("sphere")
    handle = cspd.accelerate(head, window=4, draft="frozen")
    assert "speculative" in repr(handle) and "window=4" in repr(handle) and "exact" in repr(handle)
    for seed in range(CALLS):
        known_tokens(head, z, settings, FEW, seed)
    head.net.num_calls = 0
    for seed in range(5):
        known_tokens(head, z, settings, 1, seed)
    stats = handle.stats
    assert stats.tokens == 5 and stats.full_chain == STEPS + 1 and stats.learned == SEEN
    assert stats.calls_per_token * 5 == head.net.num_calls < 5 * (STEPS + 1)
    assert stats.seconds > 0 and "5 tokens" in repr(handle) and f"{SEEN} by the full chain" in repr(handle)


@pytest.mark.parametrize("code", ["mar", "bitdance_4x", "nextstep"])
def test_calibrated_says_what_it_changes(code):
    head = layered(code)
    handle = cspd.accelerate(head, "calibrated", head_calls=5)
    with pytest.warns(UserWarning, match="differ from the full chain's by"):
        learn(head, code)
    stats = handle.stats
    assert stats.calls_per_token == 5 and 0 < stats.difference_error < stats.difference < 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn_by(head, rows_of(code, 2))
    assert handle.stats.tokens == 3


@pytest.mark.parametrize("name", sorted({*SAMPLERS} - {"speculative", "calibrated"}))
def test_every_sampler_draws_or_says_why_not(name, quiet):
    for code in ("mar", "sphere"):
        head = layered(code)
        try:
            handle = cspd.accelerate(head, name)
            drawn_by(head, rows_of(code, 2))
        except ValueError as error:
            assert name in str(error)
        else:
            assert handle.stats.tokens
