"""Models as the engine knows them: the protocol, names of classes, bundled folders, and how models are saved."""

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

# The names of a model's classes: a request may name its class, and what is shown names it too.


class ClassNames:
    """Names of the classes 0, 1, ... of a model.

    Args:
        texts: of each class its names with commas between them, the one to show first; perhaps a colon and what it is
            ("crane: large long-necked wading bird").
    """

    def __init__(self, texts: Several[str]) -> None:
        self.texts = tuple(texts)
        self._names = [[name.strip() for name in text.partition(": ")[0].split(",")] for text in self.texts]
        self._shown: dict[str, list[int]] = defaultdict(list)  # classes, by the names that are shown
        self._known: dict[str, list[int]] = defaultdict(list)  # classes, by all their names
        for label, (shown, *others) in enumerate(self._names):
            self._shown[_plain(shown)].append(label)
            for name in {_plain(each) for each in (shown, *others)}:
                self._known[name].append(label)

    def name_of(self, label: int | str | None) -> str:
        """The name to show of a class, its number where it has none; None is no class."""
        if not isinstance(label, int):
            return label or "no class"
        return self._names[label][0] if label < len(self._names) else str(label)

    def number_of(self, name: str) -> int:
        """The class of a name, whose case does not matter, nor whether it has spaces, hyphens or underscores.

        A name that is shown of one class alone is that class's, whoever else has it too.

        Raises:
            ValueError: no class has the name, or several have.
        """
        found = self._shown.get(_plain(name), []) or self._known.get(_plain(name), [])
        if len(found) == 1:
            return found[0]
        given = f"label={shortened(name)}"
        if found:
            several = "; ".join(f"{label} ({self.texts[label]})" for label in found)
            raise ValueError(f"{given} is the name of several classes: give the number of one: {several}")
        if not self.texts:
            raise ValueError(f"{given}: the classes of these models have no names: give a number")
        known = [name for names in self._names for name in names]
        raise ValueError(f"{given} is the name of no class: {choice(name, known)}")


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


@functools.cache
def imagenet() -> ClassNames:
    """Of ImageNet's 1,000 classes in their usual order: WordNet's names and definitions, as timm has them."""
    from timm.data import ImageNetInfo  # takes a quarter of a second to read

    return ClassNames(ImageNetInfo().label_descriptions(detailed=True))


NO_NAMES = ClassNames(())


class Models(Protocol):
    """The models of a family: a dataclass of modules, and of their classes' names. `MARModels`, `VQModels`."""

    family: ClassVar[str]

    @property
    def classes(self) -> ClassNames:
        """The names of the classes."""

    def check(self) -> None:
        """Raises ValueError where the models do not fit each other."""

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
        """A runner of these models, which fit and are on the device already. Raises ValueError on too little memory."""


def modules_of(models: Models) -> dict[str, nn.Module]:
    """The modules of a family's models, by name, without those that are not there."""
    parts = {field.name: getattr(models, field.name) for field in dataclasses.fields(models)}  # type: ignore[arg-type]
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


# A folder of models as `cspd.load` reads it: safetensors, and a description of what weights do not show.

DESCRIPTION = "cspd.json"
SHAPE = {"classes?": [str], "num_tokens?": int}


def save_models(models: Models, folder: str | os.PathLike) -> None:
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
                f"the {name} is of a size without a name: add it to mar/checkpoint.py or cspd/discrete/registry.py"
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


def placed(models: Any, device: torch.device) -> Any:
    """The models on a device, in eval mode and frozen."""
    modules = {name: module.to(device).eval().requires_grad_(False) for name, module in modules_of(models).items()}
    return dataclasses.replace(models, **modules)


def bundled() -> dict[str, Path]:
    """The bundled checkpoints by name; none where an installation has left them out."""
    root = next((root for root in BUNDLED_ROOTS if root.is_dir()), None)
    return {path.name: path for path in sorted(root.iterdir()) if path.is_dir()} if root else {}


def bundled_folder(name: str) -> Path:
    """The folder of a bundled checkpoint. Raises FileNotFoundError where an installation has none of this name."""
    folder = bundled().get(name)
    if folder is None:
        raise FileNotFoundError(f"{name}: this installation has no such bundled checkpoint: install cspd again")
    return folder
