"""The inputs of a VQ target and its EAGLE drafter in training, for classes or prompts by index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from pictures import HELD_OUT_EVERY
from torch import Tensor
from torch.nn import functional as F

from cspd import Request
from cspd.discrete.gpt import seen
from cspd.discrete.runner import VQRunner, inputs_of_texts
from cspd.evaluation.images import Subject, are_texts


class Inputs(NamedTuple):
    """N inputs of a drafter for each of B images: the condition, then all tokens but the last.

    Conditions are padded on the left, so that the last L inputs predict the L tokens. The target has the same inputs,
    and in addition the ends of rows if it has them.

    Attributes:
        embedded: [B, N, dim]. position: int64 [1, N], LlamaGen's. length: L.
        present: bool [B, N], False at padding; None if there is no padding.
    """

    embedded: Tensor
    position: Tensor
    length: int
    present: Tensor | None

    def sees(self) -> Tensor:
        """bool [B or 1, N, N]: the inputs that each one attends to, as in `cspd.discrete.gpt.seen`."""
        return seen(torch.ones_like(self.position, dtype=torch.bool) if self.present is None else self.present)

    def mask(self) -> Tensor | None:
        """`sees` in the form that models take; None if it is only causal."""
        return None if self.present is None else self.sees().unsqueeze(1)

    def past(self, features: Tensor) -> Tensor:
        """The feature before each input [B, N, dim], 0 before the first; features: of all inputs but the last."""
        before = F.pad(features, (0, 0, 1, 0))
        if self.present is None:
            return before
        follows = F.pad(self.present[:, :-1], (1, 0))
        return torch.where(follows.unsqueeze(-1), before, 0)


@torch.no_grad()
def features_of(target: Any, inputs: Inputs) -> Tensor:
    """The target's features [B, N, dim] after inputs; at the last token of a row, the feature after the row's end."""
    if target.config.row_end is None:
        return _through(target, inputs)
    whole, index = _with_row_ends(target, inputs)
    return _through(target, whole)[:, index]


def _through(target: Any, inputs: Inputs) -> Tensor:
    """Features after all inputs of a target, with its own positions."""
    position = inputs.position
    if target.config.text_places:
        position = (inputs.present.cumsum(1) - 1).clamp(min=0)
    return target.through(inputs.embedded, target.table(position), inputs.mask())


def _with_row_ends(target: Any, inputs: Inputs) -> tuple[Inputs, Tensor]:
    """Inputs with a row's end after each row, and the indices int64 [N] of those that predict the image's tokens.

    The end of a row, not the token before it, predicts the first token of the next row.
    """
    position, side = inputs.position[0], target.config.grid
    num_ends = (inputs.length - 1) // side
    index = torch.arange(len(position), device=position.device) + position // side
    begins_row = (position % side == 0) & (position > 0)
    end = target.cls_embedding.weight[target.config.row_end]
    embedded = end.repeat(len(inputs.embedded), len(position) + num_ends, 1)
    embedded[:, index - begins_row.long()] = inputs.embedded
    present = F.pad(inputs.present, (0, num_ends), value=True)
    return inputs._replace(embedded=embedded, present=present), index


@torch.no_grad()
def inputs_of(runner: VQRunner, subjects: Sequence[Subject], numbers: Tensor, is_null: Tensor, codes: Tensor) -> Inputs:
    """The inputs for tokens [B, L] of images, as in drafting.

    Args:
        subjects: classes or prompts. numbers: int64 [B], the index of each image's. is_null: bool [B], True for the
            unconditional branch in its place.
    """
    target, codes = runner.target, codes.to(runner.device)
    if not are_texts(subjects):
        classes = torch.where(is_null, runner.num_classes, numbers).to(runner.device)
        condition, present = target.cls_embedding(classes), None
    else:
        condition, present = _texts(
            runner, [subjects[number] for number in numbers.tolist()], is_null.to(runner.device)
        )
    length = codes.shape[1]
    embedded = torch.cat([condition, target.tok_embeddings(codes[:, :-1])], 1)
    position = torch.arange(embedded.shape[1], device=runner.device) - (condition.shape[1] - 1)
    if present is not None:
        present = F.pad(present, (0, length - 1), value=True)
    return Inputs(embedded, position.clamp(min=0).unsqueeze(0), length, present)


def _texts(runner: VQRunner, texts: list[str], is_null: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [B, n, dim] of prompts or of the unconditional branch, and which are not padding, bool [B, n]."""
    sent = runner.sent_texts([Request(prompt=text) for text in texts], num_branches=2)
    inputs = inputs_of_texts(runner.target, sent)
    each = torch.arange(len(texts), device=runner.device)
    row = 2 * each + is_null
    most = inputs.shape[1]
    index = torch.arange(most, device=runner.device) - (most - sent.length[row]).unsqueeze(1)  # negative at padding
    return inputs[row.unsqueeze(1), index.clamp(min=0)], index >= 0


def numbers_of(subjects: Sequence[Subject], held_out: bool) -> list[int]:
    """The indices of subjects that are held out, or trained on: every class is both, every tenth prompt is held out.

    Raises ValueError if there is only one prompt.
    """
    numbers = range(len(subjects))
    if not are_texts(subjects):
        return [*numbers]
    if len(subjects) == 1:
        raise ValueError(
            f"--prompts has one text, but every {HELD_OUT_EVERY}th, beginning with the first, is held out: pass more"
        )
    return [number for number in numbers if (number % HELD_OUT_EVERY == 0) == held_out]


def identity(subjects: Sequence[Subject]) -> dict[str, str]:
    """A digest of prompts, or nothing for classes, which the target defines."""
    if not are_texts(subjects):
        return {}
    return {"texts": hashlib.sha256(json.dumps(subjects).encode()).hexdigest()}
