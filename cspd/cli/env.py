"""`cspd env`: versions and device, for reports of bugs.

Alone in a file, since it must still print something if another import of the package fails.
"""

from __future__ import annotations

import argparse
import platform
import warnings
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from cspd.terminal import __version__

LIBRARIES = (
    *("torch", "triton", "numpy", "safetensors", "timm", "torch-fidelity"),
    *("transformers", "accelerate", "fastapi", "uvicorn", "ray", "webdataset", "cspd-models"),
)


def run_env(args: argparse.Namespace) -> None:
    for name, value in facts():
        print(f"{name + ':':<16}{value}")


def facts() -> Iterator[tuple[str, str]]:
    """Names and values, one after the other. A value that cannot be found is the error that says why."""
    yield "cspd", __version__
    yield "Python", platform.python_version()
    yield "system", platform.platform()
    for name in LIBRARIES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
    for name, find in (("device", _device), ("commit", _commit), ("bundled models", _models)):
        try:
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                yield name, find()
        except Exception as error:  # whatever is broken is what the report is about
            yield name, f"{type(error).__name__}: {error}"
            continue
        for warning in warned:
            yield "warning", str(warning.message)


def _device() -> str:
    import torch

    from cspd import kernels
    from cspd.device import all_bytes, describe, gibibytes, pick_device

    device = pick_device("auto")
    about = describe(device)
    text = f"{device}, {about['device']}, {gibibytes(all_bytes(device))}, {about['threads']} CPU threads"
    if device.type == "cuda":
        runs = "run" if kernels.available(device) else "do not run"
        text += f", CUDA {torch.version.cuda}, kernels of cspd {runs}"
    return text


def _commit() -> str:
    from cspd.origin import commit_of

    return commit_of(Path(__file__)) or "not in a checkout"


def _models() -> str:
    from cspd.models import bundled

    return ", ".join(bundled()) or "none"
