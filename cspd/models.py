"""Models as the engine sees them: the protocol, the names of classes, saved and bundled folders."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections import defaultdict
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from cspd.device import Precision
from cspd.files import BUNDLED_ROOTS, explained, misfit, publishing, read_json, write_json
from cspd.graphs import Graphs
from cspd.method import ModelRunner
from cspd.terminal import choice, shortened
from mar.checkpoint import named_size
from mar.tensors import CheckpointError

# The names of a model's classes, in requests and in reports.


class ClassNames:
    """Names of the classes 0, 1, ... of a model.

    Args:
        texts: for each class its names, separated by commas, the name to show first; a colon and a description may
            follow ("crane: large long-necked wading bird").
    """

    def __init__(self, texts: Several[str]) -> None:
        self.texts = tuple(texts)
        self._names: list[list[str]] = []  # of each class
        # Two indices, since a shown name wins over another class's synonym. ImageNet's "crane" still means two classes,
        # a bird and a machine: their numbers tell them apart.
        self._by_shown_name: dict[str, list[int]] = defaultdict(list)
        self._by_any_name: dict[str, list[int]] = defaultdict(list)
        for label, text in enumerate(self.texts):
            names_text, _, _description = text.partition(": ")
            names = [name.strip() for name in names_text.split(",")]
            self._names.append(names)
            self._by_shown_name[_plain(names[0])].append(label)
            for name in set(map(_plain, names)):
                self._by_any_name[name].append(label)

    def name_of(self, label: int | str | None) -> str:
        """The name to show for a class, or its number if it has no name; "no class" for None."""
        if not isinstance(label, int):
            return label or "no class"
        if label >= len(self._names):
            return str(label)
        return self._names[label][0]

    def number_of(self, name: str) -> int:
        """The class with this name. Case is ignored; spaces, hyphens and underscores are equal.

        If only one class has it as the name to show, other classes with the name are ignored.

        Raises:
            ValueError: no class has the name, or several have it.
        """
        plain = _plain(name)
        found = self._by_shown_name.get(plain) or self._by_any_name.get(plain, [])
        if len(found) == 1:
            return found[0]
        given = f"label={shortened(name)}"
        if found:
            candidates = [f"{label} ({self.texts[label]})" for label in found]
            raise ValueError(f"{given} names several classes: give the number of one: {'; '.join(candidates)}")
        if not self.texts:
            raise ValueError(f"{given}: the classes of these models have no names: give a number")
        all_names = [name for names in self._names for name in names]
        raise ValueError(f"{given} is not the name of a class: {choice(name, all_names)}")


def _plain(name: str) -> str:
    # Command lines and file names have "golden_retriever" or "golden-retriever".
    words = name.casefold().replace("_", " ").replace("-", " ").split()
    return " ".join(words)


@functools.cache
def imagenet() -> ClassNames:
    """ImageNet's 1,000 classes in their usual order: WordNet's names and definitions, from timm."""
    from timm.data import ImageNetInfo  # takes a quarter of a second to read

    texts: list[str] = ImageNetInfo().label_descriptions(detailed=True)  # type: ignore[assignment]
    return ClassNames(texts)


NO_NAMES = ClassNames(())


class Models(Protocol):
    """The models of a family: a dataclass of modules and of class names, such as `MARModels` and `VQModels`."""

    family: ClassVar[str]

    @property
    def classes(self) -> ClassNames:
        """The names of the classes."""

    def check(self) -> None:
        """Raises ValueError if the models are incompatible with each other."""

    def runner(
        self,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType,
        *,
        compiled: bool = False,
        graphs: Graphs | None = None,
        cache: Path | None = None,
    ) -> ModelRunner:
        """A runner of these models, which are checked and on the device. Raises ValueError if memory is too small."""


def modules_of(models: Models) -> dict[str, nn.Module]:
    """The modules of a family's models by name, without models that are None."""
    return {name: part for name, part in vars(models).items() if isinstance(part, nn.Module)}


# A folder of models as `cspd.load` reads it: safetensors, and a description of facts that the weights do not show.

DESCRIPTION = "cspd.json"
SHAPE = {"classes?": [str], "num_tokens?": int}


def save_models(models: Models, folder: str | os.PathLike) -> None:
    """Writes models to a new or empty folder.

    Raises:
        ValueError: the folder is not empty, or a model has a size without a name, so that it could not be loaded.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder")
    modules = modules_of(models)
    if hasattr(modules["target"], "own_type"):  # only models of transformers have one
        raise ValueError("these are models of transformers: copy their folder, which cspd.load reads")
    for name, module in modules.items():
        if named_size(module) is None:
            raise ValueError(
                f"the {name} has a size without a name: add it to mar/checkpoint.py or cspd/discrete/registry.py"
            )
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    # Facts that `cspd.load` cannot read from the shapes of the weights.
    description: dict = {"classes": models.classes.texts} if models.classes.texts else {}
    if models.family == "VQ":
        target: Any = modules["target"]
        description["num_tokens"] = target.config.block_size
    write_json(folder / DESCRIPTION, description)
    for name, module in modules.items():
        weights = {}
        for key, tensor in module.state_dict().items():
            weights[key] = tensor.detach().cpu().contiguous()
        with publishing(folder / f"{name}.safetensors") as temporary:
            save_file(weights, temporary)


def described(folder: Path, num_classes: int) -> tuple[ClassNames, int | None]:
    """The class names in a folder's description, and the number of tokens, or None if the weights give it.

    Without a description, a thousand classes are ImageNet's and other classes have no names.

    Raises:
        CheckpointError: the description cannot be read, or has another number of classes.
    """
    path = folder / DESCRIPTION
    if not path.is_file():
        return (imagenet() if num_classes == 1000 else NO_NAMES), None
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}): remove it, or save the models again") from error
    remedy = "correct it, or save the models again"
    wrong = misfit(content, SHAPE)
    if wrong:
        raise CheckpointError(f"{path}: {wrong} is missing or has the wrong type: {remedy}")
    texts = content.get("classes", [])
    if texts and len(texts) != num_classes:
        raise CheckpointError(f"{path}: {len(texts)} names for {num_classes} classes: {remedy}")
    return ClassNames(texts), content.get("num_tokens")


def placed(models: Any, device: torch.device) -> Any:
    """The models on a device, in eval mode and frozen."""
    modules = modules_of(models)
    for name, module in modules.items():
        modules[name] = module.to(device).eval().requires_grad_(False)
    return dataclasses.replace(models, **modules)


# of the package cspd-models (checkpoints/setup.cfg); the others are in cspd
IN_MODELS = ("emoji64", "emoji64_sphere", "emoji64_text")
GET_MODELS = "is in the package cspd-models: pip install ./checkpoints in a clone of the repository"


def bundled() -> dict[str, Path]:
    """The bundled checkpoints by name; empty if the installation has none."""
    for root in BUNDLED_ROOTS:
        if root.is_dir():
            folders = [path for path in sorted(root.iterdir()) if path.is_dir()]
            # `pip install ./checkpoints` in a clone leaves others there
            return {
                folder.name: folder for folder in folders if not folder.match("*.egg-info") and folder.name != "build"
            }
    return {}


def bundled_folder(name: str) -> Path:
    """The folder of a bundled checkpoint. Raises FileNotFoundError if the installation has none of this name."""
    folder = bundled().get(name)
    if folder is None:
        if name in IN_MODELS:
            raise FileNotFoundError(f"{name} {GET_MODELS}")
        raise FileNotFoundError(f"{name}: this installation has no bundled checkpoint of this name: install cspd again")
    return folder
