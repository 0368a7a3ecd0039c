"""MAR's sizes by name, and its official files."""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mar.model import MAR, MARConfig
from mar.tensors import CheckpointError, read_tensors
from mar.vae import AutoencoderKL, KLConfig

# Every model this project can build, by name: the official sizes and the bundled ones.

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingDefaults:
    """How a model's authors sample it.

    Attributes:
        num_iter: K, autoregressive iterations.
        cfg, cfg_schedule: guidance scale s and how it runs over the iterations.
        temperature: with guidance. temperature_unguided: with cfg = 1.
        num_sampling_steps: T, denoising steps per token.
    """

    num_iter: int = 64
    cfg: float = 3.0
    cfg_schedule: str = "linear"
    temperature: float = 1.0
    temperature_unguided: float = 0.95
    num_sampling_steps: int = 100


@dataclass(frozen=True)
class MARSpec:
    """A named MAR size, its published sampling settings and the autoencoder of its tokens."""

    config: MARConfig
    vae: str
    defaults: SamplingDefaults


def _official(embed_dim: int, depth: int, num_heads: int, width: int, head_depth: int, cfg: float) -> MARSpec:
    config = MARConfig(embed_dim=embed_dim, depth=depth, num_heads=num_heads, diffloss_w=width, diffloss_d=head_depth)
    return MARSpec(config, "kl16", SamplingDefaults(cfg=cfg))


def _bundled(
    embed_dim: int,
    depth: int,
    num_heads: int,
    width: int,
    head_depth: int,
    img_size: int,
    vae: str,
    defaults: SamplingDefaults,
) -> MARSpec:
    config = MARConfig(
        img_size=img_size,
        vae_stride=4,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        class_num=10,
        buffer_size=8,
        diffloss_w=width,
        diffloss_d=head_depth,
    )
    return MARSpec(config, vae, defaults)


_DIGITS = SamplingDefaults(temperature_unguided=1.0)
_EMOJI = SamplingDefaults(cfg=4.0, cfg_schedule="constant", temperature=0.9, temperature_unguided=1.0)

MARS: dict[str, MARSpec] = {
    "mar_base": _official(768, 12, 12, 1024, 6, cfg=2.9),
    "mar_large": _official(1024, 16, 16, 1280, 8, cfg=3.0),
    "mar_huge": _official(1280, 20, 16, 1536, 12, cfg=3.2),
    "mar_digits32": _bundled(192, 3, 6, 256, 3, 32, "kl_digits32", _DIGITS),
    "mar_digits32_draft": _bundled(96, 2, 4, 160, 2, 32, "kl_digits32", _DIGITS),
    "mar_emoji64": _bundled(192, 4, 6, 256, 3, 64, "kl_emoji64", _EMOJI),
    "mar_emoji64_draft": _bundled(96, 2, 4, 160, 2, 64, "kl_emoji64", _EMOJI),
}

VAES: dict[str, KLConfig] = {
    "kl16": KLConfig(),
    "kl_digits32": KLConfig(ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, scale=1.0),
    "kl_emoji64": KLConfig(ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, attention=False, scale=1.0111),
}


def suggestion(name: str, known: Collection[str]) -> str:
    """What to tell somebody who gave an unknown name: the nearest known one, or all."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known) or 'none'}"


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of a table of named things. Raises ValueError on an unknown name and lists the known ones."""
    if name not in [*table]:  # a list, since what is asked for may not be hashable
        raise ValueError(f"unknown {what} {name!r}: {suggestion(name, table)}")
    return table[name]


def mar_spec(name: str) -> MARSpec:
    """The spec of a MAR size. Raises ValueError on an unknown name."""
    return lookup(MARS, name, "MAR model")


def defaults_of(config: MARConfig) -> SamplingDefaults:
    """The published sampling settings of a size, at any resolution; the common ones for one that has no name.

    Of sizes that differ by their resolution only, those of the resolution itself.
    """
    other = {"img_size": config.img_size, "patch_size": config.patch_size}
    named = [spec for spec in MARS.values() if replace(spec.config, **other) == config]
    named.sort(key=lambda spec: spec.config != config)
    return named[0].defaults if named else SamplingDefaults()


