"""What GPTs of texts and EAGLE drafters learn from: codes, of images or of samples, made once and kept on disk."""

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

PART = 256  # images in a file
ENCODED = 16  # images through the tokenizer at a time


class Codes(NamedTuple):
    """Of N images: codes int64 [N, L], labels int64 [N], the numbers of what they are of."""

    codes: Tensor
    labels: Tensor

    def at(self, index: Tensor | slice) -> Codes:
        return Codes(self.codes[index], self.labels[index])


Make = Callable[[range], Codes]  # of images by their numbers


def of_images(
    data: Data, split: str, labels: Sequence[int], tokenizer: VQModel, first_seed: int, device: torch.device
) -> Make:
    """Makes codes of images that are drawn from a split of data, of labels in turn, with seeds from `first_seed` on."""

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
    """Makes codes that the target samples, of subjects by their labels in turn, with seeds from `first_seed` on.

    Baseline sampling of many images at once: where throughput counts, drafting would only add work.
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


def kept(make: Make, num: int, folder: Path, made_with: dict, device: torch.device) -> Codes:
    """Codes of `num` images, of which `folder` has a file for every PART; those that are there are not made again.

    Under torchrun each process makes its share of the files, and reads them all.

    Args:
        made_with: what they depend on, plain values.

    Raises:
        ValueError: files in the folder were made with something else.
    """
    metadata = {name: str(value) for name, value in made_with.items()}
    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{first:08}.safetensors": range(first, min(first + PART, num)) for first in range(0, num, PART)}
    missing = [file for file, numbers in files.items() if not _is_there(file, len(numbers), metadata)]
    wait_for_all(device)  # before any is made, so that all processes miss the same ones
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
    """Whether a file has the codes of so many images. Raises ValueError where it was made with something else."""
    if not file.exists():
        return False
    with safe_open(file, "pt") as opened:
        if opened.metadata() != metadata:
            raise ValueError(f"{file} was made with {opened.metadata()}, not {metadata}: give another --codes")
        return opened.get_slice("labels").get_shape() == [num]
