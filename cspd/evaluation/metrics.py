"""Metrics of images: FID and others, CLIP, classifiers, references, intervals and tests."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import math
import pickle
import tempfile
import zipfile
from collections.abc import Sequence
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
from cspd.evaluation.images import ImageFolder, ImageList, beginning, to_pixels
from cspd.files import WEIGHTS, check_files, read_json, weight_files
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
    "audit": (0.0, math.inf),
}


def around(name: str, value: float, error: float) -> list[float]:
    """The interval [low, high] of a value with a name in `RANGES`, from its standard error."""
    low, high = RANGES[name]
    return [min(max(end, low), high) for end in (value - NORMAL * error, value + NORMAL * error)]


def wilson(fraction: float, num: int) -> list[float]:
    """The interval [low, high] of a probability, from the fraction of `num` trials that succeeded.

    Wilson, Probable Inference, the Law of Succession, and Statistical Inference (1927): all probabilities whose
    distance from the fraction is at most `NORMAL` of their own standard errors. Unlike the normal interval, it does
    not make 8 of 8 a certainty.
    """
    weight = NORMAL**2 / num
    centre = (fraction + weight / 2) / (1 + weight)
    half = math.sqrt(fraction * (1 - fraction) * weight + (weight / 2) ** 2) / (1 + weight)
    low, high = max(0.0, centre - half), min(1.0, centre + half)
    return [min(fraction, low), max(fraction, high)]  # despite rounding


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
    if x.shape != y.shape or num < LEAST_PAIRS:
        shapes = f"{list(x.shape)} and {list(y.shape)}"
        raise ValueError(f"samples of {shapes}: give two equally many of one size, {LEAST_PAIRS} or more")
    pooled = torch.cat([x.flatten(1), y.flatten(1)]).double()
    if not pooled.isfinite().all():
        raise ValueError("samples with NaN or infinite values have no distance")
    distances = torch.cdist(pooled, pooled)

    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (permutations + 1, num), generator=generator) * 2.0 - 1
    signs[0] = 1  # the samples without swaps
    labels = torch.cat([signs, -signs], dim=1).double()  # +1 for x, -1 for y

    # the energy distance is a quadratic form in the labels
    statistic = -((labels @ distances) * labels).sum(1)
    rounding = 1e-12 * distances.sum()  # equal samples have p = 1 in any unit
    as_large = (statistic >= statistic[0] - rounding).sum()
    return (as_large / (permutations + 1)).item()


# CLIP score: how well images match their prompts, by a CLIP model of transformers, from a local folder.
#
# Hessel et al., CLIPScore (2021), scaled as in torchmetrics and most papers: the mean over images of 100 max(cos, 0),
# where cos is between the features of an image and its prompt.

SOURCE = "openai/clip-vit-large-patch14 on the Hugging Face hub has them, see docs/text.md"
FILES = {  # a folder must have one of each
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
        folder: of their files, as on the Hugging Face Hub.

    Raises:
        CheckpointError: the folder lacks a file, or has another model. ValueError: transformers is missing.
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
    try:
        config = read_json(file)
    except ValueError as error:
        raise CheckpointError(f"{file} is no JSON ({error}): {SOURCE}") from None
    if not isinstance(config, dict) or config.get("model_type") != "clip":
        raise CheckpointError(f"{file} is of another model than CLIP: {SOURCE}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("--clip needs transformers, which is not installed: pip install 'cspd[text]'")


def check_clip(folder: Path, device: torch.device | str, of_texts: bool) -> None:
    """Tries a CLIP model on a text and an image, before sampling. Raises as `Clip`.

    Raises ValueError if the images will be class-conditional, not `of_texts`.
    """
    if not of_texts:
        raise ValueError(f"--clip {folder} judges images of texts: give --prompts, or leave it out")
    Clip(folder, device).scores(ImageList([torch.zeros(3, 8, 8)]), ["a text"])


def mean_and_error(values: Tensor) -> tuple[float, float | None]:
    """The mean over images, and its standard error, None for one image."""
    error = values.double().std().item() / len(values) ** 0.5 if len(values) > 1 else None
    return values.double().mean().item(), error


# Small classifiers for the bundled models' images: they recognise classes, and give features to compare images by.

FEATURES, CLASSES = 128, 10


@dataclass(frozen=True)
class ClassifierConfig:
    """Sizes of a classifier.

    Attributes:
        size: pixels per side of its images. widths: channels of each stage; a stage halves the resolution.
        convolutions: in a stage. classes: their number.
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
    """A space of features for bundled models' images: those of a classifier of their classes.

    Attributes:
        sizes: of the classifier, with the images' size and the number of classes.
        checkpoints: the bundled ones that generate its images. The folder of the first has its files.
    """

    sizes: ClassifierConfig
    checkpoints: tuple[str, ...]

    @property
    def weights(self) -> Path:
        """The classifier's file. Raises FileNotFoundError if the installation lacks it."""
        return bundled_folder(self.checkpoints[0]) / "classifier.safetensors"

    @property
    def reference(self) -> Path:
        """The file of the default reference."""
        return bundled_folder(self.checkpoints[0]) / "reference.npz"


