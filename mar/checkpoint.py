"""MAR's sizes by name, and loading weights from its official files."""

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

# Every MAR model and autoencoder by name: the official sizes and the bundled ones.

T = TypeVar("T")


@dataclass(frozen=True)
class SamplingDefaults:
    """The settings that a model's authors sample it with.

    Attributes:
        num_iter: K, autoregressive iterations.
        cfg, cfg_schedule: guidance scale s, and how it changes over the iterations.
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
    """A named MAR size and its authors' sampling settings."""

    config: MARConfig
    defaults: SamplingDefaults


# The bundled models of digits and of emojis share the sizes of their draft models.
_SMALL = MARConfig(vae_stride=4, class_num=10, buffer_size=8)
_SMALL_DRAFT = replace(_SMALL, embed_dim=96, depth=2, num_heads=4, diffloss_w=160, diffloss_d=2)
_DIGITS = SamplingDefaults(temperature_unguided=1.0)
_EMOJI = SamplingDefaults(cfg=4.0, cfg_schedule="constant", temperature=0.9, temperature_unguided=1.0)

MARS: dict[str, MARSpec] = {
    "mar_base": MARSpec(
        MARConfig(embed_dim=768, depth=12, num_heads=12, diffloss_w=1024, diffloss_d=6),
        SamplingDefaults(cfg=2.9),
    ),
    "mar_large": MARSpec(
        MARConfig(embed_dim=1024, depth=16, num_heads=16, diffloss_w=1280, diffloss_d=8),
        SamplingDefaults(cfg=3.0),
    ),
    "mar_huge": MARSpec(
        MARConfig(embed_dim=1280, depth=20, num_heads=16, diffloss_w=1536, diffloss_d=12),
        SamplingDefaults(cfg=3.2),
    ),
    "mar_digits32": MARSpec(
        replace(_SMALL, img_size=32, embed_dim=192, depth=3, num_heads=6, diffloss_w=256, diffloss_d=3),
        _DIGITS,
    ),
    "mar_digits32_draft": MARSpec(replace(_SMALL_DRAFT, img_size=32), _DIGITS),
    "mar_emoji64": MARSpec(
        replace(_SMALL, img_size=64, embed_dim=192, depth=4, num_heads=6, diffloss_w=256, diffloss_d=3),
        _EMOJI,
    ),
    "mar_emoji64_draft": MARSpec(replace(_SMALL_DRAFT, img_size=64), _EMOJI),
}

VAES: dict[str, KLConfig] = {
    "kl16": KLConfig(),
    "kl_digits32": KLConfig(ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, scale=1.0),
    "kl_emoji64": KLConfig(ch=32, ch_mult=(1, 2, 2), num_res_blocks=1, attention=False, scale=1.0111),
}


def suggestion(name: str, known: Collection[str]) -> str:
    """Advice for an unknown name: the most similar known name, or all known names."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    return f"choose one of {', '.join(known) or 'none'}"


def lookup(table: Mapping[str, T], name: str, what: str) -> T:
    """The entry of a table by name. Raises ValueError, with a suggestion, if the name is unknown."""
    if name not in table:
        raise ValueError(f"unknown {what} {name!r}: {suggestion(name, table)}")
    return table[name]


def mar_spec(name: str) -> MARSpec:
    """The spec of a MAR size. Raises ValueError on an unknown name."""
    return lookup(MARS, name, "MAR model")


def defaults_of(config: MARConfig) -> SamplingDefaults:
    """The sampling settings of a size's authors, at any resolution; MAR's usual ones for a size without a name."""
    for spec in MARS.values():
        if spec.config == config:
            return spec.defaults
    # not the exact resolution: any one of the size
    for spec in MARS.values():
        if replace(spec.config, img_size=config.img_size, patch_size=config.patch_size) == config:
            return spec.defaults
    return SamplingDefaults()


def create_mar(name: str, seq_len: int | None = None, token_dim: int | None = None) -> MAR:
    """A MAR of the named size with random weights.

    Args:
        seq_len, token_dim: tokens per image and channels per token, if they differ from the named size's, as
            `--img_size` and `--patch_size` of the authors' training script change them. Values that belong to no
            resolution are ignored.

    Raises:
        ValueError: unknown name.
    """
    # L = (img_size / stride / patch_size)^2 and d = channels of the latent * patch_size^2
    config = mar_spec(name).config
    seq_len = seq_len or config.seq_len
    token_dim = token_dim or config.token_dim
    side = math.isqrt(seq_len)
    patch = math.isqrt(token_dim // config.vae_embed_dim)
    if side > 0 and patch > 0:
        img_size = side * patch * config.vae_stride
        config = replace(config, img_size=img_size, patch_size=patch)
    return MAR(config)


def create_vae(name: str) -> AutoencoderKL:
    """An autoencoder of the named size with random weights. Raises ValueError on an unknown name."""
    return AutoencoderKL(lookup(VAES, name, "autoencoder"))


# The names of the authors' own module, for ImageNet 256x256: 208M, 478M and 942M parameters, and 66M of KL-16.
mar_base = functools.partial(create_mar, "mar_base")
mar_large = functools.partial(create_mar, "mar_large")
mar_huge = functools.partial(create_mar, "mar_huge")
kl16 = functools.partial(create_vae, "kl16")


# Loading weights: MAR's `checkpoint-last.pth` and `kl16.ckpt`, and safetensors. Local files only.
#
# The size is found by the names and shapes of the tensors; `fill` accepts exactly the tensors of one model.

Model = TypeVar("Model", bound=nn.Module)
Shapes = dict[str, tuple[int, ...]]
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Kind(Generic[Model]):
    """A kind of models whose weights files are recognised.

    Attributes:
        what: the kind's name in messages. names: of its sizes. create: builds a model by name.
        place: advice for a file of this kind that was passed as another kind.
        at_size: from a file's tensors to a `create` at their resolution.
    """

    what: str
    names: Mapping[str, object]
    create: Callable[[str], Model]
    place: str
    at_size: Callable[[Mapping[str, Tensor]], Callable[[str], Model]] | None = None

    def like(self, tensors: Mapping[str, Tensor]) -> Callable[[str], Model]:
        """A function that builds models by name, at the resolution of a file's tensors."""
        return self.at_size(tensors) if self.at_size else self.create


