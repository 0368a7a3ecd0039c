"""Models as the engine sees them: the protocol, the names of classes, saved and bundled folders."""

from __future__ import annotations

import dataclasses
import functools
import os
import types
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Several
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from safetensors.torch import save_file
from torch import nn

from cspd.device import Precision
from cspd.files import BUNDLED_ROOTS, checked_json, explained, publishing, write_json
from cspd.graphs import Graphs
from cspd.method import ModelRunner
from cspd.terminal import choice, shortened
from mar.checkpoint import metadata_of
from mar.tensors import CheckpointError, printable

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
SHAPE = {"classes?": [str], "num_tokens?": int, "sizes?": {str: dict}}
KEYS = frozenset(key.removesuffix("?") for key in SHAPE)
REMEDY = "correct it, or save the models again"
PARTS = ("target", "draft", "eagle", "vae", "tokenizer")  # whose "sizes" it may give


def save_models(models: Models, folder: str | os.PathLike) -> None:
    """Writes models to a new or empty folder; each file has its model's sizes in its metadata.

    Raises:
        ValueError: the folder is not empty, or these are models of transformers.
        OSError: the folder cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder")
    modules = modules_of(models)
    if hasattr(modules["target"], "own_type"):  # only models of transformers have one
        raise ValueError("these are models of transformers: copy their folder, which cspd.load reads")
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / DESCRIPTION, {"classes": models.classes.texts})
    for name, module in modules.items():
        weights = {}
        for key, tensor in module.state_dict().items():
            weights[key] = tensor.detach().cpu().contiguous()
        with publishing(folder / f"{name}.safetensors") as temporary:
            save_file(weights, temporary, metadata_of(module))


@dataclasses.dataclass(frozen=True)
class Description:
    """What a folder says of its models.

    Attributes:
        path: its file. classes: names of the target's classes; None: it names none.
        sizes: by part of a checkpoint ("target", "vae"), sizes that its file does not show, such as num_heads or scale.
    """

    path: Path
    classes: ClassNames | None = None
    sizes: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def names(self, num_classes: int) -> ClassNames:
        """The names of a target's classes. If the folder names none, a thousand classes are ImageNet's.

        Raises CheckpointError if it names another number of classes.
        """
        if self.classes is None:
            return imagenet() if num_classes == 1000 else NO_NAMES
        if self.classes.texts and len(self.classes.texts) != num_classes:
            raise CheckpointError(f"{self.path}: {len(self.classes.texts)} names for {num_classes} classes: {REMEDY}")
        return self.classes


def described(folder: Path) -> Description:
    """A folder's description; an empty one if it has none. Raises CheckpointError if it cannot be read."""
    path = folder / DESCRIPTION
    if not path.is_file():
        return Description(path)
    content = checked_json(path, SHAPE, REMEDY, CheckpointError)
    unknown = [*(content.keys() - KEYS), *(content.get("sizes", {}).keys() - {*PARTS})]
    if unknown:
        known = f"{', '.join(sorted(KEYS))}, and sizes of {', '.join(PARTS)}"
        raise CheckpointError(f"{path}: has the unknown key {min(unknown)!r}; known are {known}: {REMEDY}")
    texts = content.get("classes", [])
    for text in texts:
        if printable(text) != text:
            raise CheckpointError(f"{path}: the class {text!r} has control characters: {REMEDY}")
    sizes = content.get("sizes", {})
    if "num_tokens" in content:  # written by older versions
        sizes = {**sizes, "target": {"block_size": content["num_tokens"], **sizes.get("target", {})}}
    return Description(path, ClassNames(texts) if "classes" in content else None, sizes)


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
