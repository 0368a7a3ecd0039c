"""One line in anybody's code: the sampler of a public model's diffusion head is replaced by one of ours.

>>> cspd.accelerate(model)                                  # exact
>>> cspd.accelerate(model, "calibrated", head_calls=10)     # approximate, its error is measured and printed
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from cspd.causal import head as causal
from cspd.continuous.rows import LEAST_TEMPERATURE
from cspd.continuous.tuning import head_seconds, head_times
from cspd.device import Precision
from cspd.files import FileCache, content_hash, digest_of, remember, user_cache
from cspd.heads import SAMPLERS, Chain, EulerMaruyama, Inputs, Net, euler_maruyama
from cspd.heads.chain import Schedule
from cspd.heads.learned import Learned
from cspd.heads.net import TorchNoise
from cspd.heads.samplers import DIFFUSION, FLOW, SCHEDULES, Sampler, ancestral
from cspd.tuner import Times, Tuner
from mar import head as mar_head

# What a call of the authors' `head.sample(..)` asks for, in our terms.


@dataclass(frozen=True)
class Call:
    """Tokens that a model asks its head for.

    Attributes:
        z: conditions [G, R, *condition], the unconditional branch last. scale: guidance, G - 1 numbers.
        temperature: tau. chain: a `Schedule`. noise: draws as the authors' code does.
        finish: makes what the authors' code returns of tokens [R, *token].
    """

    z: Tensor
    scale: tuple[float, ...]
    temperature: float
    chain: Schedule
    noise: TorchNoise
    finish: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Seam:
    """Where a public code draws tokens: a module with `sample(..)` around a network net(x, t, c).

    Attributes:
        code: whose it is, for people. module: has `sample`. head: the network, with the interface of `mar.head.Head`.
        read: maps the arguments of a call, by name, to a `Call`.
        conditions: name of the argument with the conditions. is_known: whether the chain is compared with the code's
            own at the first call; noise that is drawn in another order cannot be.
        kind: of the head, see `cspd.heads.samplers.Sampler.of`.
    """

    code: str
    module: Any
    head: Any
    read: Callable[[dict[str, Any]], Call]
    conditions: str
    is_known: bool = True
    kind: str = FLOW

    @property
    def weights(self) -> nn.Module:
        """The module with the head's weights."""
        return inner_of(getattr(self.module, "net", self.module))

    @property
    def is_half(self) -> bool:
        """Whether any weight is not in float32."""
        return any(each.dtype != torch.float32 for each in self.weights.parameters())


def by_branch(values: Tensor, num: int) -> Tensor:
    """Rows [G R, ..] of G branches, one branch after the other, as [G, R, ..]."""
    return values.unflatten(0, (num, -1))


def repeated(num: int) -> Callable[[Tensor], Tensor]:
    """Repeats tokens for each branch, as code does that goes on with all of them."""
    return lambda tokens: torch.cat([tokens] * num)


# Weights are used where they are: a head of ours has the modules of theirs as its own.


def plain_layers(*modules: nn.Module) -> bool:
    """Whether modules consist of float32 layers that nobody wrapped, so that their weights alone say what they do."""
    for module in modules:
        for each in module.modules():
            if each._forward_hooks or each._forward_pre_hooks:
                return False
            if not list(each.children()) and type(each) not in (nn.Linear, nn.LayerNorm, nn.SiLU):
                return False
            if any(parameter.dtype != torch.float32 for parameter in each.parameters(recurse=False)):
                return False
    return True


def borrowed(net: Any, channels: int, outputs: int) -> mar_head.Head | None:
    """MAR's head with the modules of `net`; None if these are not MAR's or not plain float32 layers."""
    names = ("time_embed.mlp", "cond_embed", "input_proj", "res_blocks", "final_layer")
    try:
        *layers, last = (net.get_submodule(name) for name in names)
        blocks, linear, modulation = list(net.res_blocks), last.linear, last.adaLN_modulation  # type: ignore
        inside = [part for block in blocks for part in (block.in_ln, block.mlp, block.adaLN_modulation)]
    except AttributeError:
        return None
    time_mlp, cond_embed, input_proj, _ = layers
    if not plain_layers(time_mlp, cond_embed, input_proj, *inside, linear, modulation):
        return None
    time_embed = with_modules(mar_head.TimestepEmbedder, mlp=time_mlp)
    time_embed.frequencies = time_mlp[0].in_features  # type: ignore
    parts = {"time_embed": time_embed, "cond_embed": cond_embed, "input_proj": input_proj, "res_blocks": net.res_blocks}
    final_layer = with_modules(mar_head.FinalLayer, linear=linear, adaLN_modulation=modulation)
    head = with_modules(mar_head.Head, **parts, final_layer=final_layer)
    head.channels, head.width, head.cond_dim = channels, linear.in_features, cond_embed.in_features
    head.fused = None
    return head if linear.out_features == outputs else None


