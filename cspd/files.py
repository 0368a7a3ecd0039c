"""Files: written completely or not at all, JSON, arrays with a digest, and caches of measurements."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import os
import platform
import re
import shutil
import tempfile
import urllib.parse
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Any, Protocol, TypeVar

import fsspec.core
import numpy as np
import platformdirs
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor, nn

from cspd.terminal import ask, telling
from mar.tensors import CheckpointError, check_finite, check_weights

# A folder or a file on this machine, or in an object store.


class Remote:
    """A folder or file of an object store, named by a URL such as s3://bucket/run, with the methods of Path that runs
    need. fsspec reaches the store. Raises ValueError if fsspec does not know it, or needs a library for it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._files, self._path = fsspec.core.url_to_fs(self.url)
        except ImportError as missing:
            raise ValueError(f"{url} needs a library: {missing}") from None
        self.name = self.url.rpartition("/")[2]

    def __truediv__(self, name: str) -> Remote:
        return Remote(f"{self.url}/{name}")

    def __str__(self) -> str:
        return self.url

    def __reduce__(self) -> tuple:
        return Remote, (self.url,)

    def exists(self) -> bool:
        return self._files.exists(self._path)

    def is_dir(self) -> bool:
        return self._files.isdir(self._path)

    def glob(self, pattern: str) -> list[Remote]:
        """The files in this folder whose names match. The folder's own name is no pattern."""
        self._files.invalidate_cache()  # other machines write here too
        try:
            paths = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        names = [path.rpartition("/")[2] for path in paths]
        return [self / name for name in names if fnmatch(name, pattern)]

    def open(self, mode: str = "rb") -> Any:
        return self._files.open(self._path, mode)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._files.cat_file(self._path).decode(encoding, errors)

    def unlink(self, missing_ok: bool = False) -> None:
        if self.exists() or not missing_ok:
            self._files.rm_file(self._path)

    def upload(self, file: Path) -> None:
        """Replaces this file. The store shows the old content or the new one."""
        self._files.put_file(str(file), self._path)

    def create(self, content: bytes) -> None:
        """Writes this file. Raises FileExistsError if it exists, for all but the first of several at the same time."""
        self._files.pipe_file(self._path, content, mode="create")


Place = Path | Remote
URL = re.compile(r"([a-z][a-z0-9+.-]+):(/.*)", re.IGNORECASE | re.DOTALL)  # a drive has one letter


def place_of(text: str) -> Place:
    """The folder or file that a path, or a URL, names.

    Raises ValueError if a file: URL names another machine, another URL has one slash only, or as `Remote`.
    """
    url = URL.fullmatch(text)
    if url is None or (url[1].lower() != "file" and url[2].startswith("//")):
        return Remote(text) if "://" in text else Path(text)
    scheme, rest = url.groups()
    if scheme.lower() != "file":
        raise ValueError(f"{text} is a URL with one slash: write {scheme}:/{rest}, or ./{text} for a local path")
    machine, slash, path = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest[1:])
    if machine.lower() not in ("", "localhost") or not slash:
        raise ValueError(f"{text} is not on this machine: give a path, or file:///PATH")
    return Path(f"/{urllib.parse.unquote(path)}")


def inside(folder: Place, name: str) -> Place:
    """The file of this name in a folder, at any depth.

    Raises ValueError if the name leads out of the folder: it is absolute, has "..", or a folder on its way is a link or
    a file.
    """
    path = PurePath(name)
    if not path.parts or path.anchor or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is not a name in {folder}")
    if isinstance(folder, Path):
        for parent in [folder / each for each in path.parents][:-1]:  # the last one is the folder itself
            if parent.is_symlink() or parent.is_file():
                raise ValueError(f"{name!r} leads out of {folder}")
    return folder / name


# Files that are written completely or not at all: an interrupted run leaves the old file or the new one.


@contextlib.contextmanager
def explained(path: Place) -> Iterator[None]:
    """Adds the remedy to an OSError of writing."""
    try:
        yield
    except OSError as error:
        remedy = "give a path that can be written"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            remedy = "make room, then repeat the command: it resumes here"
        reason = error.strerror or error
        raise OSError(f"{path} cannot be written ({reason}): {remedy}") from error


