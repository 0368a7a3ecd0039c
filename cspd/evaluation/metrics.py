"""Metrics of images: the networks that give their features, references, and the panel of scores."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from torch_fidelity import register_feature_extractor
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3, FeatureExtractorInceptionV3
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY
from torch_fidelity.utils import create_feature_extractor

from cspd.device import pick_device
from cspd.evaluation.arrays import read_arrays
from cspd.evaluation.images import (
    ImageFolder,
    ImageList,
    Images,
    NpzImages,
    Watched,
    images_in,
    read_image,
)
from cspd.evaluation.scores import (
    Score,
    around,
    discrepancy,
    frechet,
    from_influence,
    gaussian,
    inception_score,
    manifold,
    parts_of,
    polynomial,
    statistics_of,
    wilson,
)
from cspd.files import (
    WEIGHTS,
    check_files,
    check_loaded,
    checked_json,
    digest_of,
    read_item,
    user_cache,
    weight_files,
    write_item,
)
from cspd.models import bundled, bundled_folder
from cspd.origin import file_fingerprint, together
from cspd.pixels import to_pil
from cspd.terminal import choice, install, progress_bar, telling
from mar.checkpoint import fill
from mar.tensors import CheckpointError, read_tensors, reason_of

# CLIP score: how well images match their prompts, by a CLIP model of transformers, from a local folder.
#
# Hessel et al., CLIPScore (2021), scaled as in torchmetrics and most papers: the mean over images of 100 max(cos, 0),
# where cos is between the features of an image and its prompt.

SOURCE = "openai/clip-vit-large-patch14 on the Hugging Face Hub has them, see docs/text.md"
FILES = {  # a folder must have one of each
    "configuration": ("config.json",),
    "processor": ("preprocessor_config.json", "processor_config.json"),
    "tokenizer": ("tokenizer.json", "vocab.json"),
    "weights": WEIGHTS,
}
BATCH = 16  # images at once
NO_MODEL = f"no CLIP model was given: give --clip FOLDER with its files; {SOURCE}"


class Clip:
    """A CLIP model and its processor, in float32.

    Args:
        folder: the folder of their files, as on the Hugging Face Hub.

    Raises:
        CheckpointError: the folder lacks a file, or has another model. ValueError: transformers is not installed.
    """

    def __init__(self, folder: Path, device: torch.device | str = "auto") -> None:
        self.folder, self.device = folder, pick_device(device)
        _check_files(folder)
        with telling(f"loading {folder}"):
            from transformers import CLIPModel, CLIPProcessor

            try:
                local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
                self.processor = CLIPProcessor.from_pretrained(folder, **local)
                loaded: Any = CLIPModel.from_pretrained(folder, output_loading_info=True, **local)
                model, report = loaded
            except Exception as error:  # a damaged file can fail anywhere in the readers
                raise CheckpointError(f"{folder}: cannot be read as CLIP ({reason_of(error)}): {SOURCE}") from error
        if report["missing_keys"]:
            missing = min(report["missing_keys"])
            raise CheckpointError(f"{folder}: the weights lack CLIP's {missing}: {SOURCE}")
        check_loaded(model, report, folder, SOURCE)
        self.model = model.float().eval().to(self.device)
        self.most_tokens = model.config.text_config.max_position_embeddings

    @functools.cached_property
    def about(self) -> dict[str, str]:
        """The folder's "name", and the "fingerprint" of its weights, for reports."""
        fingerprint = together([file_fingerprint(file) for file in weight_files(self.folder)])
        return {"name": self.folder.resolve().name, "fingerprint": fingerprint}

    @torch.inference_mode()
    def scores(self, images: Images, texts: Sequence[str]) -> Tensor:
        """100 max(cos, 0), float32 [N] on the CPU, of images uint8 [3, H, W] and a text for each.

        A text is truncated to CLIP's maximum of tokens (77).
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

    @torch.inference_mode()
    def features(self, images: Images) -> Tensor:
        """The projected features, float32 [N, D] on the CPU, of images uint8 [3, H, W]."""
        found = []
        for start in range(0, len(images), BATCH):
            part = [to_pil(images[i]) for i in range(start, min(start + BATCH, len(images)))]
            pixels = self.processor(images=part, return_tensors="pt")["pixel_values"].to(self.device)
            pooled = self.model.vision_model(pixel_values=pixels).pooler_output
            found.append(self.model.visual_projection(pooled).cpu())
        return torch.cat(found)


def _check_files(folder: Path) -> None:
    """Raises as `Clip` if a folder lacks files, or has those of another model."""
    check_files(folder, FILES, "CLIP", SOURCE)
    file = folder / "config.json"
    if checked_json(file, {"model_type": str}, SOURCE, CheckpointError)["model_type"] != "clip":
        raise CheckpointError(f"{file} belongs to another model than CLIP: {SOURCE}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--clip needs transformers, which is not installed: {install('text')}")


def check_clip(folder: Path, device: torch.device | str, of_texts: bool) -> None:
    """Tries a CLIP model on a prompt and an image, before sampling. Raises as `Clip`.

    Raises ValueError if the images will be class-conditional, not `of_texts`.
    """
    if not of_texts:
        raise ValueError(f"--clip {folder} compares images with prompts: give --prompts, or leave --clip out")
    image = ImageList([torch.zeros(3, 8, 8)])
    Clip(folder, device).scores(image, ["a text"])


# FD-DINOv2: the Frechet distance of DINOv2's features (Stein et al., arXiv 2306.04675), from a local folder.

DINOV2_SOURCE = "facebook/dinov2-large on the Hugging Face Hub has them"
DINOV2_FILES = {"configuration": ("config.json",), "weights": WEIGHTS}


def dinov2_features(images: Images, folder: Path, device: torch.device | str = "auto") -> Tensor:
    """The class tokens of a DINOv2 model, float32 [N, D] on the CPU, of images as torch-fidelity scales them.

    Raises:
        CheckpointError: the folder lacks a file, or has another model. ValueError: a library is not installed.
    """
    check_files(folder, DINOV2_FILES, "DINOv2", DINOV2_SOURCE)
    file = folder / "config.json"
    if checked_json(file, {"model_type": str}, DINOV2_SOURCE, CheckpointError)["model_type"] != "dinov2":
        raise CheckpointError(f"{file} belongs to another model than DINOv2: {DINOV2_SOURCE}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"--dinov2 needs transformers, which is not installed: {install('text')}")
    from torch_fidelity.feature_extractor_dinov2 import FeatureExtractorDinoV2
    from transformers import Dinov2Model

    device = pick_device(device)
    try:
        model = Dinov2Model.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        model = model.float().eval().to(device)
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise CheckpointError(f"{folder}: cannot be read as DINOv2 ({reason_of(error)}): {DINOV2_SOURCE}") from error
    # torch-fidelity's own constructor would download the weights
    extractor = FeatureExtractorDinoV2.__new__(FeatureExtractorDinoV2)
    FeatureExtractorBase.__init__(extractor, "dinov2-vit-l-14", ["dinov2"])
    extractor.feature_extractor_internal_dtype = torch.float32
    extractor.model = _Pooled(model)
    weights = together([file_fingerprint(file) for file in weight_files(folder)])
    (found,) = run_over(images, extractor, device, {"space": "dinov2", "weights": weights})
    return found


class _Pooled(nn.Module):
    """Pixels [B, 3, H, W] to the pooled output [B, D] of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).pooler_output


