"""What CLIP says of a comparison's images of texts: how well each row's show them, and how that differs from plain
sampling's of the same texts and seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from cspd.evaluation.clip import NO_MODEL, Clip, mean_and_error
from cspd.evaluation.images import ImageList
from cspd.evaluation.intervals import around
from cspd.evaluation.subjects import are_texts, in_turn

VALUES = ("clip_score", "clip_difference")


def judge_by_clip(
    report: dict,
    images: Sequence[np.ndarray],
    paired: Sequence[int | None],
    folder: Path | None,
    device: torch.device,
    progress: bool,
) -> None:
    """Adds each row's CLIP score, and its mean difference from plain sampling, to a report; with 95 % intervals.

    The difference has the smaller interval: what a text makes hard or easy is in both of a pair.

    Args:
        images: of each row, uint8 [N, H, W, 3]. paired: of each row, that of plain sampling by the same seeds, if any.
        folder: of the model; None leaves its values out.
    """
    for entry in report["rows"]:
        entry |= dict.fromkeys([*VALUES, *(f"{name}_ci95" for name in VALUES)])
    if not are_texts(report["labels"]):
        return
    if folder is None:
        report["missing"]["clip_score"] = NO_MODEL
        return
    model = Clip(folder, device)
    report["clip"] = model.about
    texts = in_turn(report["labels"], report["images"])
    scores: list[Tensor] = []
    rows = list(zip(report["rows"], images))
    for entry, made in tqdm(rows, desc="by CLIP", unit=" row", disable=not progress):
        pictures = torch.from_numpy(made).permute(0, 3, 1, 2)
        scores.append(model.scores(ImageList(pictures), texts))
        entry |= _with_interval("clip_score", scores[-1])
    for entry, own, base in zip(report["rows"], scores, paired):
        if base is not None:
            entry |= _with_interval("clip_difference", own - scores[base])


def _with_interval(name: str, values: Tensor) -> dict:
    """The mean of images' values, under a name in `VALUES`, and its interval; None of one image."""
    mean, error = mean_and_error(values)
    return {name: mean, f"{name}_ci95": None if error is None else around(name, mean, error)}
