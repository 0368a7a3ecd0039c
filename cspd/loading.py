"""From a checkpoint's files to an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from cspd.continuous.models import MARModels
from cspd.discrete.hosted import hosted_models
from cspd.discrete.models import VQModels
from cspd.engine import Engine
from cspd.finding import checkpoint_files, is_remote, path_of, patterns_of
from cspd.keeping import CALIBRATION
from cspd.machine import free_bytes, gibibytes, pick_device, room_told
from cspd.method import Models
from cspd.saving import described
from cspd.telling import telling
from cspd.vq.checkpoint import load_eagle, load_gpt, load_tokenizer
from cspd.vq.eagle import Eagle
from cspd.vq.gpt import GPT
from cspd.vq.hosted.checkpoint import is_hosted
from cspd.vq.text import TextEncoder
from mar.checkpoint import load_mar, load_vae
from mar.tensors import CheckpointError, count_numbers


def check_of_one(checkpoints: Sequence[str | Path], *given: object) -> None:
    """Raises ValueError where there are several checkpoints, and a size or file is given, which is of one of them."""
    if len(checkpoints) > 1 and any(each is not None for each in given):
        names = ", ".join(map(str, checkpoints))
        raise ValueError(
            f"arch, vae, draft, eagle and text_encoder are of one checkpoint, and these are several ({names}): give the"
            " one that they belong to (--checkpoint on the command line), or put the files beside their targets"
        )


def load(
    *checkpoints: str | Path,
    arch: str | None = None,
    vae: str | Path | None = None,
    draft: str | Path | None = None,
    eagle: str | Path | None = None,
    text_encoder: str | Path | None = None,
    max_batch: int = 8,
    device: str | torch.device = "auto",
    precision: str = "fp32",
    compiled: bool = False,
    graphs: bool | None = None,
) -> Engine:
    """An engine with the models of a checkpoint, or of one of MAR and one of VQ models.

    Args:
        checkpoints: embedded names, folders with official files or as `Engine.save_pretrained` writes them, or of a
            model of `transformers` that makes images (docs/text.md), targets' files, or names on the Hugging Face hub
            ("org/name", "org/name/file"); "digits32" by default.
        arch: the target's size (`mar.registry.MARS`, `cspd.vq.registry.GPTS`); found out from the file by default.
        vae: the file of the autoencoder or tokenizer, where it does not lie beside the target.
        draft: a smaller model's file, for methods that draft, where it does not lie beside the target.
        eagle: the file of a VQ target's EAGLE drafter, where it does not lie beside the target.
        text_encoder: the folder of a T5 encoder, of models of texts, where it does not lie beside the target.
        max_batch, device, precision, compiled, graphs: as in `Engine`.

    Raises:
        CheckpointError: a file is missing, damaged or of another model, or a folder has several targets.
        TypeError: a path is something else. ValueError: as in `Engine`, weights that do not fit into memory, an unknown
            arch, an EAGLE drafter for a MAR, a text encoder for models of classes, or several checkpoints and one arch,
            vae, draft, eagle or text encoder for them.
    """
    checkpoints = checkpoints or ("digits32",)
    check_of_one(checkpoints, arch, vae, draft, eagle, text_encoder)
    named = {"vae": vae, "draft": draft, "eagle": eagle, "text_encoder": text_encoder}
    given = {name: path_of(place, name) for name, place in named.items() if place is not None}
    models: list[Models] = []
    for checkpoint in checkpoints:
        files = checkpoint_files(checkpoint)
        target = files["target"]
        assert target is not None  # or `checkpoint_files` had raised an error
        if is_hosted(target):
            unfit = {"arch (--arch)": arch, "text_encoder (--text-encoder)": text_encoder}
            _check_hosted(checkpoint, unfit | {"compiled (--compile)": compiled or None})
            drafter, decoder = given.get("eagle", files["eagle"]), given.get("vae")
            models.append(hosted_models(target, given.get("draft"), drafter, decoder, device, precision, max_batch))
            continue
        models.append(_official_models(checkpoint, files, given, arch, pick_device(device)))
    return Engine(
        *models,
        max_batch=max_batch,
        device=device,
        precision=precision,
        compiled=compiled,
        graphs=graphs,
    )


def _check_hosted(checkpoint: str | Path, given: Mapping[str, object]) -> None:
    """Raises ValueError for what is given (not None) that models of `transformers` do not take."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{checkpoint}: {name} is not for models of transformers: leave it out")


