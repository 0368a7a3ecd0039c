"""Metrics of images: FID and others, CLIP, classifiers, references, intervals and tests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset
from torch_fidelity import (
    KEY_METRIC_FID,
    KEY_METRIC_ISC_MEAN,
    KEY_METRIC_ISC_STD,
    KEY_METRIC_KID_MEAN,
    KEY_METRIC_PRECISION,
    KEY_METRIC_RECALL,
    calculate_metrics,
    register_feature_extractor,
)
from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY
from torch_fidelity.utils import create_feature_extractor, extract_featuresdict_from_input_id_cached
from tqdm import tqdm

from cspd.device import pick_device
from cspd.evaluation.images import ImageFolder, ImageList, beginning, read_image, to_pixels
from cspd.files import WEIGHTS, check_files, checked_json, weight_files
from cspd.models import bundled, bundled_folder
from cspd.request import to_pil
from cspd.runs import file_fingerprint, together
from cspd.terminal import choice, telling
from mar.checkpoint import fill
from mar.tensors import CheckpointError, read_tensors

# 95 % intervals of values measured on few images, cut to the range of each value.

NORMAL = NormalDist().inv_cdf(0.975)  # half of a 95 % interval, in standard errors
RANGES = {
    "fid": (0.0, math.inf),
    "inception_score": (1.0, math.inf),
    "clip_score": (0.0, 100.0),
    "clip_difference": (-100.0, 100.0),
    "bound": (0.0, 1.0),
    "difference": (0.0, math.inf),
    "audit": (0.0, math.inf),
}


def around(name: str, value: float, error: float) -> list[float]:
    """The interval [low, high] of a value with a name in `RANGES`, from its standard error."""
    low, high = RANGES[name]
    half = NORMAL * error
    return [min(max(end, low), high) for end in (value - half, value + half)]


def wilson(fraction: float, num: int) -> list[float]:
    """The interval [low, high] of a probability, from the fraction of `num` trials that succeeded.

    Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927): all probabilities whose
    distance from the fraction is at most `NORMAL` of their own standard errors. Unlike the normal interval, it keeps a
    width if all of 8 trials succeed.
    """
    weight = NORMAL**2 / num
    variance = fraction * (1 - fraction) * weight + (weight / 2) ** 2
    centre = (fraction + weight / 2) / (1 + weight)
    half = math.sqrt(variance) / (1 + weight)
    # rounding must not exclude the fraction itself, which is an end of the interval at 0 and at 1
    low = min(fraction, max(0.0, centre - half))
    high = max(fraction, min(1.0, centre + half))
    return [low, high]


def half_of(interval: Sequence[float]) -> float:
    """Half of the length of an interval."""
    low, high = interval
    return (high - low) / 2


# A test of whether two samplers differ, without assumptions on their distributions.

LEAST_PAIRS = 8  # fewer have too few permutations


def energy_test(x: Tensor, y: Tensor, permutations: int = 999, seed: int = 0) -> float:
    """p-value of the hypothesis that paired samples x, y [N, D] have one distribution.

    A permutation test on the energy distance (Szekely & Rizzo 2013). Row i of x and of y have the same seed, so each
    pair is swapped or not; p is uniform if swapping changes nothing. A small p says that the distributions differ; a
    large p of few samples says little.

    Raises:
        ValueError: the samples' shapes differ, there are fewer than 8 pairs, or a value is not finite.
    """
    num = len(x)
    size = permutations + 1, num
    if x.shape != y.shape or num < LEAST_PAIRS:
        shapes = f"{list(x.shape)} and {list(y.shape)}"
        raise ValueError(f"samples of shapes {shapes}: give pairs of one size, {LEAST_PAIRS} or more")
    pooled = torch.cat([x.flatten(1), y.flatten(1)]).double()
    if not pooled.isfinite().all():
        raise ValueError("samples have NaN or infinite values: leave them out")
    distances = torch.cdist(pooled, pooled)

    # each row of `labels` assigns +1 to the images that count as x, -1 to those of y; the first row swaps no pair
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, size, generator=generator) * 2.0 - 1
    signs[0] = 1
    labels = torch.cat([signs, -signs], dim=1).double()

    # 2 E|x - y| - E|x - x'| - E|y - y'| is, up to a factor, this quadratic form in the labels
    statistic = -((labels @ distances) * labels).sum(1)
    rounding = 1e-12 * distances.sum()  # equal samples have p = 1 in any unit
    as_large = (statistic >= statistic[0] - rounding).sum()
    return (as_large / (permutations + 1)).item()


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
                self.processor = CLIPProcessor.from_pretrained(folder, local_files_only=True)
                model, report = CLIPModel.from_pretrained(folder, local_files_only=True, output_loading_info=True)
            except Exception as error:  # a damaged file can fail anywhere in the readers
                reason = " ".join(str(error).split())
                raise CheckpointError(f"{folder}: cannot be read as CLIP ({reason}): {SOURCE}") from error
        if report["missing_keys"]:
            missing = min(report["missing_keys"])
            raise CheckpointError(f"{folder}: the weights lack CLIP's {missing}: {SOURCE}")
        self.model = model.float().eval().to(self.device)
        self.most_tokens = model.config.text_config.max_position_embeddings

    @functools.cached_property
    def about(self) -> dict[str, str]:
        """The folder's "name", and the "fingerprint" of its weights, for reports."""
        fingerprint = together([file_fingerprint(file) for file in weight_files(self.folder)])
        return {"name": self.folder.resolve().name, "fingerprint": fingerprint}

    @torch.inference_mode()
    def scores(self, images: Dataset, texts: Sequence[str]) -> Tensor:
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


