"""Runs of the training programs, as from the command line."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest


def run_program(program: str, patch: pytest.MonkeyPatch, **options: object) -> Path:
    """Runs a program with options by their names; returns the file that it was to write."""
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    patch.setattr(sys, "argv", [program, *flags])
    importlib.import_module(program).main()
    return Path(options["out"])