@contextlib.contextmanager
def publishing(path: Place) -> Iterator[Path]:
    """An empty temporary file that becomes `path` when the block ends, or is removed if the block fails.

    A killed process leaves the temporary file behind. In the folder of a run, the next run removes it (`cspd.runs`).
    For a file in an object store, the temporary file is in this machine's folder for those.

    Raises OSError if the file cannot be written; the message says what to do.
    """
    if isinstance(path, Remote):
        folder = Path(tempfile.mkdtemp())
        try:
            with explained(path):
                temporary = folder / path.name
                temporary.touch()
                yield temporary
                path.upload(temporary)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    # renaming would replace a pipe or /dev/null by an ordinary file
    if _is_special(path):
        raise OSError(f"{path} is not an ordinary file: give the name of a file")
    with explained(path):
        temporary = _new_file_beside(path)
    try:
        with explained(path):
            yield temporary
            os.replace(temporary, path)  # atomic within a folder
    except BaseException:
        with contextlib.suppress(OSError):  # the first error matters
            temporary.unlink(missing_ok=True)
        raise


def _is_special(path: Place) -> bool:
    """Whether a path exists and is not an ordinary file, such as /dev/null or a folder."""
    return isinstance(path, Path) and os.path.exists(path) and not os.path.isfile(path)


def ordinary(path: Place) -> Place:
    """The path. Raises OSError if it is not an ordinary file: reading from a pipe or a device might never end."""
    if _is_special(path):
        raise OSError(f"{path} is not an ordinary file")
    return path


def _new_file_beside(path: Path) -> Path:
    """Creates an empty file under the first of `temporary_names` that is free: existing files may be somebody's."""
    names = temporary_names(path.name)
    while True:
        temporary = path.with_name(next(names))
        with contextlib.suppress(FileExistsError):
            temporary.touch(exist_ok=False)
            return temporary


def temporary_names(name: str) -> Iterator[str]:
    """An endless sequence of names that a file may have while it is written."""
    yield f"{name}.tmp"
    for number in itertools.count(1):
        yield f"{name}.{number}.tmp"


def write_bytes(path: Place, content: bytes) -> None:
    """Writes as `publishing` does."""
    with publishing(path) as temporary:
        temporary.write_bytes(content)


def json_bytes(content: Mapping | Sequence) -> bytes:
    """The content of a JSON file."""
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    return text.encode()


def write_json(path: Place, content: Mapping | Sequence) -> None:
    """Writes as `publishing` does."""
    write_bytes(path, json_bytes(content))


def link_of(png: bytes) -> str:
    """A PNG's content as a data link."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def append_json(path: Path, entry: Mapping) -> None:
    """Adds a line to a file of JSON lines. A process that is killed loses at most this line. Raises OSError."""
    with explained(path), path.open("a") as file:
        file.write(json.dumps(entry, allow_nan=False) + "\n")


def check_file(path: Path, option: str) -> None:
    """Raises ValueError or OSError, before hours of work, if no file can be written at a path.

    `option` is the flag that gives the path.
    """
    if _is_special(path):
        raise ValueError(f"{path} is a folder or not an ordinary file: give {option} the name of a file")
    try:
        _new_file_beside(path).unlink()
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another {option}") from error


def make_folder(path: Place) -> None:
    """Creates a folder if necessary; an object store needs none. Raises OSError, with the remedy, if that fails."""
    if isinstance(path, Remote):
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --out") from error


# Reading JSON, and comparing its values with a shape.

NUMBER = (int, float)


def checked_json(path: Place, shape: object, remedy: str, kind: type[ValueError] = ValueError) -> Any:
    """The content of a JSON file that has a shape, see `misfit`.

    Raises an error of this `kind` if the file cannot be read or has another shape. The message ends with the remedy.
    """
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise kind(f"{path} cannot be read ({reason}): {remedy}") from error
    wrong = misfit(content, shape)
    if wrong:
        raise kind(f"{path}: {wrong} has an unexpected form: {remedy}")
    return content


def read_json(path: Place) -> Any:
    """The content of a JSON file. Raises OSError, or ValueError as `parse_json`."""
    # UTF-8 whatever the locale, with or without the mark that some editors write first
    return parse_json(ordinary(path).read_text(encoding="utf-8-sig", errors="replace"))


def parse_json(text: str) -> Any:
    """The content of JSON text.

    Raises ValueError if it is not JSON, has NaN or an infinity, which JSON lacks, or is nested a thousand levels deep.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    # json passes NaN and Infinity here, and also 1e999, which float makes infinite
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {text}, which JSON lacks")
    return number


