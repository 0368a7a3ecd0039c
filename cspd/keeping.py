"""What is measured once and kept: in which folder, and by what it is found again."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import platformdirs
import torch
from torch import Tensor, nn

from cspd.items import DIGEST, digest_of
from cspd.records import misfit, read_json, write_json
from cspd.telling import telling

# where embedded checkpoints are: inside the package when installed, beside it in a source tree
EMBEDDED_ROOTS = (Path(__file__).parent / "checkpoints", Path(__file__).parent.parent / "checkpoints")
CALIBRATION = "calibration"  # the folder beside a checkpoint
COSTS = "costs.json"  # in the user's cache folder, or beside a checkpoint
ENTRY = {"key": dict, "costs": dict, DIGEST: str}  # of it, see `misfit`
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


def is_embedded(folder: Path) -> bool:
    """Whether a folder belongs to an embedded checkpoint. What came with it is read, and nothing else is kept there."""
    return any(root.resolve() in folder.resolve().parents for root in EMBEDDED_ROOTS)


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
    found = None if again else measured_before(kind, key, [folder])
    if found is None:
        with telling(what):
            found = measure()
        keep(key, found, folder)
    return found


def measured_before(kind: type[Kind], key: Mapping, folders: Sequence[Path]) -> Kind | None:
    """What was measured under a key, from the first folder whose `COSTS` has it; None if none has."""
    for entry in itertools.chain.from_iterable(_entries(folder / COSTS) for folder in folders):
        if entry["key"] == key:
            with contextlib.suppress(TypeError, ValueError):  # not what this version measures
                found = kind(**entry["costs"])
                found.check()
                return found
    return None


def keep(key: Mapping, found: Measured, folder: Path) -> None:
    """Writes what was measured under a key to a folder's `COSTS`."""
    path = folder / COSTS
    others = [entry for entry in _entries(path) if entry["key"] != key]  # as they are by now
    with contextlib.suppress(OSError):  # read-only: measured again next time
        folder.mkdir(parents=True, exist_ok=True)
        write_json(path, [*others, _entry(key, dataclasses.asdict(found))])  # type: ignore[call-overload]


def _entry(key: Mapping, costs: Mapping) -> dict:
    """What is kept of a measurement."""
    entry = {"key": key, "costs": costs}
    return entry | {DIGEST: digest_of({}, entry)}


def _entries(path: Path) -> list[dict]:
    """The measurements in a file that are as they were written; none if it is absent or damaged."""
    try:
        entries = read_json(path)
    except (OSError, ValueError):
        return []
    whole = [entry for entry in entries if misfit(entry, ENTRY) is None] if isinstance(entries, list) else []
    return [entry for entry in whole if entry[DIGEST] == _entry(entry["key"], entry["costs"])[DIGEST]]


def content_hash(model: nn.Module) -> str:
    """A hash of a model's weights, names and shapes."""
    with telling("looking whether these weights have been calibrated"):
        digests = {name: _hash_of(tensor) for name, tensor in model.state_dict().items()}
    return digest_of({}, digests)


def _hash_of(tensor: Tensor) -> str:
    """A hash of a tensor's type, shape and values; numpy does not know all types."""
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return digest_of({"values": values}, {"type": str(tensor.dtype), "shape": list(tensor.shape)})
