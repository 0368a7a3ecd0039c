"""From a checkpoint's name, folder or hub id to its files, its models and an engine.

It imports every family of models, so that each registers its methods."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

import torch

from cspd.device import check_fits, free_bytes, gibibytes, pick_device, room_told
from cspd.discrete.family import VQModels, cache_bytes, check_draft, working_bytes
from cspd.discrete.gpt import GPT, Eagle
from cspd.discrete.hf import CONFIG, Folder, HFEagle, is_hf, load_hf_eagle, opened, read, read_prompts
from cspd.discrete.registry import CHAMELEON_DECODER, load_eagle, load_gpt, load_tokenizer
from cspd.discrete.text import TextEncoder
from cspd.engine import Engine
from cspd.files import CALIBRATION
from cspd.masked.family import MARModels
from cspd.models import DESCRIPTION, Models, bundled, described
from cspd.terminal import is_too_long, shortened, telling
from mar.checkpoint import load_mar, load_vae, suggestion
from mar.tensors import CheckpointError, count_numbers

# Checkpoints on the Hugging Face Hub by their names, through its client, which caches files.
#
# No code of a repository is run: its files are read like any others (`mar.tensors`). With HF_HUB_OFFLINE=1, or if the
# hub cannot be reached, only cached files are found.

NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?", re.ASCII)


def is_name(text: str) -> bool:
    """Whether a text is a name on the hub, "org/name" or "org/name/file", and not a local path."""
    return NAME.fullmatch(text) is not None and not Path(text.partition("/")[0]).exists()


@functools.cache
def fetched(name: str, targets: Collection[str], companions: Collection[str]) -> Path:
    """The local file of a target on the hub, in the hub's cache, with the companions from the same folder.

    Args:
        name: "org/name", or with a file or folder in it. targets, companions: patterns of files' names.

    Raises:
        CheckpointError: there is no such target, or there are several.
    """
    owner, repository, *rest = name.split("/", 2)
    repo, inside = f"{owner}/{repository}", PurePosixPath(*rest)
    files = [PurePosixPath(file) for file in _listed(repo)]
    found = [file for file in files if file == inside]
    if not found:
        found = [file for file in files if file.parent == inside and _matches(file, targets)]
    if not found:
        fetch = f"a model of transformers is fetched first: hf download {repo} --local-dir {repository}"
        raise CheckpointError(
            f"{name}: no such place here, and on the hub it has none of {', '.join(targets)}; {fetch}"
        )
    if len(found) > 1:
        names = ", ".join(f"{repo}/{file}" for file in found)
        raise CheckpointError(f"{name}: several checkpoints are there: give one: {names}")
    target = found[0]
    wanted = [str(target)]
    for file in files:
        if file.parent == target.parent and _matches(file, companions):
            wanted.append(str(file))
    return _folder(repo, wanted) / target


def _matches(file: PurePosixPath, patterns: Collection[str]) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)


def _listed(repo: str) -> list[str]:
    """The files of a repository; the cached ones if the hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        with _unlogged():
            return HfApi().list_repo_files(repo)
    except RepositoryNotFoundError:
        raise CheckpointError(f"{repo}: no such place here, and no such repository on the hub") from None
    except Exception as error:  # no network, or offline by choice: the client has an error for each
        folder = _folder(repo, None, error)
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Keeps the hub's client from logging each of its attempts: one line reports the result."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _folder(repo: str, files: list[str] | None, why: Exception | None = None) -> Path:
    """The folder of a repository in the hub's cache, with these files; None: with the cached ones.

    Raises CheckpointError with the reason `why` the hub could not be asked, or that of a failed download.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=files, local_files_only=files is None))
    except Exception as error:
        why = why or error
        reason = (str(why) or type(why).__name__).splitlines()[0]
        raise CheckpointError(f"{repo}: no such place here, and it cannot be had from the hub: {reason}") from why


# From a checkpoint's name or path to its files.

# patterns of files' names in one folder
_MAR_FILES = {
    "target": ("target.safetensors", "checkpoint-last.pth"),
    "draft": ("draft.safetensors",),
    "vae": ("vae.safetensors", "kl16.ckpt"),
}
_VQ_FILES = {
    "target": ("target.safetensors", "c2i_*.pt"),
    "draft": ("draft.safetensors",),
    "eagle": ("eagle.safetensors",),
    "tokenizer": ("tokenizer.safetensors", "vq_ds16_c2i.pt"),
}
_TEXT_FILES = _VQ_FILES | {
    "target": ("target.safetensors", "t2i_*.pt"),
    "tokenizer": ("tokenizer.safetensors", "vq_ds16_t2i.pt"),
}
_TARGETS = tuple(dict.fromkeys(_MAR_FILES["target"] + _VQ_FILES["target"] + _TEXT_FILES["target"]))
_TEXT_ENCODERS = ("flan-t5-xl", "t5-ckpt/flan-t5-xl", "text_encoder")  # folders next to a target
# fetched with a target from the hub
_COMPANIONS: tuple[str, ...] = (DESCRIPTION,)
for _files in (_MAR_FILES, _VQ_FILES, _TEXT_FILES):
    for _part, _patterns in _files.items():
        if _part != "target":
            _COMPANIONS += _patterns


def path_of(place: str | Path, what: str) -> Path:
    """A value as a path; `what` is its name in errors. Raises TypeError or ValueError if it is not a path."""
    if not isinstance(place, (str, os.PathLike)):
        raise TypeError(f"{what} must be a name or a path, not {place!r}")
    if not os.fspath(place):
        raise ValueError(f"{what} is empty: give a file, or leave it out")
    path = Path(place)
    if is_too_long(path):
        raise ValueError(f"{what} {shortened(str(path))} is too long for the file system: give a shorter name")
    return path


def is_remote(checkpoint: str | Path) -> bool:
    """Whether it is a name on the hub, and not a local path."""
    return isinstance(checkpoint, str) and is_name(checkpoint)


def _find(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [path for pattern in patterns for path in sorted(folder.glob(pattern)) if path.is_file()]


def _target_file(checkpoint: str | Path) -> Path:
    """The file of a bundled name, a folder or a target's file."""
    known = bundled()
    place = known.get(str(checkpoint), path_of(checkpoint, "checkpoint"))
    if is_remote(checkpoint):
        with telling(f"asking the hub for {checkpoint}"):
            place = fetched(str(checkpoint), _TARGETS, _COMPANIONS)
    if place.is_file():
        return place
    found = _find(place, _TARGETS) if place.is_dir() else []
    if not found and is_hf(place):
        return place / CONFIG
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{checkpoint}: several checkpoints are there ({names}): give the file of one")
    if not found:
        raise CheckpointError(
            f"{checkpoint}: no checkpoint there; give a file, a folder with one of {', '.join(_TARGETS)}"
            " (checkpoints/README.md says where the official files come from) or of a model of transformers"
            " (docs/text.md), or a bundled name:"
            f" {suggestion(str(checkpoint), known)}"
        )
    return found[0]


