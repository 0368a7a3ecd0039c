"""Quality of images: FID, Inception score, KID, precision and recall, all by torch-fidelity, in several feature spaces.

"inception" is Inception-v3 as torch-fidelity ships it, for ImageNet. The others, such as "digits", are those of the
embedded models' classifiers, `cspd.evaluation.classifier.SPACES`.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch_fidelity import (
    KEY_METRIC_FID,
    KEY_METRIC_ISC_MEAN,
    KEY_METRIC_ISC_STD,
    KEY_METRIC_KID_MEAN,
    KEY_METRIC_PRECISION,
    KEY_METRIC_RECALL,
    calculate_metrics,
)
from torch_fidelity.feature_extractor_inceptionv3 import URL_INCEPTION_V3
from torch_fidelity.metric_fid import fid_features_to_statistics, fid_statistics_to_metric
from torch_fidelity.metric_isc import isc_features_to_metric
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY
from torch_fidelity.utils import create_feature_extractor, extract_featuresdict_from_input_id_cached

from cspd.evaluation.classifier import SPACES
from cspd.evaluation.extractor import extractor_of
from cspd.evaluation.images import ImageFolder, ImageList
from cspd.evaluation.intervals import wilson
from cspd.evaluation.reference import Reference
from cspd.machine import pick_device
from mar.tensors import CheckpointError, read_tensors

# the fewest images that a number needs: two in each of torch-fidelity's ten splits, a covariance, a neighbourhood
LEAST = {"inception_score": 20, "fid": 2, "kid": 2, "precision": 4, "recall": 4}
KEYS = {
    "fid": KEY_METRIC_FID,
    "inception_score": KEY_METRIC_ISC_MEAN,
    "inception_score_std": KEY_METRIC_ISC_STD,
    "kid": KEY_METRIC_KID_MEAN,
    "precision": KEY_METRIC_PRECISION,
    "recall": KEY_METRIC_RECALL,
}
REASON = 160  # characters of PyTorch's reasons, which go on for pages
KID_SUBSET = 1000  # torch-fidelity's default; if there are fewer images, all are taken


def _options(images: Dataset | Path, space: str, weights: Path | None, device: torch.device | str) -> dict:
    """torch-fidelity's options: the images, the feature extractor, and that features are extracted only once."""
    return {
        "input1": images if isinstance(images, Dataset) else ImageFolder(Path(images)),
        "input1_cache_name": "images",
        "feature_extractor": extractor_of(space),
        "feature_extractor_weights_path": None if weights is None else str(weights),
        "cuda": pick_device(device).type == "cuda",
        "save_cpu_ram": True,  # no worker processes, and distances in parts: those of 50,000 images would take 20 GB
        "verbose": False,
    }


def _current(device: torch.device | str) -> contextlib.AbstractContextManager:
    """Makes a GPU the current one: torch-fidelity uses no other."""
    device = pick_device(device)
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _check_real(tensors: dict[str, Tensor]) -> None:
    """Raises TypeError for integers and complex numbers, which PyTorch would convert without a word."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() and not name.endswith("num_batches_tracked"):
            raise TypeError(f"{name} is {tensor.dtype}")


def _extract(options: dict) -> tuple[Tensor, Tensor]:
    """Features [N, D] and logits [N, C] of the images; kept in `cache_root`, if given, for `calculate_metrics`."""
    name, weights = options["feature_extractor"], options["feature_extractor_weights_path"]
    provided = FEATURE_EXTRACTORS_REGISTRY[name]
    layers = [provided.get_default_feature_layer_for_metric(metric) for metric in ("fid", "isc")]
    others = {key: value for key, value in options.items() if key != "feature_extractor"}
    try:
        if weights is not None:  # torch-fidelity loads without weights_only, which would run code in the file
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
    """The first of what `extract` gives."""
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
    """Raises what `measure` would raise for images of these sizes, by default square, before there are any."""
    blank = ImageList([torch.zeros(3, height, width or height)])
    extracted = features(blank, space=space, weights=weights, device=device)
    if reference is not None:
        _check_reference(reference, blank, extracted, space)


def _check_reference(reference: Reference, images: Dataset, features: Tensor, space: str) -> None:
    """Raises ValueError where a reference has images of another size, or statistics of another number of features."""
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
    """The reason for each metric that cannot be had, by name."""
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
        missing["accuracy"] = "only embedded models' classifiers judge classes"
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
    """Measures images, as torch-fidelity does by default (10 splits, KID of 100 subsets of 1,000 at most, k = 3).

    Args:
        images: a data set of uint8 [3, H, W], such as `ImageList`, or a folder of PNGs.
        space: "inception", or a name in `SPACES`: "digits" (32x32 images), "emoji" (64x64).
        weights: torch-fidelity's file of Inception-v3; by default its own download.
        labels: the images' classes, for "accuracy".
        device: where features are extracted, "auto", "cpu", "cuda" or "cuda:N".
        extracted: what `extract` returned for these images; KID, precision and recall extract features once more.

    Returns:
        "num"; "fid", "inception_score", "inception_score_std", "kid", "precision", "recall" and "accuracy" (share
        recognised as their labels), each a float, or None where it cannot be had; "accuracy_ci95", an interval of it;
        "missing", reasons by name.

    Raises:
        ValueError: images or statistics that do not fit the space, or weights that cannot be had.
    """
    options = _options(images, space, weights, device)
    images = options["input1"]
    if labels is not None and len(labels) != len(images):
        raise ValueError(f"{len(images)} images and {len(labels)} labels: give one a label each")
    missing = _missing(space, len(images), reference, labels)
    # these read the images of both sides; the others need only features, logits and statistics
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
    """What `measure` returns where nothing is measured of so many images, for a reason."""
    values = dict.fromkeys([*KEYS, "accuracy", "accuracy_ci95"])
    return {"num": num, **values, "missing": dict.fromkeys([*KEYS, "accuracy"], reason)}


def of_features(features: Tensor, logits: Tensor, names: Sequence[str], reference: Reference | None) -> dict:
    """The metrics in `names` that features and logits are enough for.

    "fid", against a reference's statistics, and "inception_score", which comes with "inception_score_std".
    """
    measured = {}
    if "inception_score" in names:
        measured |= isc_features_to_metric(logits)
    if "fid" in names:
        statistics = fid_features_to_statistics(features)
        statistics = {name: value.astype(np.float64) for name, value in statistics.items()}
        measured |= fid_statistics_to_metric(statistics, reference.statistics, verbose=False)
    return {name: measured[key] for name, key in KEYS.items() if key in measured}
