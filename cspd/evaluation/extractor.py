"""The spaces' feature extractors, by their names in torch-fidelity."""

from __future__ import annotations

from torch import Tensor
from torch_fidelity import register_feature_extractor
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY

from cspd.evaluation.classifier import SPACES, load_classifier
from cspd.parsing import choice

INCEPTION = "inception"  # the space of Inception-v3, as torch-fidelity has it
PREFIX = "cspd-"  # of the names of ours


class ClassifierExtractor(FeatureExtractorBase):
    """A space's classifier: uint8 [B, 3, size, size] to "features" [B, D] and "logits" [B, classes]."""

    def __init__(self, name: str, features_list: list[str], **_: object) -> None:
        super().__init__(name, features_list)
        self.space = name.removeprefix(PREFIX)
        self.classifier = load_classifier(self.space)

    @staticmethod
    def get_provided_features_list() -> tuple[str, ...]:
        return "features", "logits"

    @staticmethod
    def get_default_feature_layer_for_metric(metric: str) -> str:
        return "logits" if metric == "isc" else "features"

    @staticmethod
    def can_be_compiled() -> bool:
        return False

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        size = self.classifier.config.size
        if images.shape[1:] != (3, size, size):
            height, width = images.shape[2:]
            known = f"the {self.space} classifier judges {size}x{size} images"
            raise ValueError(f"{known}, these are {width}x{height}: take another space")
        scaled = images.float() / 255 * 2 - 1
        features = self.classifier.features(scaled)
        values = {"features": features, "logits": self.classifier.out(features)}
        return tuple(values[name] for name in self.features_list)


def extractor_of(space: str) -> str:
    """The name that torch-fidelity knows a space's extractor by. Raises ValueError where there is no such space."""
    if space == INCEPTION:
        return "inception-v3-compat"
    if space not in SPACES:
        raise ValueError(f"space={space!r} is unknown: {choice(space, [*SPACES, INCEPTION])}")
    name = PREFIX + space
    if name not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor(name, ClassifierExtractor)
    return name