def _check_files(folder: Path) -> None:
    """Raises as `Clip` if a folder lacks files, or has those of another model."""
    check_files(folder, FILES, "CLIP", SOURCE)
    file = folder / "config.json"
    if checked_json(file, {"model_type": str}, SOURCE, CheckpointError)["model_type"] != "clip":
        raise CheckpointError(f"{file} belongs to another model than CLIP: {SOURCE}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--clip needs transformers, which is not installed: pip install 'cspd[text]'")


def check_clip(folder: Path, device: torch.device | str, of_texts: bool) -> None:
    """Tries a CLIP model on a prompt and an image, before sampling. Raises as `Clip`.

    Raises ValueError if the images will be class-conditional, not `of_texts`.
    """
    if not of_texts:
        raise ValueError(f"--clip {folder} compares images with prompts: give --prompts, or leave --clip out")
    image = ImageList([torch.zeros(3, 8, 8)])
    Clip(folder, device).scores(image, ["a text"])


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
    if space == INCEPTION:
        return "inception-v3-compat"
    if space not in SPACES:
        raise ValueError(f"space={space!r} is unknown: {choice(space, [*SPACES, INCEPTION])}")
    name = PREFIX + space
    if name not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor(name, ClassifierExtractor)
    return name


# The reference that images are compared with: statistics of features, images, or both.

PARTS = ("mu", "sigma", "arr_0")


@dataclass(frozen=True)
class Reference:
    """The reference that images are compared with.

    Attributes:
        name: of the file or folder.
        fingerprint: its sha256; for a folder, of all names and contents.
        statistics: "mu" [D] and "sigma" [D, D] of features, float64; None: to be computed from the images.
        images: for KID, precision and recall; None: the reference has statistics only.
    """

    name: str
    fingerprint: str
    statistics: dict[str, np.ndarray] | None = None
    images: Dataset | None = None


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
    arrays = _read_npz(path)
    statistics = images = None
    try:
        if "mu" in arrays and "sigma" in arrays:
            statistics = to_statistics(arrays["mu"], arrays["sigma"])
        if "arr_0" in arrays:
            pixels = torch.from_numpy(to_pixels(arrays["arr_0"]))
            images = ImageList(pixels.permute(0, 3, 1, 2))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if statistics is None and images is None:
        raise ValueError(f"{path} has neither mu and sigma nor images (arr_0): give an .npz such as ADM's, or a folder")
    return Reference(path.name, file_fingerprint(path), statistics, images)


