"""Loads `transformers` models from directories."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from cspd.discrete.gpt import Eagle, GPTConfig
from cspd.discrete.registry import EAGLE, Architecture, HFConfig, Image
from cspd.files import WEIGHTS, check_files, check_loaded, read_json, weight_files
from cspd.request import Request
from cspd.terminal import install, shortened
from mar.checkpoint import FLOATS, load_weights, unchanged
from mar.tensors import CheckpointError, reason_of

# A directory of a `transformers` model, with the files that the Hub has.

CONFIG = "config.json"
FILES = {  # required: one of the names of each
    "tokenizer": ("tokenizer.json",),
    "tokenizer configuration": ("tokenizer_config.json",),
    "weights": WEIGHTS,
}
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # settings of the last one win
MOST_PROMPT = 512  # tokens; each takes as much of the cache as a token of the image
MOST_LAYERS = 1000
VQ_MODEL = "vqmodel."  # in the names of the VQ model's tensors


def is_hf(path: Path) -> bool:
    """Whether a path is the directory of a `transformers` model, or its configuration."""
    config = path / CONFIG if path.is_dir() else path
    return config.name == CONFIG and config.is_file() and "model_type" in _read(config)


def _read(path: Path) -> dict[str, Any]:
    """The content of a JSON file. Raises CheckpointError if it is not an object."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({reason_of(error)}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: not the configuration of a model: fetch it again")
    return content


@dataclass(frozen=True)
class Folder:
    """The directory of a model whose weights are not read yet.

    Attributes:
        path: of the directory. architecture: the model's. image: the format of its images. config: its sizes.
        own: the configuration of `transformers`.
        dtype: the type that the weights are loaded in. num_bytes: the size of the weights in that type.
    """

    path: Path
    architecture: Architecture
    image: Image
    config: HFConfig
    own: Any
    dtype: torch.dtype
    num_bytes: int

    def decoder(self, given: Path | None) -> Path | None:
        """The file with the decoder to pixels, `given` or the directory's own; None if the model needs none.

        Raises ValueError if one is given to a model that needs none, CheckpointError if there is no such file.
        """
        names = self.architecture.decoder_files
        if not names:
            if given is not None:
                raise ValueError(f"{self.path}: this model has its own image decoder: omit vae=... (--vae)")
            return None
        candidates = [self.path / name for name in names] if given is None else [given]
        for file in candidates:
            if file.is_file():
                return file
        raise CheckpointError(
            f"{given or self.path}: there is no decoder to pixels: put Chameleon's {names[0]} into the model's folder,"
            " or pass it (vae=..., --vae)"
        )


def opened(path: Path, dtype: torch.dtype | None = None) -> Folder:
    """Reads the configuration of a model's directory, but not its weights.

    Args:
        dtype: the type to load the weights in; by default the type that they are stored in.

    Raises:
        CheckpointError: a file is missing or damaged, or the model is not supported.
        ValueError: `transformers` is not installed.
    """
    config = _read(path / CONFIG)
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"{path} has a {config.get('model_type')!r} model, which needs transformers: {install('text')}"
        )
    from cspd.discrete.architectures import ARCHITECTURES, name_of

    name = name_of(config)
    if name not in ARCHITECTURES:
        known = [f"{each} (such as {architecture.example})" for each, architecture in ARCHITECTURES.items()]
        raise CheckpointError(f"{path}: models of type {name!r} are not supported; supported are {', '.join(known)}")
    architecture = ARCHITECTURES[name]
    check_files(path, FILES, f"a model such as {architecture.example}", "fetch the whole directory")
    from transformers import AutoConfig

    try:
        own = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        image = architecture.image(own, _processor(path))
        own_sizes = sizes(own, architecture, image)
        stored = getattr(own, "dtype", None) or _type_of(weight_files(path)[0])
        if stored not in FLOATS:
            raise CheckpointError(f"{path / CONFIG}: dtype is {stored}: use weights in float32, float16 or bfloat16")
        # the size of the weights is needed before they are read, to check the free memory
        stored_bytes = sum(file.stat().st_size for file in weight_files(path))
        num_bytes = stored_bytes * (dtype or stored).itemsize // stored.itemsize
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or absurd configuration can fail anywhere
        raise CheckpointError(f"{path / CONFIG}: cannot be used ({reason_of(error)}): fetch it again") from error
    return Folder(path, architecture, image, own_sizes, own, dtype or stored, num_bytes)