def _mar_at_size(tensors: Mapping[str, Tensor]) -> Callable[[str], MAR]:
    """Reads the resolution from two tensors: official sizes are for 256 pixels, but others can be trained."""
    positions = tensors.get("diffusion_pos_embed_learned")
    projection = tensors.get("z_proj.weight")
    if positions is None or projection is None or positions.dim() != 3 or projection.dim() != 2:
        return create_mar
    return _mar_of(positions.shape[1], projection.shape[1])


@functools.cache  # an equal function each time, which is a key of the cache of `_shapes`
def _mar_of(seq_len: int, token_dim: int) -> Callable[[str], MAR]:
    return functools.partial(create_mar, seq_len=seq_len, token_dim=token_dim)


MAR_MODEL = Kind(
    "MAR model",
    MARS,
    create_mar,
    "pass it as the checkpoint, or as the draft of a MAR model (--checkpoint, --draft-checkpoint)",
    _mar_at_size,
)
AUTOENCODER = Kind("autoencoder", VAES, create_vae, "pass it as the vae of a MAR model (--vae)")
KINDS: list[Kind] = [MAR_MODEL, AUTOENCODER]  # the kinds that are recognised; other families add theirs


def load_weights(path: Path, kind: Kind[Model], arch: str | None = None, ema: bool = True) -> tuple[Model, str]:
    """Loads a model's weights from a file.

    Args:
        arch: one of the kind's names; by default found from the tensors.
        ema: whether to take the averaged weights, if there are two sets.

    Returns:
        The model, on the CPU in float32, and its name.

    Raises:
        CheckpointError: the file is missing, truncated, of another size or model, or has values that are not finite.
        ValueError: arch is unknown.
    """
    if arch is not None:
        _check_arch(arch, kind)  # before the file is read
    return model_of(read_tensors(path, ema), path, kind, arch)


def model_of(tensors: dict[str, Tensor], path: Path, kind: Kind[Model], arch: str | None = None) -> tuple[Model, str]:
    """The model with these tensors of a file, and its name; otherwise as `load_weights`."""
    if arch is not None:
        _check_arch(arch, kind)
    # the first size with exactly these names and shapes; `defaults_of` tells sizes of equal shapes by their resolution
    candidates = kind.names if arch is None else [arch]
    create = kind.like(tensors)
    for name in candidates:
        if _shapes(create, name) == _shapes_of(tensors):
            model = _on_meta(create, name)
            fill(model, tensors, path)
            return model.eval().requires_grad_(False), name
    raise CheckpointError(f"{path}: {_explanation(tensors, kind, candidates)}")


def fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Puts the tensors of a file into a model, contiguous and in float32; without a copy if they already are.

    Raises:
        CheckpointError: names, shapes or types are not the model's, or a value is not finite.
    """
    own = model.state_dict()
    problem = _mismatch(_shapes_of(own), tensors)
    if problem:
        raise CheckpointError(f"{path}: not the weights of {type(model).__name__}: {problem}")
    # `assign` takes the tensors themselves, so that a memory-mapped file is not copied
    weights = {name: _converted(tensors[name], own[name].dtype, f"{path}: {name}") for name in own}
    model.load_state_dict(weights, assign=True)


def _converted(tensor: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    """A tensor in a model's type: float32, or the integers of a counter of batch normalisation."""
    accepted = [dtype]
    if dtype.is_floating_point:
        dtype = torch.float32
        accepted = FLOATS
    if tensor.dtype not in accepted:
        types = " or ".join(str(each).removeprefix("torch.") for each in accepted)
        raise CheckpointError(f"{where} is {tensor.dtype}, expected {types}: save the weights in one of these types")
    tensor = tensor.to(dtype).contiguous()
    low, high = tensor.aminmax()  # NaN if any value is; unlike isfinite of all values, it allocates nothing
    if not (low.isfinite() and high.isfinite()):
        raise CheckpointError(
            f"{where} has NaN or infinite values; the file is damaged or training diverged: fetch it again"
        )
    return tensor


def _shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _mismatch(shapes: Shapes, tensors: Mapping[str, Tensor]) -> str:
    """The first difference between tensors and those of a model, in a few words; empty if there is none."""
    for name in tensors:
        if name not in shapes:
            return f"the tensor {name} is unexpected"
    for name, shape in shapes.items():
        if name not in tensors:
            return f"the tensor {name} is missing"
        if tensors[name].shape != shape:
            return f"the tensor {name} is {list(tensors[name].shape)}, expected {list(shape)}"
    return ""


def _resemblance(shapes: Shapes, tensors: Mapping[str, Tensor]) -> float:
    """The fraction of all tensors that both have, with the same shape."""
    ours = set(shapes.items())
    theirs = set(_shapes_of(tensors).items())
    common = ours & theirs
    return len(common) / len(ours | theirs)


def _check_arch(arch: str, kind: Kind) -> None:
    """Raises ValueError unless a kind has a size of this name."""
    for other in KINDS:
        if arch in other.names and arch not in kind.names:
            raise ValueError(f"{arch} is not a {kind.what} but a {other.what}: {other.place}")
    lookup(kind.names, arch, kind.what)


def _explanation(tensors: dict[str, Tensor], wanted: Kind, candidates: Collection[str]) -> str:
    """Says which model the tensors belong to, or how they differ from the most similar candidate."""
    expected = f"the expected {wanted.what} ({', '.join(candidates)})"
    for kind in KINDS:
        for name in kind.names:
            if _shapes(kind.like(tensors), name) == _shapes_of(tensors):
                advice = "pass that name as arch, or omit arch" if kind is wanted else kind.place
                return f"these are the weights of {name} ({kind.what}), not of {expected}: {advice}"
    # not the tensors of any model: the most similar candidate shows what differs
    create = wanted.like(tensors)
    nearest = max(candidates, key=lambda name: _resemblance(_shapes(create, name), tensors))
    difference = _mismatch(_shapes(create, nearest), tensors)
    return f"not the weights of {expected}; compared with {nearest}, {difference}: pass a file of one of these models"


def named_size(model: nn.Module) -> str | None:
    """The name of the size, of any kind, that has the same tensors as a model, or None."""
    own = _shapes_of(model.state_dict())
    for kind in KINDS:
        for name in kind.names:
            if _shapes(kind.create, name) == own:
                return name
    return None


class _NoInit(TorchFunctionMode):
    """Skips the random initialisation of modules.

    On the meta device it has no effect, but torch would import its compiler for it, which takes seconds.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _on_meta(create: Callable[[str], Model], name: str) -> Model:
    with torch.device("meta"), _NoInit():
        return create(name)


@functools.cache  # building a large model takes longer than loading a small one
def _shapes(create: Callable[[str], nn.Module], name: str) -> Shapes:
    return _shapes_of(_on_meta(create, name).state_dict())


def load_mar(path: Path | str, arch: str | None = None, ema: bool = True) -> MAR:
    """Loads a MAR, on the CPU in float32.

    Args:
        path: `checkpoint-last.pth` or .safetensors.
        arch: a name in `MARS`; by default found from the tensors.
        ema: whether to take the averaged weights; official files also have the others.

    Raises:
        CheckpointError, ValueError: as in `load_weights`.
    """
    return load_weights(Path(path), MAR_MODEL, arch, ema)[0]


def load_vae(path: Path | str, arch: str | None = None) -> AutoencoderKL:
    """Loads an autoencoder, as `load_mar`; arch is a name in `VAES`."""
    return load_weights(Path(path), AUTOENCODER, arch)[0]
