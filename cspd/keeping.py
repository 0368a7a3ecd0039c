"""What is measured once and kept: in which folder, and by what it is found again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import platformdirs
import torch
from torch import nn

from cspd.records import publishing
from cspd.telling import telling

COSTS = "costs.json"  # in the user's cache folder
REMEMBERED = 64  # entries in memory


class Measured(Protocol):
    """A dataclass of plain values that can tell whether they are right."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def check(self) -> None:
        """Raises ValueError, saying what is wrong, where they are not what a measurement can have given."""


Kind = TypeVar("Kind", bound=Measured)


def user_cache() -> Path:
    """The user's cache folder for cspd: on Linux $XDG_CACHE_HOME/cspd, or ~/.cache/cspd."""
    return platformdirs.user_cache_path("cspd")


def identity_of(folder: Path) -> str:
    """A hash of the names, sizes and times of a folder's files but hidden ones, in hexadecimal."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith("."):  # a file manager leaves some
            about = path.stat()
            digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def of_device(device: torch.device) -> dict:
    """What timings depend on beside what is timed."""
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


def remember(known: dict[Any, Any], key: Hashable, value: object) -> None:
    """Adds an entry; of too many the first goes, which can be read or computed again."""
    if len(known) >= REMEMBERED:
        del known[next(iter(known))]
    known[key] = value


def measured_once(
    kind: type[Kind], key: Mapping, measure: Callable[[], Kind], what: str, folder: Path, again: bool = False
) -> Kind:
    """What was measured under a key: from a folder's `COSTS`, or measured (`again`) and kept there.

    Args:
        kind: what `measure` gives. what: is being done, for people, where it takes its time.
    """
    path = folder / COSTS
    entries = _entries(path)
    for entry in [] if again else entries:
        if entry["key"] == key:
            with contextlib.suppress(TypeError, ValueError):  # damaged: measured again
                found = kind(**entry["costs"])
                found.check()
                return found
    with telling(what):
        found = measure()
    others = [entry for entry in _entries(path) if entry["key"] != key]  # as they are by now
    entries = [*others, {"key": key, "costs": dataclasses.asdict(found)}]  # type: ignore[call-overload]
    with contextlib.suppress(OSError):  # read-only: measured again next time
        folder.mkdir(parents=True, exist_ok=True)
        with publishing(path) as temporary:
            temporary.write_text(json.dumps(entries, indent=1) + "\n")
    return found


def _entries(path: Path) -> list[dict]:
    """The measurements in a file; none where it is absent or damaged."""
    try:
        entries = json.loads(path.read_text())
        return [entry for entry in entries if isinstance(entry, dict) and {"key", "costs"} <= entry.keys()]
    except (OSError, ValueError, TypeError, RecursionError):
        return []


def content_hash(model: nn.Module) -> str:
    """A hash of a model's weights, names and shapes."""
    digest = hashlib.blake2b(digest_size=16)
    with telling("looking whether these weights have been calibrated"):
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