def mean_and_error(values: Tensor) -> tuple[float, float | None]:
    """The mean over images, and its standard error, None for one image."""
    values = values.double()
    error = values.std().item() / len(values) ** 0.5 if len(values) > 1 else None
    return values.mean().item(), error


# Small classifiers for the bundled models' images. They recognise classes, and give the features of metrics.


@dataclass(frozen=True)
class ClassifierConfig:
    """Sizes of a classifier.

    Attributes:
        size: pixels per side of its images. widths: channels of each stage; a stage halves the resolution.
        convolutions: in a stage. classes: their number.
    """

    size: int = 32
    widths: tuple[int, ...] = (32, 64, 128)
    convolutions: int = 1
    classes: int = 10


CLASSIFIERS = {
    "digits32": ClassifierConfig(),
    "emoji64": ClassifierConfig(size=64, widths=(32, 48, 96, 128), convolutions=2),
}


@dataclass(frozen=True)
class Space:
    """A feature space for the images of bundled models: the features of a classifier of their classes.

    Attributes:
        sizes: of the classifier, with the images' size and the number of classes.
        checkpoints: names of the bundled checkpoints that generate such images. The folder of the first one has the
            space's files.
    """

    sizes: ClassifierConfig
    checkpoints: tuple[str, ...]

    @property
    def weights(self) -> Path:
        """The file of the classifier. Raises FileNotFoundError if the installation lacks it."""
        return bundled_folder(self.checkpoints[0]) / "classifier.safetensors"

    @property
    def reference(self) -> Path:
        """The file of the default reference."""
        return bundled_folder(self.checkpoints[0]) / "reference.npz"


