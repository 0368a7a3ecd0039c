"""Reads a folder of a model of `transformers`."""

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
from cspd.files import WEIGHTS, check_files, read_json, weight_files
from cspd.request import Request
from cspd.terminal import shortened
from mar.checkpoint import load_weights
from mar.tensors import CheckpointError

# A folder of a model of `transformers`, as its hub has them: what is in it, and whether it can be used here.

CONFIG = "config.json"
FILES = {  # what a folder must have, any of each
    "tokenizer": ("tokenizer.json",),
    "tokenizer configuration": ("tokenizer_config.json",),
    "weights": WEIGHTS,
}
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # what is found in the last one holds
MOST_PROMPT = 512  # tokens: each takes as much of the cache as a code
OF_IMAGES = "vqmodel."  # in the names of the VQ model's weights


def is_hf(place: Path) -> bool:
    """Whether a place is a folder of a model of `transformers`, or the configuration of one."""
    config = place / CONFIG if place.is_dir() else place
    return config.name == CONFIG and config.is_file() and "model_type" in _read(config)


def _read(path: Path) -> dict[str, Any]:
    """Raises CheckpointError where it is no JSON object."""
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: is no configuration of a model: fetch it again")
    return content


@dataclass(frozen=True)
class Folder:
    """A folder of a model whose weights are not read yet.

    Attributes:
        path: its place. architecture: which of those that are hosted. image: what images it makes. config: its sizes.
        own: `transformers`' configuration. dtype: of the weights when they are read. num_bytes: of the weights then.
    """

    path: Path
    architecture: Architecture
    image: Image
    config: HFConfig
    own: Any
    dtype: torch.dtype
    num_bytes: int

    def decoder(self, given: Path | None) -> Path | None:
        """The file that decodes codes to pixels: the one that is given, or that of the folder; None where none is.

        Raises ValueError where the model has its own, CheckpointError where the one that is given is not there.
        """
        if given is not None and not self.architecture.decoder_files:
            raise ValueError(f"{self.path}: this model decodes its codes itself: leave vae=... (--vae) out")
        if given is not None and not given.is_file():
            raise CheckpointError(f"{given}: no such file: give Chameleon's vqgan.ckpt (vae=..., --vae)")
        here = (self.path / name for name in self.architecture.decoder_files)
        return given or next((file for file in here if file.is_file()), None)


def opened(path: Path, dtype: torch.dtype | None = None) -> Folder:
    """A folder, looked into.

    Args:
        dtype: that its weights are to be read in; by default their own.

    Raises:
        CheckpointError: a file is missing or damaged, the architecture is not hosted, or its vocabulary has no images.
            ValueError: `transformers` is not installed.
    """
    config = _read(path / CONFIG)
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(
            f"{path} is of {config.get('model_type')} models, which need transformers: pip install 'cspd[text]'"
        )
    from cspd.discrete.architectures import ARCHITECTURES, name_of

    name = name_of(config)
    if name not in ARCHITECTURES:
        known = [f"{each} (as {architecture.example})" for each, architecture in ARCHITECTURES.items()]
        raise CheckpointError(f"{path}: models of type {name!r} are not hosted; these are: {', '.join(known)}")
    architecture = ARCHITECTURES[name]
    check_files(path, FILES, f"a model as {architecture.example}", "fetch the whole folder")
    from transformers import AutoConfig

    try:
        own = AutoConfig.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise CheckpointError(f"{path / CONFIG}: cannot be read ({error}): fetch it again") from error
    image = architecture.image(own, _processor(path))
    kept = getattr(own, "dtype", None) or _type_of(weight_files(path)[0])
    num_bytes = sum(file.stat().st_size for file in weight_files(path))
    wanted = dtype or kept
    num_bytes = num_bytes * wanted.itemsize // kept.itemsize
    return Folder(path, architecture, image, sizes(own, architecture, image), own, wanted, num_bytes)


def _type_of(weights: Path) -> torch.dtype:
    """Of the first tensor of a file, where that can be read without the rest."""
    if weights.suffix != ".safetensors":
        return torch.float32
    try:
        with safe_open(weights, "pt") as file:
            return file.get_tensor(next(iter(file.keys()))).dtype
    except Exception as error:  # a damaged file can fail anywhere in the reader
        raise CheckpointError(f"{weights}: cannot be read ({error}): fetch it again") from error


def _processor(path: Path) -> dict[str, Any]:
    """The settings of a model's processor of images, where its folder has them."""
    settings: dict[str, Any] = {}
    for name in PROCESSORS:
        if (path / name).is_file():
            content = _read(path / name)
            settings |= content | (content.get("image_processor") or {})
    return settings


