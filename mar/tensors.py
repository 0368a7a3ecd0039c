"""Reads tensors from torch's pickles and safetensors of any origin, without running code that is in them."""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

AVERAGED_KEYS = ("model_ema", "ema")  # of the averaged weights in official files; they are sampled with
RAW_KEYS = ("model", "module", "state_dict")
AVERAGED = "ema"  # in the key of any other averaged weights
INSIDE_AVERAGED = ("shadow", "shadow_params", "ema_model", "averaged_model", "module", "model", "state_dict")
# parts of names if a model, or a block of it, was saved as it is compiled, distributed or checkpointed
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# records of training, which no forward pass reads: the losses beside an autoencoder, and counters
RECORDS = re.compile(r"loss\..*|quantize\.codebook_used|n_averaged|num_updates|decay|initted|step")
ADAPTER = re.compile(r"(^|[._])lora([._]|$)", re.IGNORECASE)
LFS_START = b"version https://git-lfs"
CONFIG = "config"  # the key, in the metadata of safetensors, of a model's sizes as JSON
MOST_UNPACKED = 20  # times the size of a file: weights hardly compress
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: object) -> str:
    """A text in one line, with control characters as escapes, so that names in a file cannot command the terminal."""
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], re.sub(r"[\t\r\n]+", " ", str(text)))


class CheckpointError(ValueError):
    """A weights file cannot be used; the message names the file, what was expected and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class Assumed(UserWarning):
    """Something that a file does not say, or says in several ways, was assumed."""


@dataclass(frozen=True)
class Weights:
    """The weights in a file.

    Attributes:
        tensors: by name, of any shape, dtype and strides; they may share memory.
        facts: what the file says of them: `args` of the training script, or the metadata of safetensors, with "arch",
            the name of a size, and "config", the sizes. Nothing of it has been checked.
        taken: the key of the averaged weights, if they were taken and official files have another key; else empty.
    """

    tensors: dict[str, Tensor]
    facts: dict[str, Any] = field(default_factory=dict)
    taken: str = ""


def read_tensors(path: Path, ema: bool = True) -> dict[str, Tensor]:
    """The tensors of a weights file, see `read_weights`."""
    return read_weights(path, ema).tensors


def read_weights(path: Path, ema: bool = True) -> Weights:
    """Reads a weights file, on the CPU and memory-mapped if the file allows it.

    Values that are not tensors are left out, and so are records of training.

    Args:
        path: a .safetensors file; any other name is read as a torch pickle, of tensors or of sets of them by key.
        ema: whether to take the averaged weights, if there are two sets.

    Raises:
        CheckpointError: the file is missing, truncated, or not a weights file.
    """
    weights = _weights_in(Path(path), ema)
    if weights.taken:
        warnings.warn(f"{path}: of its weights, the averaged ones ({printable(weights.taken)}) are used", Assumed, 2)
    return weights


def _weights_in(path: Path, ema: bool) -> Weights:
    start = check_weights(path)
    try:
        content, facts = _read(path)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        # a complete archive that still cannot be unpickled has something that `weights_only` refuses to run
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            raise CheckpointError(
                f"{path}: it holds something other than tensors, and code in a file is not run: save the weights alone"
            ) from error
        raise CheckpointError(
            f"{path}: cannot be read as weights ({reason_of(error)}); it has {path.stat().st_size:,} bytes"
            f"{_text(start)} and is likely truncated or another kind of file: fetch it again and compare its size with"
            " the source"
        ) from error
    tensors, taken = _chosen(content, ema, path)
    if not tensors:
        found = type(content).__name__
        if isinstance(content, dict):
            found = ", ".join(str(key) for key in list(content)[:6]) or "nothing"
        raise CheckpointError(
            f"{path}: expected a dict of tensors, or one with such a dict under"
            f" {' or '.join((*AVERAGED_KEYS, *RAW_KEYS))}; found {found}: use the file as its authors released it"
            " (docs/checkpoints.md)"
        )
    for name, tensor in tensors.items():
        if ADAPTER.search(name):
            raise CheckpointError(
                f"{path}: has a LoRA adapter ({name}), not a whole model: merge it into its model first"
                " (merge_and_unload of peft), and save that"
            )
        # a view that repeats a few numbers would become as large as it pretends to be
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: {name} repeats the numbers of a smaller tensor: save its contiguous copy")
    return Weights(tensors, facts, taken)


def count_numbers(path: Path) -> int:
    """How many numbers the tensors of a weights file have, by their shapes alone; 0 if the file is damaged."""
    try:
        if path.suffix != ".safetensors":
            # memory-mapped, so that few bytes are read
            return sum(tensor.numel() for tensor in _weights_in(path, ema=True).tensors.values())
        with safe_open(path, "pt") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except Exception:  # reading the file reports the reason
        return 0


def names_in(path: Path) -> frozenset[str]:
    """The names of the tensors in a weights file, as `read_weights` gives them; none if the file is damaged."""
    try:
        if path.suffix != ".safetensors":
            return frozenset(_weights_in(path, ema=True).tensors)
        with safe_open(path, "pt") as file:
            return frozenset(_named(dict.fromkeys(file.keys())))
    except Exception:  # reading the file reports the reason
        return frozenset()


def check_weights(path: Path) -> bytes:
    """Checks a file of weights without reading it; returns its first bytes.

    Raises CheckpointError if it is not a regular file (opening a pipe would wait for a writer), a pointer of Git LFS,
    or a compressed archive that would unpack to far more than its size.
    """
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
    size, unpacked = path.stat().st_size, sum(member.file_size for member in _members(path))
    if unpacked > MOST_UNPACKED * size:
        raise CheckpointError(
            f"{path}: its {size:,} bytes would unpack to {unpacked:,}, which weights do not: fetch it again, or save"
            " the weights without compression"
        )
    return start


def check_finite(tensor: Tensor, where: str) -> None:
    """Raises CheckpointError if a value of a tensor, `where` in a file, is not finite."""
    if tensor.numel() == 0:
        return
    low, high = tensor.aminmax()  # NaN if any value is; unlike isfinite of all values, it allocates nothing
    if not (low.isfinite() and high.isfinite()):
        raise CheckpointError(
            f"{where} has NaN or infinite values; the file is damaged or training diverged: fetch it again"
        )


def _members(path: Path) -> list[zipfile.ZipInfo]:
    """The members of an archive; none of any other file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError):
        return []