SPACES = {  # by name
    "digits": Space(CLASSIFIERS["digits32"], ("digits32", "digits32_vq")),
    "emoji": Space(CLASSIFIERS["emoji64"], ("emoji64", "emoji64_sphere", "emoji64_text")),
}


def space_of(target: Path) -> str | None:
    """The name of the space for the images of a target's file, or None if it is not of a bundled checkpoint."""
    folder = target.parent.resolve()
    own = [checkpoint for checkpoint, path in bundled().items() if path.resolve() == folder]
    for name, space in SPACES.items():
        if set(own) & set(space.checkpoints):
            return name
    return None


def space_of_files(images: ImageFolder | NpzImages) -> str | None:
    """The name of the space for images whose files name the bundled checkpoint that made them, or None."""
    for name, space in SPACES.items():
        if images.checkpoint in space.checkpoints:
            return name
    return None


def titled(title: str, space: str | None) -> str:
    """A score's title with the name of the space, "FID (digits)", unless that is Inception's, which papers mean."""
    return title if space in (None, INCEPTION) else f"{title} ({space})"


def _stage(in_channels: int, out_channels: int, convolutions: int) -> nn.Sequential:
    """Convolutions with batch normalisation; the first one halves the resolution."""
    layers: list[nn.Module] = []
    channels, stride = in_channels, 2
    for _ in range(convolutions):
        layers.append(nn.Conv2d(channels, out_channels, 3, stride, padding=1, bias=False))
        layers.append(nn.BatchNorm2d(out_channels))
        layers.append(nn.ReLU())
        channels, stride = out_channels, 1
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    """Images [B, 3, size, size] in -1..1 to logits [B, classes]."""

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__()
        self.config = config
        stages = []
        for in_channels, out_channels in zip((3, *config.widths), config.widths):
            stages.append(_stage(in_channels, out_channels, config.convolutions))
        self.stages = nn.Sequential(*stages)
        self.out = nn.Linear(config.widths[-1], config.classes)

    def features(self, images: Tensor) -> Tensor:
        """The layer before the logits, [B, widths[-1]]. Raises ValueError for images of another size."""
        height, width = images.shape[-2:]
        side = self.config.size
        if height != side or width != side:
            raise ValueError(f"images of {width}x{height} pixels: this feature space is for {side}x{side} only")
        return self.stages(images).mean(dim=(2, 3))

    def forward(self, images: Tensor) -> Tensor:
        return self.out(self.features(images))


def load_classifier(space: str) -> Classifier:
    """The classifier of a space, on the CPU in float32. Raises FileNotFoundError, or CheckpointError as `fill`."""
    return read_classifier(SPACES[space].weights, SPACES[space].sizes)


def read_classifier(path: Path, sizes: ClassifierConfig) -> Classifier:
    """The classifier in a file, on the CPU in float32. Raises CheckpointError."""
    model = Classifier(sizes)
    fill(model, read_tensors(path), path)
    return model.eval().requires_grad_(False)


def accuracy(classifier: Classifier, images: Tensor, labels: Tensor) -> float:
    """The fraction of images [B, 3, size, size] in 0..1 that are recognised as their labels [B]."""
    predicted = []
    with torch.inference_mode():
        for part in images.split(500):
            logits = classifier(part * 2 - 1)
            predicted.append(logits.argmax(1))
    return (torch.cat(predicted) == labels).float().mean().item()


# The feature extractors of spaces, under the names that torch-fidelity knows them by.

INCEPTION = "inception"  # the space of torch-fidelity's Inception-v3
PREFIX = "cspd-"  # of the names of our extractors


