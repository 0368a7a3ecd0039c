"""CLIP score: how well images show what their texts say, by a CLIP model of transformers, from a local folder.

Hessel et al., CLIPScore (2021), as torchmetrics and most papers scale it: 100 max(cos, 0) of an image's and its text's
features, the mean over images.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from cspd.evaluation.images import ImageList
from cspd.machine import pick_device
from cspd.pixels import to_pil
from cspd.pretrained import WEIGHTS, check_files, weight_files
from cspd.ran import file_fingerprint, together
from cspd.records import read_json
from cspd.telling import telling
from mar.tensors import CheckpointError

SOURCE = "openai/clip-vit-large-patch14 on the Hugging Face hub has them, see docs/text.md"
FILES = {  # what a folder must have, any of each
    "configuration": ("config.json",),
    "processor": ("preprocessor_config.json", "processor_config.json"),
    "tokenizer": ("tokenizer.json", "vocab.json"),
    "weights": WEIGHTS,
}
BATCH = 16  # images at once
NO_MODEL = f"there is no CLIP: give --clip FOLDER with its files; {SOURCE}"


class Clip:
    """A CLIP model and its processor, in float32.

    Args:
        folder: their files, as the hub has them.

    Raises:
        CheckpointError: the folder lacks a file, or has another model's. ValueError: transformers is missing.
    """

    def __init__(self, folder: Path, device: torch.device | str = "auto") -> None:
        self.folder, self.device = folder, pick_device(device)
        _check_files(folder)
        with telling(f"loading {folder}"):
            from transformers import CLIPModel, CLIPProcessor

            try:
                self.processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)
                model, report = CLIPModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
            except Exception as error:  # a damaged file can fail anywhere in the readers
                reason = " ".join(str(error).split())
                raise CheckpointError(f"{folder}: cannot be read as CLIP ({reason}): {SOURCE}") from error
        if report["missing_keys"]:
            missing = sorted(report["missing_keys"])[0]
            raise CheckpointError(f"{folder}: not the weights of CLIP: {missing} is missing: {SOURCE}")
        self.model = model.float().eval().to(self.device)
        self.most_tokens = model.config.text_config.max_position_embeddings

    @functools.cached_property
    def about(self) -> dict[str, str]:
        """The folder's "name", and the "fingerprint" of its weights, for reports."""
        fingerprint = together([file_fingerprint(file) for file in weight_files(self.folder)])
        return {"name": self.folder.resolve().name, "fingerprint": fingerprint}

    @torch.inference_mode()
    def scores(self, images: Dataset, texts: Sequence[str]) -> Tensor:
        """100 max(cos, 0), float32 [N] on the CPU, of images uint8 [3, H, W] and a text of each.

        A text of more tokens than CLIP takes (77) is cut off there, before its end's token.
        """
        found = []
        for start in range(0, len(texts), BATCH):
            part = range(start, min(start + BATCH, len(texts)))
            inputs = self.processor(
                images=[to_pil(images[i]) for i in part],
                text=[texts[i] for i in part],
                return_tensors="pt",
                padding=True,
                truncation=True,
                max_length=self.most_tokens,
            )
            outputs = self.model(**inputs.to(self.device))
            cosine = functional.cosine_similarity(outputs.image_embeds, outputs.text_embeds)
            found.append(100 * cosine.clamp(min=0).cpu())
        return torch.cat(found)


def _check_files(folder: Path) -> None:
    """Raises as `Clip` where a folder's files are not there, or of something else."""
    check_files(folder, FILES, "CLIP", SOURCE)
    file = folder / "config.json"
    try:
        config = read_json(file)
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON ({error}): {SOURCE}") from None
    if not isinstance(config, dict) or config.get("model_type") != "clip":
        raise CheckpointError(f"{file} is of another model than CLIP: {SOURCE}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--clip needs transformers, which is not installed: pip install 'cspd[text]'")


def check_clip(folder: Path, device: torch.device | str, of_texts: bool) -> None:
    """Raises what `Clip` raises, and reads a text and an image by it, before there are any.

    Raises ValueError where the images will be of classes, not `of_texts`.
    """
    if not of_texts:
        raise ValueError(f"--clip {folder} judges images of texts: give --prompts, or leave it out")
    Clip(folder, device).scores(ImageList([torch.zeros(3, 8, 8)]), ["a text"])


def mean_and_error(values: Tensor) -> tuple[float, float | None]:
    """The mean over images, and its standard error by their spread; None of one image."""
    error = values.double().std().item() / len(values) ** 0.5 if len(values) > 1 else None
    return values.double().mean().item(), error
