"""Runs of the training programs, as from the command line, and images for them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image


def run_program(program: str, patch: pytest.MonkeyPatch, **options: object) -> Path:
    """Runs a program with options by their names; returns the file that it was to write."""
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    patch.setattr(sys, "argv", [program, *flags])
    try:
        importlib.import_module(program).main()
    finally:
        torch.set_flush_denormal(False)  # other tests need them
    return Path(options["out"])


def shades(folder: Path, count: int) -> Path:
    """Images of other sizes that are darker the smaller the number in their name."""
    folder.mkdir()
    for i in range(count):
        Image.new("RGB", (20 + i, 18), (20 * i,) * 3).save(folder / f"{i}.png")
    return folder
