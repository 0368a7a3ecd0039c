"""A small classifier of coloured digits: judges the embedded models' samples, and gives features to compare them by."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cspd.loading import embedded_folder
from mar.checkpoint import fill
from mar.tensors import read_tensors

FEATURES, CLASSES = 128, 10


def _stage(in_channels: int, out_channels: int) -> nn.Sequential:
    conv = nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), nn.ReLU())


class DigitClassifier(nn.Module):
    """Images [B, 3, 32, 32] in -1..1 to logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.Sequential(_stage(3, 32), _stage(32, 64), _stage(64, FEATURES))
        self.out = nn.Linear(FEATURES, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        """The layer before the logits, [B, 128]."""
        return self.stages(images).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.features(images))


def load_classifier(checkpoint: str = "digits32") -> DigitClassifier:
    """The classifier that is embedded beside a checkpoint, on the CPU in float32."""
    path = embedded_folder(checkpoint) / "classifier.safetensors"
    model = DigitClassifier()
    fill(model, read_tensors(path), path)
    return model.eval().requires_grad_(False)


def accuracy(classifier: DigitClassifier, images: Tensor, labels: Tensor) -> float:
    """Share of images [B, 3, 32, 32] in 0..1 that are recognised as their labels [B]."""
    with torch.inference_mode():
        predicted = torch.cat([classifier(part * 2 - 1).argmax(1) for part in images.split(500)])
    return (predicted == labels).float().mean().item()