def _room_for(files: Mapping[str, Path], device: torch.device) -> str:
    """How much memory the weights of files take, as it follows their name; nothing where that is little.

    They are read into the CPU's memory, in float32, and moved to the device.

    Raises ValueError where they do not fit, before any is read.
    """
    weights = [file for name, file in files.items() if name != "text_encoder"]
    needed = torch.float32.itemsize * sum(map(count_numbers, weights))
    for place in {device, torch.device("cpu")}:
        free = free_bytes(place)
        if needed > free:
            raise ValueError(
                f"{files['target']}: its models need {gibibytes(needed)} and {place} has {gibibytes(free)} free: use"
                " a smaller model or another device"
            )
    return room_told(needed, device)


def _official_models(
    checkpoint: str | Path,
    files: Mapping[str, Path | None],
    given: Mapping[str, Path],
    arch: str | None,
    device: torch.device,
) -> MARModels | VQModels:
    """The models of files beside a target, but for those that are given, see `load`."""
    decoder = "tokenizer" if "tokenizer" in files else "vae"
    if decoder == "vae" and "eagle" in given:
        raise ValueError(f"{checkpoint}: eagle=... is for VQ targets, and this is a MAR: leave it out")
    own = {decoder if name == "vae" else name: place for name, place in given.items()}
    there = {name: place for name, place in {**files, **own}.items() if place is not None}
    if decoder not in there:
        wanted = " or ".join(patterns_of(there["target"])[decoder])
        raise CheckpointError(
            f"{checkpoint}: no autoencoder beside it ({wanted}): give its file (vae=..., --vae on the command line)"
        )
    models: MARModels | VQModels
    with telling(f"loading {there['target']}{_room_for(there, device)}"):
        if decoder == "vae":
            models = _mar_models(there, arch)
        else:
            models = _vq_models(there, arch, eagle_must_fit="eagle" in given)
    if not is_remote(checkpoint):  # which lies in a folder of the hub's own client
        models = dataclasses.replace(models, calibrations=there["target"].parent / CALIBRATION)
    if "text_encoder" in given and getattr(models, "text_encoder", None) is None:
        raise ValueError(f"{checkpoint} makes images of classes: leave text_encoder=... (--text-encoder) out")
    return models


def _mar_models(files: Mapping[str, Path], arch: str | None) -> MARModels:
    target = load_mar(files["target"], arch)
    draft = load_mar(files["draft"]) if "draft" in files else None
    classes, _ = described(files["target"].parent, target.config.class_num)
    return MARModels(target, draft, load_vae(files["vae"]), classes)


def _vq_models(files: Mapping[str, Path], arch: str | None, eagle_must_fit: bool) -> VQModels:
    """`eagle_must_fit`: an EAGLE drafter of another width is not another target's that lies beside this one."""
    target = load_gpt(files["target"], arch)
    classes, num_tokens = described(files["target"].parent, target.config.num_classes)
    if num_tokens is not None:
        target.config = dataclasses.replace(target.config, block_size=num_tokens)
    draft = load_gpt(files["draft"]) if "draft" in files else None
    eagle = load_eagle(files["eagle"]) if "eagle" in files else None
    if eagle and eagle.config.dim != target.config.dim and not eagle_must_fit:
        eagle = None
    smaller: list[GPT | Eagle] = [model for model in (draft, eagle) if model]
    for model in smaller:  # weights fit any resolution
        model.config = dataclasses.replace(model.config, block_size=target.config.block_size)
    is_text = target.config.caption_dim > 0
    encoder = TextEncoder(files["text_encoder"]) if is_text and "text_encoder" in files else None
    return VQModels(target, draft, eagle, load_tokenizer(files["tokenizer"]), classes, encoder)
