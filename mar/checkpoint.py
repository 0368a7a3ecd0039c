"""MAR's sizes by name, and loading weights from its official files."""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mar.model import MAR, MARConfig
from mar.tensors import CONFIG, Assumed, CheckpointError, Weights, check_finite, read_weights
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


# what a size can be trained for: other images, latents and classes do not make it another size
TRAINED_FOR = ("img_size", "vae_stride", "patch_size", "vae_embed_dim", "class_num")


def defaults_of(config: MARConfig) -> SamplingDefaults:
    """The sampling settings of a size's authors, for any images; MAR's usual ones for a size without a name."""
    for spec in MARS.values():
        if spec.config == config:
            return spec.defaults
    trained_for = {name: getattr(config, name) for name in TRAINED_FOR}
    for spec in MARS.values():
        if replace(spec.config, **trained_for) == config:
            return spec.defaults
    return SamplingDefaults()


def create_mar(name: str) -> MAR:
    """A MAR of the named size with random weights. Raises ValueError on an unknown name."""
    return MAR(mar_spec(name).config)


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
# The size is found by the names and shapes of the tensors, and by what the file says of sizes that have no tensor, such
# as the number of heads; `fill` accepts exactly the tensors of one model.

Model = TypeVar("Model", bound=nn.Module)
Shapes = dict[str, tuple[int, ...]]
ALIGNMENT = 64  # bytes, as torch allocates tensors and writes them to archives
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
NUMBER_OF_HEADS = (("embed_dim", "num_heads"), ("dim", "n_head"))  # must divide the width
# sizes that count layers: a file cannot have more of them than tensors
COUNTS = {"depth", "diffloss_d", "n_layer", "diff_layers", "diff_adanln_layers", "num_res_blocks"}
COUNTS |= {"encoder_layers", "decoder_layers"}
MOST, MOST_LEVELS = 2**24, 16  # the largest number, and the most levels of a resolution, that are tried
IN_CSPD_JSON = "set sizes in the cspd.json of its folder (docs/checkpoints.md)"


def unchanged(config: Any, shapes: Shapes, facts: Mapping[str, Any]) -> Any:
    """The `Kind.adapted` of models of one resolution, or of any with the same sizes."""
    return config


def _unknown(shapes: Shapes, facts: Mapping[str, Any], path: Path) -> Any:
    return None


@dataclass(frozen=True)
class Kind(Generic[Model]):
    """A kind of models whose weights files are recognised.

    Attributes:
        what: the kind's name in messages. names: of its sizes; each has the sizes, or a spec with a `config`.
        build: from sizes to a model with random weights. place: advice for a file of this kind that was passed as
            another kind.
        adapted: (named sizes, shapes and facts of a file) -> the sizes at the file's resolution and classes.
        inferred: (shapes, facts, path) -> the sizes of a model without a name, or None.
        configs: the classes of its sizes, which a file may state.
    """

    what: str
    names: Mapping[str, Any]
    build: Callable[[Any], Model]
    place: str
    adapted: Callable[[Any, Shapes, Mapping[str, Any]], Any] = unchanged
    inferred: Callable[[Shapes, Mapping[str, Any], Path], Any] = _unknown
    configs: tuple[type, ...] = ()
    ours: frozenset[str] = field(init=False, default=frozenset())  # names that no plugin added

    def __post_init__(self) -> None:
        object.__setattr__(self, "ours", frozenset(self.names))

    def config(self, name: str) -> Any:
        """The sizes of a name."""
        named = self.names[name]
        return getattr(named, "config", named)