SPACES = {  # by name
    "digits": Space(CLASSIFIERS["digits32"], ("digits32", "digits32_vq")),
    "emoji": Space(CLASSIFIERS["emoji64"], ("emoji64", "emoji64_text")),
}


def space_of(target: Path) -> str | None:
    """The name of the space for the images of a target's file, or None if it is not of a bundled checkpoint."""
    folder = target.parent.resolve()
    checkpoints = bundled()
    for name, space in SPACES.items():
        if any(name in checkpoints and checkpoints[name].resolve() == folder for name in space.checkpoints):
            return name
    return None


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
    """The classifier of a space, on the CPU in float32. Raises FileNotFoundError or CheckpointError."""
    return read_classifier(SPACES[space].weights, SPACES[space].sizes)


def read_classifier(path: Path, sizes: ClassifierConfig) -> Classifier:
    """A classifier of a file, on the CPU in float32. Raises CheckpointError."""
    model = Classifier(sizes)
    fill(model, read_tensors(path), path)
    return model.eval().requires_grad_(False)


def accuracy(classifier: Classifier, images: Tensor, labels: Tensor) -> float:
    """The fraction of images [B, 3, size, size] in 0..1 that are recognised as their labels [B]."""
    with torch.inference_mode():
        predicted = torch.cat([classifier(part * 2 - 1).argmax(1) for part in images.split(500)])
    return (predicted == labels).float().mean().item()


# The feature extractors of spaces, by their names in torch-fidelity.

INCEPTION = "inception"  # the space of torch-fidelity's Inception-v3
PREFIX = "cspd-"  # of our extractors' names


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
LARGEST = np.finfo(np.float32).max  # squares of it are finite


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
    return None if given is None else load_reference(given)


def load_reference(path: Path) -> Reference:
    """A reference from an .npz as ADM's (mu and sigma, images in arr_0, or both) or a folder of images.

    Everything is checked: the images of a folder are read once, for an .npz see `to_pixels` and `to_statistics`.

    Raises:
        ValueError: the reference has neither statistics nor images, or damaged ones.
        FileNotFoundError: no such file or folder.
    """
    path = Path(path)
    if path.is_dir():
        folder = ImageFolder(path)
        digest = hashlib.sha256()
        for index, file in enumerate(tqdm(folder.files, desc="reading the reference", unit=" image", delay=2)):
            folder[index]  # a damaged image must fail now, not after hours of sampling
            digest.update(file.name.encode())
            digest.update(hashlib.sha256(file.read_bytes()).digest())
        return Reference(path.name, digest.hexdigest(), images=folder)
    arrays = _read_npz(path)
    statistics = images = None
    try:
        if "mu" in arrays and "sigma" in arrays:
            statistics = to_statistics(arrays["mu"], arrays["sigma"])
        if "arr_0" in arrays:
            images = ImageList(torch.from_numpy(to_pixels(arrays["arr_0"])).permute(0, 3, 1, 2))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if statistics is None and images is None:
        raise ValueError(f"{path}: has neither mu and sigma nor images (arr_0): give an .npz as ADM's, or a folder")
    return Reference(path.name, file_fingerprint(path), statistics, images)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a reference's file, by name."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder: give an .npz as ADM's, or a folder of images")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: no .npz, or a truncated one: it begins with {beginning(path)}")
    try:
        with np.load(path) as file:
            return {name: file[name] for name in PARTS if name in file.files}
    except Exception as error:  # a damaged file can fail anywhere in the readers
        raise ValueError(f"{path}: a damaged .npz, or one too large for this machine ({error})") from error


