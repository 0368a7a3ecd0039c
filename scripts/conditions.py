"""What a VQ target's images are made of, classes or texts by numbers, and what it takes in of them and of codes."""

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
    """What a drafter takes in of B images at once: N inputs, of a condition and then of all codes but the last.

    Conditions are padded at the left, so that the last L inputs predict the L codes. A target takes in the same, and
    the ends of rows where it has them.

    Attributes:
        bundled: [B, N, dim]. position: int64 [1, N], LlamaGen's. length: L.
        present: bool [B, N], which are no padding; None where all are.
    """

    bundled: Tensor
    position: Tensor
    length: int
    present: Tensor | None

    def sees(self) -> Tensor:
        """bool [B or 1, N, N]: which inputs each looks at, as `cspd.discrete.gpt.seen` has it."""
        return seen(torch.ones_like(self.position, dtype=torch.bool) if self.present is None else self.present)

    def mask(self) -> Tensor | None:
        """`sees` as models take it in, None where it is causal alone."""
        return None if self.present is None else self.sees().unsqueeze(1)

    def past(self, features: Tensor) -> Tensor:
        """The feature before each input [B, N, dim], of those of all inputs but the last; before the first it is 0."""
        before = F.pad(features, (0, 0, 1, 0))
        if self.present is None:
            return before
        follows = F.pad(self.present[:, :-1], (1, 0))
        return torch.where(follows.unsqueeze(-1), before, 0)


@torch.no_grad()
def features_of(target: Any, inputs: Inputs) -> Tensor:
    """The target's features [B, N, dim] after inputs: where a row begins, that of the end of the row before."""
    if target.config.row_end is None:
        return _through(target, inputs)
    whole, place = _with_row_ends(target, inputs)
    return _through(target, whole)[:, place]


def _through(target: Any, inputs: Inputs) -> Tensor:
    """Features after all that a target takes in, at its own positions."""
    position = inputs.position
    if target.config.text_places:
        position = (inputs.present.cumsum(1) - 1).clamp(min=0)
    return target.through(inputs.bundled, target.table(position), inputs.mask())


def _with_row_ends(target: Any, inputs: Inputs) -> tuple[Inputs, Tensor]:
    """Inputs with a row's end after each row's last code, and where in them those are that predict codes, int64 [N].

    A row's last code comes before its end, which predicts the next row's first code in its place.
    """
    position, side = inputs.position[0], target.config.grid
    num_ends = (inputs.length - 1) // side
    place = torch.arange(len(position), device=position.device) + position // side
    begins_row = (position % side == 0) & (position > 0)
    end = target.cls_embedding.weight[target.config.row_end]
    bundled = end.repeat(len(inputs.bundled), len(position) + num_ends, 1)
    bundled[:, place - begins_row.long()] = inputs.bundled
    present = F.pad(inputs.present, (0, num_ends), value=True)
    return inputs._replace(bundled=bundled, present=present), place


@torch.no_grad()
def inputs_of(runner: VQRunner, subjects: Sequence[Subject], numbers: Tensor, is_null: Tensor, codes: Tensor) -> Inputs:
    """What a target and its drafter take in for codes [B, L] of subjects by their numbers int64 [B], as in drafting.

    Args:
        is_null: bool [B], where guidance's null class or null caption is in the subject's place.
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
    bundled = torch.cat([condition, target.tok_embeddings(codes[:, :-1])], 1)
    position = torch.arange(bundled.shape[1], device=runner.device) - (condition.shape[1] - 1)
    if present is not None:
        present = F.pad(present, (0, length - 1), value=True)
    return Inputs(bundled, position.clamp(min=0).unsqueeze(0), length, present)


def _texts(runner: VQRunner, texts: list[str], is_null: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs [B, n, dim] of texts or their null captions, and which of them are no padding, bool [B, n]."""
    sent = runner.sent_texts([Request(prompt=text) for text in texts], num_branches=2)
    inputs = inputs_of_texts(runner.target, sent)
    each = torch.arange(len(texts), device=runner.device)
    row, most = 2 * each + is_null, inputs.shape[1]
    place = torch.arange(most, device=runner.device) - (most - sent.count[row]).unsqueeze(1)
    return inputs[row.unsqueeze(1), place.clamp(min=0)], place >= 0


def numbers_of(subjects: Sequence[Subject], held_out: bool) -> list[int]:
    """The numbers of those that are held out, or trained on: all classes are both, and each tenth text is held out.

    Raises ValueError where that leaves none.
    """
    numbers = range(len(subjects))
    if not are_texts(subjects):
        return [*numbers]
    if len(subjects) == 1:
        raise ValueError(
            f"--prompts has one text, and each {HELD_OUT_EVERY}th is held out from the first on: give more"
        )
    return [number for number in numbers if (number % HELD_OUT_EVERY == 0) == held_out]


def identity(subjects: Sequence[Subject]) -> dict[str, str]:
    """What tells texts from others; of classes the target tells all."""
    if not are_texts(subjects):
        return {}
    return {"texts": hashlib.sha256(json.dumps(subjects).encode()).hexdigest()}