class ClassifierExtractor(FeatureExtractorBase):
    """A space's classifier: uint8 [B, 3, size, size] to "features" [B, D] and "logits" [B, classes]."""

    def __init__(self, name: str, features_list: list[str], **_: object) -> None:
        super().__init__(name, features_list)
        self.classifier = load_classifier(name.removeprefix(PREFIX))

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
        scaled = images.float() / 255 * 2 - 1
        features = self.classifier.features(scaled)
        values = {"features": features, "logits": self.classifier.out(features)}
        return tuple(values[name] for name in self.features_list)


def extractor_of(space: str) -> str:
    """The name of a space's extractor in torch-fidelity. Raises ValueError for an unknown space."""
    if space not in (*SPACES, INCEPTION):
        raise ValueError(f"space={space!r} is unknown: {choice(space, [*SPACES, INCEPTION])}")
    name = PREFIX + space
    if name not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor(name, InceptionExtractor if space == INCEPTION else ClassifierExtractor)
    return name


class InceptionExtractor(FeatureExtractorInceptionV3):
    """torch-fidelity's Inception-v3 with one more output, "spatial" [B, 2023], the last: ADM's features of sFID.

    They are the first 7 channels of the 1x1 branch of the seventh mixed block, 17x17 positions, in ADM's order.
    """

    def __init__(self, name: str, features_list: list[str], **how: object) -> None:
        super().__init__(name, [layer for layer in features_list if layer != "spatial"], **how)
        self._spatial = torch.empty(0)
        self.Mixed_6d.branch1x1.register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: object, output: Tensor) -> None:
        self._spatial = output[:, :7].permute(0, 2, 3, 1).flatten(1).float()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return *super().forward(images), self._spatial


# The reference that images are compared with: statistics of features, images, or both.

ROUNDING = 1e-4  # of a covariance that was computed in float32, relative to its largest values


@dataclass(frozen=True)
class Reference:
    """The reference that images are compared with.

    Attributes:
        name: of the file or folder.
        fingerprint: its sha256; for a folder, of all names and contents.
        statistics: "mu" [D] and "sigma" [D, D] of features, float64; None: to be computed from the images.
        images: for KID, precision and others; None: the reference has statistics only.
        spatial: "mu" and "sigma" of ADM's spatial features, for sFID.
    """

    name: str
    fingerprint: str
    statistics: dict[str, np.ndarray] | None = None
    images: Images | None = None
    spatial: dict[str, np.ndarray] | None = None


def reference_for(space: str, given: Path | None) -> Reference | None:
    """The given reference, or the default of a space if it has one. Raises as `load_reference`."""
    if given is None and space in SPACES:
        given = SPACES[space].reference
    if given is None:
        return None
    return load_reference(given)