class FlowHead:
    """MAR's head as the velocity of a stochastic differential equation: without a variance channel."""

    def __init__(self, head: mar_head.Head, chain: Callable[[int], Any]) -> None:
        self.head, self.chain = head, chain
        for name in ("channels", "width", "cond_dim", "res_blocks", "time_embed", "cond_embed", "modulations", "split"):
            setattr(self, name, getattr(head, name))
        self.own_type = None

    def schedule(self, num_steps: int, first_timestep: int | None = None) -> Any:
        return self.chain(num_steps)

    def ready(self) -> FlowHead:
        self._ready = self.head.ready()
        return self

    def denoise(self, x: Tensor, modulations: Any) -> Tensor:
        out = self._ready.denoise(x, modulations) if hasattr(self, "_ready") else self.head.denoise(x, modulations)
        return torch.cat([out, torch.zeros_like(out)], dim=-1)


class _Cells(nn.Module):
    """A linear layer of theirs on each cell of a patch, whose numbers follow each other."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.unflatten(-1, (-1, self.linear.in_features))).flatten(-2)


def with_modules(kind: Any, **modules: Any) -> Any:
    """An instance of a module's class whose children are these modules."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, module in modules.items():
        setattr(made, name, module)
    return made


def borrowed_flow(net: Any, channels: int, num_cells: int | None, is_clean: bool) -> causal.DiffHead | None:
    """The head of `cspd.causal` with the modules of SphereAR's or BitDance's `net`; None as in `borrowed`."""
    first, last = net.res_blocks[0], net.final_layer
    if not plain_layers(net.time_embed.mlp, net.cond_embed, net.input_proj, *net.res_blocks, *net.ada_ln_blocks, last):
        return None
    if num_cells is None and hasattr(first, "norm"):
        blocks = [with_modules(causal.FlowResBlock, w1=b.w1, w2=b.w2, norm=b.norm) for b in net.res_blocks]
    elif hasattr(first, "w1") and getattr(first.attn, "head_dim", None) == causal.HEAD_DIM and is_imagenet(net):
        blocks = []
        for b in net.res_blocks:
            attention = with_modules(causal._CellAttention, wqkv=b.attn.wqkv, wo=b.attn.wo)
            parts = {"norm1": b.norm1, "attn": attention, "norm2": b.norm2, "w1": b.w1, "w2": b.w2}
            blocks.append(with_modules(causal.TransBlock, **parts))
    else:
        return None
    own = with_modules(
        nn.Module,
        time_embed=with_modules(mar_head.TimestepEmbedder, mlp=net.time_embed.mlp),
        cond_embed=_Cells(net.cond_embed),
        input_proj=net.input_proj,
        res_blocks=nn.ModuleList(blocks),
        ada_ln_blocks=net.ada_ln_blocks,
        final_layer=last,
    )
    own.time_embed.frequencies = net.time_embed.mlp[0].in_features
    head = with_modules(causal.DiffHead, net=own)
    head.binary, head.num_cells, head.fused = is_clean, num_cells or 1, None
    head.channels, head.cond_dim = head.num_cells * channels, head.num_cells * net.cond_embed.in_features
    head.width = head.num_cells * net.cond_embed.out_features
    return head


def is_imagenet(net: Any) -> bool:
    """Whether a BitDance's head is one for ImageNet: the text-to-image models' ends in a sigmoid."""
    return not hasattr(net.res_blocks[0], "use_swiglu")


# One function for each family of codes: it knows a module by its attributes, and gives its seam or None.