def checkpoint_files(checkpoint: str | Path) -> dict[str, Path | None]:
    """The files of a bundled name, a folder, or a target's file, by their role; None if absent.

    The roles are "target", "draft" and "vae" for MAR; "target", "draft", "eagle", "tokenizer" and the folder
    "text_encoder" for VQ models, which are recognised by a tokenizer in the same folder or by their official name. A
    model of `transformers` has its config.json as target, and Chameleon's decoder as tokenizer and a drafter if they
    are in the folder.

    Raises:
        CheckpointError: there is no target, or there are several. TypeError, ValueError: the argument is not a path.
    """
    target = _target_file(checkpoint)
    files: dict[str, Path | None] = {"target": target}
    if is_hf(target):
        decoder = next(iter(_find(target.parent, CHAMELEON_DECODER)), None)
        drafter = next(iter(_find(target.parent, _VQ_FILES["eagle"])), None)
        return files | {"draft": None, "eagle": drafter, "tokenizer": decoder, "text_encoder": None}
    own = patterns_of(target)
    for name, patterns in own.items():
        if name != "target":
            files[name] = next(iter(_find(target.parent, patterns)), None)
    if own is not _MAR_FILES:
        folders = [target.parent / name for name in _TEXT_ENCODERS]
        files["text_encoder"] = next((folder for folder in folders if folder.is_dir()), None)
    return files