def _type_of(weights: Path) -> torch.dtype:
    """The type of the first floating tensor of a safetensors file; other files would have to be read whole."""
    if weights.suffix != ".safetensors":
        return torch.float32
    try:
        with safe_open(weights, "pt") as file:
            tensors = map(file.get_tensor, file.keys())
            return next(tensor.dtype for tensor in tensors if tensor.is_floating_point())
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise CheckpointError(f"{weights}: cannot be read ({reason_of(error)}): fetch it again") from error


def _processor(path: Path) -> dict[str, Any]:
    """The settings of a model's image processor, as far as its directory has them."""
    settings: dict[str, Any] = {}
    for name in PROCESSORS:
        if (path / name).is_file():
            content = _read(path / name)
            settings |= content | (content.get("image_processor") or {})
    return settings


def sizes(own: Any, architecture: Architecture, image: Image) -> HFConfig:
    """The sizes in a configuration of `transformers`. Raises CheckpointError if no prompt fits before an image."""
    text = architecture.text(own)
    heads, layers = text.num_attention_heads, text.num_hidden_layers
    if not 0 < layers <= MOST_LAYERS:
        raise CheckpointError(
            f"config.json: num_hidden_layers={layers}: expected at most {MOST_LAYERS}: fetch it again"
        )
    length = image.side**2
    # the positions of a prompt, of the image and of the ends of its rows all count
    row_ends = 0 if image.row_end is None else image.side
    room = text.max_position_embeddings - length - row_ends
    if room < 1:
        raise CheckpointError(
            f"config.json: max_position_embeddings={text.max_position_embeddings} leaves no room for a prompt before"
            f" {length + row_ends} tokens of an image: use the config.json of a model that generates images"
        )
    return HFConfig(
        architecture.name,
        dim=text.hidden_size,
        n_layer=layers,
        n_head=heads,
        key_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=image.num_codes,
        block_size=length,
        prefix_length=min(MOST_PROMPT, room),
        stride=image.stride,
        row_end=image.row_end,
        defaults=replace(architecture.defaults, image_size=image.side * image.stride),
    )


def read(folder: Folder, device: torch.device, decoder: Path | None) -> tuple[nn.Module, nn.Module | None]:
    """Loads a model, and its tokenizer between pixels and tokens if there is one; decoder: see `Folder.decoder`.

    Raises CheckpointError if weights cannot be read or are incomplete.
    """
    from cspd.discrete.architectures import HFModel

    # without accelerate the weights are read into the CPU's memory, and the engine moves them
    straight = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    try:
        model_class: Any = folder.architecture.model_class()
        model, report = model_class.from_pretrained(
            folder.path,
            config=folder.own,
            dtype=folder.dtype,
            device_map={"": device} if straight else None,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            attn_implementation="sdpa",
        )
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise CheckpointError(
            f"{folder.path}: its weights cannot be read ({reason_of(error)}): fetch them again"
        ) from error
    # Lumina-mGPT's weights lack the VQ model, and others may lack parts that are not used here
    parts = folder.architecture.parts(model, folder.image, decoder)
    for name in sorted(report["missing_keys"]):
        if not _is_elsewhere(name, parts.tokenizer):
            raise CheckpointError(f"{folder.path}: the weights lack {name}: fetch the whole directory again")
    check_loaded(model, report, folder.path, "fetch the whole directory again")
    return HFModel(folder.config, parts), parts.tokenizer


def _is_elsewhere(name: str, tokenizer: Any) -> bool:
    """Whether a missing tensor belongs to a VQ model that is not used, or was read from the decoder's file."""
    _, vq_model, rest = name.partition(VQ_MODEL)
    return bool(vq_model) and (tokenizer is None or rest in getattr(tokenizer, "from_file", ()))