def _folder_as_reference(path: Path) -> Reference:
    folder = ImageFolder(path)
    digest = hashlib.sha256()
    for file in tqdm(folder.files, desc="reading the reference", unit=" image", delay=2):
        read_image(file)  # a damaged image must fail now, not after hours of sampling
        digest.update(file.name.encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return Reference(path.name, digest.hexdigest(), images=folder)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a reference's file, by name."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder: give an .npz such as ADM's, or a folder of images")
    try:
        with np.load(path) as file:
            return {name: file[name] for name in PARTS if name in file.files}
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise ValueError(f"{path} cannot be read as .npz ({error}): it begins with {beginning(path)}") from error


def to_statistics(mu: np.ndarray, sigma: np.ndarray) -> dict[str, np.ndarray]:
    """The mean [D] and covariance [D, D] of features as float64, by "mu" and "sigma".

    Raises:
        ValueError: other shapes, or values that are not finite numbers.
    """
    if mu.ndim != 1 or sigma.shape != (len(mu), len(mu)):
        raise ValueError(f"mu and sigma are {list(mu.shape)} and {list(sigma.shape)}: give [D] and [D, D]")
    mu, sigma = mu.astype(np.float64), sigma.astype(np.float64)
    if not (np.isfinite(mu).all() and np.isfinite(sigma).all()):
        raise ValueError("mu or sigma has NaN or infinite values: give statistics of finite features")
    return {"mu": mu, "sigma": sigma}


# The quality of images: FID, Inception score, KID, precision and recall, by torch-fidelity, in several feature spaces.
#
# "inception" is torch-fidelity's Inception-v3, for ImageNet. The others, such as "digits", are those of the bundled
# models' classifiers, `SPACES`.

# the fewest images: two in each of the Inception score's ten parts; a covariance; a neighbourhood of 3
LEAST = {"inception_score": 20, "fid": 2, "kid": 2, "precision": 4, "recall": 4}
OF_IMAGES = ("kid", "precision", "recall")  # metrics that need the images of the reference
KEYS = {
    "fid": KEY_METRIC_FID,
    "inception_score": KEY_METRIC_ISC_MEAN,
    "inception_score_std": KEY_METRIC_ISC_STD,
    "kid": KEY_METRIC_KID_MEAN,
    "precision": KEY_METRIC_PRECISION,
    "recall": KEY_METRIC_RECALL,
}
REASON = 160  # characters of PyTorch's reasons, which can fill pages
KID_SUBSET = 1000  # torch-fidelity's default; all images if there are fewer


def _options(images: Dataset | Path, space: str, weights: Path | None, device: torch.device | str) -> dict:
    """torch-fidelity's options for images, the feature extractor, and a cache of features."""
    return {
        "input1": images if isinstance(images, Dataset) else ImageFolder(Path(images)),
        "input1_cache_name": "images",
        "feature_extractor": extractor_of(space),
        "feature_extractor_weights_path": None if weights is None else str(weights),
        "cuda": pick_device(device).type == "cuda",
        "save_cpu_ram": True,  # no worker processes, and the distances of 50,000 images, 20 GB, in parts
        "verbose": False,
    }


def _current(device: torch.device | str) -> contextlib.AbstractContextManager:
    """Makes a GPU the current one, which torch-fidelity uses."""
    device = pick_device(device)
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _extract(options: dict) -> tuple[Tensor, Tensor]:
    """Features [N, D] and logits [N, C] of the images; written to `cache_root`, if given, for `calculate_metrics`."""
    name, weights = options["feature_extractor"], options["feature_extractor_weights_path"]
    provided = FEATURE_EXTRACTORS_REGISTRY[name]
    layers = [provided.get_default_feature_layer_for_metric(metric) for metric in ("fid", "isc")]
    others = dict(options)
    del others["feature_extractor"]
    try:
        if weights is not None:
            read_tensors(Path(weights))  # torch-fidelity's own loading would run code in the file
        extractor = create_feature_extractor(name, layers, **others)
    except CheckpointError as error:
        raise ValueError(f"{error}; torch-fidelity's file of Inception-v3 is {URL_INCEPTION_V3}") from error
    except URLError as error:
        raise ValueError(f"no network ({error.reason}): give a file of Inception-v3, {URL_INCEPTION_V3}") from error
    except RuntimeError as error:  # other tensors
        if weights is None or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())[:REASON]
        raise ValueError(
            f"{weights} lacks torch-fidelity's weights of Inception-v3 ({reason}): take {URL_INCEPTION_V3}"
        ) from error
    found = extract_featuresdict_from_input_id_cached(1, extractor, cache="cache_root" in options, **others)
    values = tuple(found[layer] for layer in layers)
    if not all(value.isfinite().all() for value in values):
        raise ValueError(f"{weights or name} gives features that are not finite: fetch these weights again")
    return values


