"""Loading weights of VQ models: the official `c2i_*.pt` and `vq_ds16_c2i.pt`, and safetensors. Local files only."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.registry import GPTS, TOKENIZERS, create_eagle, create_gpt, create_tokenizer
from cspd.vq.tokenizer import VQModel
from mar.checkpoint import load_weights

PIXELS = re.compile(r"_(256|384|512)\b")  # in an official file's name; its weights are the same at any resolution


def load_gpt(path: Path | str, arch: str | None = None) -> GPT:
    """A GPT with the weights of a file, on the CPU in float32.

    Args:
        path: `c2i_*.pt` or .safetensors. Only an official name tells the resolution (c2i_L_384.pt: 576 tokens), the
            weights do not; for another name it is the resolution published for the size.
        arch: a name of `cspd.vq.registry.GPTS`; found out from the file by default.

    Raises:
        CheckpointError: missing, truncated, of another size, of another model, or with NaN. ValueError: unknown arch.
    """
    model, name = load_weights(Path(path), arch, GPTS, create_gpt, "GPT")
    pixels = PIXELS.search(Path(path).stem)
    if pixels:
        side = int(pixels[1]) // TOKENIZERS[GPTS[name].tokenizer].stride
        model.config = replace(model.config, block_size=side * side)
    return model


def load_tokenizer(path: Path | str, arch: str | None = None) -> VQModel:
    """A tokenizer with the weights of a file, as `load_gpt`; arch is a name of `cspd.vq.registry.TOKENIZERS`."""
    return load_weights(Path(path), arch, TOKENIZERS, create_tokenizer, "tokenizer")[0]


def load_eagle(path: Path | str, arch: str | None = None) -> Eagle:
    """An EAGLE drafter with the weights of a file, as `load_gpt`; arch is its target's."""
    return load_weights(Path(path), arch, GPTS, create_eagle, "EAGLE drafter")[0]
