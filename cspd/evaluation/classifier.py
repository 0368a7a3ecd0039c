"""Small classifiers of the embedded models' images: they judge samples, and give features to compare them by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from cspd.finding import embedded, embedded_folder
from mar.checkpoint import fill
from mar.tensors import read_tensors

FEATURES, CLASSES = 128, 10


@dataclass(frozen=True)
class ClassifierConfig:
    """Sizes of a classifier.

    Attributes:
        size: pixels per side of its images. widths: channels of each stage, which halves the resolution.
        convolutions: of a stage. classes: how many.
    """

    size: int = 32
    widths: tuple[int, ...] = (32, 64, FEATURES)
    convolutions: int = 1
    classes: int = CLASSES


CLASSIFIERS = {
    "digits32": ClassifierConfig(),
    "emoji64": ClassifierConfig(size=64, widths=(32, 48, 96, FEATURES), convolutions=2),
}


@dataclass(frozen=True)
class Space:
    """A space of features that embedded models' images are judged in: those of a classifier that knows their classes.

    Attributes:
        sizes: of the classifier; they have the images' size and the number of classes.
        checkpoints: the embedded ones whose images it judges. The folder of the first has its files.
    """

    sizes: ClassifierConfig
    checkpoints: tuple[str, ...]

    @property
    def weights(self) -> Path:
        """The classifier's file. Raises FileNotFoundError where an installation has left it out."""
        return embedded_folder(self.checkpoints[0]) / "classifier.safetensors"

    @property
    def reference(self) -> Path:
        """The file of what images are compared with by default, see `cspd.evaluation.reference`."""
        return embedded_folder(self.checkpoints[0]) / "reference.npz"


SPACES = {  # by name
    "digits": Space(CLASSIFIERS["digits32"], ("digits32", "digits32_vq")),
    "emoji": Space(CLASSIFIERS["emoji64"], ("emoji64", "emoji64_text")),
}


def space_of(target: Path) -> str | None:
    """The name of the space that judges the images of a target's file; None if the target is not an embedded one."""
    own = {name for name, folder in embedded().items() if folder.resolve() == target.parent.resolve()}
    return next((name for name, space in SPACES.items() if own & {*space.checkpoints}), None)


def _layer(in_channels: int, out_channels: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]


def _stage(in_channels: int, out_channels: int, convolutions: int) -> nn.Sequential:
    layers = _layer(in_channels, out_channels, stride=2)
    for _ in range(convolutions - 1):
        layers += _layer(out_channels, out_channels, stride=1)
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    """Images [B, 3, size, size] in -1..1 to logits [B, classes]."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        widths = zip((3, *config.widths), config.widths)
        self.stages = nn.Sequential(*(_stage(a, b, config.convolutions) for a, b in widths))
        self.out = nn.Linear(config.widths[-1], config.classes)

    def features(self, images: Tensor) -> Tensor:
        """The layer before the logits, [B, widths[-1]]. Raises ValueError for images of another size."""
        if images.shape[-2:] != (self.config.size, self.config.size):
            height, width = images.shape[-2:]
            side = self.config.size
            raise ValueError(f"this classifier judges images of {side}x{side}, these are {width}x{height}")
        return self.stages(images).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.features(images))


def load_classifier(space: str) -> Classifier:
    """The classifier of a space, on the CPU in float32. Raises FileNotFoundError, CheckpointError."""
    return read_classifier(SPACES[space].weights, SPACES[space].sizes)


def read_classifier(path: Path, sizes: ClassifierConfig) -> Classifier:
    """A classifier of a file, on the CPU in float32. Raises CheckpointError."""
    model = Classifier(sizes)
    fill(model, read_tensors(path), path)
    return model.eval().requires_grad_(False)


def accuracy(classifier: Classifier, images: Tensor, labels: Tensor) -> float:
    """Share of images [B, 3, size, size] in 0..1 that are recognised as their labels [B]."""
    with torch.inference_mode():
        predicted = torch.cat([classifier(part * 2 - 1).argmax(1) for part in images.split(500)])
    return (predicted == labels).float().mean().item()