def to_statistics(mu: np.ndarray, sigma: np.ndarray) -> dict[str, np.ndarray]:
    """The mean [D] and covariance [D, D] of features as float64, by "mu" and "sigma".

    Raises:
        ValueError: other shapes or dtypes, or values that are NaN, infinite or huge.
    """
    if mu.ndim != 1 or mu.size == 0 or sigma.shape != 2 * mu.shape:
        raise ValueError(f"mu and sigma are {list(mu.shape)} and {list(sigma.shape)}, not [D] and [D, D]")
    statistics = {}
    for name, values in (("mu", mu), ("sigma", sigma)):
        if values.dtype.kind not in "iuf":
            raise ValueError(f"{name} is {values.dtype}: give real numbers")
        statistics[name] = values.astype(np.float64)
        if not (np.abs(statistics[name]) <= LARGEST).all():
            raise ValueError(f"{name} has values that are NaN, infinite or beyond {LARGEST:.1g}")
    return statistics


# The quality of images: FID, Inception score, KID, precision and recall, by torch-fidelity, in several feature spaces.
#
# "inception" is torch-fidelity's Inception-v3, for ImageNet. The others, such as "digits", are those of the bundled
# models' classifiers, `SPACES`.

# the fewest images for a metric: two in each of torch-fidelity's ten splits, a covariance, a neighbourhood
LEAST = {"inception_score": 20, "fid": 2, "kid": 2, "precision": 4, "recall": 4}
KEYS = {
    "fid": KEY_METRIC_FID,
    "inception_score": KEY_METRIC_ISC_MEAN,
    "inception_score_std": KEY_METRIC_ISC_STD,
    "kid": KEY_METRIC_KID_MEAN,
    "precision": KEY_METRIC_PRECISION,
    "recall": KEY_METRIC_RECALL,
}
REASON = 160  # characters of PyTorch's reasons, which fill pages
KID_SUBSET = 1000  # torch-fidelity's default; if there are fewer images, all are taken


def _options(images: Dataset | Path, space: str, weights: Path | None, device: torch.device | str) -> dict:
    """torch-fidelity's options for images, the feature extractor, and a cache of features."""
    return {
        "input1": images if isinstance(images, Dataset) else ImageFolder(Path(images)),
        "input1_cache_name": "images",
        "feature_extractor": extractor_of(space),
        "feature_extractor_weights_path": None if weights is None else str(weights),
        "cuda": pick_device(device).type == "cuda",
        "save_cpu_ram": True,  # no worker processes; distances of 50,000 images in parts, which would take 20 GB
        "verbose": False,
    }


