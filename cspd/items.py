"""Arrays in files, each tied to what it was made of: damage and images of other settings or seeds are noticed."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cspd.records import publishing

DIGEST = "digest"
SHOWN = 5  # files that a line names, at most


def write_item(path: Path, arrays: Mapping[str, Any], made_of: Mapping) -> None:
    """Writes an .npz of `arrays` and a digest of them and of `made_of`, plain values. Raises OSError."""
    arrays = {**arrays, DIGEST: np.array(digest_of(arrays, made_of))}
    with publishing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def read_item(path: Path, made_of: Mapping, like: Mapping[str, tuple[type, tuple]]) -> dict[str, np.ndarray] | None:
    """The arrays of an item; None if it is not there, damaged, of something else, or not `like` {name: (type, shape)}.

    Files of older versions have no digest: of them, `like` alone is known.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}  # reading to the end compares checksums
        digest = arrays.pop(DIGEST, None)
    except Exception:  # a damaged or hostile archive makes its readers raise almost anything
        return None
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
    """A text that is the same where `cspd.store.differences` finds none: 3.0 is 3, and None is as if left out."""
    plain = json.loads(json.dumps(made_of), parse_float=_number, object_hook=_given)
    return json.dumps(plain, sort_keys=True)


def _number(text: str) -> float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _given(settings: dict) -> dict:
    return {name: value for name, value in settings.items() if value is not None}


def tell_damaged(names: Sequence[str]) -> None:
    """Says which files are made again, if any."""
    if names:
        more = " ..." if len(names) > SHOWN else ""
        count = "1 file is" if len(names) == 1 else f"{len(names)} files are"
        shown = ", ".join(names[:SHOWN])
        print(f"cspd: {count} damaged, incomplete or of other images, and made again: {shown}{more}", file=sys.stderr)
