"""Stand-ins of the public codes that `cspd.accelerate` knows.

They have the codes' names of classes and attributes, arguments of `sample`, and order of noise, at small sizes. A net
has layers, whose weights are named as the authors name them, or is `Known`: then its tokens have a known distribution.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import numpy as np
import torch
from golden_files import drawn, drawn_weights
from torch import Tensor, nn
from torch.nn import functional as F

from mar.head import schedule

# Nets with layers.


class TimestepEmbedder(nn.Module):
    def __init__(self, width: int, factor: float = 1.0, casts: bool = False) -> None:
        super().__init__()
        self.casts = casts  # to the weights' type; otherwise float32 meets them, and half precision needs autocast
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.factor = factor

    def forward(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(128) / 128)
        args = self.factor * t.float()[:, None] * frequencies
        features = torch.cat([args.cos(), args.sin()], dim=-1)
        return self.mlp(features.to(self.mlp[0].weight.dtype) if self.casts else features)


class ResBlock(nn.Module):
    """MAR's, and NextStep-1's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(y).chunk(3, dim=-1)
        return x + gate * self.mlp(self.in_ln(x) * (1 + scale) + shift)


class FinalLayer(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(width, outputs)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(y).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class SimpleMLPAdaLN(nn.Module):
    """MAR's with 2 d outputs; NextStep-1's with d."""

    def __init__(self, channels: int, cond: int, width: int, layers: int, outputs: int) -> None:
        super().__init__()
        self.channels = channels
        self.time_embed = TimestepEmbedder(width, casts=outputs == channels)
        self.cond_embed = nn.Linear(cond, width)
        self.input_proj = nn.Linear(channels, width)
        self.res_blocks = nn.ModuleList(ResBlock(width) for _ in range(layers))
        self.final_layer = FinalLayer(width, outputs)

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        x, y = self.input_proj(x), self.time_embed(t) + self.cond_embed(c)
        for block in self.res_blocks:
            x = block(x, y)
        return self.final_layer(x, y)

    def forward_with_cfg(self, x: Tensor, t: Tensor, c: Tensor, cfg_scale: float) -> Tensor:
        return guided_by_halves(self, x, t, c, cfg_scale)


def guided_by_halves(net: nn.Module, x: Tensor, t: Tensor, c: Tensor, cfg_scale: float | Tensor) -> Tensor:
    half = x[: len(x) // 2]
    eps, rest = net.forward(torch.cat([half, half]), t, c).chunk(2, dim=1)
    conditional, null = eps.chunk(2)
    guided = null + cfg_scale * (conditional - null)
    return torch.cat([torch.cat([guided, guided]), rest], dim=1)


class Attention(nn.Module):
    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.wqkv = nn.Linear(width, 3 * width)
        self.wo = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.wqkv(x).chunk(3, dim=-1))
        return self.wo(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GatedBlock(nn.Module):
    """SphereAR's, and BitDance's of one cell: SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = int(1.5 * width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.w1, self.w2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, gate: Tensor) -> Tensor:
        a, b = self.w1(self.norm(x) * (1 + scale) + shift).chunk(2, dim=-1)
        return x + gate * self.w2(F.silu(a) * b)


class TransBlock(nn.Module):
    """BitDance's of several cells. `use_swiglu` is an attribute of the text-to-image models' only; None: ImageNet's."""

    def __init__(self, width: int, use_swiglu: bool | None = None) -> None:
        super().__init__()
        hidden = int(1.5 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, 64 if use_swiglu is None else 128)
        if use_swiglu is not None:
            self.use_swiglu = use_swiglu
        if use_swiglu is False:
            self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, width))
        else:
            self.w1, self.w2 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, *six: Tensor) -> Tensor:
        scale1, shift1, gate1, scale2, shift2, gate2 = six
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        h = self.norm2(x) * (1 + scale2) + shift2
        if hasattr(self, "mlp"):
            return x + gate2 * self.mlp(h)
        a, b = self.w1(h).chunk(2, dim=-1)
        return x + gate2 * self.w2(F.silu(a) * b)


