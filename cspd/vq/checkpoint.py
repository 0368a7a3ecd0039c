"""Loading weights of VQ models from local files: official `c2i_*.pt`, `t2i_*.pt`, `vq_ds16_*.pt`, and safetensors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.registry import GPTS, TOKENIZERS, create_eagle, create_gpt, create_tokenizer
from cspd.vq.tokenizer import VQModel
from mar.checkpoint import KINDS, Kind, load_weights

GPT_MODEL = Kind(
    "GPT",
    GPTS,
    create_gpt,
    "give it as checkpoint, with its tokenizer beside it, or as draft of a GPT (--checkpoint, --draft-checkpoint)",
)
TOKENIZER = Kind("tokenizer", TOKENIZERS, create_tokenizer, "give it as vae of a GPT (--vae)")
EAGLE = Kind("EAGLE drafter", GPTS, create_eagle, "give it as eagle of its GPT (--eagle)")
KINDS += [GPT_MODEL, TOKENIZER, EAGLE]
PIXELS = re.compile(r"_(256|384|512)\b")  # in an official file's name; its weights are the same at any resolution


def load_gpt(path: Path | str, arch: str | None = None) -> GPT:
    """A GPT with the weights of a file, on the CPU in float32.

    Args:
        path: `c2i_*.pt`, `t2i_*.pt` or .safetensors. Only an official name tells the resolution (c2i_L_384.pt: 576
            tokens), the weights do not; for another name it is the resolution published for the size.
        arch: a name of `cspd.vq.registry.GPTS`; found out from the file by default.

    Raises:
        CheckpointError, ValueError: as in `mar.checkpoint.load_weights`.
    """
    model, name = load_weights(Path(path), GPT_MODEL, arch)
    pixels = PIXELS.search(Path(path).stem)
    if pixels:
        side = int(pixels[1]) // TOKENIZERS[GPTS[name].tokenizer].stride
        model.config = replace(model.config, block_size=side * side)
    return model


def load_tokenizer(path: Path | str, arch: str | None = None) -> VQModel:
    """A tokenizer with the weights of a file, as `load_gpt`; arch is a name of `cspd.vq.registry.TOKENIZERS`."""
    return load_weights(Path(path), TOKENIZER, arch)[0]


def load_eagle(path: Path | str, arch: str | None = None) -> Eagle:
    """An EAGLE drafter with the weights of a file, as `load_gpt`; arch is its target's."""
    return load_weights(Path(path), EAGLE, arch)[0]
