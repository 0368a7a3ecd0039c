"""Files: written completely or not at all, JSON, arrays with a digest, and caches of measurements."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import platform
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from cspd.terminal import telling
from mar.tensors import CheckpointError

# Files that are written completely or not at all: an interrupted run leaves the old file or the new one.

NUMBER = (int, float)


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Adds the remedy to an OSError of writing."""
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "make room, then the same command goes on from here" if is_full else "give a place that can be written"
        raise OSError(f"{path} cannot be written ({error.strerror or error}): {remedy}") from error


@contextlib.contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """An empty temporary file that becomes `path` when the block ends, or is removed if the block fails.

    A killed process leaves it; in the folder of a run, the next run removes it (`cspd.runs`).

    Raises OSError if it cannot be written; the message says what to do.
    """
    if _is_special(path):
        raise OSError(f"{path} is no ordinary file, and would be replaced by one: give the name of a file")
    with explained(path):
        temporary = _new_file_beside(path)
    try:
        with explained(path):
            yield temporary
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # of a folder that cannot be written: said above
            temporary.unlink(missing_ok=True)
        raise


def _is_special(path: Path) -> bool:
    """Whether a path exists and is not an ordinary file, such as /dev/null or a folder."""
    with contextlib.suppress(OSError):  # of a name that cannot be: writing says so
        return path.exists() and not path.is_file()
    return False


def _new_file_beside(path: Path) -> Path:
    """Creates an empty file with the first free one of `temporary_names`; an existing file may be anybody's."""
    names = temporary_names(path.name)
    while True:
        temporary = path.with_name(next(names))
        with contextlib.suppress(FileExistsError):
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            return temporary


def temporary_names(name: str) -> Iterator[str]:
    """The names that a file may have while it is written, an endless sequence."""
    yield f"{name}.tmp"
    for number in itertools.count(1):
        yield f"{name}.{number}.tmp"


def write_bytes(path: Path, content: bytes) -> None:
    """Writes as `publishing` does."""
    with publishing(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: Path, content: Mapping | Sequence) -> None:
    """Writes as `publishing` does."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def link_of(png: bytes) -> str:
    """A PNG's content as a data link."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def append_json(path: Path, entry: Mapping) -> None:
    """Adds a line to a file of JSON lines; a process that is killed then loses at most this one. Raises OSError."""
    with explained(path), path.open("a") as file:
        file.write(json.dumps(entry, allow_nan=False) + "\n")


def check_file(path: Path, option: str) -> None:
    """Raises ValueError or OSError if no file can be written, before hours of work."""
    if _is_special(path):
        folder, other = f"is a folder: give {option} a file in it", f"is no ordinary file: give another {option}"
        raise ValueError(f"{path} {folder if path.is_dir() else other}")
    try:
        _new_file_beside(path).unlink()
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another {option}") from error


def make_folder(path: Path) -> None:
    """Creates a folder if necessary. Raises OSError, with the remedy, if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --out") from error


def read_json(path: Path) -> Any:
    """The content of a JSON file. Raises OSError, or ValueError as `parse_json`."""
    return parse_json(path.read_text(errors="replace"))


def parse_json(text: str) -> Any:
    """The content of JSON text. Raises ValueError if it is not JSON, or has NaN or an infinity, which JSON lacks."""
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {text}")
    return number


def misfit(value: object, shape: object, path: str = "") -> str | None:
    """The path of the first part of a JSON value that does not have a shape, or None.

    Args:
        shape: a type or several; [shape], a list of such values; {"key": shape}, a mapping that has these keys ("key?"
            may be absent); {str: shape}, a mapping of such values. A boolean is not a number.
    """
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            return path or "it"
        if str in shape:
            shape = dict.fromkeys(value, shape[str])
        parts = []
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name == key or name in value:
                parts.append((value.get(name), inner, f"{path}.{name}".removeprefix(".")))
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return path or "it"
        parts = [(each, shape[0], f"{path}[{i}]") for i, each in enumerate(value)]
    else:
        fits = isinstance(value, shape) and not isinstance(value, bool)  # type: ignore[arg-type]
        return None if fits else path or "it"
    wrong = (misfit(*part) for part in parts)
    return next(filter(None, wrong), None)


# Arrays in files, each with a digest of the arrays and of the settings that they were made from.

DIGEST = "digest"


def write_item(path: Path, arrays: Mapping[str, Any], made_of: Mapping) -> None:
    """Writes an .npz of `arrays`, and a digest of them and of `made_of`, plain values. Raises OSError."""
    arrays = {**arrays, DIGEST: np.array(digest_of(arrays, made_of))}
    with publishing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def read_item(path: Path, made_of: Mapping, like: Mapping[str, tuple[type, tuple]]) -> dict[str, np.ndarray] | None:
    """The arrays of an item, or None if it is absent, damaged, made from other settings, or not `like` {name: (type,
    shape)}.

    Files of older versions have no digest: they are checked by `like` only.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}  # reading to the end compares checksums
    except Exception:  # a damaged archive makes its readers raise almost anything
        return None
    digest = arrays.pop(DIGEST, None)
    for name, (kind, shape) in like.items():
        array = arrays.get(name)
        if array is None or array.shape != shape or not np.issubdtype(array.dtype, kind):
            return None
    return arrays if digest is None or str(digest) == digest_of(arrays, made_of) else None