class FlowFinalLayer(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.ada_ln_modulation = nn.Linear(width, 2 * width)
        self.linear = nn.Linear(width, outputs)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale, shift = self.ada_ln_modulation(y).chunk(2, dim=-1)
        return self.linear(self.norm_final(x) * (1 + scale) + shift)


class Encoder(nn.Module):
    """`MlpEncoder` without `parallel_num`, `TransEncoder` with it."""

    def __init__(self, channels: int, cond: int, width: int, depths: tuple[int, int], **parallel) -> None:
        super().__init__()
        layers, modulations = depths
        self.ada_ln_switch_freq = layers // modulations
        self.time_embed = TimestepEmbedder(width, factor=1000.0)
        self.cond_embed = nn.Linear(cond, width)
        self.input_proj = nn.Linear(channels, width)
        self.final_layer = FlowFinalLayer(width, channels)
        self.is_t2i = "use_swiglu" in parallel
        if parallel:
            self.parallel_num = parallel["parallel_num"]
            blocks, parts = [TransBlock(width, parallel.get("use_swiglu")) for _ in range(layers)], 6
        else:
            blocks, parts = [GatedBlock(width) for _ in range(layers)], 3
        self.res_blocks = nn.ModuleList(blocks)
        self.ada_ln_blocks = nn.ModuleList(nn.Linear(width, parts * width) for _ in range(modulations))

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        x, time = self.input_proj(x), self.time_embed(t)
        y = F.silu((time.unsqueeze(1) if x.dim() == 3 else time) + self.cond_embed(c))
        for i, block in enumerate(self.res_blocks):
            modulation = self.ada_ln_blocks[i // self.ada_ln_switch_freq](y)
            x = block(x, *modulation.chunk(modulation.shape[-1] // y.shape[-1], dim=-1))
        out = self.final_layer(x, y)
        return 2 * torch.sigmoid(out) - 1 if self.is_t2i else out


# A net of known distribution.


class Known(nn.Module):
    """The optimal output for tokens c +- split + N(0, scale^2), both signs as likely, in each number.

    Without a split the output is linear in the noisy token, so that chains are Gaussian.

    Args:
        kind: "velocity", "clean" or "noise", what is predicted. scale: [*token].
    """

    ada_ln_blocks = ()
    final_layer = None

    def __init__(self, kind: str, scale: Tensor, split: float = 0.0) -> None:
        super().__init__()
        self.kind, self.split, self.num_calls = kind, split, 0
        self.scale = nn.Parameter(scale, requires_grad=False)
        if scale.dim() == 2:
            self.parallel_num = len(scale)

    def forward(self, x: Tensor, t: Tensor, c: Tensor) -> Tensor:
        self.num_calls += 1
        t = t.float().view(-1, *[1] * (x.dim() - 1))
        if self.kind == "noise":
            abar = torch.tensor(schedule(1000).alphas_cumprod, dtype=torch.float32)[t.long()]
            of_clean, of_noise = abar.sqrt(), (1 - abar).sqrt()
        else:
            of_clean, of_noise = t, 1 - t
        variance = (of_clean * self.scale) ** 2 + of_noise**2
        centred = x - of_clean * c
        side = self.split * torch.tanh(of_clean * self.split * centred / variance)
        clean = c + side + of_clean * self.scale**2 / variance * (centred - of_clean * side)
        if self.kind == "clean":
            return clean
        if self.kind == "velocity":
            return (clean - x) / (1 - t)
        v = torch.sin(0.7 * t) + self.split * torch.sin(3 * x)
        return torch.cat([(x - of_clean * clean) / of_noise, v], dim=1)


class KnownNoise(Known):
    forward_with_cfg = guided_by_halves


# MAR's, and DiSA's of it.


class SpacedDiffusion:
    """A `GaussianDiffusion` of T steps: its tables, and its loop."""

    model_mean_type, model_var_type = SimpleNamespace(name="EPSILON"), SimpleNamespace(name="LEARNED_RANGE")

    def __init__(self, num_steps: int) -> None:
        self.__dict__.update(vars(schedule(num_steps)))

    def p_sample_loop(self, model, shape, noise, clip_denoised, model_kwargs, progress, temperature) -> Tensor:
        x = noise
        for i in reversed(range(len(self.timestep_map))):
            t = torch.full((len(x),), int(self.timestep_map[i]))
            with torch.no_grad():
                eps, v = model(x, t, **model_kwargs).chunk(2, dim=1)
            draw = torch.randn_like(x)
            low, high = self.posterior_log_variance_clipped[i], np.log(self.betas[i])
            log_variance = (v + 1) / 2 * high + (1 - v) / 2 * low
            clean = self.sqrt_recip_alphas_cumprod[i] * x - self.sqrt_recipm1_alphas_cumprod[i] * eps
            x = self.posterior_mean_coef1[i] * clean + self.posterior_mean_coef2[i] * x
            x = x + (i != 0) * torch.exp(0.5 * log_variance) * draw * temperature
        return x.float()


class DiffLoss(nn.Module):
    """LTH14/mar's."""

    def __init__(self, net: nn.Module, channels: int, num_steps: int) -> None:
        super().__init__()
        self.in_channels, self.net = channels, net
        self.gen_diffusion = SpacedDiffusion(num_steps)

    def sample(self, z, temperature=1.0, cfg=1.0):
        return self.drawn(z, temperature, cfg, self.gen_diffusion)

    def drawn(self, z, temperature, cfg, chain):
        if not cfg == 1.0:
            noise = torch.randn(len(z) // 2, self.in_channels)
            noise = torch.cat([noise, noise])
            function, more = self.net.forward_with_cfg, {"c": z, "cfg_scale": cfg}
        else:
            noise = torch.randn(len(z), self.in_channels)
            function, more = self.net.forward, {"c": z}
        return chain.p_sample_loop(
            function,
            noise.shape,
            noise,
            clip_denoised=False,
            model_kwargs=more,
            progress=False,
            temperature=temperature,
        )


class AnnealedDiffLoss(DiffLoss):
    """DiSA's: a list of chains, of which the iteration decides."""

    def __init__(self, net: nn.Module, channels: int, lower: int, upper: int, sampler: str = "DiSA") -> None:
        super().__init__(net, channels, upper)
        self.sampler, self.diff_annealing_strategy = sampler, "linear"
        self.gen_diffusion = [SpacedDiffusion(num) for num in range(lower, upper + 1)]

    def sample(self, z, temperature=1.0, cfg=1.0, step=0, ar_num_iter=64):
        last = ar_num_iter - 1
        index = int((last - step) / last * (len(self.gen_diffusion) - 1))
        return self.drawn(z, temperature, cfg, self.gen_diffusion[index])


class CachedDiffLoss(DiffLoss):
    """LazyMAR's."""

    def sample(self, z, temperature=1.0, cfg=1.0, cache_type="none", step=0, cache_threshold=7, device="cpu"):
        return self.drawn(z, temperature, cfg, self.gen_diffusion)


# SphereAR's and BitDance's.


def halves(v: Tensor, cfg: float, num: int) -> Tensor:
    if num == 1:
        return v
    conditional, null = v.chunk(2)
    return null + cfg * (conditional - null)


class DiffHead(nn.Module):
    """SphereAR's."""

    def __init__(self, net: nn.Module, ch_target: int) -> None:
        super().__init__()
        self.ch_target, self.net = ch_target, net

    def times(self, num_steps: int) -> tuple[list[Tensor], float]:
        return [torch.tensor(0.96 / num_steps)] * num_steps, 0.04

    def velocity(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        return self.net.forward(x, t, z)

    def sample(self, z, cfg, num_sampling_steps):
        num = 2 if cfg > 1 else 1
        x = torch.randn([len(z) // num, *z.shape[1:-1], self.ch_target])
        all_dt, last = self.times(num_sampling_steps)
        t, each = torch.tensor(0.0), torch.zeros(len(z))
        for dt in all_dt:
            each[:] = t
            v = halves(self.velocity(torch.cat([x] * num), each, z).float(), cfg, num)
            score = (t * v - x) / ((1 - t) ** 2 + t * (1 - t))
            x = x + (v + (1 - t) * score) * dt + (2 * (1 - t) * dt) ** 0.5 * torch.randn_like(x)
            t = t + dt
        each[:] = 1 - last
        x = x + halves(self.velocity(torch.cat([x] * num), each, z).float(), cfg, num) * last
        return torch.cat([x] * num)


class BitDiffHead(DiffHead):
    """BitDance's, of any number of cells."""

    def __init__(self, net: nn.Module, ch_target: int, time_shift: float = 1.0) -> None:
        super().__init__(net, ch_target)
        self.time_shift = time_shift

    def times(self, num_steps: int) -> tuple[list[Tensor], float]:
        t = torch.linspace(0, 0.95, num_steps + 1)
        t = (1 / self.time_shift) / (1 / self.time_shift + (1 / t - 1))
        return [*t.diff()], 0.05

    def velocity(self, x: Tensor, t: Tensor, z: Tensor) -> Tensor:
        to_go = (1 - t).view(-1, *[1] * (x.dim() - 1)).clamp_min(0.05)
        return (self.net.forward(x, t, z) - x) / to_go


# NextStep-1's.


class FlowMatchingHead(nn.Module):
    def __init__(self, net: nn.Module, input_dim: int) -> None:
        super().__init__()
        self.input_dim, self.net = input_dim, net

    def get_velocity_from_cfg(self, v, cfg, cfg2, cfg_mult):
        if cfg_mult < 3:
            return halves(v, cfg, cfg_mult)
        conditional, null, null2 = v.chunk(3)
        return null2 + cfg2 * (null - null2) + cfg * (conditional - null)

    def noisy_steps(self, c, cfg, cfg2, num, t, noise_repeat) -> Tensor:
        rows = len(c) // num
        draw = lambda: torch.randn((noise_repeat, self.input_dim)).repeat(rows // noise_repeat, 1)  # noqa: E731
        x = draw()
        for now, after in itertools.pairwise(t):
            v, dt = self.velocity(x, now, c, cfg, cfg2, num), after - now
            score = (now * v - x) / ((1 - now) ** 2 + now * (1 - now))
            x = x + (v + (1 - now) * score) * dt + torch.sqrt(2 * (1 - now)) * draw() * torch.sqrt(dt)
        return x

    def velocity(self, x, t, c, cfg, cfg2, num) -> Tensor:
        out = self.net(torch.cat([x] * num).to(c.dtype), t.expand(len(c)).to(c), c).float()
        return self.get_velocity_from_cfg(out, cfg, cfg2, num)

    @torch.no_grad()
    def sample(
        self,
        c,
        cfg=1.0,
        cfg2=1.0,
        timesteps_shift=1.0,
        num_sampling_steps=20,
        last_step_size=0.04,
        noise_repeat=1,
    ):
        num = 1 + (cfg > 1.0) + (cfg2 > 1.0)
        t = torch.linspace(0, 1 - last_step_size, num_sampling_steps)
        t = t / (timesteps_shift - (timesteps_shift - 1) * t)
        x = self.noisy_steps(c, cfg, cfg2, num, t, noise_repeat)
        return (x + self.velocity(x, t[-1], c, cfg, cfg2, num) * last_step_size).to(c.dtype)


class NewerFlowMatchingHead(FlowMatchingHead):
    """NextStep-1.1's, as vLLM-Omni has it."""

    @torch.no_grad()
    def sample(
        self,
        c,
        cfg=1.0,
        cfg_img=1.0,
        cfg_mult=None,
        timesteps_shift=1.0,
        num_sampling_steps=20,
        last_step_size=0.0,
        noise_repeat=1,
    ):
        num = cfg_mult or 1 + (cfg > 1.0) + (cfg_img > 1.0)
        t = torch.linspace(0, 1, num_sampling_steps + 1)[:-1]
        t = torch.cat([t / (timesteps_shift - (timesteps_shift - 1) * t), torch.ones(1)])
        return self.noisy_steps(c, cfg, cfg_img, num, t, noise_repeat).to(c.dtype)


# Heads with drawn weights, which golden files have the tokens of.

CHANNELS, COND = 4, 6
PARALLEL = {"t2i_16": (16, False, 1.0), "t2i_64": (64, True, 2.0)}
NEXT = {"num_sampling_steps": 12, "noise_repeat": 2}
GOLDEN_RUNS = {
    "nextstep": {
        "plain": NEXT,
        "guided": NEXT | {"cfg": 4.0},
        "shifted": NEXT | {"cfg": 4.0, "timesteps_shift": 3.0},
        "three": NEXT | {"cfg": 4.0, "cfg2": 1.5},
    },
    "t2i_16": {"plain": {"cfg": 1.0, "num_sampling_steps": 12}, "guided": {"cfg": 3.0, "num_sampling_steps": 12}},
}
GOLDEN_RUNS["nextstep_1_1"] = {
    kind: {name.replace("cfg2", "cfg_img"): value for name, value in run.items()}
    for kind, run in GOLDEN_RUNS["nextstep"].items()
}
GOLDEN_RUNS["t2i_64"] = GOLDEN_RUNS["t2i_16"]


def golden_inputs(code: str, kind: str) -> tuple[Tensor, Tensor]:
    """Conditions [branches * 4, .., COND] and draws [T + 1, rows, .., CHANNELS] of a golden run, x_T first."""
    run = GOLDEN_RUNS[code][kind]
    branches = 1 + sum(run.get(name, 1.0) > 1 for name in ("cfg", "cfg2", "cfg_img"))
    cells = [PARALLEL[code][0]] if code in PARALLEL else []
    rows = 4 if cells else run["noise_repeat"]
    c = drawn(30_000, [4 * branches, *cells, COND])
    return c, drawn(30_001, [run["num_sampling_steps"] + 1, rows, *cells, CHANNELS])


def filled(module: nn.Module) -> nn.Module:
    """The module with drawn weights; they depend on the names and shapes of its parameters only."""
    module.load_state_dict(drawn_weights({name: each.shape for name, each in module.named_parameters()}))
    return module.eval().requires_grad_(False)


def layered(code: str) -> nn.Module:
    """A code's head with drawn weights."""
    if code in ("mar", "disa", "lazymar"):
        kinds = {"mar": DiffLoss, "disa": AnnealedDiffLoss, "lazymar": CachedDiffLoss}
        sizes = (10, 12) if code == "disa" else (12,)
        return filled(kinds[code](SimpleMLPAdaLN(CHANNELS, COND, 16, 2, 2 * CHANNELS), CHANNELS, *sizes))
    if code in ("nextstep", "nextstep_1_1"):
        kind = FlowMatchingHead if code == "nextstep" else NewerFlowMatchingHead
        return filled(kind(SimpleMLPAdaLN(CHANNELS, COND, 16, 2, CHANNELS), CHANNELS))
    if code in PARALLEL:
        cells, use_swiglu, shift = PARALLEL[code]
        net = Encoder(CHANNELS, COND, 128, (2, 1), parallel_num=cells, use_swiglu=use_swiglu)
        return filled(BitDiffHead(net, CHANNELS, shift))
    if code in ("bitdance_4x", "bitdance_16x"):
        net = Encoder(CHANNELS, COND, 64, (2, 1), parallel_num=4 if code == "bitdance_4x" else 16)
        return filled(BitDiffHead(net, CHANNELS))
    net = Encoder(CHANNELS, COND, 16, (2, 1))
    return filled(DiffHead(net, CHANNELS) if code == "sphere" else BitDiffHead(net, CHANNELS))


CODES = ("mar", "disa", "sphere", "bitdance", "bitdance_4x", "bitdance_16x", "t2i_16", "t2i_64", "nextstep")
CODES += ("nextstep_1_1",)
