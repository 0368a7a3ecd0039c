"""Training data of models of continuous tokens: the latents of a data set, encoded once, and batches of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from pictures import Data
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import trange
from training import FIRST_SEED, is_first

from cspd.files import publishing

PART = 500  # images that are encoded at a time


class Latents(NamedTuple):
    """The posteriors of the tokens of images, float16, and labels int64 [N].

    Attributes:
        means: [N, L, d]. stds: standard deviations [N, L, d], or an S-VAE's concentrations [N, L, 1].
    """

    means: Tensor
    stds: Tensor
    labels: Tensor


def latents(
    encode: Callable[[Tensor], tuple[Tensor, Tensor]],
    data: Data,
    num: int,
    device: torch.device,
    cache: Path,
    settings: dict,
) -> Latents:
    """The latents of `num` training images, from the file `cache` or computed.

    The file is replaced if it was computed with other settings, plain values.

    Args:
        encode: images [B, 3, H, W] on the device -> means and stds [B, L, d], see `Latents`.
    """
    made_with = {name: str(value) for name, value in settings.items()}
    if cache.exists():
        with safe_open(cache, "pt") as file:
            if file.metadata() == made_with:
                return Latents(*(file.get_tensor(name) for name in Latents._fields))

    parts = []
    for start in trange(0, num, PART, desc="latents"):
        images, labels = data.draw(min(PART, num - start), FIRST_SEED + start, "train")
        with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16):
            encoded = encode(images.to(device))
        # unlike an inference tensor, a clone can be trained on
        means, stds = (tokens.half().cpu().contiguous().clone() for tokens in encoded)
        parts.append((means, stds, labels))
    whole = Latents(*(torch.cat(each) for each in zip(*parts)))
    if is_first():
        cache.parent.mkdir(parents=True, exist_ok=True)
        with publishing(cache) as temporary:
            save_file(whole._asdict(), temporary, metadata=made_with)
    return whole


class Guessing(nn.Module):
    """A model of continuous tokens, and a layer that predicts the means of its tokens from z, of `width` numbers."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.model = model
        self.guess = nn.Linear(width, model.config.token_dim)  # type: ignore[union-attr, arg-type, operator]


class Batch(NamedTuple):
    """The data of one step; all images have the same number of known tokens, as in MAR's training.

    Attributes:
        tokens: [B, L, d]. order: int64 [B, L]. num_known: tokens that are not masked. labels: int64 [B].
        generator: for all other random numbers of the step, on the CPU. means: of the tokens' posteriors, [B, L, d].
    """

    tokens: Tensor
    order: Tensor
    num_known: int
    labels: Tensor
    generator: torch.Generator
    means: Tensor


class Batches:
    """Maps the number of a batch to the batch, on a device."""

    def __init__(self, data: Latents, batch: int, mask_ratio_min: float, device: torch.device) -> None:
        self.data, self.batch, self.mask_ratio_min, self.device = data, batch, mask_ratio_min, device

    def __call__(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        index = torch.randint(len(self.data.labels), (self.batch,), generator=generator)
        means = self.data.means[index].float()
        tokens = means + self.data.stds[index].float() * torch.randn(means.shape, generator=generator)
        length = means.shape[1]
        order = torch.rand(self.batch, length, generator=generator).argsort(dim=1)
        uniform = torch.rand((), generator=generator).item()
        mask_ratio = 1 - (1 - self.mask_ratio_min) * uniform**1.5
        num_known = length - max(1, round(length * mask_ratio))
        labels = self.data.labels[index]
        tokens, order, labels, means = (each.to(self.device) for each in (tokens, order, labels, means))
        return Batch(tokens, order, num_known, labels, generator, means)
