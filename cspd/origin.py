"""The origin of a report: date, command, versions, machine, and the models' files, known by their content."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cspd.files import FileCache, Place, user_cache, weight_files
from cspd.terminal import __version__, telling

LIBRARIES = ("numpy", "torch-fidelity")
PATIENCE = 10  # seconds that git may take
DIGESTS = "digests"  # the folder of digests in the user's cache
OTHER_WEIGHTS = 2**27  # bytes: larger files beside a model's weights are the same weights in formats that nothing reads


def what_ran(machine: Mapping, models: Sequence[dict] = (), command: str | None = None) -> dict:
    """The origin of a report, as plain values.

    Args:
        machine: from `cspd.engine.Engine.describe`. models: from `models_of`. command: the command line.

    Returns:
        "date" (ISO 8601, with the offset from UTC), "command", "commit" (None if the package is not in a checkout),
        "versions", "machine" and "models".
    """
    versions = {"cspd": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": command,
        "commit": commit_of(Path(__file__)),
        "versions": versions,
        "machine": {name: value for name, value in machine.items() if name != "torch"},  # torch is in versions
        "models": list(models),
    }


def models_of(settings: Mapping[str, Any], runner: Any) -> list[dict]:
    """The models of a model runner whose files a run's settings name: the file's name, fingerprint and size.

    Args:
        settings: from `cspd.checkpoints.run_settings`. runner: the engine's, of the models' family.
    """
    modules = {"vae": getattr(runner, "vae", None), **runner.models}
    found = []
    for role, stored in settings.items():
        if role in modules and isinstance(stored, dict):
            parameters = sum(each.numel() for each in modules[role].parameters())
            about = {name: stored[name] for name in ("file", "sha256", "bytes")}
            found.append({"role": role, **about, "parameters": parameters})
    return found


def model_line(model: Mapping) -> str:
    """A model of `models_of` for people: "target.safetensors, 8.5 million parameters, sha256 0123456789ab"."""
    millions = model["parameters"] / 1e6
    fingerprint = model["sha256"][:12]
    return f"{model['file']}, {millions:,.1f} million parameters, sha256 {fingerprint}"


def file_fingerprint(path: Place) -> str:
    """sha256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(2**20), b""):
            digest.update(block)
    return digest.hexdigest()


def together(fingerprints: Sequence[str]) -> str:
    """One fingerprint for several. The fingerprint of a single file stays as it is."""
    # users can compare it with sha256sum
    if len(fingerprints) == 1:
        return fingerprints[0]
    return hashlib.sha256("".join(fingerprints).encode()).hexdigest()


@dataclass
class Content:
    """The digest of a file's content, cached so that many gigabytes of weights are read once: uint8 [32]."""

    sha256: np.ndarray

    def check(self, *_: int) -> None:
        """Raises ValueError if it is not a digest."""
        if self.sha256.dtype != np.uint8 or self.sha256.shape != (32,):
            raise ValueError("the content of a file has no digest of SHA-256")


def content_digest(path: Path) -> str:
    """`file_fingerprint` of a file with a model, from the user's cache unless its path, size or time has changed."""
    path = path.resolve()
    about = path.stat()
    key = {"file": str(path), "bytes": about.st_size, "modified": about.st_mtime_ns}
    cache = FileCache([user_cache() / DIGESTS])
    found = cache.find(Content, key)
    if found is None:
        with telling(f"reading {path} once, for its digest"):
            found = Content(np.frombuffer(bytes.fromhex(file_fingerprint(path)), np.uint8))
        cache.put(found, key)
    return found.sha256.tobytes().hex()


def identity_of(folder: Path) -> str:
    """A hash, in hexadecimal, of the names and contents of a model's files in a folder, except hidden files."""
    weights = weight_files(folder)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        is_hidden = path.name.startswith(".")  # file managers leave some
        if path.is_file() and not is_hidden and (path in weights or path.stat().st_size < OTHER_WEIGHTS):
            digest.update(f"{path.name} {content_digest(path)}\n".encode())
    return digest.hexdigest()


def commit_of(file: Path) -> str | None:
    """The commit of the git checkout that contains a file, with "-dirty" if something in it was changed since.

    None without git, or if git does not track the file: a package may be installed inside another project.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    # `git describe --dirty` would lock the index, and a killed run would leave the lock
    changes = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
