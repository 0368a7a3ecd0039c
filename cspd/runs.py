"""The folder of a run: its record, its lock, what ran, and the means of its statistics."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import socket
import stat
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from cspd.files import (
    MAYBE,
    NUMBER,
    TEMPORARY,
    make_folder,
    misfit,
    read_json,
    temporary_names,
    weight_files,
    write_bytes,
    write_json,
)
from cspd.request import PHASES, png_of
from cspd.terminal import __version__

# A lock on a folder: one run at a time holds it, and a run that is killed holds it no longer.

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".cspd.lock"
SIGN = "cspd: "  # what the file begins with, unless it is empty
HOLDER_SHOWN = 500  # characters of what the holder says of itself, at most


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder, which is made if there is none. The lock is the kernel's, on an open file: it ends with us.

    The file stays, since another run may have opened it already. It says who holds the lock, for others to tell.

    Raises:
        ValueError: another run holds it (the message says which), or the file is not ours. OSError: no file can be
            written there.
    """
    make_folder(folder)
    path = folder / LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --out") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a pipe would be waited for
            raise ValueError(f"{path} is not a file: give another --out")
        said = os.read(file, HOLDER_SHOWN).decode(errors="replace")
        if said and not said.startswith(SIGN):
            raise ValueError(f"{path} is not a file of cspd: give another --out")
        _lock(file, folder, said)
        with contextlib.suppress(OSError):  # of a full disk: who we are is only information
            os.truncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, f"{SIGN}{_who()}\n".encode(errors="backslashreplace"))  # an argument may be no UTF-8
        yield
    finally:
        os.close(file)


def _who() -> str:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}, {command}"


def _lock(file: int, folder: Path, said: str) -> None:
    """Locks an open file. Raises ValueError if another run holds it, which `said` who it is."""
    try:
        if fcntl is None:
            raise OSError("not on this system")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        line = said.removeprefix(SIGN).partition("\n")[0]
        holder = "".join(filter(str.isprintable, line)) or "another process"
        raise ValueError(f"{folder} is in use by {holder}: wait for its end, or give another --out") from None
    except OSError as error:  # of a file system without locks
        reason = error.strerror or error
        warnings.warn(f"{folder} cannot be locked ({reason}): start no second run there", stacklevel=3)


# The folder of a run that goes on where it was cut off, under `sample`, `compare` and `evaluate`.

DECIDED = {"window": int, "head_calls": int, "draft": str, "gamma": int}  # what a method decides where it is left open
REMEDY = "give another --out"
NAMES_SHOWN = 5  # differences, or files, that an error names, at most
LONGEST = 1000  # characters of a value that it shows whole: of a path the end tells


