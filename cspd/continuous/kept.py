"""What takes long to fit and is kept: in memory and on disk, found again by all that it depends on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from cspd.items import DIGEST, digest_of
from cspd.keeping import remember
from cspd.records import publishing

ABOUT = "cspd"  # in a file's metadata; of several entries the order would not be the same in every file


class Arrays(Protocol):
    """A dataclass of arrays that can tell whether they are right."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    def check(self, num_steps: int) -> None:
        """Raises ValueError, saying what is wrong, where they are none for T = `num_steps` denoising steps."""


Kind = TypeVar("Kind", bound=Arrays)


class Kept:
    """Arrays by their settings.

    Args:
        folders: where they are looked for, in this order; new ones are kept in the first that can be written to.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders
        self._known: dict[str, Any] = {}

    def get(self, kind: type[Kind], settings: Mapping, make: Callable[[], Kind]) -> Kind:
        """The arrays of some settings, which have T as "num_sampling_steps": remembered, read, or made and kept."""
        text = json.dumps(settings, sort_keys=True)
        if text not in self._known:
            remember(self._known, text, self._read(kind, text) or self._make(kind, text, make))
        return self._known[text]

    def folder_of(self, kind: type[Kind], settings: Mapping) -> Path | None:
        """The folder that keeps some settings' arrays; None if there are none on disk."""
        name = _file_name(kind, json.dumps(settings, sort_keys=True))
        return next((folder for folder in self.folders if (folder / name).is_file()), None)

    def _make(self, kind: type[Kind], text: str, make: Callable[[], Kind]) -> Kind:
        made = make()
        if not self._write(made, text):
            places = ", ".join(map(str, self.folders)) or "none given"
            what = kind.__name__.lower()
            warnings.warn(f"the {what} cannot be kept for the next run: no folder is writable ({places})", stacklevel=2)
        return made

    def _read(self, kind: type[Kind], text: str) -> Kind | None:
        settings = json.loads(text)
        for folder in self.folders:
            # absent or damaged: it is looked for elsewhere, or made again
            with contextlib.suppress(OSError, SafetensorError, LookupError, TypeError, ValueError, AttributeError):
                with safe_open(folder / _file_name(kind, text), "np") as file:
                    arrays = {field.name: file.get_tensor(field.name) for field in dataclasses.fields(kind)}
                    about = json.loads(file.metadata()[ABOUT])
                if about == _about(arrays, settings):
                    read = kind(**arrays)
                    read.check(settings["num_sampling_steps"])
                    return read
        return None

    def _write(self, made: Arrays, text: str) -> bool:
        """Writes to the first folder that can be written to; returns whether there was one."""
        for folder in self.folders:
            with contextlib.suppress(OSError, SafetensorError):
                folder.mkdir(parents=True, exist_ok=True)
                with publishing(folder / _file_name(type(made), text)) as temporary:
                    about = json.dumps(_about(vars(made), json.loads(text)))
                    save_file(vars(made), temporary, metadata={ABOUT: about})
                    temporary.chmod(0o644)
                return True
        return False


def _about(arrays: Mapping[str, np.ndarray], settings: Mapping) -> dict:
    """What a file says of itself: what it was made for, and a digest of that and of all in it."""
    return {"settings": settings, DIGEST: digest_of(arrays, settings)}


def _file_name(kind: type, text: str) -> str:
    return f"{kind.__name__.lower()}-{digest_of({}, json.loads(text))[:20]}.safetensors"
