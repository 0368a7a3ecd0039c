"""A folder of models as `cspd.load` reads it: safetensors, and a description of what weights do not show."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file

from cspd.classes import NO_NAMES, ClassNames, imagenet
from cspd.method import Models, modules_of
from cspd.records import explained, misfit, publishing, read_json, write_json
from mar.checkpoint import named_size
from mar.tensors import CheckpointError

DESCRIPTION = "cspd.json"
SHAPE = {"classes?": [str], "num_tokens?": int}


def save(models: Models, folder: str | os.PathLike) -> None:
    """Writes models to a folder that is new or empty.

    Raises:
        ValueError: it is not empty, or a model has a size that has no name, by which it could be found again. OSError.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder")
    modules = modules_of(models)
    if hasattr(modules["target"], "own_type"):
        raise ValueError("these are models of transformers, whose folder cspd.load reads: copy that")
    for name, module in modules.items():
        if named_size(module) is None:
            raise ValueError(
                f"the {name} is of a size without a name: add it to mar/registry.py or cspd/vq/registry.py"
            )
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    description: dict = {"classes": models.classes.texts} if models.classes.texts else {}
    if models.family == "VQ":
        description["num_tokens"] = modules["target"].config.block_size
    write_json(folder / DESCRIPTION, description)
    for name, module in modules.items():
        with publishing(folder / f"{name}.safetensors") as temporary:
            save_file({key: _own(tensor) for key, tensor in module.state_dict().items()}, temporary)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous()


def described(folder: Path, num_classes: int) -> tuple[ClassNames, int | None]:
    """The classes' names and the number of tokens that a folder's description gives, None where weights show it.

    Without a description a thousand classes are ImageNet's, and others have no names.

    Raises:
        CheckpointError: it is no description, or has another number of classes.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        return (imagenet() if num_classes == 1000 else NO_NAMES), None
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): remove it, or save the models again") from error
    wrong = misfit(content, SHAPE)
    texts = [] if wrong else content.get("classes", [])
    if wrong or len(texts) not in (0, num_classes):
        problem = f"{wrong} is not as it should be" if wrong else f"{len(texts)} names for {num_classes} classes"
        raise CheckpointError(f"{path}: {problem}: correct it, or save the models again")
    return ClassNames(texts), content.get("num_tokens")