def extract(
    images: Dataset | Path, *, space: str, weights: Path | None = None, device: torch.device | str = "auto"
) -> tuple[Tensor, Tensor]:
    """Features [N, D] (128 of a classifier, 2,048 of Inception) and logits [N, C] of images, float32 on the CPU.

    Raises:
        ValueError: as in `measure`.
    """
    with _current(device):
        return _extract(_options(images, space, weights, device))


def features(images: Dataset | Path, **how: object) -> Tensor:
    """The features of `extract`, with its arguments."""
    return extract(images, **how)[0]


def check(
    height: int,
    width: int | None = None,
    *,
    space: str,
    weights: Path | None = None,
    reference: Reference | None = None,
    device: torch.device | str = "auto",
) -> None:
    """Raises the errors of `measure` for images of this size, by default square, before sampling."""
    blank = ImageList([torch.zeros(3, height, width or height)])
    # a black image meets the same errors as the real ones: wrong sizes, weights, reference
    extracted = features(blank, space=space, weights=weights, device=device)
    if reference is not None:
        _check_reference(reference, blank, extracted, space)


def _check_reference(reference: Reference, images: Dataset, features: Tensor, space: str) -> None:
    """Raises ValueError if a reference has images of another size, or statistics of another number of features."""
    if reference.images is not None:
        _, height, width = reference.images[0].shape
        _, own_height, own_width = images[0].shape
        if (height, width) != (own_height, own_width):
            raise ValueError(
                f"{reference.name} has images of {width}x{height} pixels, and the measured images have"
                f" {own_width}x{own_height}: give a reference of their size, since scaling changes the features"
            )
    if reference.statistics is not None:
        given = len(reference.statistics["mu"])
        expected = features.shape[1]
        if given != expected:
            raise ValueError(
                f"{reference.name} has statistics of {given} features, and the {space} space has {expected}: give"
                " another reference or another space"
            )


def _missing(space: str, num: int, reference: Reference | None, labels: Sequence[int] | None) -> dict[str, str]:
    """The reason for each missing metric, by name."""
    missing = {}
    for name, least in LEAST.items():
        if num < least:
            missing[name] = f"{num} images: {least} are needed"
    if reference is None:
        missing |= dict.fromkeys(("fid", *OF_IMAGES), "there is no reference")
    elif reference.images is None:
        missing |= dict.fromkeys(OF_IMAGES, f"{reference.name} has statistics, no images")
    else:
        count = len(reference.images)
        names = OF_IMAGES if reference.statistics else ("fid", *OF_IMAGES)
        for name in names:
            if count < LEAST[name]:
                missing[name] = f"{reference.name} has {count} images: {LEAST[name]} are needed"
    if space not in SPACES:
        missing["accuracy"] = "only bundled models' images have a classifier"
    elif labels is None:
        missing["accuracy"] = "the images' classes are not known"
    else:
        classes = SPACES[space].sizes.classes
        if not all(0 <= label < classes for label in labels):
            missing["accuracy"] = (
                f"the {space} classifier knows classes 0..{classes - 1}, these are up to {max(labels)}"
            )
    return missing