def load_reference(path: Path) -> Reference:
    """A reference from an .npz such as ADM's (mu and sigma, images in arr_0, or both) or from a folder of images.

    Everything is checked: the images of a folder are read once, for an .npz see `to_pixels` and `to_statistics`.

    Raises:
        ValueError: the reference has neither statistics nor images, or damaged ones.
        FileNotFoundError: no such file or folder.
    """
    path = Path(path)
    if path.is_dir():
        return _folder_as_reference(path)
    arrays = read_arrays(path)
    statistics = spatial = None
    try:
        if "mu" in arrays and "sigma" in arrays:
            statistics = to_statistics(arrays["mu"], arrays["sigma"])
        if "mu_s" in arrays and "sigma_s" in arrays:
            spatial = to_statistics(arrays["mu_s"], arrays["sigma_s"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    images = NpzImages(path, arrays) if "arr_0" in arrays else None
    if statistics is None and images is None:
        raise ValueError(f"{path} has neither mu and sigma nor images (arr_0): give an .npz such as ADM's, or a folder")
    return Reference(path.name, file_fingerprint(path), statistics, images, spatial)


def _folder_as_reference(path: Path) -> Reference:
    folder = ImageFolder(path)
    digest = hashlib.sha256()
    for file in progress_bar(folder.files, desc="reading the reference", unit=" image", delay=2):
        read_image(file)  # a damaged image must fail now, not after hours of sampling
        digest.update(str(file.relative_to(path)).encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return Reference(path.name, digest.hexdigest(), images=folder)


def to_statistics(mu: np.ndarray, sigma: np.ndarray) -> dict[str, np.ndarray]:
    """The mean [D] and covariance [D, D] of features as float64, by "mu" and "sigma".

    Raises:
        ValueError: other shapes, values that are not finite numbers, or a sigma that is no covariance.
    """
    if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
        raise ValueError(f"mu and sigma are {list(mu.shape)} and {list(sigma.shape)}: give [D] and [D, D]")
    mu, sigma = mu.astype(np.float64), sigma.astype(np.float64)
    if not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
        raise ValueError("mu or sigma has NaN or infinite values: give statistics of finite features")
    if np.abs(sigma - sigma.T).max() > ROUNDING * np.abs(sigma).max():
        raise ValueError("sigma is not symmetric: give the covariance of features")
    variances = np.linalg.eigvalsh(sigma)
    if variances[0] < -ROUNDING * abs(variances[-1]):
        raise ValueError(
            f"sigma has the negative variance {variances[0]:.3g} in some direction: give the covariance of features"
        )
    return {"mu": mu, "sigma": sigma}


# The panel: FID and sFID, Inception score, KID, precision and recall, density and coverage, CMMD and FD-DINOv2.
#
# The networks are torch-fidelity's and transformers', and the formulas those of `cspd.evaluation.scores`, which are
# ADM's evaluator's for the scores that it has. "inception" is the space of Inception-v3, for ImageNet. The others, such
# as "digits", are those of the bundled models' classifiers, `SPACES`.

# the fewest images, of either side: a covariance; a neighbourhood of 3 or 5
LEAST = {
    "fid": 2,
    "sfid": 2,
    "fd_dinov2": 2,
    "inception_score": 2,
    "kid": 2,
    "cmmd": 2,
    "precision": 4,
    "recall": 4,
    "density": 6,
    "coverage": 6,
}
PANEL = (*LEAST, "accuracy")
OF_IMAGES = ("kid", "cmmd", "fd_dinov2", "precision", "recall", "density", "coverage")  # need the reference's images
OF_FEATURES = ("fid", "inception_score", "accuracy")  # need only features, logits and the reference's statistics
REASON = 160  # characters of PyTorch's reasons, which can fill pages
CHUNK = 64  # images at once
WORTH_KNOWING = 0.05  # a change of a score that one wants to see


class Extracted(NamedTuple):
    """What a space's network gives for N images, float32 on the CPU.

    Attributes:
        features: [N, D], 128 of a classifier, 2,048 of Inception. logits: [N, C].
        spatial: [N, 2023], ADM's features of sFID; None for a classifier.
    """

    features: Tensor
    logits: Tensor
    spatial: Tensor | None = None

    def of(self, images: slice) -> Extracted:
        """What it gives for some of the images."""
        spatial = None if self.spatial is None else self.spatial[images]
        return Extracted(self.features[images], self.logits[images], spatial)


def extract(
    images: Images | Path, *, space: str, weights: Path | None = None, device: torch.device | str = "auto"
) -> Extracted:
    """What a space's network gives for images: a data set of uint8 [3, H, W], or a folder or an .npz of images.

    Raises:
        ValueError: as in `scores_of`.
    """
    name = extractor_of(space)
    layers = ["2048", "logits_unbiased", "spatial"] if space == INCEPTION else ["features", "logits"]
    device = pick_device(device)
    try:
        if weights is not None:
            read_tensors(Path(weights))  # torch-fidelity's own loading would run code in the file
        path = None if weights is None else str(weights)
        extractor = create_feature_extractor(
            name, layers, cuda=False, feature_extractor_weights_path=path, verbose=False
        )
    except CheckpointError as error:
        raise ValueError(f"{error}; torch-fidelity's file of Inception-v3 is {URL_INCEPTION_V3}") from error
    except URLError as error:
        raise ValueError(
            f"no network ({error.reason}): give --weights a file of Inception-v3, {URL_INCEPTION_V3}; or, for images of"
            f" bundled models, --space {' or '.join(SPACES)}"
        ) from error
    except RuntimeError as error:  # other tensors
        if weights is None or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())[:REASON]
        raise ValueError(
            f"{weights} lacks torch-fidelity's weights of Inception-v3 ({reason}): take {URL_INCEPTION_V3}"
        ) from error
    about = None  # a classifier is quick
    if space == INCEPTION:
        about = {"space": space, "weights": file_fingerprint(Path(weights)) if weights else URL_INCEPTION_V3}
    found = Extracted(*run_over(images, extractor.to(device), device, about))
    if not all(value.isfinite().all() for value in found if value is not None):
        raise ValueError(f"{weights or name} gives features that are not finite: fetch these weights again")
    return found


@torch.inference_mode()
def run_over(
    images: Images | Path,
    network: Callable[[Tensor], tuple[Tensor, ...]],
    device: torch.device,
    about: Mapping[str, str] | None = None,
) -> tuple[Tensor, ...]:
    """The outputs of a network on the CPU. Only `CHUNK` images are in memory at once.

    Args:
        about: what the outputs depend on besides the pixels. With it, the outputs of each chunk are kept in the user's
            cache folder until all are there: an interrupted run resumes.
    """
    if not isinstance(images, Dataset):
        images = images_in(Path(images))
    kept = []
    outputs = []
    for start in range(0, len(images), CHUNK):
        batch = torch.stack([images[i] for i in range(start, min(start + CHUNK, len(images)))])
        path = None
        if about is not None and len(images) > CHUNK:
            path = user_cache() / "features" / f"{digest_of({'pixels': batch.numpy()}, about)}.npz"
            kept.append(path)
        outputs.append(_outputs(batch.to(device), network, path))
    for path in kept:
        path.unlink(missing_ok=True)
    return tuple(map(torch.cat, zip(*outputs)))


def _outputs(batch: Tensor, network: Callable[[Tensor], tuple[Tensor, ...]], path: Path | None) -> tuple[Tensor, ...]:
    """The outputs of a network for a batch, on the CPU: from a file, or computed and written to it."""
    found = None if path is None else read_item(path, {}, {})
    if found is not None:
        return tuple(torch.from_numpy(found[name]) for name in sorted(found))
    outputs = tuple(value.cpu() for value in network(batch))
    if path is not None:
        with contextlib.suppress(OSError):  # the folder may be read-only: an interrupted run begins again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_item(path, {str(i): value.numpy() for i, value in enumerate(outputs)}, {})
    return outputs


class Evaluation(NamedTuple):
    """How images are evaluated.

    Attributes:
        space: of the features, "inception" or a name in `SPACES`: "digits" (32x32 images), "emoji" (64x64). Without it
            nothing is measured that needs features.
        weights: torch-fidelity's file of Inception-v3; by default torch-fidelity downloads it.
        clip, dinov2: the folders of a CLIP model, for CMMD and for prompts, and of a DINOv2 model. Without CLIP, the
            CMMD of bundled models' images is by their classifier.
        device: where features are extracted, "auto", "cpu", "cuda" or "cuda:N".
    """

    space: str | None = None
    weights: Path | None = None
    reference: Reference | None = None
    clip: Path | None = None
    dinov2: Path | None = None
    device: torch.device | str = "auto"

    def extract(self, images: Images | Path) -> Extracted:
        """What the space's network gives for images, see `extract`."""
        return extract(images, space=str(self.space), weights=self.weights, device=self.device)


def features(images: Images | Path, **how: Any) -> Tensor:
    """The features of `extract`, with its arguments."""
    return extract(images, **how).features


def check(evaluation: Evaluation, height: int, width: int | None = None) -> None:
    """Raises the errors of `scores_of` for images of this size, by default square, before sampling."""
    blank = ImageList([torch.zeros(3, height, width or height)])
    # a black image meets the same errors as the real ones: wrong sizes, weights, reference
    if evaluation.clip is not None:
        Clip(evaluation.clip, evaluation.device).features(blank)
    if evaluation.dinov2 is not None:
        dinov2_features(blank, evaluation.dinov2, evaluation.device)
    _check_reference(evaluation, blank, evaluation.extract(blank))


def _check_reference(evaluation: Evaluation, images: Images, extracted: Extracted) -> None:
    """Raises ValueError if a reference has images of another size, or statistics of another number of features."""
    reference = evaluation.reference
    if reference is None:
        return
    if reference.images is not None:
        _, height, width = reference.images[0].shape
        _, own_height, own_width = images[0].shape
        if (height, width) != (own_height, own_width):
            raise ValueError(
                f"{reference.name} has images of {width}x{height} pixels, and the measured images have"
                f" {own_width}x{own_height}: give a reference of their size, since scaling changes the features"
            )
    pairs = ((reference.statistics, extracted.features), (reference.spatial, extracted.spatial))
    for statistics, features in pairs:
        if statistics is None or features is None:
            continue
        given = len(statistics["mu"])
        expected = features.shape[1]
        if given != expected:
            raise ValueError(
                f"{reference.name} has statistics of {given} features, and the {evaluation.space} space has"
                f" {expected}: give another reference or another space"
            )


def _missing(evaluation: Evaluation, num: int, labels: Any) -> dict[str, str]:
    """The reason for each missing score, by name."""
    space, reference = evaluation.space, evaluation.reference
    missing = {}
    of_reference = ("fid", "sfid", *OF_IMAGES)
    for name, least in LEAST.items():
        if num < least:
            missing[name] = f"{num} images: {least} are needed"
    if reference is None:
        missing |= dict.fromkeys(of_reference, "there is no reference")
    elif reference.images is None:
        missing |= dict.fromkeys(OF_IMAGES, f"{reference.name} has statistics, no images")
        if reference.spatial is None:
            missing["sfid"] = f"{reference.name} has neither images nor mu_s and sigma_s"
    else:
        count = len(reference.images)
        names = set(OF_IMAGES)
        names |= set() if reference.statistics else {"fid"}
        names |= set() if reference.spatial else {"sfid"}
        for name in names:
            if count < LEAST[name]:
                missing[name] = f"{reference.name} has {count} images: {LEAST[name]} are needed"
    if space in SPACES:
        missing["sfid"] = "only Inception has spatial features"
        if evaluation.dinov2 is None:
            missing["fd_dinov2"] = f"FID is the Frechet distance of the {space} classifier in its place"
    else:
        missing["accuracy"] = "only bundled models' images have a classifier"
        if evaluation.clip is None:
            missing["cmmd"] = f"no CLIP model was given: give --clip FOLDER with its files; {SOURCE}"
        if evaluation.dinov2 is None:
            missing["fd_dinov2"] = f"no DINOv2 was given: give --dinov2 FOLDER with its files; {DINOV2_SOURCE}"
    if space in SPACES and labels is None:
        missing["accuracy"] = "the images' classes are not known"
    elif space in SPACES:
        classes = SPACES[space].sizes.classes
        if not all(0 <= label < classes for label in labels):
            missing["accuracy"] = (
                f"the {space} classifier knows classes 0..{classes - 1}, these are up to {max(labels)}"
            )
    return missing


def scores_of(
    images: Images | Path,
    evaluation: Evaluation,
    *,
    labels: Sequence[int] | None = None,
    cycle: int = 1,
    extracted: Extracted | None = None,
) -> tuple[dict[str, Score], dict[str, str]]:
    """The scores in `PANEL` that images have, and the reasons for missing ones, by name.

    Args:
        images: a data set of uint8 [3, H, W], such as `ImageList`, or a folder of them, or an .npz in ADM's layout.
        labels: the images' classes, for "accuracy". cycle: image i has class i modulo `cycle`; 1 if it has not.
        extracted: the result of `extract` for these images.

    Raises:
        ValueError: images or statistics of another size than the space's, or missing weights.
    """
    images = images if isinstance(images, Dataset) else images_in(Path(images))
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images and {len(labels)} labels: give one label for each image")
    missing = _missing(evaluation, len(images), labels)
    extracted = extracted or evaluation.extract(images)
    _check_reference(evaluation, images, extracted)
    part = parts_of(len(images), cycle)
    theirs = _of_reference(evaluation, missing)
    scores = of_features(extracted, set(PANEL) - set(missing), evaluation.reference, labels, part, theirs)
    if theirs is not None:
        scores |= _of_networks(images, evaluation, extracted, theirs, missing, part)
    return scores, missing


def measure(images: Images | Path, evaluation: Evaluation, **known: Any) -> dict:
    """The scores of images as plain values; arguments and errors as of `scores_of`.

    Returns:
        "num"; the scores in `PANEL`, each a float or None; for each "NAME_ci95", its 95 % interval;
        "NAME_resolution", the smallest difference that two sets of so many images can show at 95 %; "NAME_needed", the
        images with which that is 5 % of the score; "missing", the reasons for None, by name.
    """
    images = images if isinstance(images, Dataset) else images_in(Path(images))
    scores, missing = scores_of(images, evaluation, **known)
    return {"num": len(images), **told(scores, len(images)), "missing": missing}


def _of_reference(evaluation: Evaluation, missing: Mapping[str, str]) -> Extracted | None:
    """The features of the reference's images, or None if no score needs them."""
    reference = evaluation.reference
    if reference is None or reference.images is None:
        return None
    needed = set(OF_IMAGES) - {"cmmd", "fd_dinov2"}
    needed |= set() if reference.statistics else {"fid"}
    needed |= set() if reference.spatial else {"sfid"}
    if not needed - set(missing):
        return None
    with progress_bar(total=len(reference.images), desc="measuring the reference", unit=" image", delay=2) as bar:
        return evaluation.extract(Watched(reference.images, bar))


def _of_networks(
    images: Images,
    evaluation: Evaluation,
    extracted: Extracted,
    theirs: Extracted,
    missing: Mapping[str, str],
    part: Tensor | None,
) -> dict[str, Score]:
    """CMMD and FD-DINOv2, which have networks of their own, unless they are missing."""
    reference: Any = evaluation.reference
    dinov2: Any = evaluation.dinov2
    scores = {}
    if "cmmd" not in missing:
        sides = extracted.features, theirs.features
        if evaluation.clip is not None:
            model = Clip(evaluation.clip, evaluation.device)
            sides = model.features(images), model.features(reference.images)
        scores["cmmd"] = discrepancy(*sides, gaussian, part)
    if "fd_dinov2" not in missing:
        ours, of_reference = (dinov2_features(each, dinov2, evaluation.device) for each in (images, reference.images))
        scores["fd_dinov2"] = frechet(ours, statistics_of(of_reference), part)
    return scores


def of_features(
    extracted: Extracted,
    names: Collection[str],
    reference: Any,
    labels: Sequence[int] | None,
    part: Tensor | None,
    theirs: Any = None,
) -> dict[str, Score]:
    """The scores in `names` that need no other network, by name.

    Args:
        part: of each image, see `parts_of`. theirs: of the reference's images; without it, the scores in `OF_FEATURES`.
    """
    scores = {}
    spatial: Any
    ours, logits, spatial = extracted
    if "fid" in names:
        scores["fid"] = frechet(ours, reference.statistics or statistics_of(theirs.features), part)
    if "sfid" in names:
        scores["sfid"] = frechet(spatial, reference.spatial or statistics_of(theirs.spatial), part)
    if "inception_score" in names:
        scores["inception_score"] = inception_score(logits, part)
    if "accuracy" in names:
        recognised = (logits.argmax(1) == torch.tensor(labels)).double()
        scores["accuracy"] = from_influence(recognised.mean().item(), recognised, part)
    if theirs is not None:
        if "kid" in names:
            scores["kid"] = discrepancy(ours, theirs.features, polynomial, part)
        by_neighbours = {"precision", "recall", "density", "coverage"} & set(names)
        if by_neighbours:
            found = manifold(ours, theirs.features, part)._asdict()
            scores |= {name: found[name] for name in by_neighbours}
    return scores


def told(scores: Mapping[str, Score], num: int) -> dict[str, Any]:
    """The scores of `num` images as plain values, see `measure`; None for those of `PANEL` that are not there."""
    values: dict[str, Any] = {}
    for name in PANEL:
        values |= dict.fromkeys((name, f"{name}_ci95", f"{name}_resolution", f"{name}_needed"))
        score: Any = scores.get(name)
        if score is None:
            continue
        values[name] = score.value
        if score.error is not None:
            values[f"{name}_ci95"] = around(name, score.value, score.error, len(score.parts) - 1)
            values[f"{name}_resolution"] = score.resolution
            wanted = WORTH_KNOWING * abs(score.value)
            if wanted > 0:  # the error falls with the root of the number of images
                values[f"{name}_needed"] = math.ceil(num * (score.resolution / wanted) ** 2)
    if values["accuracy"] is not None:
        values["accuracy_ci95"] = wilson(values["accuracy"], num)
    return values


def unmeasured(num: int, reason: str) -> dict:
    """The result of `measure` if nothing is measured, with the reason."""
    return {"num": num, **told({}, num), "missing": dict.fromkeys(PANEL, reason)}