def _mar_adapted(config: MARConfig, shapes: Shapes, facts: Mapping[str, Any]) -> MARConfig:
    """A size for the images and classes that a file's model was trained for."""
    read = _mar_shapes(shapes)
    if read is None:
        return config
    sizes, seq_len, token_dim = read
    stated = {name: facts[name] for name in ("vae_stride", "vae_embed_dim", "num_heads") if _is_count(facts.get(name))}
    config = replace(config, class_num=sizes["class_num"], **stated)
    # L = (img_size / stride / patch_size)^2 and d = channels of the latent * patch_size^2
    side = math.isqrt(seq_len)
    patch = math.isqrt(token_dim // config.vae_embed_dim)
    if side == 0 or patch == 0:
        return config
    return replace(config, img_size=side * patch * config.vae_stride, patch_size=patch)


def _mar_shapes(shapes: Shapes) -> tuple[dict[str, int], int, int] | None:
    """The sizes that the shapes of a MAR's tensors give, L and d; None if they are of another model."""
    try:
        class_num, embed_dim = shapes["class_emb.weight"]
        _, seq_len, _ = shapes["diffusion_pos_embed_learned"]
        _, length, _ = shapes["encoder_pos_embed_learned"]
        _, token_dim = shapes["z_proj.weight"]
        diffloss_w, _ = shapes["diffloss.net.input_proj.weight"]
    except (KeyError, ValueError):
        return None
    sizes = {"class_num": class_num, "embed_dim": embed_dim, "buffer_size": length - seq_len, "diffloss_w": diffloss_w}
    for name, layers in (("depth", "encoder_blocks"), ("diffloss_d", "diffloss.net.res_blocks")):
        found = re.compile(rf"{re.escape(layers)}\.(\d+)\.")
        sizes[name] = len({match[1] for match in map(found.match, shapes) if match})
    return (sizes, seq_len, token_dim) if min(seq_len, token_dim, *sizes.values()) > 0 else None


def _mar_inferred(shapes: Shapes, facts: Mapping[str, Any], path: Path) -> MARConfig | None:
    """The sizes of a MAR by its shapes; its number of heads as stated, or else the usual one, with a warning."""
    read = _mar_shapes(shapes)
    if read is None:
        return None
    config = _mar_adapted(MARConfig(**read[0], num_heads=1), shapes, facts)
    if not _has_shapes(MAR, config, shapes):
        return None
    if _is_count(facts.get("num_heads")):
        return config
    return replace(config, num_heads=_heads_of(config, facts, path))


def _heads_of(config: MARConfig, facts: Mapping[str, Any], path: Path) -> int:
    width = config.embed_dim
    named = MARS.get(str(facts.get("arch")))
    if named is not None and named.config.embed_dim == width:
        return named.config.num_heads
    for per_head in (80, 64) if width >= WIDE else (64, 80):
        if width % per_head == 0:
            said = (
                f"{path}: does not say its number of heads: {width // per_head} are assumed, {per_head} channels each"
            )
            warnings.warn(f"{said}; if it has others, set sizes in cspd.json: {EXAMPLE}", Assumed, 2)
            return width // per_head
    raise CheckpointError(
        f"{path}: does not say the number of heads of its {width} channels: {IN_CSPD_JSON}: {EXAMPLE}"
    )


WIDE = 1280  # channels of the authors' largest model, whose heads have 80 each
EXAMPLE = '{"sizes": {"target": {"num_heads": 8}}}'


def _is_count(value: object) -> bool:
    return type(value) is int and 0 < value <= MOST


MAR_MODEL = Kind(
    "MAR model",
    MARS,
    MAR,
    "pass it as the checkpoint, or as the draft of a MAR model (--checkpoint, --draft-checkpoint)",
    _mar_adapted,
    _mar_inferred,
    (MARConfig,),
)
AUTOENCODER = Kind("autoencoder", VAES, AutoencoderKL, "pass it as the vae of a MAR model (--vae)", configs=(KLConfig,))
KINDS: list[Kind] = [MAR_MODEL, AUTOENCODER]  # the kinds that are recognised; other families add theirs


def load_weights(
    path: Path, kind: Kind[Model], arch: str | None = None, ema: bool = True, sizes: Mapping[str, Any] | None = None
) -> tuple[Model, dict[str, Any]]:
    """Loads a model's weights from a file.

    Args:
        arch: one of the kind's names; by default found from the tensors and from what the file says.
        ema: whether to take the averaged weights, if there are two sets.
        sizes: some of the model's sizes, by name; they replace what the file and the name say.

    Returns:
        The model, on the CPU in float32, and what the file says of it, see `mar.tensors.Weights.facts`.

    Raises:
        CheckpointError: the file is missing, truncated, of another size or model, or has values that are not finite;
            or several sizes have its tensors, and it does not say which one.
        ValueError: arch is unknown.
    """
    if arch is not None:
        _check_arch(arch, kind)  # before the file is read
    weights = read_weights(path, ema)
    return model_of(weights, path, kind, arch, sizes), weights.facts


def model_of(
    weights: Weights, path: Path, kind: Kind[Model], arch: str | None = None, sizes: Mapping[str, Any] | None = None
) -> Model:
    """The model with these weights of a file; otherwise as `load_weights`."""
    if arch is not None:
        _check_arch(arch, kind)
    config = _config_of(weights, path, kind, arch, sizes or {})
    _check_heads(config, path)
    model = _on_meta(kind.build, config)
    fill(model, weights.tensors, path)
    return model.eval().requires_grad_(False)


def _config_of(weights: Weights, path: Path, kind: Kind, arch: str | None, sizes: Mapping[str, Any]) -> Any:
    """The sizes of a file's model: of `arch`, as the file states them, of the name with its shapes, or as inferred."""
    shapes, facts = _shapes_of(weights.tensors), weights.facts
    stated = None if arch else _stated(facts.get(CONFIG), kind, len(shapes))
    if stated is not None:
        stated = _with_sizes(stated, sizes, len(shapes), path)
        if _has_shapes(kind.build, stated, shapes):
            return stated
    found = {}
    said = {**({} if arch else facts), **sizes}
    for name in kind.names if arch is None else [arch]:
        config = kind.adapted(kind.config(name), shapes, said)
        config = _with_sizes(config, sizes, len(shapes), path)
        if _has_shapes(kind.build, config, shapes):
            found[name] = config
    if found:
        return found[_name_of_several(found, facts, path, kind)]
    inferred = kind.inferred(shapes, said, path) if arch is None else None
    if inferred is not None:
        inferred = _with_sizes(inferred, sizes, len(shapes), path)
        _check_heads(inferred, path)
        if _has_shapes(kind.build, inferred, shapes):
            return inferred
    raise CheckpointError(f"{path}: {_explanation(weights.tensors, kind, kind.names if arch is None else [arch])}")


def _has_shapes(build: Callable[[Any], nn.Module], config: Any, shapes: Shapes) -> bool:
    try:
        return _shapes(build, config) == shapes
    except (ArithmeticError, LookupError, RuntimeError, ValueError):  # sizes of which no layer can be built
        return False


def _name_of_several(found: Mapping[str, Any], facts: Mapping[str, Any], path: Path, kind: Kind) -> str:
    """Of the names with a file's shapes, the one that the file states, or that a plugin added, or the only one.

    Raises CheckpointError if names of different sizes remain.
    """
    stated = str(facts.get("arch"))
    first, *others = found
    if all(found[name] == found[first] for name in others):
        return first
    if stated in found:
        names = ", ".join(name for name in found if found[name] != found[stated])
        warnings.warn(f"{path}: its size is {stated}, as the file says, not {names} of equal shapes", Assumed, 2)
        return stated
    added = [name for name in found if name not in kind.ours]
    if len({found[name] for name in added}) == 1:
        return added[0]
    differ = [each.name for each in fields(found[first]) if len({getattr(found[n], each.name) for n in found}) > 1]
    raise CheckpointError(
        f"{path}: several sizes have these shapes ({', '.join(found)}) and differ in {', '.join(differ)}: give one of"
        f" them as arch (--arch), or {IN_CSPD_JSON}"
    )


def _with_sizes(config: Any, sizes: Mapping[str, Any], num_tensors: int, path: Path) -> Any:
    """A configuration with some other sizes. Raises CheckpointError if one is unknown or has another type."""
    known = [each.name for each in fields(config)]
    for name, value in sizes.items():
        if name not in known or not _is_size(name, value, getattr(config, name), num_tensors):
            raise CheckpointError(
                f'{path}: "sizes" has {name}={value!r}, which is not one of {", ".join(known)} or cannot be its value:'
                " correct the cspd.json"
            )
    return replace(config, **{name: _frozen(value) for name, value in sizes.items()})


def _stated(content: object, kind: Kind, num_tensors: int) -> Any:
    """The sizes in a file's metadata; None if they are no possible sizes of a kind."""
    for config_class in kind.configs:
        usual = config_class()
        if not isinstance(content, Mapping) or not content.keys() <= {each.name for each in fields(usual)}:
            continue
        if all(_is_size(name, value, getattr(usual, name), num_tensors) for name, value in content.items()):
            return config_class(**{name: _frozen(value) for name, value in content.items()})
    return None


def _is_size(name: str, value: object, usual: object, num_tensors: int) -> bool:
    """Whether a value of JSON can replace the usual value of a size, in a file with a number of tensors."""
    most = num_tensors if name in COUNTS else MOST
    if isinstance(usual, tuple):
        return isinstance(value, list) and 0 < len(value) <= MOST_LEVELS and all(map(_is_count, value))
    if isinstance(usual, float):
        return type(value) in (int, float) and 0 < value <= most  # type: ignore[operator]
    return type(value) is type(usual) and 0 <= value <= most  # type: ignore[operator]


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check_heads(config: Any, path: Path) -> None:
    """Raises CheckpointError if the number of heads does not divide the width."""
    for width, heads in NUMBER_OF_HEADS:
        if hasattr(config, heads):
            channels, count = getattr(config, width), getattr(config, heads)
            if count < 1 or channels % count:
                raise CheckpointError(f"{path}: {heads}={count} does not divide {width}={channels}: correct {heads}")


def metadata_of(model: nn.Module) -> dict[str, str]:
    """The metadata by which `load_weights` finds the sizes of a model again in a .safetensors file."""
    return {CONFIG: json.dumps(asdict(model.config))}  # type: ignore[call-overload]


def fill(model: nn.Module, tensors: dict[str, Tensor], path: Path) -> None:
    """Puts the tensors of a file into a model, contiguous, aligned and in float32; without a copy if they already are.

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
    if tensor.data_ptr() % ALIGNMENT:  # products round by where a matrix begins: a seed has one image, for any file
        tensor = tensor.clone()
    check_finite(tensor, where)
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
    shapes = _shapes_of(tensors)
    for kind in KINDS:
        for name in kind.names:
            if _shapes(kind.build, kind.adapted(kind.config(name), shapes, {})) == shapes:
                advice = "pass that name as arch, or omit arch" if kind is wanted else kind.place
                return f"these are the weights of {name} ({kind.what}), not of {expected}: {advice}"
    # not the tensors of any model: the most similar candidate shows what differs
    own = {name: _shapes(wanted.build, wanted.adapted(wanted.config(name), shapes, {})) for name in candidates}
    nearest = max(candidates, key=lambda name: _resemblance(own[name], tensors))
    difference = _mismatch(own[nearest], tensors)
    return f"not the weights of {expected}; compared with {nearest}, {difference}: pass a file of one of these models"


class _NoInit(TorchFunctionMode):
    """Skips the random initialisation of modules.

    On the meta device it has no effect, but torch would import its compiler for it, which takes seconds.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _on_meta(build: Callable[[Any], Model], config: Any) -> Model:
    with torch.device("meta"), _NoInit():
        return build(config)


@functools.cache  # building a large model takes longer than loading a small one
def _shapes(build: Callable[[Any], nn.Module], config: Any) -> Shapes:
    return _shapes_of(_on_meta(build, config).state_dict())


def load_mar(
    path: Path | str, arch: str | None = None, ema: bool = True, sizes: Mapping[str, Any] | None = None
) -> MAR:
    """Loads a MAR, on the CPU in float32.

    Args:
        path: `checkpoint-last.pth` or .safetensors.
        arch: a name in `MARS`; by default found from the file.
        ema: whether to take the averaged weights; official files also have the others.
        sizes: some of the sizes in `MARConfig`, such as num_heads, which no tensor shows.

    Raises:
        CheckpointError, ValueError: as in `load_weights`.
    """
    return load_weights(Path(path), MAR_MODEL, arch, ema, sizes)[0]


def load_vae(path: Path | str, arch: str | None = None, sizes: Mapping[str, Any] | None = None) -> AutoencoderKL:
    """Loads an autoencoder, as `load_mar`; arch is a name in `VAES`, and sizes may have the scale."""
    return load_weights(Path(path), AUTOENCODER, arch, sizes=sizes)[0]