@dataclass
class Store:
    """The folder of one run: a record of its settings, which lists all files that the run will write.

    A run that was cut off is known by its record, and goes on if its settings are the same. No files but the record
    and those that it lists are ever replaced or removed. The temporary files of `publishing` are listed too, by names
    that nobody has taken before. As a context manager, it ends the claim on the folder.

    Attributes:
        folder: where. name: of the record's file. schema: the version of the record.
        shape: what a record must have, see `misfit`. names: a pattern of all names that it may list.
        compared: the parts that are settings; None: all.
        files, temporary: what the record lists, once the folder is claimed.
    """

    folder: Path
    name: str
    schema: str
    shape: Mapping
    names: str
    compared: Collection[str] | None = None
    files: list[str] = field(default_factory=list, init=False)
    temporary: list[str] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._held = contextlib.ExitStack()
        self._replaced: Sequence[str] = ()  # files of the run that this one replaces

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def claim(self, asked: Mapping, files: Sequence[str], overwrite: bool = False) -> dict | None:
        """Holds the folder for this run alone, until the `with` ends, and returns the record of the run to go on from.

        Args:
            asked: the record of this run. What it leaves a method to decide (`DECIDED`) fits any.
            files: names of all that it will write beside the record, relative to the folder.
            overwrite: replace another run, once this one begins.

        Returns:
            What an earlier run of the same settings left; None where there was none, or it is replaced.

        Raises:
            ValueError: another run is at work there, or was with other settings; its record is damaged; or others'
                files are in the way. The message names them and says what to do. OSError: nothing can be written.
        """
        if not (self.folder / LOCK).exists():
            self._examine(asked, files, overwrite)  # a folder that is refused is left as it was
        self._held.enter_context(locked(self.folder))
        record, listed, temporary = self._examine(asked, files, overwrite)
        self._remove(temporary)  # which a killed run left
        self.files = list(files) if overwrite else list(dict.fromkeys([*listed, *files]))
        written = [self.name, *self.files]
        taken = self._entries(written)
        self.temporary = [next(free for free in temporary_names(name) if free not in taken) for name in written]
        self._replaced = listed if overwrite else ()
        return None if overwrite else record

    def begin(self, record: Mapping) -> None:
        """Writes the record, before anything that it lists, and removes a run that is replaced. Raises OSError."""
        self._remove(self._replaced)
        for parent in _parents(self.files):
            make_folder(self.folder / parent)
        self.save(record)

    def save(self, record: Mapping) -> None:
        """Writes the record. Raises OSError as `publishing`."""
        write_json(self.folder / self.name, {**record, **self.lists()})

    def lists(self) -> dict[str, list[str]]:
        """What a record of this run lists, by the keys that it has there."""
        return {"files": self.files, "temporary": self.temporary}

    def refuse(self, changes: Sequence[str]) -> None:
        """Raises ValueError, naming them, if the run in the folder differs from this one by `changes`."""
        if changes:
            named = _several([change.removeprefix("settings.") for change in changes], "; ")
            remedy = "another --out, or --overwrite to replace it"
            raise ValueError(f"{self.folder} holds another run ({named}): give its settings, {remedy}")

    def _examine(
        self, asked: Mapping, files: Sequence[str], overwrite: bool
    ) -> tuple[dict | None, Sequence[str], Sequence[str]]:
        """The record that is there, and the files and temporary files that it lists. Raises ValueError as `claim`."""
        record = self._record()
        if record is not None and not overwrite:
            plain = json.loads(json.dumps(asked))  # as reading the file gives it
            self.refuse(differences(self._settings(record), self._settings(plain)))
        listed, temporary = self._listed(record, files, overwrite)
        entries, own = self._entries([*files, *listed]), set(listed)
        folders = [name for name in dict.fromkeys([*files, *listed, *temporary]) if entries.get(name)]
        if folders:
            raise ValueError(
                f"{self.folder} holds {_several(folders)} as folders, where files are to be written: {REMEDY}, or move"
                " them away"
            )
        foreign = [name for name in files if name in entries and name not in own]
        if foreign:
            why = f"and no {self.name}" if record is None else f"which {self.name} does not list"
            raise ValueError(
                f"{self.folder} holds {_several(foreign)}, {why}, so that this command may not write there:"
                f" {REMEDY}, or move the files away"
            )
        return record, listed, temporary

    def _record(self) -> dict | None:
        path = self.folder / self.name
        remedy = f"{REMEDY}, or remove what is not needed there yourself"
        try:
            record = read_json(path)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ValueError(f"{self.folder} is a file, or below one: {REMEDY}") from None
        except (ValueError, OSError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}), so that no file is known as its own: {remedy}"
            ) from None
        if not isinstance(record, dict) or record.get("schema") != self.schema:
            raise ValueError(f"{path} is not a record of this version: {remedy}")
        place = misfit(record, {**self.shape, "files?": [str], "temporary?": [str]})
        if place:
            raise ValueError(f"{path} is damaged ({place} is not as cspd writes it): {remedy}")
        return record

    def _settings(self, record: Mapping) -> dict:
        """The compared part of a record."""
        parts = record if self.compared is None else self.compared
        return {part: record[part] for part in record if part in parts and part not in self.lists()}

    def _listed(
        self, record: Mapping | None, files: Sequence[str], overwrite: bool
    ) -> tuple[Sequence[str], Sequence[str]]:
        """The files and the temporary files of the run that is there."""
        if record is None:
            return (), ()
        if "files" not in record and overwrite:
            raise ValueError(
                f"{self.folder / self.name} is of an older version and does not list its files: {REMEDY}, or remove"
                " the folder yourself"
            )
        listed, temporary = record.get("files", files), record.get("temporary", ())
        foreign = [name for name in listed if not re.fullmatch(self.names, name)]  # such as ../precious.txt
        written = {self.name, *listed}
        for name in temporary:
            match = TEMPORARY.fullmatch(name)
            if match is None or match[1] not in written:
                foreign.append(name)
        if foreign:
            raise ValueError(f"{self.folder / self.name} lists {_shown(foreign[0])}, which cspd never wrote: {REMEDY}")
        return listed, temporary

    def _entries(self, names: Iterable[str]) -> dict[str, bool]:
        """All that is in the folders where `names` are, and whether it is a folder. Raises ValueError as `claim`."""
        found = {}
        for parent in _parents(names):
            place = self.folder / parent
            if parent and (place.is_symlink() or place.is_file()):  # the folder itself may be a link
                raise ValueError(f"{place} is a link or a file, where cspd has a folder: {REMEDY}")
            with contextlib.suppress(FileNotFoundError), os.scandir(place) as entries:
                for entry in entries:
                    found[os.path.join(parent, entry.name)] = entry.is_dir(follow_symlinks=False)
        return found

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def _parents(names: Iterable[str]) -> list[str]:
    return sorted({os.path.dirname(name) for name in names})