def _read(path: Path) -> tuple[object, dict[str, Any]]:
    """The content of a file, and what it says of its weights."""
    if path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            facts = dict(file.metadata() or {})
        try:
            facts |= {CONFIG: json.loads(facts[CONFIG])} if CONFIG in facts else {}
        except (ValueError, RecursionError):  # another program's
            del facts[CONFIG]
        return load_file(path), facts
    # mapping a compressed archive into memory would give other weights
    members = _members(path)
    mapped = bool(members) and all(member.compress_type == zipfile.ZIP_STORED for member in members)
    # official files hold the arguments of the training script next to the weights
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    args = content.get("args") if isinstance(content, dict) else None
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    return content, {"arch": args.get("model")} | args if isinstance(args, dict) else {}


def reason_of(error: Exception) -> str:
    """The first line of a reader's error, without its advice to run code that is in the files."""
    message = str(error) or type(error).__name__
    if "weights_only" in message:
        return "it holds something other than tensors"
    if "trust_remote_code" in message:
        return "it needs code in its folder, which is not run"
    return message.strip().splitlines()[0]


def _text(start: bytes) -> str:
    """The first line of a file in words, if it is text: often the error of a server, saved in place of the file."""
    line = start.decode("ascii", errors="replace").partition("\n")[0].strip()
    if line and line.isascii() and line.isprintable():
        return f", begins with {line!r}"
    return ""