def create_mar(name: str, seq_len: int | None = None, token_dim: int | None = None) -> MAR:
    """A MAR of the named size with random weights.

    Args:
        seq_len, token_dim: of another resolution than the published one, as `--img-size` and `--patch_size` of the
            authors' training script give it. What no resolution has is left out.

    Raises:
        ValueError: unknown name.
    """
    config = mar_spec(name).config
    patch = math.isqrt((token_dim or config.token_dim) // config.vae_embed_dim)
    side = math.isqrt(seq_len or config.seq_len)
    if patch and side:
        config = replace(config, img_size=side * patch * config.vae_stride, patch_size=patch)
    return MAR(config)


def create_vae(name: str) -> AutoencoderKL:
    """An autoencoder of the named size with random weights. Raises ValueError on an unknown name."""
    return AutoencoderKL(lookup(VAES, name, "autoencoder"))


def _entry_point(name: str, create: Callable, doc: str) -> Callable:
    def build():
        return create(name)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = doc
    return build


mar_base = _entry_point("mar_base", create_mar, "MAR-B: 208M parameters, ImageNet 256x256.")
mar_large = _entry_point("mar_large", create_mar, "MAR-L: 478M parameters, ImageNet 256x256.")
mar_huge = _entry_point("mar_huge", create_mar, "MAR-H: 942M parameters, ImageNet 256x256.")
kl16 = _entry_point("kl16", create_vae, "KL-16: 66M parameters, stride 16, 16 channels.")


# Loading weights: MAR's `checkpoint-last.pth` and `kl16.ckpt`, and safetensors. Local files only.
#
# A file is anybody's: `read_tensors` makes dense tensors of it, and `fill` lets them into a model if they are its own.

Model = TypeVar("Model", bound=nn.Module)
Shapes = dict[str, tuple[int, ...]]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LISTED = 3  # tensors that a message names


@dataclass(frozen=True)
class Kind(Generic[Model]):
    """Models that files are told apart by.

    Attributes:
        what: what they are called in messages. names: of their sizes. create: makes one by name.
        place: what to do with a file of theirs that was given as another's.
        at_size: `create`, at the resolution that a file's tensors have.
    """

    what: str
    names: Mapping[str, object]
    create: Callable[[str], Model]
    place: str
    at_size: Callable[[Mapping[str, Tensor]], Callable[[str], Model]] | None = None

    def like(self, tensors: Mapping[str, Tensor]) -> Callable[[str], Model]:
        """What makes models by name, at the resolution that tensors have."""
        return self.at_size(tensors) if self.at_size else self.create


def _mar_at_size(tensors: Mapping[str, Tensor]) -> Callable[[str], MAR]:
    """MAR's sizes are published at 256 pixels; at others, weights differ in what has a place for each token."""
    positions, projection = (tensors.get(name) for name in ("diffusion_pos_embed_learned", "z_proj.weight"))
    if positions is None or projection is None or positions.dim() != 3 or projection.dim() != 2:
        return create_mar
    return _mar_of(positions.shape[1], projection.shape[1])


@functools.cache  # one function, so that its shapes are found again
def _mar_of(seq_len: int, token_dim: int) -> Callable[[str], MAR]:
    return functools.partial(create_mar, seq_len=seq_len, token_dim=token_dim)


MAR_MODEL = Kind(
    "MAR model",
    MARS,
    create_mar,
    "give it as checkpoint, or as draft of a MAR model (--checkpoint, --draft-checkpoint)",
    _mar_at_size,
)
AUTOENCODER = Kind("autoencoder", VAES, create_vae, "give it as vae of a MAR model (--vae)")
KINDS: list[Kind] = [MAR_MODEL, AUTOENCODER]  # those that a file is recognised as; other families add theirs


def load_weights(path: Path, kind: Kind[Model], arch: str | None = None, ema: bool = True) -> tuple[Model, str]:
    """A model with the weights of a file, on the CPU in float32, and its name.

    Args:
        arch: one of the kind's names; found out from the file by default.
        ema: whether to take the averaged weights where there are two sets.

    Raises:
        CheckpointError: missing, truncated, of another size, of another model, not of real numbers, or with NaN.
        ValueError: unknown arch.
    """
    if arch is not None:
        _check_arch(arch, kind)
    tensors = read_tensors(path, ema)
    candidates = kind.names if arch is None else [arch]
    create = kind.like(tensors)
    name = next((name for name in candidates if _mismatch(_shapes(create, name), tensors) is None), None)
    if name is None:
        raise CheckpointError(f"{path}: {_what_it_is(tensors, kind, candidates)}")
    model = _on_meta(create, name)
    fill(model, tensors, path)
    return model.eval().requires_grad_(False), name


def fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Gives a model the tensors that `read_tensors` found in a file: its own, contiguous, in float32, and finite.

    Those that are so already are taken without a copy.

    Raises:
        CheckpointError: names, shapes or types are not the model's, or a value is not finite.
    """
    own = model.state_dict()
    problem = _mismatch({name: tuple(tensor.shape) for name, tensor in own.items()}, tensors)
    if problem:
        raise CheckpointError(f"{path}: not the weights of {type(model).__name__}: {problem}")
    weights = {name: _converted(tensors[name], own[name].dtype, f"{path}: {name}") for name in own}
    model.load_state_dict(weights, assign=True)


def _converted(tensor: Tensor, dtype: torch.dtype, place: str) -> Tensor:
    """A tensor as a model has it, of real numbers or, for a counter, of its integers."""
    wanted, accepted = (torch.float32, FLOATS) if dtype.is_floating_point else (dtype, (dtype,))
    if tensor.dtype not in accepted:
        types = " or ".join(str(each).removeprefix("torch.") for each in accepted)
        raise CheckpointError(f"{place} is {tensor.dtype}, expected {types}: save the weights as these")
    tensor = tensor.to(wanted).contiguous()
    low, high = tensor.aminmax()  # NaN where there is one; isfinite would make copies
    if not (low.isfinite() and high.isfinite()):
        raise CheckpointError(
            f"{place} has NaN or infinite values; the file is damaged or training diverged: fetch it again"
        )
    return tensor


def _mismatch(shapes: Shapes, tensors: dict[str, Tensor]) -> str | None:
    """Why the tensors are not a model's, in a few words; None if they are."""
    problems = {
        "missing": [name for name in shapes if name not in tensors],
        "unexpected": [name for name in tensors if name not in shapes],
        "misshapen": [
            f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
            for name, shape in shapes.items()
            if name in tensors and tensors[name].shape != shape
        ],
    }
    return "; ".join(f"{problem}: {_few(names)}" for problem, names in problems.items() if names) or None


def _few(names: list[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")


def _resemblance(shapes: Shapes, tensors: dict[str, Tensor]) -> float:
    """Which share of all tensors are in both, with the same shape."""
    theirs = {(name, tuple(tensor.shape)) for name, tensor in tensors.items()}
    ours = set(shapes.items())
    return len(ours & theirs) / len(ours | theirs)


def _check_arch(arch: str, kind: Kind) -> None:
    """Raises ValueError unless a kind has a size of this name."""
    for other in KINDS:
        if arch in [*other.names] and arch not in [*kind.names]:
            raise ValueError(f"{arch} is no {kind.what} but a {other.what}: {other.place}")
    lookup(kind.names, arch, kind.what)


def _what_it_is(tensors: dict[str, Tensor], wanted: Kind, candidates: Collection[str]) -> str:
    """What to tell of tensors that are no candidate's: whose they are instead, or what keeps them from the nearest."""
    expected = f"the expected {wanted.what} ({', '.join(candidates)})"
    for kind in KINDS:
        for name in kind.names:
            if _mismatch(_shapes(kind.like(tensors), name), tensors) is None:
                advice = "ask for that, or leave arch out" if kind is wanted else kind.place
                return f"these are the weights of {name} ({kind.what}), not of {expected}: {advice}"
    create = wanted.like(tensors)
    nearest = max(candidates, key=lambda name: _resemblance(_shapes(create, name), tensors))
    differences = _mismatch(_shapes(create, nearest), tensors)
    return f"not the weights of {expected}; compared with {nearest}, {differences}: give the file of one of these"


def named_size(model: nn.Module) -> str | None:
    """The name of the size whose tensors a model has, of any kind; None where there is none."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return next((name for kind in KINDS for name in kind.names if _shapes(kind.create, name) == own), None)


class _NoInit(TorchFunctionMode):
    """Leaves tensors as they are where a module would draw its first weights.

    On the meta device there is nothing to draw, and torch imports its compiler for it, which takes seconds.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _on_meta(create: Callable[[str], Model], name: str) -> Model:
    with torch.device("meta"), _NoInit():
        return create(name)


@functools.cache  # building the large ones takes longer than loading a small one
def _shapes(create: Callable[[str], nn.Module], name: str) -> Shapes:
    return {key: tuple(tensor.shape) for key, tensor in _on_meta(create, name).state_dict().items()}


def load_mar(path: Path | str, arch: str | None = None, ema: bool = True) -> MAR:
    """A MAR with the weights of a file, on the CPU in float32.

    Args:
        path: `checkpoint-last.pth` or .safetensors.
        arch: a name of `MARS`; found out from the file by default.
        ema: whether to take the averaged weights (an official file has both).

    Raises:
        CheckpointError, ValueError: as in `load_weights`.
    """
    return load_weights(Path(path), MAR_MODEL, arch, ema)[0]


def load_vae(path: Path | str, arch: str | None = None) -> AutoencoderKL:
    """An autoencoder with the weights of a file, as `load_mar`; arch is a name of `VAES`."""
    return load_weights(Path(path), AUTOENCODER, arch)[0]