def sizes(own: Any, architecture: Architecture, image: Image) -> HFConfig:
    """What a runner must know of a configuration of `transformers`. Raises CheckpointError where it has no room."""
    text = architecture.text(own)
    heads = text.num_attention_heads
    length = image.side**2
    rows = 0 if image.row_end is None else image.side
    room = text.max_position_embeddings - length - rows
    if room < 1:
        raise CheckpointError(
            f"config.json: max_position_embeddings={text.max_position_embeddings} leaves no room for a prompt before"
            f" {length + rows} tokens of an image: take the config.json of a model that makes images"
        )
    return HFConfig(
        architecture.name,
        dim=text.hidden_size,
        n_layer=text.num_hidden_layers,
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
    """The model of a folder, and what makes pixels of its codes where there is that; decoder: as `Folder.decoder`.

    Raises CheckpointError where weights cannot be read, or are not all there.
    """
    from cspd.discrete.architectures import HFModel

    # without accelerate it is read into the computer's memory first, and moved by the engine
    straight = device.type != "cpu" and importlib.util.find_spec("accelerate") is not None
    try:
        model, report = folder.architecture.model_class().from_pretrained(
            folder.path,
            config=folder.own,
            dtype=folder.dtype,
            device_map={"": device} if straight else None,
            local_files_only=True,
            output_loading_info=True,
            attn_implementation="sdpa",
        )
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise CheckpointError(f"{folder.path}: its weights cannot be read ({error}): fetch them again") from error
    parts = folder.architecture.parts(model, folder.image, decoder)
    missing = sorted(name for name in report["missing_keys"] if not _is_elsewhere(name, parts.tokenizer))
    if missing:
        raise CheckpointError(f"{folder.path}: the weights lack {missing[0]}: fetch the whole folder again")
    return HFModel(folder.config, parts), parts.tokenizer


def _is_elsewhere(name: str, tokenizer: Any) -> bool:
    """Whether a tensor that the weights lack is of the VQ model and not needed, or read from the decoder's file."""
    _, of_images, rest = name.partition(OF_IMAGES)
    return bool(of_images) and (tokenizer is None or rest in getattr(tokenizer, "from_file", ()))


def read_prompts(folder: Folder) -> Any:
    """What makes tokens of texts for a folder's model. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise CheckpointError(f"{folder.path}: its tokenizer cannot be read ({error}): fetch it again") from error
    older = folder.path / "chat_template.json"  # which only processors read
    if not tokenizer.chat_template and older.is_file():
        tokenizer.chat_template = _read(older).get("chat_template")
    return Prompts(tokenizer, folder.architecture, folder.image)


# The tokens that a model of `transformers` takes in before the first code, by its own tokenizer.

REMEMBERED = 4096  # prompts in memory


class Prompts:
    """Makes tokens of texts, in the place of `cspd.discrete.text.TextEncoder`.

    Args:
        tokenizer: the model's own. architecture: what it puts around a text. image: what comes after it.
    """

    width = 0
    bytes_to_load = 0  # a tokenizer has no weights

    def __init__(self, tokenizer: Any, architecture: Architecture, image: Image) -> None:
        self.tokenizer, self.architecture, self.image = tokenizer, architecture, image
        self._of_text = functools.lru_cache(maxsize=REMEMBERED)(self._tokens)

    def features(self, text: str, most: int, device: torch.device) -> Tensor:
        """The tokens of a prompt, int64 [n], n <= most, on the CPU.

        Raises:
            ValueError: it has more tokens, or the tokenizer lacks one of the model's.
        """
        tokens = self._of_text(text)
        if len(tokens) > most:
            raise ValueError(
                f"{shortened(text)} has {len(tokens)} tokens and the model takes {most}: give a shorter prompt"
            )
        return tokens

    def null(self, prompt: Tensor, most: int) -> Tensor:
        """The tokens that guidance leads away from where a request does not say, int64 [n], n <= most, on the CPU.

        Raises ValueError where the tokenizer lacks one of them, or there are more.
        """
        made = self._made(self.architecture.null(self.tokenizer, prompt.tolist(), self.image), "guidance")
        if len(made) > most:
            raise ValueError(f"guidance leads away from {len(made)} tokens and the model takes {most}: give cfg=1")
        return made

    def check(self, request: Request, most: int) -> None:
        """Raises ValueError where a request's prompts are too long, or guidance needs one that cannot be made."""
        own = self.features(request.prompt, most, torch.device("cpu"))
        if request.negative_prompt is not None:
            self.features(request.negative_prompt, most, torch.device("cpu"))
        elif request.guided:
            self.null(own, most)

    def _tokens(self, text: str) -> Tensor:
        return self._made(self.architecture.prompt(self.tokenizer, text, self.image), "a prompt")

    def _made(self, tokens: list[int | None], what: str) -> Tensor:
        if None in tokens:
            fix = "give a negative_prompt, or cfg=1" if what == "guidance" else "take the tokenizer files of the model"
            raise ValueError(
                f"{what} needs a special token that this tokenizer of {self.architecture.name} models does not"
                f" have: {fix}"
            )
        return torch.tensor(tokens)


# EAGLE's drafter for a model of `transformers`: the layer that a LlamaGen of its width and heads would have.


class HFEagle(Eagle):
    """Runs ahead of a model in its features, code by code: the ends of rows are no inputs of its.

    It computes in the type of its weights, as its target does. config: the target's.
    """

    def __init__(self, config: HFConfig) -> None:
        names = ("dim", "n_head", "vocab_size", "block_size", "prefix_length")
        sizes = {name: getattr(config, name) for name in names}
        super().__init__(GPTConfig(**sizes, n_layer=1, num_classes=0))

    @property
    def own_type(self) -> torch.dtype:
        """As `HFModel.own_type`."""
        return self.fc.weight.dtype


def load_hf_eagle(path: Path, target: HFConfig, dtype: torch.dtype) -> HFEagle:
    """A drafter with the weights of a file, on the CPU in a type; target: what it drafts for.

    Raises:
        CheckpointError: as in `mar.checkpoint.load_weights`.
    """
    kind = replace(EAGLE, names={target.architecture: target}, create=lambda name: HFEagle(target))
    return load_weights(path, kind)[0].to(dtype)