def patterns_of(target: Path) -> dict[str, tuple[str, ...]]:
    """The patterns of the files next to a target, by their role."""
    if target.match("t2i_*"):
        return _TEXT_FILES
    has_tokenizer = bool(_find(target.parent, _VQ_FILES["tokenizer"]))
    is_vq = target.match("c2i_*") or (target.suffix != ".pth" and has_tokenizer)
    return _VQ_FILES if is_vq else _MAR_FILES


def family_of(checkpoint: str | Path) -> str:
    """The family of a bundled name, a folder or a target's file: "MAR" or "VQ". Raises CheckpointError."""
    return (VQModels if "tokenizer" in checkpoint_files(checkpoint) else MARModels).family


# From folders of `transformers` models to the models of a VQ engine.

SMALLER = "use a smaller model or another device"
HALF = ", or precision='bf16' (--precision bf16), which halves the weights"


def hf_models(
    place: Path,
    draft: Path | None,
    eagle: Path | None,
    vae: Path | None,
    device: str | torch.device,
    precision: str,
    max_batch: int,
) -> VQModels:
    """The models of a folder, loaded straight to a device.

    The weights keep their own type, and compute in it; under "bf16" they become bfloat16.

    Args:
        place: the folder. draft: that of a smaller model of the same codes. eagle: the file of an EAGLE drafter. vae:
            the file of the decoder, if `transformers` lacks one and the folder does too.
        max_batch: the number of slots that must fit into memory.

    Raises:
        CheckpointError: as in `cspd.discrete.hf`. ValueError: too little memory, a library is missing, or
            `vae` is given to a model that makes pixels itself, or the draft does not fit.
    """
    device = pick_device(device)
    dtype = torch.bfloat16 if precision == "bf16" else None
    folders = [opened(_hf_folder(each), dtype) for each in (place, draft) if each is not None]
    decoder = folders[0].decoder(vae)
    prefix = min(folder.config.prefix_length for folder in folders)
    folders = [replace(folder, config=replace(folder.config, prefix_length=prefix)) for folder in folders]
    for folder in folders[1:]:
        check_draft(folders[0].config, folder.config)
    drafter = load_hf_eagle(eagle, folders[0].config, folders[0].dtype) if eagle else None
    _check_memory(folders, drafter, device, max_batch)
    prompts = read_prompts(folders[0])
    models = []
    for folder, own_decoder in zip(folders, (decoder, None)):
        with telling(f"loading {folder.path}{room_told(folder.num_bytes, device)}"):
            models.append(read(folder, device, own_decoder))
    (target, tokenizer), *others = models
    return VQModels(target, next((model for model, _ in others), None), drafter, tokenizer, text_encoder=prompts)  # type: ignore[arg-type]


def _hf_folder(place: Path) -> Path:
    if not is_hf(place):
        raise CheckpointError(f"{place}: no folder of a model of transformers, as the target's is: it has no {CONFIG}")
    return place if place.is_dir() else place.parent