def misfit(value: object, shape: object, path: str = "") -> str | None:
    """The path of the first part of a JSON value that does not have a shape, or None.

    Args:
        shape: a type or several; [shape], a list of such values; {"key": shape}, a mapping that has these keys ("key?"
            may be absent); {str: shape}, a mapping of such values. A boolean is not a number.
    """
    here = path or "the content"
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            return here
        if str in shape:
            shape = dict.fromkeys(value, shape[str])
        for key, inner in shape.items():
            name = key.removesuffix("?")
            inside = f"{path}.{name}" if path else name
            if name in value:
                wrong = misfit(value[name], inner, inside)
            else:
                wrong = inside if key == name else None
            if wrong:
                return wrong
        return None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return here
        for i, each in enumerate(value):
            wrong = misfit(each, shape[0], f"{path}[{i}]")
            if wrong:
                return wrong
        return None
    fits = isinstance(value, shape) and not isinstance(value, bool)  # type: ignore[arg-type]
    return None if fits else here


# Arrays in files, each with a digest of the arrays and of the settings that they were made from.

DIGEST = "digest"


def write_item(path: Place, arrays: Mapping[str, Any], made_of: Mapping) -> None:
    """Writes an .npz of `arrays`, and a digest of them and of `made_of`, plain values. Raises OSError."""
    arrays = {**arrays, DIGEST: np.array(digest_of(arrays, made_of))}
    with publishing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


@contextlib.contextmanager
def open_arrays(path: Place) -> Iterator[Any]:
    """An .npz of ours, whose arrays are read when asked for.

    Raises OSError if it is not an ordinary file, ValueError if it is compressed, as ours never is: a few bytes could
    fill the memory; and almost anything if it is damaged.
    """
    with ordinary(path).open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        with np.load(opened) as file:
            if sum(member.file_size for member in file.zip.infolist()) > size:
                raise ValueError(f"{path} is compressed")
            yield file


def read_item(path: Place, made_of: Mapping, like: Mapping[str, tuple[type, tuple]]) -> dict[str, np.ndarray] | None:
    """The arrays of an item, or None if it is absent, damaged or made from other settings.

    Args:
        like: {name: (type, shape)} of the arrays that the item must have. Files of older versions have no digest, and
            only this is checked.
    """
    try:
        with open_arrays(path) as file:
            # all arrays are read to their end, where their checksums are
            arrays = {name: file[name] for name in file.files}
    except Exception:  # the readers of a damaged archive raise almost any error
        return None
    digest = arrays.pop(DIGEST, None)
    for name, (kind, shape) in like.items():
        array = arrays.get(name)
        if array is None or array.shape != shape:
            return None
        if not np.issubdtype(array.dtype, kind):
            return None
    if digest is not None and str(digest) != digest_of(arrays, made_of):
        return None
    return arrays