def measure(
    images: Dataset | Path,
    *,
    space: str,
    weights: Path | None = None,
    reference: Reference | None = None,
    labels: Sequence[int] | None = None,
    device: torch.device | str = "auto",
    extracted: tuple[Tensor, Tensor] | None = None,
) -> dict:
    """Measures images with torch-fidelity's defaults (10 parts, KID of 100 subsets of at most 1,000, k = 3).

    Args:
        images: a data set of uint8 [3, H, W], such as `ImageList`, or a folder of PNGs.
        space: "inception", or a name in `SPACES`: "digits" (32x32 images), "emoji" (64x64).
        weights: torch-fidelity's file of Inception-v3; by default torch-fidelity downloads it.
        labels: the images' classes, for "accuracy".
        device: where features are extracted, "auto", "cpu", "cuda" or "cuda:N".
        extracted: the result of `extract` for these images. KID, precision and recall extract features once more.

    Returns:
        "num"; "fid", "inception_score", "inception_score_std", "kid", "precision", "recall" and "accuracy" (fraction
        recognised as their labels), each a float or None; "accuracy_ci95", its interval; "missing", the reasons for
        None, by name.

    Raises:
        ValueError: images or statistics of another size than the space's, or missing weights.
    """
    options = _options(images, space, weights, device)
    images = options["input1"]
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images and {len(labels)} labels: give one label for each image")
    missing = _missing(space, len(images), reference, labels)
    # torch-fidelity measures these on the images of both sides; the others need only features, logits and statistics
    by_images = {
        "kid": "kid" not in missing,
        "prc": "precision" not in missing,
        "fid": "fid" not in missing and reference.statistics is None,
    }
    if reference and reference.images:
        options["input2"] = reference.images
        options["kid_subset_size"] = min(KID_SUBSET, len(images), len(reference.images))
    with tempfile.TemporaryDirectory() as folder, _current(device):
        options["cache_root"] = folder
        features, logits = extracted or _extract(options)
        if reference is not None:
            _check_reference(reference, images, features, space)
        measured = calculate_metrics(**options, **by_images) if any(by_images.values()) else {}

    values = {name: measured.get(key) for name, key in KEYS.items()}
    names = {"inception_score", "fid"} - set(missing)
    if by_images["fid"]:
        names.discard("fid")
    values |= of_features(features, logits, names, reference)
    values["accuracy"] = interval = None
    if "accuracy" not in missing:
        recognised = logits.argmax(1) == torch.tensor(labels)
        values["accuracy"] = recognised.float().mean().item()
        interval = wilson(values["accuracy"], len(images))
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            values[name] = None
            missing[name] = f"its value is {value}"
    return {"num": len(images), **values, "accuracy_ci95": interval, "missing": missing}


def unmeasured(num: int, reason: str) -> dict:
    """The result of `measure` if nothing is measured, with the reason."""
    values = dict.fromkeys([*KEYS, "accuracy", "accuracy_ci95"])
    return {"num": num, **values, "missing": dict.fromkeys([*KEYS, "accuracy"], reason)}


def of_features(features: Tensor, logits: Tensor, names: Collection[str], reference: Reference | None) -> dict:
    """The metrics in `names` that need only features and logits.

    These are "fid", against a reference's statistics, and "inception_score", with "inception_score_std".
    """
    measured = {}
    # torch-fidelity's own formulas, on features that were extracted once
    if "inception_score" in names:
        measured |= isc_features_to_metric(logits)
    if "fid" in names:
        own = fid_features_to_statistics(features)
        own = to_statistics(own["mu"], own["sigma"])
        measured |= fid_statistics_to_metric(own, reference.statistics, verbose=False)
    return {name: measured[key] for name, key in KEYS.items() if key in measured}