def _check_memory(folders: list[Folder], drafter: HFEagle | None, device: torch.device, max_batch: int) -> None:
    """Raises ValueError if weights and caches do not fit into memory."""
    target = folders[0].config
    caches = sum(cache_bytes(target, folder.config, folder.config.n_layer, folder.dtype) for folder in folders)
    weights = sum(folder.num_bytes for folder in folders)
    if drafter is not None:
        caches += cache_bytes(target, drafter.config, len(drafter.layers), drafter.own_type)
        weights += sum(parameter.nbytes for parameter in drafter.parameters())
    what = " with the models' weights and key-value caches"
    is_full = any(folder.dtype == torch.float32 for folder in folders)
    fix = SMALLER + HALF if is_full else SMALLER
    check_fits(caches + working_bytes(target), max_batch, what, fix, device, weights)


# From a checkpoint's files to an engine.


def check_of_one(checkpoints: Sequence[str | Path], *given: object) -> None:
    """Raises ValueError if there are several checkpoints, and a size or file is given, which belongs to one of them."""
    if len(checkpoints) > 1 and any(each is not None for each in given):
        names = ", ".join(map(str, checkpoints))
        raise ValueError(
            f"arch, vae, draft, eagle and text_encoder are of one checkpoint, and these are several ({names}): give the"
            " one that they belong to (--checkpoint on the command line), or put the files beside their targets"
        )


def load(
    *checkpoints: str | Path,
    arch: str | None = None,
    vae: str | Path | None = None,
    draft: str | Path | None = None,
    eagle: str | Path | None = None,
    text_encoder: str | Path | None = None,
    max_batch: int = 8,
    device: str | torch.device = "auto",
    precision: str = "fp32",
    compiled: bool = False,
    graphs: bool | None = None,
) -> Engine:
    """An engine with the models of a checkpoint, or of one of MAR and one of VQ models.

    Args:
        checkpoints: bundled names, folders with official files or written by `Engine.save_pretrained`, or of an image
            model of `transformers` (docs/text.md), targets' files, or names on the Hugging Face Hub ("org/name",
            "org/name/file"); "digits32" by default.
        arch: the target's size (`mar.checkpoint.MARS`, `cspd.discrete.registry.GPTS`); by default inferred from the
            file.
        vae: the file of the autoencoder or tokenizer, if it is not in the target's folder.
        draft: a smaller model's file, for methods that draft, if it is not in the target's folder.
        eagle: the file of a VQ target's EAGLE drafter, if it is not in the target's folder.
        text_encoder: the folder of a text-to-image model's T5 encoder, if it is not in the target's folder.
        max_batch, device, precision, compiled, graphs: as in `Engine`.

    Raises:
        CheckpointError: a file is missing, damaged or of another model, or a folder has several targets.
        TypeError: a path is something else. ValueError: as in `Engine`, weights that do not fit into memory, an unknown
            arch, an EAGLE drafter for a MAR, a text encoder for a class-conditional model, or several checkpoints with
            one arch, vae, draft, eagle or text encoder.
    """
    checkpoints = checkpoints or ("digits32",)
    check_of_one(checkpoints, arch, vae, draft, eagle, text_encoder)
    named = {"vae": vae, "draft": draft, "eagle": eagle, "text_encoder": text_encoder}
    given = {name: path_of(place, name) for name, place in named.items() if place is not None}
    models: list[Models] = []
    for checkpoint in checkpoints:
        files = checkpoint_files(checkpoint)
        target = files["target"]
        assert target is not None  # or `checkpoint_files` had raised an error
        if is_hf(target):
            unfit = {"arch (--arch)": arch, "text_encoder (--text-encoder)": text_encoder}
            _check_hf(checkpoint, unfit | {"compiled (--compile)": compiled or None})
            drafter, decoder = given.get("eagle", files["eagle"]), given.get("vae")
            models.append(hf_models(target, given.get("draft"), drafter, decoder, device, precision, max_batch))
            continue
        models.append(_official_models(checkpoint, files, given, arch, pick_device(device)))
    return Engine(
        *models,
        max_batch=max_batch,
        device=device,
        precision=precision,
        compiled=compiled,
        graphs=graphs,
    )