def _several(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return between.join(names[:NAMES_SHOWN]) + more


def kept_choices(settings: Mapping, earlier: Mapping | None) -> dict:
    """What was decided in an `earlier` run of the same settings, if any, and is left open in these.

    Deciding again might come to something else, and a seed's image depends on it.
    """
    return {name: (earlier or {}).get(name) for name in DECIDED if settings.get(name) is None}


def differences(old: Mapping, new: Mapping, where: str = "") -> list[str]:
    """What differs between two nested settings, in words: ["request.cfg was 1.0, now 2.0"].

    What only one of them has differs too, unless it is None. What is None in `new` for a method to decide fits any.
    """
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, now = old.get(key), new.get(key)
        place = f"{where}{_called(key, now)}"
        is_open = key in DECIDED and key in new and now is None
        if isinstance(before, dict) and isinstance(now, dict):
            found += differences(before, now, f"{place}.")
        elif before != now and not is_open:
            found.append(f"{place} was {_shown(before)}, now {_shown(now)}")
    return found


def _called(key: str, value: object) -> str:
    """A setting as users know it: records of texts have them as labels."""
    are_texts = isinstance(value, list) and any(isinstance(each, str) for each in value)
    return "prompts" if key == "labels" and are_texts else key


def _shown(value: object) -> str:
    if value is None or isinstance(value, dict):
        return "nothing" if value is None else "something"
    try:
        text = json.dumps(value)
    except RecursionError:
        return "something nested too deeply"
    if isinstance(value, list) and len(text) > 60:
        return f"{text[:40]} ... ({len(value)} of them)"
    return text if len(text) < LONGEST else f"{text[:40]} ... {text[-40:]}"


# What a run's images cost on the average, and how fast they were made.

COUNTS = ("iterations", "backbone_calls", "head_calls", "head_evaluations", "draft_backbone_calls", "bound")
MEASURED = ("difference", "divergence", "audit", "audit_error")  # of a "measured" sampler
WORTH = 1.05  # a run that is fewer times as fast as plain sampling has no speed-up
LAZY = "lazy_backbone_calls"
MEASURES = {f"{name}?": MAYBE for name in MEASURED}  # older versions' files have none
ADDED = MEASURES | {f"{LAZY}?": NUMBER}  # the same of images
STATS = {  # what is read of them, see `misfit`
    **dict.fromkeys((*COUNTS, "head_calls_per_token"), NUMBER),
    **dict.fromkeys(("alpha", "step_compression"), MAYBE),
    **ADDED,
    "guarantee": str,
    "committed": {str: int},
    "seconds": dict.fromkeys(PHASES, NUMBER),
}


def summary_of(stats: Sequence[dict], made: int, seconds: float) -> dict:
    """Means of images' statistics (`RoundStats.to_dict`), and the speed of the `made` ones of this run."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    summary = {
        "guarantee": stats[0]["guarantee"],
        "images_made": made,
        "seconds": seconds,
        "images_per_second": made / seconds,
    }
    summary |= {f"{name}_per_image": mean([s[name] for s in stats]) for name in COUNTS}
    summary[f"{LAZY}_per_image"] = mean([s.get(LAZY, 0) for s in stats])
    compressions = [s["step_compression"] for s in stats if s["step_compression"] is not None]
    if compressions:
        summary["step_compression"] = mean(compressions)
        rounds: dict[int, int] = {}
        for n, count in (pair for s in stats for pair in s["committed"].items()):
            rounds[int(n)] = rounds.get(int(n), 0) + count
        summary["rounds_by_codes_committed"] = dict(sorted(rounds.items()))
        bounds = [s["bound"] for s in stats]
        summary["bound_standard_error"] = statistics.stdev(bounds) / len(bounds) ** 0.5 if len(bounds) > 1 else None
    alphas = [s["alpha"] for s in stats if s["alpha"] is not None]
    summary |= {"alpha": mean(alphas) if alphas else None}
    summary["head_calls_per_token"] = mean([s["head_calls_per_token"] for s in stats])
    summary |= measured(stats)
    return summary | {"seconds_by_phase": {p: mean([s["seconds"][p] for s in stats]) for p in PHASES}}


def measured(stats: Sequence[Mapping]) -> dict[str, float | None]:
    """Means over images of what was measured of their sampler, `MEASURED`; None of what was not.

    `audit_error` is the standard error of the mean audit: by the images' spread, which has all that differs between
    them, or of a single image its own.
    """
    values = {name: [each[name] for each in stats if each.get(name) is not None] for name in MEASURED}
    means = {name: statistics.fmean(found) if found else None for name, found in values.items()}
    audits = values["audit"]
    if len(audits) > 1:
        means["audit_error"] = statistics.stdev(audits) / len(audits) ** 0.5
    return means


def measured_lines(summary: Mapping) -> list[tuple[str, str, str]]:
    """What a summary says was measured of a sampler, for people: (title, value, what it is) each."""
    meanings = {
        "difference": "s.d. of a token (r.m.s.) from the full chain's of the same condition and noise, held-out",
        "divergence": "nats per token, of its chain from the full one of the same condition, held-out",
        "audit": "nats per token, the divergence estimated on these images",
    }
    if summary.get("audit_error") is not None:
        meanings["audit"] = f"+- {summary['audit_error']:.3f} {meanings['audit']}, and its standard error"
    known = [name for name in meanings if summary.get(name) is not None]
    return [(name, f"{summary[name]:.3f}", meanings[name]) for name in known]


def speed_line(summary: Mapping, at_once: int) -> str | None:
    """What a summary says of a run's speed against plain sampling, for people; None if it says nothing."""
    speedup = summary.get("speedup")
    if speedup is None:
        why = summary.get("speedup_unknown")
        return why and f"the speed-up over plain sampling (ar) is not known: {why}"
    faster = f"{speedup:.1f}x as fast as plain sampling (ar)"
    if speedup >= WORTH:
        return faster
    images = "1 image" if at_once == 1 else f"{at_once} images"
    told = f"no speed-up with {images} at once on this device"
    if speedup < 1 / WORTH:
        told = f"{faster}: {told}"
    other = summary["alternative"]
    if other is None:
        return told
    method = f"`--method {other['method']}`"
    if other["difference"] is None:
        return f"{told}; {method} may give one, once it is fitted for these settings (cspd calibrate)"
    difference = f"at a difference of {other['difference']:.2g} s.d. per token"
    if other["speedup"] is None:
        return f"{told}; {method} may give one, {difference}"
    if other["speedup"] < WORTH:
        return f"{told}, nor by {method}"
    return f"{told}; {method} is {other['speedup']:.1f}x, {difference}"


# What ran, for reports: when, by which command and program, on which machine, and by which models' files.

LIBRARIES = ("numpy", "torch-fidelity")
PATIENCE = 10  # seconds for git to answer


def what_ran(machine: Mapping, models: Sequence[dict] = (), command: str | None = None) -> dict:
    """What a report says of the run that it is on, as plain values.

    Args:
        machine: as `cspd.engine.Engine.describe` has it. models: as from `models_of`. command: the command line.

    Returns:
        "date" (ISO 8601, with the offset from UTC), "command", "commit" (None where the package lies in no checkout),
        "versions", "machine" and "models".
    """
    versions = {"cspd": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # in a source tree
            continue
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "commit": commit_of(Path(__file__)),
        "versions": versions,
        "machine": {name: value for name, value in machine.items() if name != "torch"},
        "models": list(models),
    }


def models_of(settings: Mapping[str, Any], runner: Any) -> list[dict]:
    """The models of a runner that a run's settings name files of, each with its file's name, fingerprint and size.

    Args:
        settings: as `cspd.cli.options.run_settings` gives them. runner: the engine's, of their family.
    """
    found = []
    for role, stored in _files(settings).items():
        modules = {"vae": getattr(runner, "vae", None), **runner.models}
        file, parameters = Path(stored["file"]), sum(each.numel() for each in modules[role].parameters())
        named = {"role": role, "file": file.name, "sha256": _fingerprint((file,), stored["modified"])}
        if "folder" in stored:  # of a model of transformers
            weights = tuple(weight_files(file.parent))
            named |= {"file": file.parent.name, "sha256": _fingerprint(weights, stored["modified"])}
        found.append(named | {"bytes": stored["bytes"], "parameters": parameters})
    return found


def model_line(model: Mapping) -> str:
    """A model of `models_of` for people: "target.safetensors, 8.5 million parameters, sha256 0123456789ab"."""
    millions = f"{model['parameters'] / 1e6:,.1f} million parameters"
    return f"{model['file']}, {millions}, sha256 {model['sha256'][:12]}"


def without_folders(settings: Mapping[str, Any]) -> dict:
    """A run's settings with names in place of paths, which are nobody else's business."""
    named = {role: {**stored, "file": Path(stored["file"]).name} for role, stored in _files(settings).items()}
    return {**settings, **named}


def _files(settings: Mapping[str, Any]) -> dict[str, dict]:
    """The files among a run's settings, by what they are for."""
    return {
        role: value
        for role, value in settings.items()
        if isinstance(value, dict) and isinstance(value.get("file"), str)
    }


def file_fingerprint(path: Path) -> str:
    """sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def together(fingerprints: Sequence[str]) -> str:
    """One fingerprint of several; of a single one, that."""
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("".join(fingerprints).encode()).hexdigest()


@functools.cache
def _fingerprint(paths: tuple[Path, ...], modified: int) -> str:
    """`file_fingerprint` of a file as it was `modified`, or one of many: many configurations have the same ones."""
    return together([file_fingerprint(path) for path in paths])


def commit_of(file: Path) -> str | None:
    """The commit of the git checkout that has a file, with "-dirty" where something in it was changed since.

    None where there is no git, or the file is not of the checkout that it lies in, as a package installed within
    another project.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    return _git(file.parent, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git answers; None where it fails or is not there."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def write_png(path: Path, picture: Image.Image) -> None:
    """Writes as `publishing` does."""
    write_bytes(path, png_of(picture))
