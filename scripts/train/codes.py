"""Training data of text-to-image GPTs and EAGLE drafters: tokens of images or of samples, cached on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pictures import Data
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from training import rank_and_world, wait_for_all

from cspd import Engine, Request, VQModels
from cspd.discrete.gpt import VQModel
from cspd.discrete.runner import VQRunner
from cspd.evaluation.images import Subject, asking_for
from cspd.files import publishing

PART = 256  # images per file
ENCODED = 16  # images that are encoded at a time


class Codes(NamedTuple):
    """Tokens int64 [N, L] of N images, and labels int64 [N], the indices of their classes or prompts."""

    codes: Tensor
    labels: Tensor

    def at(self, index: Tensor | slice) -> Codes:
        return Codes(self.codes[index], self.labels[index])


Make = Callable[[range], Codes]  # from the indices of images to their tokens


def of_images(
    data: Data, split: str, labels: Sequence[int], tokenizer: VQModel, first_seed: int, device: torch.device
) -> Make:
    """Returns a function that encodes images of a split, cycling through labels, with seeds from `first_seed`."""

    def make(numbers: range) -> Codes:
        own = torch.tensor([labels[number % len(labels)] for number in numbers])
        images, _ = data.draw(len(numbers), first_seed + numbers.start, split, own)
        with torch.no_grad():
            codes = [tokenizer.encode(part.to(device)).cpu() for part in images.split(ENCODED)]
        return Codes(torch.cat(codes), own)

    return make


def of_target(
    runner: VQRunner, subjects: Sequence[Subject], labels: Sequence[int], cfg: float, max_batch: int, first_seed: int
) -> Make:
    """Returns a function that samples from the target, cycling through labels, with seeds from `first_seed`.

    Many images are sampled at once with `ar`: drafting lowers latency, but here throughput counts.
    """
    precision = "bf16" if runner.device.type == "cuda" else "fp32"
    models = VQModels(runner.target, text_encoder=runner.text_encoder)
    engine = Engine(models, max_batch=max_batch, device=runner.device, precision=precision)

    def make(numbers: range) -> Codes:
        own = [labels[number % len(labels)] for number in numbers]
        requests = [
            asking_for(Request(seed=first_seed + number, method="ar", cfg=cfg), subjects[label])
            for number, label in zip(numbers, own)
        ]
        outputs = engine.generate(requests)
        return Codes(torch.stack([output.tokens for output in outputs]), torch.tensor(own))

    return make


def cached(make: Make, num: int, folder: Path, made_with: dict, device: torch.device) -> Codes:
    """Tokens of `num` images, from files in `folder` with PART images each; missing files are computed and written.

    Under torchrun each process computes its part of the files, and reads all of them.

    Args:
        made_with: the settings that the tokens depend on, plain values.

    Raises:
        ValueError: files in the folder were computed with other settings.
    """
    metadata = {name: str(value) for name, value in made_with.items()}
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{first:08}.safetensors": range(first, min(first + PART, num)) for first in range(0, num, PART)}
    missing = [file for file, numbers in files.items() if not _is_there(file, len(numbers), metadata)]
    wait_for_all(device)  # all processes must see the same missing files
    rank, world = rank_and_world()
    to_make = sum(len(files[file]) for file in missing)
    with tqdm(total=num, initial=num - to_make, unit="image", desc=f"codes, {folder.name}", disable=rank > 0) as bar:
        for file in missing[rank::world]:
            codes = make(files[file])
            with publishing(file) as temporary:
                save_file(codes._asdict(), temporary, metadata=metadata)
            bar.update(min(len(files[file]) * world, num - bar.n))
    wait_for_all(device)
    parts = [load_file(file) for file in files]
    return Codes(*(torch.cat([part[name] for part in parts]) for name in Codes._fields))


def _is_there(file: Path, num: int, metadata: dict[str, str]) -> bool:
    """Whether a file has the tokens of `num` images. Raises ValueError if it was computed with other settings."""
    if not file.exists():
        return False
    with safe_open(file, "pt") as opened:
        if opened.metadata() != metadata:
            raise ValueError(f"{file} was computed with {opened.metadata()}, not {metadata}: pass another --codes")
        return opened.get_slice("labels").get_shape() == [num]