def _check_hf(checkpoint: str | Path, given: Mapping[str, object]) -> None:
    """Raises ValueError for given options (not None) that `transformers` models do not have."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{checkpoint}: {name} is not for models of transformers: leave it out")


def _room_for(files: Mapping[str, Path], device: torch.device) -> str:
    """The memory that the weights of files take, for a message after their name; empty if it is little.

    They are read into the CPU's memory, in float32, and moved to the device.

    Raises ValueError, before reading them, if they do not fit.
    """
    weights = [file for name, file in files.items() if name != "text_encoder"]
    needed = torch.float32.itemsize * sum(map(count_numbers, weights))
    for place in {device, torch.device("cpu")}:
        free = free_bytes(place)
        if needed > free:
            raise ValueError(
                f"{files['target']}: its models need {gibibytes(needed)} and {place} has {gibibytes(free)} free: use"
                " a smaller model or another device"
            )
    return room_told(needed, device)


def _official_models(
    checkpoint: str | Path,
    files: Mapping[str, Path | None],
    given: Mapping[str, Path],
    arch: str | None,
    device: torch.device,
) -> MARModels | VQModels:
    """The models of the files in a target's folder, replaced by given ones, see `load`."""
    decoder = "tokenizer" if "tokenizer" in files else "vae"
    if decoder == "vae" and "eagle" in given:
        raise ValueError(f"{checkpoint}: eagle=... is for VQ targets, and this is a MAR: leave it out")
    own = {decoder if name == "vae" else name: place for name, place in given.items()}
    there = {name: place for name, place in {**files, **own}.items() if place is not None}
    if decoder not in there:
        wanted = " or ".join(patterns_of(there["target"])[decoder])
        raise CheckpointError(
            f"{checkpoint}: no autoencoder beside it ({wanted}): give its file (vae=..., --vae on the command line)"
        )
    models: MARModels | VQModels
    with telling(f"loading {there['target']}{_room_for(there, device)}"):
        if decoder == "vae":
            models = _mar_models(there, arch)
        else:
            models = _vq_models(there, arch, eagle_must_fit="eagle" in given)
    if not is_remote(checkpoint):  # the folder of the hub's client is not ours
        models = dataclasses.replace(models, calibrations=there["target"].parent / CALIBRATION)
    if "text_encoder" in given and getattr(models, "text_encoder", None) is None:
        raise ValueError(f"{checkpoint} makes images of classes: leave text_encoder=... (--text-encoder) out")
    return models


def _mar_models(files: Mapping[str, Path], arch: str | None) -> MARModels:
    target = load_mar(files["target"], arch)
    draft = load_mar(files["draft"]) if "draft" in files else None
    classes, _ = described(files["target"].parent, target.config.class_num)
    return MARModels(target, draft, load_vae(files["vae"]), classes)


def _vq_models(files: Mapping[str, Path], arch: str | None, eagle_must_fit: bool) -> VQModels:
    """`eagle_must_fit`: keep an EAGLE drafter of another width, which otherwise belongs to another target."""
    target = load_gpt(files["target"], arch)
    classes, num_tokens = described(files["target"].parent, target.config.num_classes)
    if num_tokens is not None:
        target.config = dataclasses.replace(target.config, block_size=num_tokens)
    draft = load_gpt(files["draft"]) if "draft" in files else None
    eagle = load_eagle(files["eagle"]) if "eagle" in files else None
    if eagle and eagle.config.dim != target.config.dim and not eagle_must_fit:
        eagle = None
    smaller: list[GPT | Eagle] = [model for model in (draft, eagle) if model]
    for model in smaller:  # weights fit any resolution
        model.config = dataclasses.replace(model.config, block_size=target.config.block_size)
    is_text = target.config.caption_dim > 0
    encoder = TextEncoder(files["text_encoder"]) if is_text and "text_encoder" in files else None
    return VQModels(target, draft, eagle, load_tokenizer(files["tokenizer"]), classes, encoder)