def _current(device: torch.device | str) -> contextlib.AbstractContextManager:
    """Makes a GPU the current one, which torch-fidelity uses."""
    device = pick_device(device)
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check_real(tensors: dict[str, Tensor]) -> None:
    """Raises TypeError for integers and complex numbers, which PyTorch would convert silently."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not name.endswith("num_batches_tracked"):
            raise TypeError(f"{name} is {tensor.dtype}")


def _extract(options: dict) -> tuple[Tensor, Tensor]:
    """Features [N, D] and logits [N, C] of the images; written to `cache_root`, if given, for `calculate_metrics`."""
    name, weights = options["feature_extractor"], options["feature_extractor_weights_path"]
    provided = FEATURE_EXTRACTORS_REGISTRY[name]
    layers = [provided.get_default_feature_layer_for_metric(metric) for metric in ("fid", "isc")]
    others = {key: value for key, value in options.items() if key != "feature_extractor"}
    try:
        if weights is not None:  # safely: torch-fidelity loads without weights_only, which runs code in the file
            _check_real(read_tensors(Path(weights)))
        extractor = create_feature_extractor(name, layers, **others)
    except CheckpointError as error:
        raise ValueError(f"{error}; Inception-v3's are torch-fidelity's file, {URL_INCEPTION_V3}") from error
    except (RuntimeError, EOFError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        if weights is None or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())[:REASON]
        raise ValueError(
            f"{weights}: these are not torch-fidelity's weights of Inception-v3 ({reason}): take {URL_INCEPTION_V3}"
        ) from error
    except URLError as error:
        raise ValueError(f"no network ({error.reason}): give a file of Inception-v3, {URL_INCEPTION_V3}") from error
    found = extract_featuresdict_from_input_id_cached(1, extractor, cache="cache_root" in options, **others)
    values = tuple(found[layer] for layer in layers)
    if not all(value.isfinite().all() for value in values):
        raise ValueError(f"{weights or name}: its features are not finite: fetch these weights again")
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
    """The features of `extract`."""
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
    extracted = features(blank, space=space, weights=weights, device=device)
    if reference is not None:
        _check_reference(reference, blank, extracted, space)


def _check_reference(reference: Reference, images: Dataset, features: Tensor, space: str) -> None:
    """Raises ValueError if a reference has images of another size, or statistics of another number of features."""
    if reference.images is not None:
        sizes = [f"{image.shape[2]}x{image.shape[1]}" for image in (reference.images[0], images[0])]
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"{reference.name} has images of {sizes[0]} pixels, those to be measured have {sizes[1]}: give others,"
                " since a change of size changes the features"
            )
    if reference.statistics is not None:
        width, expected = len(reference.statistics["mu"]), features.shape[1]
        if width != expected:
            raise ValueError(
                f"{reference.name} has statistics of {width} features, the {space} space has {expected}: give others,"
                " or another space"
            )


def _missing(space: str, num: int, reference: Reference | None, labels: Sequence[int] | None) -> dict[str, str]:
    """The reason for each missing metric, by name."""
    missing = {name: f"{num} images: {least} are needed" for name, least in LEAST.items() if num < least}
    if reference is None:
        missing |= dict.fromkeys(("fid", "kid", "precision", "recall"), "there is no reference")
    elif reference.images is None:
        missing |= dict.fromkeys(("kid", "precision", "recall"), f"{reference.name} has statistics, no images")
    else:
        count = len(reference.images)
        from_images = ["kid", "precision", "recall"]
        if reference.statistics is None:
            from_images.append("fid")
        for name in from_images:
            if count < LEAST[name]:
                missing[name] = f"{reference.name} has {count} images: {LEAST[name]} are needed"
    if space not in SPACES:
        missing["accuracy"] = "only bundled models' classifiers judge classes"
    elif labels is None:
        missing["accuracy"] = "the images' classes are not known"
    elif not all(0 <= label < SPACES[space].sizes.classes for label in labels):
        known = f"the {space} classifier knows classes 0..{SPACES[space].sizes.classes - 1}"
        missing["accuracy"] = f"{known}, these are up to {max(labels)}"
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
    """Measures images with torch-fidelity's defaults (10 splits, KID of 100 subsets of at most 1,000, k = 3).

    Args:
        images: a data set of uint8 [3, H, W], such as `ImageList`, or a folder of PNGs.
        space: "inception", or a name in `SPACES`: "digits" (32x32 images), "emoji" (64x64).
        weights: torch-fidelity's file of Inception-v3; by default its own download.
        labels: the images' classes, for "accuracy".
        device: where features are extracted, "auto", "cpu", "cuda" or "cuda:N".
        extracted: what `extract` returned for these images; KID, precision and recall extract features once more.

    Returns:
        "num"; "fid", "inception_score", "inception_score_std", "kid", "precision", "recall" and "accuracy" (fraction
        recognised as their labels), each a float or None; "accuracy_ci95", its interval; "missing", the reasons for
        None, by name.

    Raises:
        ValueError: images or statistics that do not fit the space, or missing weights.
    """
    options = _options(images, space, weights, device)
    images = options["input1"]
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images and {len(labels)} labels: give one a label each")
    missing = _missing(space, len(images), reference, labels)
    # these need the images of both sides, the others only features, logits and statistics
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
    by_features = [name for name in ("inception_score", "fid") if name not in missing and not by_images.get(name)]
    values |= of_features(features, logits, by_features, reference)
    values["accuracy"] = None
    if "accuracy" not in missing:
        values["accuracy"] = (logits.argmax(1) == torch.tensor(labels)).float().mean().item()
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            values[name], missing[name] = None, f"it comes out as {value}"
    interval = None if values["accuracy"] is None else wilson(values["accuracy"], len(images))
    return {"num": len(images), **values, "accuracy_ci95": interval, "missing": missing}


def unmeasured(num: int, reason: str) -> dict:
    """The result of `measure` if nothing is measured, for a reason."""
    values = dict.fromkeys([*KEYS, "accuracy", "accuracy_ci95"])
    return {"num": num, **values, "missing": dict.fromkeys([*KEYS, "accuracy"], reason)}


def of_features(features: Tensor, logits: Tensor, names: Sequence[str], reference: Reference | None) -> dict:
    """The metrics in `names` that need only features and logits.

    These are "fid", against a reference's statistics, and "inception_score", with "inception_score_std".
    """
    measured = {}
    if "inception_score" in names:
        measured |= isc_features_to_metric(logits)
    if "fid" in names:
        statistics = fid_features_to_statistics(features)
        statistics = {name: value.astype(np.float64) for name, value in statistics.items()}
        measured |= fid_statistics_to_metric(statistics, reference.statistics, verbose=False)
    return {name: measured[key] for name, key in KEYS.items() if key in measured}
