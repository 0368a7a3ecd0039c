"""Runs of the training programs with flags, and images for them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image


def run_program(program: str, patch: pytest.MonkeyPatch, **options: object) -> Path:
    """Runs a program with options by name; returns its file `out`."""
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    patch.setattr(sys, "argv", [program, *flags])
    try:
        importlib.import_module(program).main()
    finally:
        torch.set_flush_denormal(False)  # programs set it, and other tests need denormal numbers
    return Path(options["out"])


def shades(folder: Path, count: int) -> Path:
    """Images of various sizes, darker for smaller numbers in their names."""
    folder.mkdir()
    for i in range(count):
        Image.new("RGB", (20 + i, 18), (20 * i,) * 3).save(folder / f"{i}.png")
    return folder


def class_images(folder: Path, classes: int, per_class: int) -> Path:
    """Random images of 20 by 18 pixels in class_0/, class_1/, ..., white in the left half."""
    random = np.random.default_rng(0)
    for label in range(classes):
        (folder / f"class_{label}").mkdir(parents=True)
        for i in range(per_class):
            pixels = random.integers(0, 100, (18, 20, 3), dtype=np.uint8)
            pixels[:, :10] = 255
            Image.fromarray(pixels).save(folder / f"class_{label}" / f"{i}.png")
    return folder
