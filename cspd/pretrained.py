"""Folders of models of `transformers`: which files they must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mar.tensors import CheckpointError

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
