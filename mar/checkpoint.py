"""Loading weights: MAR's `checkpoint-last.pth` and `kl16.ckpt`, and safetensors. Local files only.

Official files are pickles: they are read with `weights_only=True`, so that no code in them runs, and memory-mapped.
"""

from __future__ import annotations

import argparse
import functools
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from mar.model import MAR
from mar.registry import MARS, VAES, create_mar, create_vae
from mar.vae import AutoencoderKL

Model = TypeVar("Model", bound=nn.Module)
WEIGHT_KEYS = ("model_ema", "model", "module", "state_dict")  # the averaged weights are the ones to sample with


class CheckpointError(ValueError):
    """A weights file cannot be used; the message names the file, what was expected and what to do."""


def read_tensors(path: Path, ema: bool = True) -> dict[str, Tensor]:
    """The tensors of a weights file, memory-mapped.

    Args:
        path: .safetensors, or anything else as a torch pickle holding `model_ema` and/or another of WEIGHT_KEYS.
        ema: whether to take the averaged weights where there are two sets.

    Raises:
        CheckpointError: missing, truncated, or not a weights file.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; checkpoints/README.md says where the official files come from")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # official files carry the training script's arguments beside the weights
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged file can fail anywhere in the readers
        if isinstance(error, pickle.UnpicklingError):  # its own message advises to run code that is in the file
            reason = "it holds more than weights"
        else:
            reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path}: cannot be read as weights ({reason}); it has {path.stat().st_size:,} bytes and is likely"
            " truncated or another kind of file: fetch it again and compare its size with the source"
        ) from error
    tensors = _tensors_in(content, ema)
    if not tensors:
        found = ", ".join(map(str, list(content)[:6])) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path}: expected a dict with {' or '.join(WEIGHT_KEYS)}, found {found}; take the file as its authors"
            " published it (checkpoints/README.md)"
        )
    return tensors


def _tensors_in(content: object, ema: bool) -> dict[str, Tensor]:
    """The tensors of the first set of weights in a file's content; with `ema` off, of the last."""
    if not isinstance(content, dict):
        return {}
    sets = [content[key] for key in WEIGHT_KEYS if isinstance(content.get(key), dict)]
    if not sets:
        sets = [content]  # LlamaGen's largest files are bare
    weights = sets[0 if ema else -1]
    return {name: value for name, value in weights.items() if isinstance(value, Tensor)}


def _fit(shapes: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]) -> str | None:
    """Why the tensors are not this model's, in a few words; None if they are."""
    missing = shapes.keys() - tensors.keys()
    unexpected = tensors.keys() - shapes.keys()
    problems = []
    if missing:
        problems.append(f"{len(missing)} tensors missing (such as {min(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} tensors unexpected (such as {min(unexpected)})")
    if problems:
        return " and ".join(problems)
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            return f"{name} is {list(tensors[name].shape)}, expected {list(shape)}"
    return None


def _on_meta(create: Callable[[str], Model], name: str) -> Model:
    with torch.device("meta"):
        return create(name)


@functools.cache  # building the large ones takes longer than loading a small one
def _shapes(create: Callable[[str], nn.Module], name: str) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in _on_meta(create, name).state_dict().items()}


def load_weights(
    path: Path, arch: str | None, names: dict, create: Callable[[str], Model], kind: str, ema: bool = True
) -> tuple[Model, str]:
    """A model with the weights of a file, on the CPU in float32, and its name.

    Args:
        arch: one of `names`; found out from the file by default.
        create: makes a model by name. kind: what these models are called in messages.
        ema: whether to take the averaged weights where there are two sets.

    Raises:
        CheckpointError: missing, truncated, of another size, of another model, or with NaN. ValueError: unknown arch.
    """
    tensors = read_tensors(path, ema)
    fits = {name: _fit(_shapes(create, name), tensors) for name in names}
    found = next((name for name, problem in fits.items() if problem is None), None)
    wanted = arch or found
    if wanted is None:
        raise CheckpointError(
            f"{path}: the weights are of no {kind} known here ({', '.join(names)}): give the file of one of these"
        )
    if wanted not in names:
        raise ValueError(f"unknown {kind} {wanted!r}: choose one of {', '.join(names)}")
    if fits[wanted] is not None:
        advice = f"these are the weights of {found}: ask for that" if found else f"give the file of {wanted}"
        raise CheckpointError(f"{path}: not the weights of {wanted}: {fits[wanted]}; {advice}")
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{path}: {name} has NaN or infinite values; the file is damaged or training diverged: fetch it again"
            )
    model = _on_meta(create, wanted)
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return model.eval().requires_grad_(False), wanted


def load_mar(path: Path | str, arch: str | None = None, ema: bool = True) -> MAR:
    """A MAR with the weights of a file, on the CPU in float32.

    Args:
        path: `checkpoint-last.pth` or .safetensors.
        arch: a name of `mar.registry.MARS`; found out from the file by default.
        ema: whether to take the averaged weights (an official file has both).

    Raises:
        CheckpointError: missing, truncated, of another size, of another model, or with NaN. ValueError: unknown arch.
    """
    return load_weights(Path(path), arch, MARS, create_mar, "MAR model", ema)[0]


def load_vae(path: Path | str, arch: str | None = None) -> AutoencoderKL:
    """An autoencoder with the weights of a file, as `load_mar`; arch is a name of `mar.registry.VAES`."""
    return load_weights(Path(path), arch, VAES, create_vae, "autoencoder")[0]