def read_prompts(folder: Folder) -> Any:
    """Loads the tokenizer of a model's prompts. Raises CheckpointError if it cannot be read."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise CheckpointError(
            f"{folder.path}: its tokenizer cannot be read ({reason_of(error)}): fetch it again"
        ) from error
    older = folder.path / "chat_template.json"  # tokenizers do not read this file, only processors do
    if not tokenizer.chat_template and older.is_file():
        tokenizer.chat_template = _read(older).get("chat_template")
    return Prompts(tokenizer, folder.architecture, folder.image)


# The tokens of a prompt, which a `transformers` model reads before the first token of the image.

REMEMBERED = 4096  # prompts in memory


class Prompts:
    """Converts prompts to tokens, with the interface of `cspd.discrete.text.TextEncoder`.

    Args:
        tokenizer: the model's own. architecture: decides which tokens surround a prompt.
        image: the format of the images, which some prompts state.
    """

    width = 0
    bytes_to_load = 0  # a tokenizer has no weights

    def __init__(self, tokenizer: Any, architecture: Architecture, image: Image) -> None:
        self.tokenizer, self.architecture, self.image = tokenizer, architecture, image
        self._of_text = functools.lru_cache(maxsize=REMEMBERED)(self._tokens)

    def features(self, text: str, most: int, device: torch.device) -> Tensor:
        """The tokens of a prompt, int64 [n], n <= most, on the CPU.

        Raises:
            ValueError: there are more than `most`, or the tokenizer lacks a special token.
        """
        tokens = self._of_text(text)
        if len(tokens) > most:
            raise ValueError(
                f"{shortened(text)} has {len(tokens)} tokens, but the model takes {most}: use a shorter prompt"
            )
        return tokens

    def null(self, prompt: Tensor, most: int) -> Tensor:
        """The tokens of the unconditional branch for requests without a negative prompt, int64 [n], on the CPU.

        Raises:
            ValueError: there are more than `most`, or the tokenizer lacks a special token.
        """
        tokens = self.architecture.null(self.tokenizer, prompt.tolist(), self.image)
        made = self._made(tokens, "guidance", "use a negative_prompt, or cfg=1")
        if len(made) > most:
            raise ValueError(f"the unconditional branch has {len(made)} tokens, but the model takes {most}: use cfg=1")
        return made

    def check(self, request: Request, most: int) -> None:
        """Raises ValueError if a prompt of a request is too long, or the tokenizer cannot express it."""
        prompt: Any = request.prompt
        own = self.features(prompt, most, torch.device("cpu"))
        if request.negative_prompt is not None:
            self.features(request.negative_prompt, most, torch.device("cpu"))
        elif request.guided:
            self.null(own, most)

    def _tokens(self, text: str) -> Tensor:
        tokens = self.architecture.prompt(self.tokenizer, text, self.image)
        return self._made(tokens, "a prompt", "use the tokenizer files of the model")

    def _made(self, tokens: list[int | None], purpose: str, fix: str) -> Tensor:
        if None in tokens:
            name = self.architecture.name
            raise ValueError(f"{purpose} needs a special token that this tokenizer of a {name} model lacks: {fix}")
        return torch.tensor(tokens)


# EAGLE's drafter for a `transformers` model: a LlamaGen layer with the model's width and number of heads.


class HFEagle(Eagle):
    """Drafts for a `transformers` model; tokens that end rows are not among its inputs.

    It computes in the type of its weights, as its target does. config: the target's.
    """

    def __init__(self, config: HFConfig) -> None:
        # LlamaGen's layer has as many key heads as query heads, also if the target has fewer
        names = ("dim", "n_head", "vocab_size", "block_size", "prefix_length")
        sizes = {name: getattr(config, name) for name in names}
        super().__init__(GPTConfig(**sizes, n_layer=1, num_classes=0))

    @property
    def own_type(self) -> torch.dtype:
        """As `HFModel.own_type`."""
        return self.fc.weight.dtype


def load_hf_eagle(path: Path, target: HFConfig, dtype: torch.dtype) -> HFEagle:
    """Loads a drafter for a target, on the CPU. Raises CheckpointError as `mar.checkpoint.load_weights` does."""
    # a kind with a single size: the file's tensors must be those of this target's drafter
    kind: Any = replace(EAGLE, names={target.architecture: target}, build=HFEagle, adapted=unchanged, configs=())
    return load_weights(path, kind)[0].to(dtype)
