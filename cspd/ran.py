"""What ran, for reports: when, by which command and program, on which machine, and by which models' files."""

from __future__ import annotations

import functools
import hashlib
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from cspd.pretrained import weight_files
from cspd.version import __version__

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


def models_of(settings: Mapping[str, Any], host: Any) -> list[dict]:
    """The models of a host that a run's settings name files of, each with its file's name, fingerprint and size.

    Args:
        settings: as `cspd.commands.options.run_settings` gives them. host: the engine's, of their family.
    """
    found = []
    for role, stored in _files(settings).items():
        modules = {"vae": getattr(host, "vae", None), **host.models}
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
