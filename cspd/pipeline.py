"""A pipeline with the arguments of diffusers' `DiTPipeline` and `StableDiffusionPipeline`. It needs no diffusers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cspd.checkpoints import load
from cspd.engine import Engine
from cspd.request import Label, Output, is_several

SEEDS = 2**63 - 1  # seeds are drawn below it
PRECISIONS = {None: "fp32", torch.float32: "fp32", torch.bfloat16: "bf16"}


def _arrays(outputs: list[Output]) -> np.ndarray:
    return _tensors(outputs).permute(0, 2, 3, 1).numpy()


def _tensors(outputs: list[Output]) -> Tensor:
    return torch.stack([output.image for output in outputs if output.image is not None])


def _pictures(outputs: list[Output]) -> list[Image.Image]:
    return [output.pil() for output in outputs]


FORMS: dict[str, Callable[[list[Output]], Any]] = {"pil": _pictures, "pt": _tensors, "np": _arrays}


@dataclass(frozen=True)
class PipelineOutput:
    """The result of `CspdPipeline`.

    Attributes:
        images: PIL images for output_type "pil", float32 [B, 3, H, W] for "pt", float32 [B, H, W, 3] for "np", in 0..1.
        outputs: the engine's outputs, with the settings and the cost of each image.
    """

    images: Any
    outputs: list[Output]


class CspdPipeline:
    """Generates images with an engine, by the names that diffusers has for its arguments.

    >>> pipe = CspdPipeline.from_pretrained("digits32")
    >>> image = pipe(class_labels=[3], guidance_scale=3.0, generator=torch.Generator().manual_seed(0)).images[0]
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._shows_bar = True

    @classmethod
    def from_pretrained(cls, checkpoint: str, *, torch_dtype: torch.dtype | None = None, **more: Any) -> CspdPipeline:
        """A pipeline with the models of a checkpoint.

        Args:
            checkpoint, more: as in `cspd.load`. By default on a GPU if there is one.
            torch_dtype: torch.float32 or torch.bfloat16, which is `precision="bf16"`.

        Raises:
            ValueError: another torch_dtype, or as `cspd.load`.
        """
        if torch_dtype not in PRECISIONS:
            raise ValueError(f"torch_dtype={torch_dtype} is invalid: give torch.float32 or torch.bfloat16")
        if torch_dtype is not None:
            more["precision"] = PRECISIONS[torch_dtype]
        return cls(load(checkpoint, **more))

    @property
    def device(self) -> torch.device:
        """The device of the models."""
        return self.engine.device

    def to(self, device: str | torch.device) -> CspdPipeline:
        """Moves the models to a device, in place, and returns the pipeline. Raises ValueError as `Engine`."""
        self.engine = self.engine.moved_to(device)
        return self

    def set_progress_bar_config(self, disable: bool = False) -> None:
        """Shows or hides the progress bar of the images."""
        self._shows_bar = not disable

    def __call__(
        self,
        class_labels: Label | Iterable[Label] = None,
        prompt: str | Iterable[str] | None = None,
        *,
        negative_prompt: str | None = None,
        guidance_scale: float | None = None,
        num_inference_steps: int | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | list[torch.Generator] | None = None,
        seed: int | Iterable[int] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        **settings: Any,
    ) -> PipelineOutput | tuple[Any]:
        """Images of classes or prompts.

        Args:
            class_labels: classes by number or name, one or many; None: unconditional.
            prompt: one or many, for text-to-image models.
            negative_prompt: the text that guidance steers away from.
            guidance_scale: our `cfg`; by default as the models' authors published.
            num_inference_steps: MAR's denoising steps, our `num_sampling_steps`, by default as published; the
                autoregressive iterations are `num_iter`.
            num_images_per_prompt: images of each class or prompt.
            generator: one for all images, or a list of one for each, from which their seeds are drawn; by default
                torch's global generator.
            seed: our seed in its place, of the first image or of each, see `Engine.sample`.
            output_type: "pil", "pt" or "np", see `PipelineOutput`.
            return_dict: False: returns (images,).
            settings: others of `cspd.Request`, such as `method` and `num_iter`.

        Raises:
            ValueError: a value is invalid.
            TypeError: an unknown setting.
            FloatingPointError: as in `Engine.generate`.
        """
        if output_type not in FORMS:
            raise ValueError(f"output_type={output_type!r} is invalid: choose one of {', '.join(FORMS)}")
        if generator is not None and seed is not None:
            raise ValueError("generator and seed are both given: give one of them")
        asked: Any = class_labels if prompt is None else prompt
        single = list(asked) if is_several(asked) else [asked]
        repeated = [each for each in single for _ in range(num_images_per_prompt)]
        outputs = self.engine.sample(
            repeated if prompt is None else class_labels,
            prompts=None if prompt is None else repeated,
            seed=_seeds(generator, len(repeated)) if seed is None else seed,
            negative_prompt=negative_prompt,
            cfg=guidance_scale,
            num_sampling_steps=num_inference_steps,
            progress=self._shows_bar,
            **settings,
        )
        images = FORMS[output_type](outputs)
        return PipelineOutput(images, outputs) if return_dict else (images,)


def _seeds(generator: torch.Generator | list[torch.Generator] | None, num: int) -> list[int]:
    """Seeds of `num` images, drawn from one generator or from one for each image. Raises ValueError."""
    generators = generator if isinstance(generator, list) else [generator] * num
    if len(generators) != num:
        raise ValueError(f"generator has {len(generators)} generators for {num} images: give one for each, or one")
    seeds = []
    for each in generators:
        device = "cpu" if each is None else each.device
        seeds.append(int(torch.randint(SEEDS, (), generator=each, device=device)))
    return seeds