def mar(module: Any) -> Seam | None:
    """LTH14/mar and the codes that copy its `DiffLoss`: LazyMAR, Harmon and DiSA."""
    net: Any = getattr(module, "net", None)
    chains = getattr(module, "gen_diffusion", None)
    if not hasattr(net, "forward_with_cfg") or chains is None:
        return None
    arguments = inspect.signature(inspect.unwrap(type(module).sample)).parameters
    if "cache_threshold" in arguments:
        raise ValueError("LazyMAR's cached head depends on its earlier calls: build the model with lazy_mar=False")
    if getattr(module, "sampler", "DiSA") not in ("DiSA", "default"):
        raise ValueError(f"DiSA's sampler {module.sampler!r} has no noise to speculate on: use 'DiSA' or 'default'")
    for chain in chains if isinstance(chains, list) else [chains]:
        if (chain.model_mean_type.name, chain.model_var_type.name) != ("EPSILON", "LEARNED_RANGE"):
            return None
    channels = module.in_channels

    def function(x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        kind = next(net.parameters()).dtype
        return net(x.to(kind), t.round().long(), c.to(kind))

    def read(given: dict[str, Any]) -> Call:
        z, cfg = given["z"], float(given["cfg"])
        num = 1 if cfg == 1.0 else 2
        begin = lambda rows, d: torch.randn(rows, d).to(z.device)  # noqa: E731 - their code draws it on the CPU
        step = lambda rows, d: torch.randn(num * rows, d, device=z.device)[:rows]  # noqa: E731
        noise, chain = TorchNoise(z.device, begin, step), ddpm(chain_of(module, given))
        return Call(by_branch(z, num), (cfg,), float(given["temperature"]), chain, noise, repeated(num))

    head: Any = borrowed(inner_of(net), channels, 2 * channels)
    if head is None:
        head = Net(function, mar_head.schedule, [channels], variances=True)
    return Seam("MAR's DiffLoss", module, head, read, "z", kind=DIFFUSION)


def chain_of(module: Any, given: dict[str, Any]) -> Any:
    """The `GaussianDiffusion` of a call; DiSA has one for each number of steps, which falls over the iterations."""
    chains = module.gen_diffusion
    if not isinstance(chains, list):
        return chains
    last = max(1, given["ar_num_iter"] - 1)
    name = module.diff_annealing_strategy
    share = 0 if name == "constant" else SCHEDULES[name](given["step"], last)
    return chains[int(share * (len(chains) - 1))]


@functools.cache
def ddpm(chain: Any) -> mar_head.DiffusionSchedule:
    """The schedule of a `GaussianDiffusion`, from its own tables."""
    names = [f.name for f in mar_head.DiffusionSchedule.__dataclass_fields__.values() if f.name != "timestep_map"]
    tables = {name: np.asarray(getattr(chain, name), np.float64) for name in names}
    return mar_head.DiffusionSchedule(timestep_map=np.asarray(chain.timestep_map, np.int64), **tables)


def sphere(module: Any) -> Seam | None:
    """SphereAR and BitDance, both of its heads: for ImageNet, and of the text-to-image models."""
    net: Any = getattr(module, "net", None)
    if not hasattr(net, "ada_ln_blocks") or not hasattr(module, "ch_target"):
        return None
    is_clean = hasattr(module, "time_shift")  # BitDance's predict the clean token
    shift = float(getattr(module, "time_shift", 1.0))
    num_cells = getattr(inner_of(net), "parallel_num", None)
    token = [module.ch_target] if num_cells is None else [num_cells, module.ch_target]
    call = uncompiled(net)

    def function(x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        kind = next(net.parameters()).dtype
        return call(x.to(kind), t.to(kind), c.to(kind))

    def read(given: dict[str, Any]) -> Call:
        z, cfg = given["z"], float(given["cfg"])
        num = 2 if cfg > 1 else 1
        z = by_branch(z, num)
        own = z.shape[2:-1]
        normal = lambda rows, d: torch.randn(rows, *own, module.ch_target, device=z.device).flatten(1)  # noqa: E731
        chain = flow(int(given["num_sampling_steps"]), is_clean, shift, factor)
        return Call(z, (cfg,), 1.0, chain, TorchNoise(z.device, normal, last=False), repeated(num))

    mine: causal.DiffHead | None = None
    with contextlib.suppress(AttributeError, IndexError):  # the layers of a fork may have other names
        mine = borrowed_flow(inner_of(net), module.ch_target, num_cells, is_clean)
    factor = 1.0 if mine is None else float(causal.TIME_FACTOR)
    head: Any = Net(function, lambda num: flow(num, is_clean, shift, 1.0), token) if mine is None else mine
    return Seam("BitDance's DiffHead" if is_clean else "SphereAR's DiffHead", module, head, read, "z")


@functools.cache
def flow(num_steps: int, is_clean: bool, shift: float, time_factor: float) -> EulerMaruyama:
    """The chain of SphereAR or BitDance: T noisy steps and one of h without noise, as their code times them."""
    last = 0.05 if is_clean else 0.04
    if is_clean:
        edges = torch.linspace(0, 1 - last, num_steps + 1)
        dt = ((1 / shift) / (1 / shift + (1 / edges - 1))).diff().numpy()
    else:
        dt = np.full(num_steps, (1 - last) / num_steps, np.float32)
    before = np.cumsum(dt, dtype=np.float32)[:-1]
    t = np.concatenate([np.zeros(1, np.float32), before, np.array([1 - last], np.float32)])
    return euler_maruyama(t, np.append(dt, np.float32(last)), clean=is_clean, time_factor=time_factor)


def next_step(module: Any) -> Seam | None:
    """NextStep-1's `FlowMatchingHead`, and NextStep-1.1's as vLLM-Omni has it."""
    net: Any = getattr(module, "net", None)
    if not hasattr(module, "get_velocity_from_cfg") or not hasattr(net, "final_layer"):
        return None
    arguments = inspect.signature(inspect.unwrap(type(module).sample)).parameters
    is_newer = "cfg_img" in arguments
    second = "cfg_img" if is_newer else "cfg2"
    chain_of = lambda num: next_step_chain(num, 1.0, is_newer, 0.04)  # noqa: E731
    call = uncompiled(net)

    def function(x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        kind = next(net.parameters()).dtype
        return call(x.to(kind), t.to(kind), c.to(kind))

    def read(given: dict[str, Any]) -> Call:
        z, cfg, cfg2 = given["c"], float(given.get("cfg", 1.0)), float(given.get(second, 1.0))
        num = given.get("cfg_mult") or 1 + (cfg > 1) + (cfg2 > 1)
        repeat = int(given.get("noise_repeat", 1))
        if z.shape[0] // num % repeat:
            raise ValueError(f"noise_repeat={repeat} does not divide {z.shape[0] // num} rows of tokens")
        drawn = repeat
        normal = lambda rows, d: torch.randn(drawn, d, device=z.device).repeat(rows // drawn, 1)  # noqa: E731
        shift, last = float(given.get("timesteps_shift", 1.0)), float(given.get("last_step_size", 0.04))
        chain = next_step_chain(int(given.get("num_sampling_steps", 20)), shift, is_newer, last)
        noise = TorchNoise(z.device, normal, repeat=drawn, last=is_newer)
        return Call(by_branch(z, num), (cfg, cfg2)[: max(1, num - 1)], 1.0, chain, noise, lambda x: x.to(z.dtype))

    mine = borrowed(inner_of(net), module.input_dim, module.input_dim)
    head: Any = Net(function, chain_of, [module.input_dim]) if mine is None else FlowHead(mine, chain_of)
    return Seam(f"NextStep-1{'.1' if is_newer else ''}'s FlowMatchingHead", module, head, read, "c")


@functools.cache
def next_step_chain(num_steps: int, shift: float, is_newer: bool, last: float) -> EulerMaruyama:
    """NextStep-1: T - 1 noisy steps and one of h from wherever the shift ends. 1.1: T noisy steps."""
    if is_newer:
        t = torch.linspace(0, 1, num_steps + 1)[:-1]
        t = torch.cat([t / (shift - (shift - 1) * t), torch.ones(1)])
        return euler_maruyama(t[:-1].numpy(), t.diff().numpy(), clean=False, noisy_end=True)
    t = torch.linspace(0, 1 - last, num_steps)
    t = t / (shift - (shift - 1) * t)
    return euler_maruyama(t.numpy(), np.append(t.diff().numpy(), np.float32(last)), clean=False)


def generic(module: Any, net: Net) -> Seam:
    """A code that is not known: sample(z, .., cfg, temperature, num_sampling_steps) around a network of the user's.

    The first argument has the conditions, with cfg != 1 those of the unconditional branch after them; as many rows
    come back.
    """
    first = list(inspect.signature(inspect.unwrap(type(module).sample)).parameters)[1]

    def read(given: dict[str, Any]) -> Call:
        z, cfg = given[first], float(given.get("cfg", 1.0))
        num = 1 if cfg == 1.0 else 2
        chain, temperature = net.chain(int(given.get("num_sampling_steps", 100))), float(given.get("temperature", 1.0))
        noise = TorchNoise(z.device, lambda rows, d: torch.randn(rows, d, device=z.device))
        return Call(by_branch(z, num), (cfg,), temperature, chain, noise, repeated(num))

    kind = DIFFUSION if net.variances else FLOW
    return Seam(f"{type(module).__name__}, by the network given", module, net, read, first, is_known=False, kind=kind)


CODES: tuple[Callable[[nn.Module], Seam | None], ...] = (mar, sphere, next_step)


def inner_of(net: Any) -> Any:
    """The module inside of torch.compile's."""
    return getattr(net, "_orig_mod", net)


def uncompiled(net: Any) -> Callable:
    """A network's forward without torch.compile, which would compile again for every number of rows."""
    forward = inner_of(net).forward
    while hasattr(forward, "_torchdynamo_orig_callable"):
        forward = forward._torchdynamo_orig_callable
    return forward


def seams_of(model: Any) -> list[Seam]:
    """The seams in a model: among its modules, or those of the modules that an object has as attributes."""
    own = [model] if isinstance(model, nn.Module) else getattr(model, "__dict__", {}).values()
    roots = [each for each in own if isinstance(each, nn.Module)]
    modules = {id(module): module for root in roots for module in root.modules()}
    found = [seam_of(module) for module in modules.values() if callable(getattr(module, "sample", None))]
    return [seam for seam in found if seam is not None]


def seam_of(module: nn.Module) -> Seam | None:
    """The seam of a module with `sample`; None if it is of no code that is known."""
    return next((seam for code in CODES if (seam := code(module)) is not None), None)


# The replacement.

CHECKED_ROWS = 4
TOLERANCE = 0.02  # r.m.s. difference of our chains from the code's own, in s.d. of a token
HALF_TOLERANCE = 0.5  # if the head computes in half precision, whose rounding the chain's first step multiplies


class Ambient(Precision):
    """The precision of the code that calls: only the first step leaves its autocast.

    It cannot leave it if the weights are in half precision (`is_half`), whose inputs autocast may have to convert.
    """

    def __init__(self, device: torch.device, is_half: bool) -> None:
        super().__init__("fp32", device)
        self.is_half = is_half

    def prepare(self, module: Any) -> Any:
        return module

    @property
    def uniform(self) -> bool:
        return not torch.is_autocast_enabled(self.device.type)

    def fast(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def full(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.is_half else super().full()


class Stats(NamedTuple):
    """What an accelerated head has done.

    Attributes:
        tokens: drawn by the method. learned: drawn by the full chain, to learn from. others: drawn by the code's own
            sampler, with the reason in `note`.
        calls_per_token: sequential head calls of the method's tokens, on average. full_chain: those of a full chain.
        acceptance: of the drafted states that were verified, the fraction that was accepted; None if none was drafted.
        difference, difference_error: of an approximate method's tokens from the full chain's of the same noise, in
            standard deviations of a token: the largest of all fits; None if nothing was measured.
        seconds: of calls by the method and by the full chain, fits and timings included; on a GPU, of launching them.
    """

    tokens: int
    learned: int
    others: int
    calls_per_token: float
    acceptance: float | None
    full_chain: int
    difference: float | None
    difference_error: float | None
    seconds: float
    note: str


@dataclass
class _Counts:
    tokens: int = 0
    learned: int = 0
    others: int = 0
    calls: int = 0
    drafted: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))
    full_chain: int = 0
    seconds: float = 0.0
    note: str = ""
    told: set[str] = field(default_factory=set)


def guidance_bin(scale: float) -> int:
    """Guidance scales that share a fit of an approximate sampler: those within a factor of the square root of 2."""
    return round(2 * math.log2(max(scale, 0.25)))


class Accelerated:
    """A head whose tokens are drawn by one of our samplers; `accelerate` makes it.

    Attributes:
        stats: counts so far, see `Stats`. sampler, settings: the method.
    """

    def __init__(
        self,
        seam: Seam,
        find: Callable[[], Seam | None],
        sampler: Sampler,
        settings: dict,
        generator: torch.Generator | None,
    ) -> None:
        self.seam, self.sampler, self.settings, self.generator = seam, sampler, settings, generator
        self._find = find  # the seam again, if layers are replaced
        self._counts = _Counts()
        self._learned: dict[tuple, Learned] = {}
        self._times: dict[int, Times] = {}
        self._is_right: bool | None = None
        self._earlier = vars(seam.module).get("sample")  # one that the user has put there
        self._own = seam.module.sample  # the class's method, bound
        self._arguments = inspect.signature(inspect.unwrap(type(seam.module).sample))
        self._cache = FileCache([user_cache()])
        self._weights: str | None = None
        self._state: tuple = ()
        self._layers = self._layers_now()
        object.__setattr__(seam.module, "sample", _Replaced(self))

    def restore(self) -> None:
        """Puts the code's own sampler back."""
        replaced = vars(self.seam.module).get("sample")
        if isinstance(replaced, _Replaced) and replaced.accelerated is self:
            del self.seam.module.__dict__["sample"]
            if self._earlier is not None:
                object.__setattr__(self.seam.module, "sample", self._earlier)

    @property
    def stats(self) -> Stats:
        counts = self._counts
        fits = [each.shortcut for each in self._learned.values() if each.shortcut is not None]
        measured = [(fit.difference.item(), fit.difference_error.item()) for fit in fits]
        difference, error = max(measured, default=(None, None))
        mean = counts.calls / counts.tokens if counts.tokens else float("nan")
        verified, accepted = counts.drafted.tolist()
        acceptance = accepted / verified if verified else None
        own = counts.tokens, counts.learned, counts.others, mean, acceptance, counts.full_chain
        return Stats(*own, difference, error, counts.seconds, counts.note)

    def __repr__(self) -> str:
        stats, settings = self.stats, "".join(f", {name}={value}" for name, value in self.settings.items())
        about = f"<cspd.accelerate: {self.seam.code}, {self.sampler.name}{settings} ({self.sampler.guarantee})"
        if stats.tokens:
            about += f": {stats.tokens} tokens by {stats.calls_per_token:.3g} calls each in place of {stats.full_chain}"
        if stats.learned:
            about += f"; {stats.learned} by the full chain, to learn from"
        if stats.others:
            about += f"; {stats.others} by the code's own sampler"
        return about + (f"; {stats.note}>" if stats.note else ">")

    # A call.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        self._follow_changes()
        call = self._read(args, kwargs)
        num = call.z.shape[1]
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._by_their_code(args, kwargs, num, "its own sampler is captured as a CUDA graph")
        if call.temperature < LEAST_TEMPERATURE:
            return self._by_their_code(args, kwargs, num, "temperature 0 has no noise to speculate on")
        if self._is_right is None:
            self._is_right = not self.seam.is_known or self._check(args, kwargs)
        if not self._is_right:
            return self._by_their_code(args, kwargs, num, self._counts.note)
        with torch.inference_mode():
            drawn = self._draw(call)
        made = call.finish(torch.empty_like(drawn).copy_(drawn))  # not an inference tensor, unless the caller wants it
        self._counts.seconds += time.perf_counter() - begun
        return made

    def _layers_now(self) -> tuple:
        """What a seam depends on: the modules of the head, their hooks, and the types of their weights."""
        net = self.seam.weights
        layers = [(id(each), len(each._forward_hooks), len(each._forward_pre_hooks)) for each in net.modules()]
        return tuple(layers), tuple(each.dtype for each in net.parameters())

    def _follow_changes(self) -> None:
        """Finds the head again if its layers were replaced, and drops all fits if its weights are others.

        An average may be loaded in the weights' place for a while.
        """
        layers = self._layers_now()
        if layers != self._layers:
            found = self._find()
            self._layers, self._state, self._is_right = layers, (), None
            self._times.clear()
            if found is None:
                self._is_right, self._counts.note = False, "its layers were replaced by unknown ones"
            else:
                self.seam = found
        parameters = self.seam.weights.parameters()
        state = tuple((each.data_ptr(), -1 if each.is_inference() else each._version) for each in parameters)
        if state != self._state:
            self._state, self._weights = state, None
            self._learned.clear()

    def _read(self, args: tuple, kwargs: dict) -> Call:
        bound = self._arguments.bind(self.seam.module, *args, **kwargs)
        bound.apply_defaults()
        call = self.seam.read(bound.arguments)
        if self.generator is not None:
            call = replace(call, noise=TorchNoise(call.z.device, generator=self.generator, repeat=call.noise.repeat))
        return call

    def _by_their_code(self, args: tuple, kwargs: dict, num: int, why: str) -> Any:
        self._counts.others += num
        self._counts.note = why
        return self._own(*args, **kwargs)

    def _chain(self, call: Call, fitted: Learned | None = None) -> Chain:
        z, device = call.z.flatten(2), call.z.device
        head, num = self.seam.head, z.shape[1]
        if isinstance(head, Net):
            head.take(call.z.shape[2:])
        names = torch.zeros(num, dtype=torch.int64, device=device)
        scale = torch.tensor([call.scale], device=device).expand(num, -1)
        temperature = torch.full((num, 1), call.temperature, device=device)
        inputs = Inputs(z.float(), scale, temperature, names, names)
        return Chain(head, call.chain, inputs, call.noise, Ambient(device, self.seam.is_half), fitted=fitted)

    def _draw(self, call: Call) -> Tensor:
        """Tokens [R, *token]."""
        learned = self._learned_of(call) if self.sampler.fit else None
        chain, counts = self._chain(call, learned), self._counts
        if learned is not None and learned.needs_tokens(self.sampler, self.settings):
            tokens = learned.record(chain)
            counts.learned += len(tokens)
        else:
            tokens = self.sampler.function(chain, **self.settings)
            counts.tokens += len(tokens)
            counts.calls += int(chain.tally.of_rows(len(tokens))[0].sum())
            counts.drafted += np.array(chain.tally.drafted)
            counts.full_chain = len(call.chain)
            self._tell_difference(learned)
        sigma = getattr(call.chain, "end_sigma", 0.0)
        if sigma and self.sampler.of != FLOW:  # the noise of the chain's own last step, which solvers do not take
            last = chain.eps[-1] if "eps" in vars(chain) else call.noise.step(*tokens.shape)
            tokens = tokens + call.temperature * sigma * last
        return self._shaped(tokens, call)

    def _shaped(self, tokens: Tensor, call: Call) -> Tensor:
        """Tokens [R, d] in the shape that the code has: conditions of several cells have tokens of as many."""
        cells = call.z.shape[2:-1]
        return tokens.unflatten(-1, (*cells, -1)) if cells else tokens

    def _learned_of(self, call: Call) -> Learned:
        branches = len(call.z)
        guidance: tuple[int, ...] = ()
        if branches > 1 and self.sampler.guarantee != "exact":
            guidance = tuple(map(guidance_bin, call.scale))  # exact samplers draft well by the fit of another guidance
        kind = call.z.device.type
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        key = call.chain, call.temperature, branches, guidance, autocast
        if key not in self._learned:
            if self._weights is None:
                self._weights = content_hash(self.seam.weights)
            names = "mean_x", "mean_eps", "log_sigma_base", "log_sigma_slope"
            steps = digest_of({name: np.ascontiguousarray(getattr(call.chain, name)) for name in names}, {})
            settings: dict[str, Any] = {"schema": "cspd.accelerate/1", "weights": self._weights, "chain": steps}
            hooks = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in self.seam.weights.modules())
            settings |= {"temperature": call.temperature, "branches": branches, "hooks": hooks}
            settings |= {"guidance": [*guidance], "autocast": autocast}
            own = self._chain(call)
            seconds = functools.partial(self._seconds, branches)
            made = Learned(
                own.head, call.chain, call.temperature, branches, own.precision, self._cache, settings, seconds
            )
            remember(self._learned, key, made)
        return self._learned[key]

    def _seconds(self, branches: int, num_steps: int, rows: int, window: int, calls: Any) -> float:
        if branches not in self._times:
            device = next(self.seam.module.parameters()).device
            tuner = Tuner(Ambient(device, self.seam.is_half))
            about = {"accelerate": self._weights, "branches": branches}
            self._times[branches] = head_times(tuner, self.seam.head, branches > 1, about)
        return head_seconds(self._times[branches], num_steps, rows, window, calls)

    def _tell_difference(self, learned: Learned | None) -> None:
        if learned is None or learned.shortcut is None:
            return
        difference, error = learned.shortcut.difference.item(), learned.shortcut.difference_error.item()
        measured = f"{difference:.3f} +- {error:.3f} standard deviations of a token"
        what = f"{self.sampler.name} is approximate: its tokens differ from the full chain's by {measured}"
        self._tell(f"difference of {id(learned)}", what)  # each fit has its own

    def _tell(self, about: str, text: str) -> None:
        if about not in self._counts.told:
            self._counts.told.add(about)
            warnings.warn(f"cspd: {text}", stacklevel=2)

    def _check(self, args: tuple, kwargs: dict) -> bool | None:
        """Whether our full chain of a few of these tokens gives what the code's own sampler gives, from equal seeds.

        None if their tokens are not finite.
        """
        bound = self._arguments.bind(self.seam.module, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given.pop(next(iter(given)))  # self
        call = self.seam.read(bound.arguments)
        few = call.z[:, :CHECKED_ROWS]
        given[self.seam.conditions] = few.flatten(0, 1)
        if "noise_repeat" in given:
            given["noise_repeat"] = 1
        kinds = given.pop("kwargs", {})
        devices = [call.z.device] if call.z.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            _seed(call.z.device)
            theirs = self._own(**given, **kinds)
            _seed(call.z.device)
            again = self.seam.read({**bound.arguments, **given})
            with torch.inference_mode():
                ours = self._full(again)
            ours = again.finish(ours)
        num = few.shape[1]
        theirs, ours = theirs[:num].float(), ours[:num].float()
        if not theirs.isfinite().all():
            self._counts.note = "its tokens are not finite"
            return None
        error = ((theirs - ours).square().mean() / theirs.var().clamp(min=1e-12)).sqrt().item()
        is_half = self.seam.is_half or torch.is_autocast_enabled(few.device.type)
        if error < (HALF_TOLERANCE if is_half else TOLERANCE):
            return True
        known = f"its chain is not the one that {self.seam.code} is known for"
        self._counts.note = f"{known} (r.m.s. difference {error:.2g})"
        self._tell("wrong", f"not accelerated: {self._counts.note}. Give head=cspd.heads.Net(net, chain)")
        return False

    def _full(self, call: Call) -> Tensor:
        chain = self._chain(call)
        tokens = ancestral(chain)
        tokens = tokens + call.temperature * getattr(call.chain, "end_sigma", 0.0) * chain.eps[-1]
        return self._shaped(tokens, call)


def _seed(device: torch.device) -> None:
    """Seeds the generators of the CPU and of one device; `torch.manual_seed` would seed all devices."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(0)


class _Replaced:
    """What stands in a module in place of its `sample`. Copies of the module get their class's own back."""

    def __init__(self, accelerated: Accelerated) -> None:
        self.accelerated = accelerated

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.accelerated(*args, **kwargs)

    def __reduce__(self) -> tuple:
        return getattr, (self.accelerated.seam.module, "sample")


def _check_settings(sampler: Sampler, settings: dict[str, Any], seam: Seam) -> None:
    """Raises ValueError if a sampler or its settings have no meaning for a head outside of an engine."""
    if not (sampler.whole or sampler.fit):
        raise ValueError(f"method={sampler.name!r} needs each token's iteration, unknown here: use cspd.load")
    if settings.get("grid") == "planned":
        raise ValueError("grid='planned' needs a fit, which this method does not make here: use grid='uniform'")
    if settings.get("head_calls") is not None and settings.get("divergence") is not None:
        raise ValueError("head_calls and divergence both say how long a plan is: give only one of them")
    if not isinstance(seam.head, mar_head.Head) and (sampler.name == "cached" or "first_timestep" in settings):
        raise ValueError(f"{sampler.name} with {settings or 'its defaults'} needs MAR's own float32 layers")


def accelerate(
    model: Any,
    method: str = "speculative",
    *,
    head: Net | None = None,
    generator: torch.Generator | None = None,
    **settings: Any,
) -> Accelerated:
    """Lets a model of a public code draw its tokens by one of our samplers, where it is.

    The model's diffusion head is found by its attributes, in LTH14/mar and its copies, SphereAR, BitDance and
    NextStep-1. Weights stay where they are. The first tokens (about 512) are drawn by the full chain, and are what the
    sampler's fits are made from; these are cached. Exact methods are exact before and after.

    Args:
        model: the authors' module, its head, or an object that has it as an attribute.
        method: a name in `cspd.heads.SAMPLERS`. settings: its settings, such as head_calls=10 or window=16.
        head: the network of a code that is not known here; `model` then has `sample`, see `generic`.
        generator: of all noise; by default torch's own, so that torch.manual_seed decides the image.

    Returns:
        A handle with `stats` and `restore()`.

    Raises:
        ValueError: no head is found, or more than one; or the method or a setting is unknown.
    """
    if method not in SAMPLERS:
        raise ValueError(f"method={method!r} is unknown: choose one of {', '.join(SAMPLERS)}")
    sampler = SAMPLERS[method]
    options = {option.name: option for option in sampler.options}
    for name, value in settings.items():
        if name not in options:
            raise ValueError(
                f"{name}={value!r} is not an option of {method!r}, which has {', '.join(options) or 'none'}"
            )
        options[name].check(value)
    seams = [generic(model, head)] if head is not None else seams_of(model)
    if len(seams) != 1:
        looked = "MAR's DiffLoss, SphereAR's and BitDance's DiffHead, NextStep-1's FlowMatchingHead"
        found = f"has {len(seams)} diffusion heads" if seams else f"has no diffusion head that is known ({looked})"
        raise ValueError(f"{type(model).__name__} {found}: pass the head itself, or head=")
    (seam,) = seams
    if sampler.of not in (None, seam.kind):
        raise ValueError(f"method={method!r} is for {sampler.of} heads, and {seam.code} is a {seam.kind} head")
    _check_settings(sampler, settings, seam)
    earlier = vars(seam.module).get("sample")
    if isinstance(earlier, _Replaced):
        earlier.accelerated.restore()
    find = functools.partial(seam_of, seam.module) if head is None else lambda: seam
    return Accelerated(seam, find, sampler, settings, generator)
