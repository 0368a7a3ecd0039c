"""Arrays of images and of statistics in .npz and .npy files, which may come from anybody."""

from __future__ import annotations

import math
import sys
import zipfile
from pathlib import Path
from typing import IO, Literal, NamedTuple

import numpy as np

NAMES = ("arr_0", "arr_1", "mu", "sigma", "mu_s", "sigma_s")  # images, their classes or prompts, and statistics
NUMBERS = "biuf"  # kinds of dtypes that may be mapped: the bytes of an object would be taken for pointers
TEXT = "U"  # in arr_1 only: prompts
SMALL = 2**28  # bytes that any file may unpack to
GROWTH = 100  # times a file's own size, beyond that
STEP = 2**14  # bytes read at once: a packed byte can become thousands
HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an .npz that have one of `NAMES`; an .npy has `arr_0`.

    Uncompressed numbers stay on the disk until they are used: 50,000 images of 256x256 pixels take 10 GB.

    Raises:
        FileNotFoundError: no such file. ValueError: another or a damaged file, arrays of objects, or compressed ones
            that are out of proportion to the file.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder: give an .npz such as ADM's, or a folder of images")
    if not path.is_file():
        raise ValueError(f"{path} is not an ordinary file: give an .npz such as ADM's, or a folder of images")
    try:
        if beginning(path).startswith(np.lib.format.MAGIC_PREFIX):
            return {"arr_0": _mapped(path, 0, path.stat().st_size)}
        return _read_npz(path)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        known = beginning(path).startswith((b"PK", np.lib.format.MAGIC_PREFIX))
        also = "" if known else f": it begins with {beginning(path)!r}"
        raise ValueError(
            f"{path} cannot be read as .npz ({error}){also}: give an .npz such as ADM's, or a folder of images"
        ) from error


def beginning(path: Path) -> bytes:
    """The first bytes of a file, for messages: they show whether it is an error page or a Git LFS pointer."""
    with path.open("rb") as file:
        return file.read(40)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        existing = set(archive.namelist())
        entries = {name: archive.getinfo(f"{name}.npy") for name in NAMES if f"{name}.npy" in existing}
        packed = [entry for entry in entries.values() if entry.compress_type != zipfile.ZIP_STORED]
        # before anything is read: a file of 4 MB can unpack to gigabytes
        total = sum(entry.file_size for entry in packed)
        if total > max(SMALL, GROWTH * path.stat().st_size):
            raise ValueError(f"its arrays would take {total / 2**30:.1f} GiB, over {GROWTH} times its size")
        arrays = {}
        for name, entry in entries.items():
            kinds = NUMBERS + TEXT if name == "arr_1" else NUMBERS
            if entry in packed:
                with archive.open(entry) as file:
                    arrays[name] = _unpacked(file, entry.file_size, kinds)
            else:
                arrays[name] = _mapped(path, _begin_of(path, entry), entry.file_size, kinds)
    return arrays


def _begin_of(path: Path, entry: zipfile.ZipInfo) -> int:
    """The offset of an uncompressed entry's content in the archive."""
    # a local header has 30 bytes, the last four the lengths of its name and of what follows it
    with path.open("rb") as file:
        file.seek(entry.header_offset + 26)
        return entry.header_offset + 30 + sum(np.frombuffer(file.read(4), "<u2").tolist())


class Header(NamedTuple):
    """The header of an array: its shape, dtype and order, "C" or "F", and its own length in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    order: Literal["C", "F"]
    length: int


def _header(file: IO[bytes], size: int, kinds: str) -> Header:
    """The header of the array in the `size` bytes that follow in a file. Raises ValueError unless they belong to it."""
    begin = file.tell()
    version = np.lib.format.read_magic(file)
    if version not in HEADERS:
        raise ValueError(f"version {version} of its header is not that of numbers")
    shape, is_fortran, dtype = HEADERS[version](file)
    length = file.tell() - begin
    if dtype.kind not in kinds:
        raise ValueError(f"it has an array of {dtype}, not of numbers")
    expected = length + math.prod(shape) * dtype.itemsize
    if size != expected:
        raise ValueError(f"an array of {size} bytes has a header of one of {expected}")
    return Header(shape, dtype, "F" if is_fortran else "C", length)


def _mapped(path: Path, begin: int, size: int, kinds: str = NUMBERS) -> np.ndarray:
    """The array in `size` bytes of a file, which stays on the disk unless it is text."""
    with path.open("rb") as file:
        if begin + size > path.stat().st_size:
            raise ValueError("it ends before its last array")
        file.seek(begin)
        header = _header(file, size, kinds)
        if header.dtype.kind == TEXT or 0 in header.shape:  # nothing cannot be mapped
            file.seek(begin)
            return _unpacked(file, size, kinds)
    return np.memmap(path, header.dtype, "r", begin + header.length, header.shape, header.order)


def _unpacked(file: IO[bytes], size: int, kinds: str) -> np.ndarray:
    """The array in the `size` bytes that follow in a file, in memory."""
    header = _header(file, size, kinds)
    content = np.empty(size - header.length, np.uint8)
    done = 0
    while done < len(content) and (part := file.read(min(STEP, len(content) - done))):
        content[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done += len(part)
    if done < len(content):
        raise ValueError("it ends before its last array")
    # NumPy does not check that text has characters
    if header.dtype.kind == TEXT and content.view(f"{header.dtype.byteorder}u4").max(initial=0) > sys.maxunicode:
        raise ValueError("it has text that is damaged")
    return np.ndarray(header.shape, header.dtype, content, order=header.order)