def digest_of(arrays: Mapping[str, Any], made_of: Mapping) -> str:
    """SHA-256, in hexadecimal, of the names, types, shapes and values of arrays and of plain values."""
    digest = hashlib.sha256(_canonical(made_of).encode())
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _canonical(made_of: Mapping) -> str:
    """A text that is equal for settings without `cspd.runs.differences`: 3.0 equals 3, and None a missing setting."""
    plain = json.loads(json.dumps(made_of), parse_float=_number, object_hook=_without_none)
    return json.dumps(plain, sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _without_none(settings: dict) -> dict:
    return {name: value for name, value in settings.items() if value is not None}


# A cache of measurements: plain values in `COSTS`, found again by their key.

# the folders of bundled checkpoints: inside the package when installed, next to it in a source tree
BUNDLED_ROOTS = (Path(__file__).parent / "checkpoints", Path(__file__).parent.parent / "checkpoints")
CALIBRATION = "calibration"  # the folder in that of a checkpoint
COSTS = "costs.json"  # in the user's cache folder, or in the folder of a checkpoint
REMEMBERED = 64  # entries in memory


class Measured(Protocol):
    """A dataclass of plain values, or of arrays, that can check itself."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def check(self, *num_steps: int) -> None:
        """Raises ValueError, saying what is wrong, for values that no measurement can have given.

        Arrays are told T, their number of denoising steps.
        """


Kind = TypeVar("Kind", bound=Measured)


def user_cache() -> Path:
    """The user's cache folder for cspd: on Linux $XDG_CACHE_HOME/cspd, or ~/.cache/cspd."""
    return platformdirs.user_cache_path("cspd")


def is_bundled(folder: Path) -> bool:
    """Whether a folder belongs to a bundled checkpoint, whose files are read and never written."""
    return any(root.resolve() in folder.resolve().parents for root in BUNDLED_ROOTS)


def identity_of(folder: Path) -> str:
    """A hash, in hexadecimal, of the names, sizes and times of the files in a folder, hidden ones excepted."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):  # a file manager leaves some
            about = path.stat()
            digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def of_device(device: torch.device) -> dict:
    """The part of a timing's key that describes the device."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{_processor()}, {os.cpu_count()} cores",
        "threads": 0 if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    with contextlib.suppress(OSError, StopIteration):
        return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    return platform.processor() or platform.machine()


def remember(cached: dict[Any, Any], key: Hashable, value: object) -> None:
    """Adds an entry to a cache in memory; if the cache is full, the oldest entry goes."""
    if len(cached) >= REMEMBERED:
        del cached[next(iter(cached))]
    cached[key] = value


def measured_once(
    kind: type[Kind], key: Mapping, measure: Callable[[], Kind], what: str, folder: Path, again: bool = False
) -> Kind:
    """The measurement with this key: from the `COSTS` of a folder, or measured (`again`) and cached there.

    Args:
        kind: the type that `measure` returns. what: the work, in words, shown if it takes long.
    """
    found = None if again else measured_before(kind, key, [folder])
    if found is None:
        with telling(what):
            found = measure()
        keep(key, found, folder)
    return found


def measured_before(kind: type[Kind], key: Mapping, folders: Sequence[Path]) -> Kind | None:
    """The measurement with this key, from the first folder whose `COSTS` has it, or None."""
    for folder in folders:
        for entry in _entries(folder / COSTS):
            if entry["key"] == key:
                with contextlib.suppress(TypeError, ValueError):  # of another version
                    found = kind(**entry["costs"])
                    found.check()
                    return found
    return None


def keep(key: Mapping, found: Measured, folder: Path) -> None:
    """Adds a measurement to the `COSTS` of a folder, in place of an older one with its key."""
    path = folder / COSTS
    others = [entry for entry in _entries(path) if entry["key"] != key]  # another process may have added some
    entry = {"key": key, "costs": dataclasses.asdict(found)}  # type: ignore[call-overload]
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, [*others, entry | {DIGEST: digest_of({}, entry)}])


def _entries(path: Path) -> list[dict]:
    """The undamaged measurements in a file."""
    try:
        entries = read_json(path)
    except (OSError, ValueError):
        return []
    return [entry for entry in entries if _is_whole(entry)] if isinstance(entries, list) else []