def digest_of(arrays: Mapping[str, Any], made_of: Mapping) -> str:
    """SHA-256, in hexadecimal, of the names, types, shapes and values of arrays and of plain values."""
    digest = hashlib.sha256(_canonical(made_of).encode())
    for name in sorted(arrays):
        # the header tells apart arrays of other shapes or types with the same bytes
        array = np.asarray(arrays[name])
        header = f"{name} {array.dtype.str} {array.shape}\n"
        digest.update(header.encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _canonical(made_of: Mapping) -> str:
    """A text that is equal for settings without `cspd.runs.differences`: 3.0 equals 3, and None a missing setting."""

    def counting(settings: dict) -> dict:
        return without_none(without_name(settings))

    plain = json.loads(json.dumps(made_of), parse_float=_number, object_hook=counting)
    return json.dumps(plain, sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def without_name(settings: Mapping) -> dict:
    """Settings that are compared: a file is its content, and a copy with another name is the same file."""
    names = {"file", "bytes"} if "sha256" in settings else set()
    return {key: value for key, value in settings.items() if key not in names}


def without_none(settings: dict) -> dict:
    """The settings that are not None; `object_hook` of json.loads."""
    return {name: value for name, value in settings.items() if value is not None}


# A cache of measurements, in memory and in one file each. They are found by the settings that they depend on.

# the folders of bundled checkpoints: inside the package if it is installed, next to it in a source tree
_PACKAGE = Path(__file__).parent
BUNDLED_ROOTS = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")
CALIBRATION = "calibration"  # the folder of measurements in the folder of a checkpoint
REMEMBERED = 64  # entries in memory
MOST_CACHED = 1000  # files in the user's cache folder: the oldest ones are removed
ABOUT = "cspd"  # the key in a file's metadata
DIGITS = 20  # of the digest in a file's name


class Measured(Protocol):
    """A dataclass, named tuple or dictionary of arrays and numbers, that can check itself."""

    def check(self, num_steps: int) -> None:
        """Raises ValueError for values that no measurement can give; `num_steps`: T of its settings, or 0."""


Entry = TypeVar("Entry", bound=Measured)


class FileCache:
    """Measurements by their settings, plain values. The setting "num_sampling_steps" is T.

    Args:
        folders: searched in this order. New entries are written to the first folder that is writable and does not
            belong to a bundled checkpoint.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self.writable = [folder for folder in folders if not is_bundled(folder)]
        self._remembered: dict[str, Any] = {}

    def get(self, kind: type[Entry], settings: Mapping, make: Callable[[], Entry]) -> Entry:
        """The entry with these settings: from memory, from a file, or made and written.

        Warns if it cannot be written: making it takes long.
        """
        found = self.find(kind, settings)
        if found is None:
            ask(begins=True)
            found = make()
            if not self.put(found, settings):
                tried = ", ".join(map(str, self.writable)) or "none given"
                problem = f"the {kind.__name__.lower()} cannot be kept for the next run: no folder is writable"
                warnings.warn(f"{problem} ({tried})", stacklevel=3)
        return found

    def find(self, kind: type[Entry], settings: Mapping) -> Entry | None:
        """The entry with these settings, from memory or from a file, or None."""
        name = _file_name(kind, settings)
        cached = user_cache() / name
        if cached.parent in self.folders:
            with contextlib.suppress(OSError):
                os.utime(cached)  # it is in use, so that others are removed before it
        if name in self._remembered:
            return self._remembered[name]
        for folder in self.folders:
            found = _read(folder, kind, settings)
            if found is not None:
                remember(self._remembered, name, found)
                return found
        return None

    def folder_of(self, kind: type[Entry], settings: Mapping) -> Path | None:
        """The folder that has the entry with these settings, or None."""
        for folder in self.folders:
            if _read(folder, kind, settings) is not None:
                return folder
        return None

    def put(self, made: Measured, settings: Mapping, in_file: bool = True) -> bool:
        """Remembers an entry, in place of an older one. Returns whether it is in a file, for later processes.

        Args:
            in_file: whether to write it.
        """
        file = _file_name(type(made), settings)
        self._remembered.pop(file, None)
        remember(self._remembered, file, made)
        if not in_file:
            return False
        # safetensors writes the memory of an array, which of a transposed one is not its values in order
        arrays = {name: np.asarray(value, order="C") for name, value in _values(made).items()}
        about = json.dumps(_about(arrays, settings))
        for folder in self.writable:
            with contextlib.suppress(OSError, SafetensorError):
                folder.mkdir(parents=True, exist_ok=True)
                with publishing(folder / file) as temporary:
                    save_file(arrays, temporary, metadata={ABOUT: about})
                    temporary.chmod(0o644)  # safetensors makes files that only their owner can read
                if folder.is_relative_to(user_cache()):
                    _remove_unused(folder)
                return True
        return False


def _values(made: Any) -> Mapping[str, Any]:
    """The arrays and numbers of an entry, by name."""
    if isinstance(made, Mapping):
        return made
    return made._asdict() if hasattr(made, "_asdict") else vars(made)


def _remove_unused(folder: Path) -> None:
    """Removes the entries in a folder that were not used for longest, beyond `MOST_CACHED`."""
    files = folder.glob(f"*-{'[0-9a-f]' * DIGITS}.safetensors")
    with contextlib.suppress(OSError):  # another process removes them too
        for path in sorted(files, key=lambda path: path.stat().st_mtime_ns)[:-MOST_CACHED]:
            path.unlink()


def _read(folder: Path, kind: type[Entry], settings: Mapping) -> Entry | None:
    """The entry with these settings in a folder, or None if it is absent, damaged or of other settings."""
    with contextlib.suppress(OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError):
        with safe_open(folder / _file_name(kind, settings), "np") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}
            about = json.loads(file.metadata()[ABOUT])
        if about == _about(arrays, settings):
            read = kind(**{name: array if array.ndim else array.item() for name, array in arrays.items()})
            read.check(settings.get("num_sampling_steps", 0))
            return read
    return None


def _about(arrays: Mapping[str, np.ndarray], settings: Mapping) -> dict:
    """The metadata of a file: its settings, and a digest of them and of all arrays."""
    return {"settings": settings, DIGEST: digest_of(arrays, settings)}


def _file_name(kind: type, settings: Mapping) -> str:
    digest = digest_of({}, settings)
    return f"{kind.__name__.lower()}-{digest[:DIGITS]}.safetensors"


def remember(cached: dict[Any, Any], key: Hashable, value: object) -> None:
    """Adds an entry to a cache in memory. If the cache is full, the oldest entry is removed."""
    if len(cached) >= REMEMBERED:
        del cached[next(iter(cached))]
    cached[key] = value


def user_cache() -> Path:
    """The user's cache folder for cspd: on Linux $XDG_CACHE_HOME/cspd, or ~/.cache/cspd.

    Without a home directory it is a temporary folder that ends with this process: others could write to a lasting one.
    """
    with contextlib.suppress(RuntimeError):  # no HOME, and a user whom the system does not know
        path = platformdirs.user_cache_path("cspd")
        if path.is_absolute():  # "~" stays in older versions
            return path
    return Path(_temporary_cache().name)


@functools.cache
def _temporary_cache() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="cspd-")


def is_bundled(folder: Path) -> bool:
    """Whether a folder belongs to a bundled checkpoint, whose files are read and never written."""
    parents = folder.resolve().parents
    return any(root.resolve() in parents for root in BUNDLED_ROOTS)


def of_device(device: torch.device) -> dict:
    """The part of a timing's key that describes the device."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        threads = 0
    else:
        name = f"{_processor()}, {os.cpu_count()} cores"
        threads = torch.get_num_threads()
    return {"device": name, "threads": threads, "torch": torch.__version__}


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if "model name" in line:
                return line
    return platform.processor() or platform.machine()


def content_hash(model: nn.Module) -> str:
    """A hash of a model's weights, names and shapes."""
    with telling("looking whether these weights have been calibrated"):
        digests = {name: _hash_of(tensor) for name, tensor in model.state_dict().items()}
    return digest_of({}, digests)


def _hash_of(tensor: Tensor) -> str:
    """A hash of a tensor's type, shape and values."""
    # numpy lacks some of torch's types, such as bfloat16: take the bytes
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    about = {"type": str(tensor.dtype), "shape": list(tensor.shape)}
    return digest_of({"values": values}, about)


# Folders of `transformers` models: the files that they must have, and what was loaded from them.

WEIGHTS = ("model.safetensors", "model-*.safetensors", "pytorch_model*.bin")  # in the order of `transformers`' search


def files_of(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files of the first pattern that matches any."""
    for pattern in patterns:
        files = filter(Path.is_file, folder.glob(pattern))
        if found := sorted(files):
            return found
    return []


def weight_files(folder: Path) -> list[Path]:
    """The files of a model's weights. The folder may also have one of our drafters, which is not among them."""
    return files_of(folder, WEIGHTS)


def check_files(folder: Path, needed: Mapping[str, Sequence[str]], of: str, advice: str) -> None:
    """Raises CheckpointError if a folder lacks a file, or has weights that `mar.tensors.check_weights` refuses.

    Args:
        needed: for each kind of file, patterns of its name; one match is enough. of: the model that has these files.
    """
    for what, patterns in needed.items():
        if not files_of(folder, patterns):
            names = " or ".join(patterns)
            raise CheckpointError(f"{folder} lacks the {what} of {of} ({names}): {advice}")
    for file in weight_files(folder):
        check_weights(file)


LAYER = re.compile(r"\.(?:layers|block)\.\d+\.")


def check_loaded(model: nn.Module, report: Mapping[str, Any], folder: Path, remedy: str) -> None:
    """Checks a model that `transformers` loaded; `report`: its loading info.

    Raises CheckpointError if the weights have more layers than the configuration, or values that are not finite.
    """
    for name in sorted(report["unexpected_keys"]):
        if LAYER.search(name):
            raise CheckpointError(
                f"{folder}: the weights have {name}, a layer that config.json does not have: {remedy}"
            )
    for name, parameter in model.named_parameters():
        check_finite(parameter, f"{folder}: {name}")
