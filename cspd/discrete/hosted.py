"""From folders of models of `transformers` to what a VQ engine takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from cspd.discrete.memory import cache_bytes, working_bytes
from cspd.discrete.models import VQModels, check_draft
from cspd.machine import check_fits, pick_device, room_told
from cspd.telling import telling
from cspd.vq.hosted.checkpoint import CONFIG, Folder, is_hosted, opened, read, read_prompts
from cspd.vq.hosted.eagle import HostedEagle, load_hosted_eagle
from mar.tensors import CheckpointError

SMALLER = "use a smaller model or another device"
HALF = ", or precision='bf16' (--precision bf16), which halves the weights"


def hosted_models(
    place: Path,
    draft: Path | None,
    eagle: Path | None,
    vae: Path | None,
    device: str | torch.device,
    precision: str,
    max_batch: int,
) -> VQModels:
    """The models of a folder, loaded straight to a device.

    The weights keep their own type, which is what they compute in; under "bf16" they become bfloat16.

    Args:
        place: the folder. draft: that of a smaller model of the same codes. eagle: the file of an EAGLE drafter. vae:
            that of what makes pixels, where `transformers` has nothing that does, if it does not lie in the folder.
        max_batch: slots that there must be room for.

    Raises:
        CheckpointError: as in `cspd.vq.hosted.checkpoint`. ValueError: too little memory, a library is missing, or
            `vae` is given to a model that makes pixels itself, or the draft does not fit.
    """
    device = pick_device(device)
    dtype = torch.bfloat16 if precision == "bf16" else None
    folders = [opened(_folder(each), dtype) for each in (place, draft) if each is not None]
    decoder = folders[0].decoder(vae)
    prefix = min(folder.config.prefix_length for folder in folders)
    folders = [replace(folder, config=replace(folder.config, prefix_length=prefix)) for folder in folders]
    for folder in folders[1:]:
        check_draft(folders[0].config, folder.config)
    drafter = load_hosted_eagle(eagle, folders[0].config, folders[0].dtype) if eagle else None
    _check_memory(folders, drafter, device, max_batch)
    prompts = read_prompts(folders[0])
    models = []
    for folder, own_decoder in zip(folders, (decoder, None)):
        with telling(f"loading {folder.path}{room_told(folder.num_bytes, device)}"):
            models.append(read(folder, device, own_decoder))
    (target, tokenizer), *others = models
    return VQModels(target, next((model for model, _ in others), None), drafter, tokenizer, text_encoder=prompts)


def _folder(place: Path) -> Path:
    if not is_hosted(place):
        raise CheckpointError(f"{place}: no folder of a model of transformers, as the target's is: it has no {CONFIG}")
    return place if place.is_dir() else place.parent


def _check_memory(folders: list[Folder], drafter: HostedEagle | None, device: torch.device, max_batch: int) -> None:
    """Raises ValueError where weights and caches will not fit."""
    target = folders[0].config
    caches = sum(cache_bytes(target, folder.config, folder.config.n_layer, folder.dtype) for folder in folders)
    weights = sum(folder.num_bytes for folder in folders)
    if drafter is not None:
        caches += cache_bytes(target, drafter.config, len(drafter.layers), drafter.own_type)
        weights += sum(parameter.nbytes for parameter in drafter.parameters())
    what = " with the models' weights and key-value caches"
    is_full = any(folder.dtype == torch.float32 for folder in folders)
    fix = SMALLER + HALF if is_full else SMALLER
    check_fits(caches + working_bytes(target), max_batch, what, fix, device, weights)
