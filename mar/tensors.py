"""Reads tensors from torch's pickles and safetensors of any origin, without running code that is in them."""

from __future__ import annotations

import argparse
import math
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

WEIGHT_KEYS = (
    "model_ema",
    "ema",
    "model",
    "module",
    "state_dict",
)  # the averaged weights come first: they are sampled with
PREFIXES = ("module.", "_orig_mod.")  # of all names, if the model was saved inside DistributedDataParallel or compiled
UNREAD = ("quantize.codebook_used",)  # a record of training in LlamaGen's tokenizers, which no forward pass reads
LFS_START = b"version https://git-lfs"


class CheckpointError(ValueError):
    """A weights file cannot be used; the message names the file, what was expected and what to do."""


def read_tensors(path: Path, ema: bool = True) -> dict[str, Tensor]:
    """Reads the tensors of a weights file, on the CPU and memory-mapped if the file allows it.

    Values that are not tensors are left out, and so are records of training.

    Args:
        path: a .safetensors file; any other name is read as a torch pickle, of tensors or of sets of them by
            WEIGHT_KEYS.
        ema: whether to take the averaged weights, if there are two sets.

    Returns:
        Tensors by name, of any shape, dtype and strides; they may share memory.

    Raises:
        CheckpointError: the file is missing, truncated, or not a weights file.
    """
    path = Path(path)
    start = _start(path)
    try:
        content = _read(path)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        # a complete archive that still cannot be unpickled has something that `weights_only` refuses to run
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path}: it holds something other than tensors, and code in a file is not run: save the weights alone"
            ) from error
        raise CheckpointError(
            f"{path}: cannot be read as weights ({_reason(error)}); it has {path.stat().st_size:,} bytes{_text(start)}"
            " and is likely truncated or another kind of file: fetch it again and compare its size with the source"
        ) from error
    # official files hold sets of weights by key, and sometimes a prefix in all names
    tensors = _to_read(_tensors_in(content, ema))
    if not tensors:
        found = type(content).__name__
        if isinstance(content, dict):
            found = ", ".join(str(key) for key in list(content)[:6]) or "nothing"
        raise CheckpointError(
            f"{path}: expected a dict of tensors, or one with such a dict under {' or '.join(WEIGHT_KEYS)}; found"
            f" {found}: use the file as its authors released it (docs/checkpoints.md)"
        )
    return tensors


def count_numbers(path: Path) -> int:
    """How many numbers the tensors of a weights file have, by their shapes alone; 0 if the file is damaged."""
    try:
        if path.suffix != ".safetensors":
            # memory-mapped, so that few bytes are read
            return sum(tensor.numel() for tensor in read_tensors(path).values())
        with safe_open(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except Exception:  # reading the file reports the reason
        return 0


def _start(path: Path) -> bytes:
    """The first bytes of a file. Only regular files are opened: opening a pipe would wait for a writer."""
    try:
        if not path.is_file():
            found = "not a file" if path.exists() else "no such file"
            raise CheckpointError(f"{path}: {found}; docs/checkpoints.md says where to get the official files")
        with path.open("rb") as file:
            start = file.read(60)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if start.startswith(LFS_START):
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file itself: fetch the file with `git lfs pull`")
    return start


def _read(path: Path) -> object:
    if path.suffix == ".safetensors":
        return load_file(path)
    # official files hold the arguments of the training script next to the weights
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=_holds_plain_bytes(path))


def _holds_plain_bytes(path: Path) -> bool:
    """Whether a file is an uncompressed archive. Mapping a compressed one into memory would give other weights."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return all(member.compress_type == zipfile.ZIP_STORED for member in archive.infolist())


def _reason(error: Exception) -> str:
    """The first line of an error's message."""
    message = str(error) or type(error).__name__
    if "weights_only" in message:  # torch advises to run code that is in the file
        return "it holds something other than tensors"
    return message.splitlines()[0]


def _text(start: bytes) -> str:
    """The first line of a file in words, if it is text: often the error of a server, saved in place of the file."""
    line = start.decode("ascii", errors="replace").partition("\n")[0].strip()
    if line and line.isascii() and line.isprintable():
        return f", begins with {line!r}"
    return ""


def _tensors_in(content: object, ema: bool) -> dict[str, Tensor]:
    """The tensors of the first set of weights in a file's content, or without `ema` of the last set."""
    if not isinstance(content, dict):
        return {}
    sets = [_named_tensors(content.get(key)) for key in WEIGHT_KEYS]
    sets = [weights for weights in sets if weights]
    if not sets:
        return _named_tensors(content)  # LlamaGen's largest files have no key around the tensors
    return sets[0 if ema else -1]


def _named_tensors(weights: object) -> dict[str, Tensor]:
    if not isinstance(weights, dict):
        return {}
    return {str(name): value for name, value in weights.items() if isinstance(value, Tensor)}


def _to_read(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that models read, under the names that models use."""
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in tensors.items() if name not in UNREAD}
