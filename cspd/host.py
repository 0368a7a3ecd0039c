"""What the engine and the methods' registry ask of a family of models. One implementation a family: MARHost, VQHost."""

from __future__ import annotations

import types
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor

from cspd.precision import Precision

if TYPE_CHECKING:
    from cspd.method import Method
    from cspd.sequence import Request
    from cspd.sequence import Sequence as Running


class Host(Protocol):
    """Owns the models of a family and, in slots allocated once, the tensors of every running sequence.

    Attributes:
        family: "MAR" or "VQ". seq_len: tokens of an image. num_classes: labels are 0 .. num_classes - 1.
        image_size: pixels of an image's side.
    """

    family: str
    seq_len: int
    num_classes: int
    image_size: int

    def check(self, request: Request, method: Method) -> Request:
        """The request with all defaults filled in. Raises ValueError on a bad setting or a model that is not there."""

    def resolve(self, request: Request, method: Method) -> Request:
        """A checked request with what was left to be decided, which may take a calibration. Raises ValueError."""

    def adopt(self, other: Any) -> None:
        """Takes over what another host of the same models has measured."""

    def admit(self, sequences: list[Running]) -> None:
        """Prepares the slots of sequences that are about to run."""

    def results(self, sequences: list[Running]) -> tuple[Tensor, Tensor]:
        """(tokens [B, L(, d)], heat [B, L]) of sequences."""

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 of tokens; None without a decoder."""

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Tokens by the sampler as the models' authors published it; settings of every method of the family."""

    def forget(self, key: Hashable) -> None:
        """Drops what methods keep of sequences of one key, none of which is left."""

    def clear(self) -> None:
        """Drops what methods keep of all sequences."""


class Models(Protocol):
    """The models of a family: a dataclass of modules. `MARModels`, `VQModels`."""

    family: ClassVar[str]

    def host(
        self,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType,
        *,
        compiled: bool = False,
        cache: Path | None = None,
    ) -> Host:
        """A host of these models, which are on the device already. Raises ValueError where it cannot be."""