# Which of a file's sets of weights is taken, and the names of its tensors.


def _chosen(content: object, ema: bool, path: Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of one set of weights in a file's content, and its key if it has to be reported.

    Raises CheckpointError if there are several averaged sets, or one that is not of the other set's tensors.
    """
    if not isinstance(content, Mapping):
        return {}, ""
    own, of_content = _split(_tensors(content))  # LlamaGen's largest files have no key around the tensors
    raw, averaged = own, {"ema_model": of_content}
    for key in reversed(RAW_KEYS):
        others, inside = _split(_tensors(content.get(key)))
        raw = others or raw
        averaged[f"{key}.ema_model"] = inside
    for key, value in content.items():
        if AVERAGED in str(key).lower():
            averaged[str(key)] = _averages(value, raw)
    averaged = {key: tensors for key, tensors in averaged.items() if tensors and _is_of(raw, key, tensors)}
    if not averaged or (raw and not ema):
        return raw, ""
    official = next((key for key in AVERAGED_KEYS if key in averaged), None)
    if official is None and len(averaged) > 1:
        raise CheckpointError(f"{path}: has several averaged sets of weights ({', '.join(averaged)}): save one of them")
    key = official or next(iter(averaged))
    tensors = averaged[key]
    if not raw:
        return tensors, ""
    if not (tensors.keys() <= raw.keys() or raw.keys() <= tensors.keys()):
        other = min(tensors.keys() - raw.keys())
        raise CheckpointError(
            f"{path}: its averaged weights ({key}) have the tensor {other}, which the others lack: save one set alone"
        )
    # an average of the trained weights leaves the others as they are
    return raw | tensors, "" if key == official else key


def _is_of(raw: dict[str, Tensor], key: str, tensors: dict[str, Tensor]) -> bool:
    """Whether a set may be an average of the others: "semantic" parts and settings of optimisers share no name."""
    return not raw or key in AVERAGED_KEYS or bool(tensors.keys() & raw.keys())


def _averages(value: object, raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """The averaged tensors by name in a value of a file: a set, or an object that holds one."""
    found = _average(value, raw)
    if not found and isinstance(value, Mapping):
        inside = [_average(value.get(key), raw) for key in INSIDE_AVERAGED]
        found = next(filter(None, inside), {})
    return found


def _average(value: object, raw: dict[str, Tensor]) -> dict[str, Tensor]:
    """The averaged tensors by name in a set, or in a list in the order of the raw weights."""
    if isinstance(value, (list, tuple)):
        given = [each for each in value if _is_plain(each)]
        in_order = [each.shape for each in given] == [tensor.shape for tensor in raw.values()]
        return dict(zip(raw if in_order else map(str, range(len(given))), given))
    others, inside = _split(_tensors(value))
    return inside or others


def _split(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A set's own tensors, and those of the average that is saved in the same set, under names with its prefix."""
    inside = {name: tensor for name, tensor in tensors.items() if name.startswith("ema_model.")}
    if not inside:
        return tensors, {}
    others = {name.removeprefix("online_model."): each for name, each in tensors.items() if name not in inside}
    return others, {name.removeprefix("ema_model."): tensor for name, tensor in inside.items()}


def _is_plain(value: object) -> bool:
    """Whether a value is a tensor with its numbers, one after the other."""
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and not value.is_nested


def _tensors(weights: object) -> dict[str, Tensor]:
    """The tensors of a set that models read, under the names that models use."""
    if not isinstance(weights, Mapping):
        return {}
    return _named({str(name): value for name, value in weights.items() if _is_plain(value)})


def _named(values: dict[str, Any]) -> dict[str, Any]:
    """Values by the names without wrappers, unless two would be equal, and without records of training."""
    named = {}
    for name, value in values.items():
        named[".".join(part for part in name.split(".") if part not in WRAPPERS)] = value
    named = named if len(named) == len(values) else values
    return {name: value for name, value in named.items() if not RECORDS.fullmatch(name)}
