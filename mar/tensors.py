"""Reading tensors from a file that anybody may have written: torch's pickles and safetensors. No code in them runs."""

from __future__ import annotations

import argparse
import math
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

WEIGHT_KEYS = ("model_ema", "model", "module", "state_dict")  # the averaged weights are the ones to sample with
PREFIXES = ("module.", "_orig_mod.")  # of all names, where a model was saved inside DistributedDataParallel or compiled
UNREAD = ("quantize.codebook_used",)  # a record of training in LlamaGen's tokenizers: nothing is computed with it
LFS_START = b"version https://git-lfs"
UNUSUAL: dict[str, Callable[[Tensor], bool]] = {
    "nested": lambda tensor: tensor.is_nested,
    "sparse": lambda tensor: tensor.layout != torch.strided,
    "without values (on the meta device)": lambda tensor: tensor.is_meta,
    "quantised": lambda tensor: tensor.is_quantized,
}


class CheckpointError(ValueError):
    """A weights file cannot be used; the message names the file, what was expected and what to do."""


def read_tensors(path: Path, ema: bool = True) -> dict[str, Tensor]:
    """The tensors of a weights file by name: dense, on the CPU, memory-mapped where the file allows it.

    They are of any shape, dtype and strides, and may share memory. Values that are no tensors are left out, and so are
    records of training.

    Args:
        path: .safetensors, or anything else as a torch pickle holding `model_ema` and/or another of WEIGHT_KEYS.
        ema: whether to take the averaged weights where there are two sets.

    Raises:
        CheckpointError: missing, truncated, not a weights file, or with tensors that are not dense.
    """
    path = Path(path)
    start = _start(path)
    try:
        content = _read(path)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):  # whole: what is last is there
            raise CheckpointError(
                f"{path}: it holds something other than tensors, or than dense ones, and no code in it is run; save the"
                " weights as ordinary dense tensors"
            ) from error
        raise CheckpointError(
            f"{path}: cannot be read as weights ({_reason(error)}); it has {path.stat().st_size:,} bytes{_text(start)}"
            " and is likely truncated or another kind of file: fetch it again and compare its size with the source"
        ) from error
    tensors = _to_read(_tensors_in(content, ema))
    if not tensors:
        keys = ", ".join(map(str, list(content)[:6])) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path}: expected a dict of tensors, or one with such a dict under {' or '.join(WEIGHT_KEYS)}; found"
            f" {keys or 'nothing'}: take the file as its authors published it (checkpoints/README.md)"
        )
    for name, tensor in tensors.items():
        for form, is_so in UNUSUAL.items():
            if is_so(tensor):
                raise CheckpointError(f"{path}: {name} is {form}; save the weights as ordinary dense tensors")
    return tensors


def count_numbers(path: Path) -> int:
    """How many numbers the tensors of a weights file have, by their shapes alone; 0 where it is damaged."""
    try:
        if path.suffix != ".safetensors":
            return sum(tensor.numel() for tensor in read_tensors(path).values())
        with safe_open(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except Exception:  # whoever reads it says what is wrong with it
        return 0


def _start(path: Path) -> bytes:
    """The first bytes of a file, which is one and can be opened; nothing else is, since a pipe would wait for ever."""
    try:
        if not path.is_file():
            found = "not a file" if path.exists() else "no such file"
            raise CheckpointError(f"{path}: {found}; checkpoints/README.md says where the official files come from")
        with path.open("rb") as file:
            start = file.read(60)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if start.startswith(LFS_START):
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`")
    return start


def _read(path: Path) -> object:
    if path.suffix == ".safetensors":
        return load_file(path)
    # official files carry the training script's arguments beside the weights
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_holds_plain_bytes(path))


def _holds_plain_bytes(path: Path) -> bool:
    """Whether tensors lie in a file as they are: mapping one that was packed again would give other weights."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())


def _reason(error: Exception) -> str:
    """Why a file cannot be read, in a line."""
    message = str(error) or type(error).__name__
    if "weights_only" in message:  # advises to run code that is in the file
        return "it holds something other than tensors"
    return message.splitlines()[0]


def _text(start: bytes) -> str:
    """What a file begins with, if that is text: often the message of a server, in place of the file."""
    line = start.decode("ascii", errors="replace").partition("\n")[0].strip()
    return f", begins with {line!r}" if line and line.isascii() and line.isprintable() else ""


def _tensors_in(content: object, ema: bool) -> dict[str, Tensor]:
    """The tensors of the first set of weights in a file's content; with `ema` off, of the last."""
    if not isinstance(content, dict):
        return {}
    wrapped = [_named_tensors(content[key]) for key in WEIGHT_KEYS if isinstance(content.get(key), dict)]
    sets = [weights for weights in wrapped if weights]
    if not sets:
        return _named_tensors(content)  # LlamaGen's largest files are bare
    return sets[0 if ema else -1]


def _named_tensors(weights: dict) -> dict[str, Tensor]:
    return {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}


def _to_read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that models read, by the names that models have."""
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in tensors.items() if name not in UNREAD}
