"""From a checkpoint's name or place to an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from cspd.engine import Engine
from mar.checkpoint import CheckpointError, load_mar, load_vae

# beside the package in a source tree, inside it when installed
_ROOTS = (Path(__file__).parent / "checkpoints", Path(__file__).parent.parent / "checkpoints")
_TARGET_FILES = ("target.safetensors", "checkpoint-last.pth")
_VAE_FILES = ("vae.safetensors", "kl16.ckpt")
_DRAFT_FILES = ("draft.safetensors",)


def embedded() -> dict[str, Path]:
    """The embedded checkpoints by name."""
    root = next(root for root in _ROOTS if root.is_dir())
    return {path.name: path for path in sorted(root.iterdir()) if path.is_dir()}


def _find(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)


def checkpoint_files(checkpoint: str | Path) -> dict[str, Path | None]:
    """The files "target", "draft" and "vae" of an embedded name, a folder, or a target's file; None where absent.

    Raises:
        CheckpointError: there is no target to be found.
    """
    place = embedded().get(str(checkpoint), Path(checkpoint))
    target = _find(place, _TARGET_FILES) if place.is_dir() else place
    if target is None or not target.is_file():
        raise CheckpointError(
            f"{checkpoint}: no checkpoint there; give an embedded name ({', '.join(embedded())}), a file, or a folder"
            f" with {' or '.join(_TARGET_FILES)} (checkpoints/README.md says where the official files come from)"
        )
    # beside the target, whatever name or file it was found by
    return {"target": target, "draft": _find(target.parent, _DRAFT_FILES), "vae": _find(target.parent, _VAE_FILES)}


def load(
    checkpoint: str | Path = "digits32",
    *,
    arch: str | None = None,
    vae: str | Path | None = None,
    draft: str | Path | None = None,
    max_batch: int = 8,
    device: str | torch.device = "auto",
    precision: str = "fp32",
    compiled: bool = False,
) -> Engine:
    """An engine with the models of a checkpoint.

    Args:
        checkpoint: an embedded name, a folder with official files, or a target's file.
        arch: the target's size (`mar.registry.MARS`); found out from the file by default.
        vae: the autoencoder's file, where it does not lie beside the target.
        draft: a smaller model's file, for methods that draft, where it does not lie beside the target.
        max_batch, device, precision, compiled: as in `Engine`.

    Raises:
        CheckpointError: a file is missing, damaged or of another model. ValueError: as in `Engine`.
    """
    files = checkpoint_files(checkpoint)
    vae_file, draft_file = vae or files["vae"], draft or files["draft"]
    if vae_file is None:
        raise CheckpointError(
            f"{checkpoint}: no autoencoder beside it ({' or '.join(_VAE_FILES)}): give its file (vae=..., --vae on the"
            " command line)"
        )
    return Engine(
        load_mar(files["target"], arch),
        load_mar(draft_file) if draft_file else None,
        load_vae(vae_file),
        max_batch=max_batch,
        device=device,
        precision=precision,
        compiled=compiled,
        cache=files["target"].parent / "calibration",
    )