def _is_whole(entry: object) -> bool:
    """Whether an entry is as `keep` wrote it."""
    if not isinstance(entry, dict) or DIGEST not in entry:
        return False
    content = {name: value for name, value in entry.items() if name != DIGEST}
    return entry[DIGEST] == digest_of({}, content)


def content_hash(model: nn.Module) -> str:
    """A hash of a model's weights, names and shapes."""
    with telling("looking whether these weights have been calibrated"):
        digests = {name: _hash_of(tensor) for name, tensor in model.state_dict().items()}
    return digest_of({}, digests)


def _hash_of(tensor: Tensor) -> str:
    """A hash of a tensor's type, shape and values, as bytes: numpy lacks some types."""
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return digest_of({"values": values}, {"type": str(tensor.dtype), "shape": list(tensor.shape)})


# A cache of fitted arrays: in memory and in one file each, found again by the settings that they depend on.

ABOUT = "cspd"  # the key in a file's metadata


class ArrayCache:
    """Arrays by their settings, of which "num_sampling_steps" is T.

    Args:
        folders: searched in this order. New arrays are written to the first that is writable and not of a bundled
            checkpoint.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self.writable = [folder for folder in folders if not is_bundled(folder)]
        self._remembered: dict[str, Any] = {}

    def get(self, kind: type[Kind], settings: Mapping, make: Callable[[], Kind]) -> Kind:
        """The arrays with these settings: from memory, from a file, or made and written."""
        found = self.find(kind, settings)
        if found is None:
            found = make()
            self._write(found, settings)
            remember(self._remembered, _file_name(kind, settings), found)
        return found

    def find(self, kind: type[Kind], settings: Mapping) -> Kind | None:
        """The arrays with these settings, from memory or from a file, or None."""
        name = _file_name(kind, settings)
        if name in self._remembered:
            return self._remembered[name]
        for folder in self.folders:
            found = _read(folder, kind, settings)
            if found is not None:
                remember(self._remembered, name, found)
                return found
        return None

    def folder_of(self, kind: type[Kind], settings: Mapping) -> Path | None:
        """The folder that has the arrays with these settings, or None."""
        return next((folder for folder in self.folders if _read(folder, kind, settings) is not None), None)

    def _write(self, made: Measured, settings: Mapping) -> None:
        """Writes to the first writable folder. Warns if there is none."""
        about = json.dumps(_about(vars(made), settings))
        for folder in self.writable:
            with contextlib.suppress(OSError, SafetensorError):
                folder.mkdir(parents=True, exist_ok=True)
                with publishing(folder / _file_name(type(made), settings)) as temporary:
                    save_file(vars(made), temporary, metadata={ABOUT: about})
                    temporary.chmod(0o644)
                return
        folders = ", ".join(map(str, self.writable)) or "none given"
        what = type(made).__name__.lower()
        warnings.warn(f"the {what} cannot be kept for the next run: no folder is writable ({folders})", stacklevel=3)


def _read(folder: Path, kind: type[Kind], settings: Mapping) -> Kind | None:
    """The arrays with these settings in a folder, or None if they are absent, damaged or of other settings."""
    with contextlib.suppress(OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError):
        with safe_open(folder / _file_name(kind, settings), "np") as file:
            arrays = {field.name: file.get_tensor(field.name) for field in dataclasses.fields(kind)}
            about = json.loads(file.metadata()[ABOUT])
        if about == _about(arrays, settings):
            read = kind(**arrays)
            read.check(settings["num_sampling_steps"])
            return read
    return None


def _about(arrays: Mapping[str, np.ndarray], settings: Mapping) -> dict:
    """The metadata of a file: its settings, and a digest of them and of all arrays."""
    return {"settings": settings, DIGEST: digest_of(arrays, settings)}


def _file_name(kind: type, settings: Mapping) -> str:
    return f"{kind.__name__.lower()}-{digest_of({}, settings)[:20]}.safetensors"


# Folders of models of `transformers`: which files they must have.

WEIGHTS = ("model.safetensors", "model-*.safetensors", "pytorch_model*.bin")  # in the order that it looks for them


def files_of(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of the first pattern that has any."""
    found = (sorted(file for file in folder.glob(pattern) if file.is_file()) for pattern in patterns)
    return next(filter(None, found), [])


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights, beside which a drafter of ours may lie."""
    return files_of(folder, WEIGHTS)


def check_files(folder: Path, needed: Mapping[str, Sequence[str]], of: str, advice: str) -> None:
    """Raises CheckpointError where a folder lacks a file.

    Args:
        needed: maps what a file is to patterns of its name, of which any will do. of: whose files they are.
    """
    for what, patterns in needed.items():
        if not files_of(folder, patterns):
            raise CheckpointError(f"{folder}: no {what} of {of} there ({' or '.join(patterns)}): {advice}")
