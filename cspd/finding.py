"""From a checkpoint's name or place to its files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from cspd import hub
from cspd.continuous.models import MARModels
from cspd.discrete.models import VQModels
from cspd.keeping import EMBEDDED_ROOTS
from cspd.parsing import is_too_long, shortened
from cspd.saving import DESCRIPTION
from cspd.telling import telling
from cspd.vq.hosted.checkpoint import CONFIG, is_hosted
from cspd.vq.hosted.config import CHAMELEON_DECODER
from mar.registry import suggestion
from mar.tensors import CheckpointError

# file names looked for beside each other; * stands for any text
_MAR_FILES = {
    "target": ("target.safetensors", "checkpoint-last.pth"),
    "draft": ("draft.safetensors",),
    "vae": ("vae.safetensors", "kl16.ckpt"),
}
_VQ_FILES = {
    "target": ("target.safetensors", "c2i_*.pt"),
    "draft": ("draft.safetensors",),
    "eagle": ("eagle.safetensors",),
    "tokenizer": ("tokenizer.safetensors", "vq_ds16_c2i.pt"),
}
_TEXT_FILES = _VQ_FILES | {
    "target": ("target.safetensors", "t2i_*.pt"),
    "tokenizer": ("tokenizer.safetensors", "vq_ds16_t2i.pt"),
}
_TARGETS = tuple(dict.fromkeys(_MAR_FILES["target"] + _VQ_FILES["target"] + _TEXT_FILES["target"]))
_TEXT_ENCODERS = ("flan-t5-xl", "t5-ckpt/flan-t5-xl", "text_encoder")  # folders looked for beside a target
# what is fetched with a target from the hub
_COMPANIONS = (
    DESCRIPTION,
    *(
        pattern
        for files in (_MAR_FILES, _VQ_FILES, _TEXT_FILES)
        for part, patterns in files.items()
        if part != "target"
        for pattern in patterns
    ),
)


def embedded() -> dict[str, Path]:
    """The embedded checkpoints by name; none where an installation has left them out."""
    root = next((root for root in EMBEDDED_ROOTS if root.is_dir()), None)
    return {path.name: path for path in sorted(root.iterdir()) if path.is_dir()} if root else {}


def embedded_folder(name: str) -> Path:
    """The folder of an embedded checkpoint. Raises FileNotFoundError where an installation has none of this name."""
    folder = embedded().get(name)
    if folder is None:
        raise FileNotFoundError(f"{name}: this installation has no such embedded checkpoint: install cspd again")
    return folder


def path_of(place: str | Path, what: str) -> Path:
    """A place as a path; `what` is its name in errors. Raises TypeError if it is none, ValueError if none can be."""
    if not isinstance(place, (str, os.PathLike)):
        raise TypeError(f"{what} must be a name or a path, not {place!r}")
    if not os.fspath(place):
        raise ValueError(f"{what} is empty: give a file, or leave it out")
    path = Path(place)
    if is_too_long(path):
        raise ValueError(f"{what} {shortened(str(path))} is too long for the file system: give a shorter name")
    return path


def is_remote(checkpoint: str | Path) -> bool:
    """Whether it is a name on the hub, and no place here."""
    return isinstance(checkpoint, str) and hub.is_name(checkpoint)


def _find(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def _target_file(checkpoint: str | Path) -> Path:
    """The file of an embedded name, a folder or a target's file."""
    known = embedded()
    place = known.get(str(checkpoint), path_of(checkpoint, "checkpoint"))
    if is_remote(checkpoint):
        with telling(f"asking the hub for {checkpoint}"):
            place = hub.fetched(str(checkpoint), _TARGETS, _COMPANIONS)
    if place.is_file():
        return place
    found = _find(place, _TARGETS) if place.is_dir() else []
    if not found and is_hosted(place):
        return place / CONFIG
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{checkpoint}: several checkpoints are there ({names}): give the file of one")
    if not found:
        raise CheckpointError(
            f"{checkpoint}: no checkpoint there; give a file, a folder with one of {', '.join(_TARGETS)}"
            " (checkpoints/README.md says where the official files come from) or of a model of transformers"
            " (docs/text.md), or an embedded name:"
            f" {suggestion(str(checkpoint), known)}"
        )
    return found[0]


def checkpoint_files(checkpoint: str | Path) -> dict[str, Path | None]:
    """The files of an embedded name, a folder, or a target's file, by what they are for; None where absent.

    "target", "draft" and "vae" of MAR; "target", "draft", "eagle", "tokenizer" and the folder "text_encoder" of VQ
    models, which are known by a tokenizer beside them or by their official name. A model of `transformers` has its
    config.json as target, and Chameleon's decoder as tokenizer and a drafter where those are in the folder; its others
    are one model.

    Raises:
        CheckpointError: there is no target to be found, or there are several. TypeError, ValueError: it is no path.
    """
    target = _target_file(checkpoint)
    files: dict[str, Path | None] = {"target": target}
    if is_hosted(target):
        decoder = next(iter(_find(target.parent, CHAMELEON_DECODER)), None)
        drafter = next(iter(_find(target.parent, _VQ_FILES["eagle"])), None)
        return files | {"draft": None, "eagle": drafter, "tokenizer": decoder, "text_encoder": None}
    own = patterns_of(target)
    for name, patterns in own.items():
        if name != "target":  # beside it, whatever name or file it was found by
            files[name] = next(iter(_find(target.parent, patterns)), None)
    if own is not _MAR_FILES:
        folders = [target.parent / name for name in _TEXT_ENCODERS]
        files["text_encoder"] = next((folder for folder in folders if folder.is_dir()), None)
    return files


def patterns_of(target: Path) -> dict[str, tuple[str, ...]]:
    """What the files beside a target are called."""
    if target.match("t2i_*"):
        return _TEXT_FILES
    has_tokenizer = bool(_find(target.parent, _VQ_FILES["tokenizer"]))
    is_vq = target.match("c2i_*") or (target.suffix != ".pth" and has_tokenizer)
    return _VQ_FILES if is_vq else _MAR_FILES


def family_of(checkpoint: str | Path) -> str:
    """Whose models an embedded name, a folder or a target's file has: "MAR" or "VQ". Raises CheckpointError."""
    return (VQModels if "tokenizer" in checkpoint_files(checkpoint) else MARModels).family
