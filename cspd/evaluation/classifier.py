"""Small classifiers of the embedded models' images: they judge samples, and give features to compare them by."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cspd.loading import embedded_folder
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
        """The layer before the logits, [B, widths[-1]]."""
        return self.stages(images).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.features(images))


def load_classifier(checkpoint: str = "digits32") -> Classifier:
    """The classifier that is embedded beside a checkpoint, on the CPU in float32."""
    path = embedded_folder(checkpoint) / "classifier.safetensors"
    model = Classifier(CLASSIFIERS[checkpoint])
    fill(model, read_tensors(path), path)
    return model.eval().requires_grad_(False)


def accuracy(classifier: Classifier, images: Tensor, labels: Tensor) -> float:
    """Share of images [B, 3, size, size] in 0..1 that are recognised as their labels [B]."""
    with torch.inference_mode():
        predicted = torch.cat([classifier(part * 2 - 1).argmax(1) for part in images.split(500)])
    return (predicted == labels).float().mean().item()
