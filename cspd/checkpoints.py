"""From a checkpoint's name, folder or hub id to its files, its models and an engine.

It imports every family of models, so that each registers its methods."""

from __future__ import annotations

import functools
import os
import re
from argparse import Namespace
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from cspd.causal.family import CausalModels
from cspd.causal.registry import load_autoencoder, load_causal
from cspd.device import check_fits, free_bytes, gibibytes, pick_device, room_told
from cspd.discrete.family import VQModels, check_draft
from cspd.discrete.hf import CONFIG, Folder, HFEagle, is_hf, load_hf_eagle, opened, read, read_prompts
from cspd.discrete.kv_cache import cache_bytes, working_bytes
from cspd.discrete.registry import CHAMELEON_DECODER, load_eagle, load_gpt, load_tokenizer
from cspd.discrete.text import TextEncoder
from cspd.engine import Engine, check_not_forked
from cspd.files import CALIBRATION, weight_files
from cspd.masked.family import MARModels
from cspd.method import method_of
from cspd.models import DESCRIPTION, GET_MODELS, IN_MODELS, Models, bundled, described
from cspd.origin import content_digest, identity_of, together
from cspd.request import Request
from cspd.terminal import __version__, telling
from mar.checkpoint import load_mar, load_vae, suggestion
from mar.tensors import CheckpointError, count_numbers, names_in

# Checkpoints on the Hugging Face Hub, through its client, which caches files.
#
# No code of a repository runs: its files are read like any others (`mar.tensors`). With HF_HUB_OFFLINE=1, or if the
# hub cannot be reached, only cached files are found.

NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?", re.ASCII)


def is_remote(checkpoint: str | Path) -> bool:
    """Whether it is a name on the hub, "org/name" or "org/name/file", and not a local path."""
    if not isinstance(checkpoint, str) or not NAME.fullmatch(checkpoint):
        return False
    first = checkpoint.partition("/")[0]
    return not Path(first).exists()  # a folder of this name: a mistyped local path is likelier


@functools.cache
def fetched(name: str, targets: Collection[str], companions: Collection[str]) -> Path:
    """The local file of a target on the hub, in the hub's cache, with its companions from the same folder.

    Args:
        name: "org/name", or with a file or folder in it. targets, companions: patterns of files' names.

    Raises:
        CheckpointError: there is no such target, or there are several.
    """
    owner, repository, *rest = name.split("/", 2)
    repo = f"{owner}/{repository}"
    inside = PurePosixPath(*rest)  # the repository, or a folder or file in it
    files = [PurePosixPath(file) for file in _listed(repo)]
    if inside in files:
        found = [inside]
    else:
        found = [file for file in files if _is_in(file, inside, targets)]
    if not found:
        raise CheckpointError(
            f"{name} is not a local path, and on the Hugging Face Hub it has none of {', '.join(targets)}. To use a"
            f" transformers model, fetch it first: hf download {repo} --local-dir {repository}"
        )
    if len(found) > 1:
        names = ", ".join(f"{repo}/{file}" for file in found)
        raise CheckpointError(f"{name} has several checkpoints: give one of {names}")
    target = found[0]
    wanted = [str(target)]
    wanted += [str(file) for file in files if _is_in(file, target.parent, companions)]
    return _folder(repo, wanted) / target


def _is_in(file: PurePosixPath, folder: PurePosixPath, patterns: Collection[str]) -> bool:
    return file.parent == folder and any(fnmatch(file.name, pattern) for pattern in patterns)


def _listed(repo: str) -> list[str]:
    """The files of a repository; the cached ones if the hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return HfApi().list_repo_files(repo)
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{repo} is neither a local path nor a repository on the Hugging Face Hub: check its name"
        ) from None
    except Exception as error:  # no network, or offline by choice: the client has an error for each
        folder = _folder(repo, None, error)
    cached = filter(Path.is_file, folder.rglob("*"))
    return [path.relative_to(folder).as_posix() for path in cached]


def _folder(repo: str, files: list[str] | None, why: Exception | None = None) -> Path:
    """The folder of a repository in the hub's cache, with these files; None: only the cached files.

    Raises CheckpointError with `why` the hub could not be asked, or the reason of a failed download.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=files, local_files_only=files is None))
    except Exception as error:
        why = why or error
        reason = (str(why) or type(why).__name__).splitlines()[0]
        raise CheckpointError(
            f"{repo} is not a local path, and the Hugging Face Hub cannot be reached: {reason}"
        ) from why


# From a checkpoint's name or path to its files.

# patterns of files' names in one folder: the official names and those of `Engine.save_pretrained`
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
_CAUSAL_FILES: dict[str, tuple[str, ...]] = {
    "target": ("target.safetensors", "SphereAR_*.pt", "BitDance_*.pt"),
    "vae": ("vae.safetensors", "ae_d16c32.pt"),
}
# all official files may be in one folder, and SphereAR's own autoencoder is inside its file
_SPHERE_FILES = _CAUSAL_FILES | {"vae": ()}
_FAMILIES = (_MAR_FILES, _VQ_FILES, _TEXT_FILES, _CAUSAL_FILES)
_TARGETS = tuple(dict.fromkeys(pattern for files in _FAMILIES for pattern in files["target"]))
_TEXT_ENCODERS = ("flan-t5-xl", "t5-ckpt/flan-t5-xl", "text_encoder")  # folders next to a target
# the hub's client fetches these with a target
_COMPANIONS: tuple[str, ...] = (DESCRIPTION,)
for _files in _FAMILIES:
    for _part, _patterns in _files.items():
        if _part != "target":
            _COMPANIONS += _patterns


def path_of(path: str | Path, name: str) -> Path:
    """A value as a path; `name` is the argument's. Raises TypeError or ValueError if it is not a path."""
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name} must be a name or a path, not {path!r}")
    if not os.fspath(path):
        raise ValueError(f"{name} is empty: give a file, or leave it out")
    return Path(path)


def _find(folder: Path, patterns: Iterable[str]) -> list[Path]:
    """The files of a folder that match, in the order of the patterns."""
    found: list[Path] = []
    for pattern in patterns:
        found += sorted(filter(Path.is_file, folder.glob(pattern)))
    return found


def _first(folder: Path, patterns: Iterable[str]) -> Path | None:
    return next(iter(_find(folder, patterns)), None)


def _target_file(checkpoint: str | Path) -> Path:
    """The target's file of a bundled name, a folder, a name on the hub, or that file itself."""
    known = bundled()
    path = known.get(str(checkpoint), path_of(checkpoint, "checkpoint"))
    if is_remote(checkpoint):
        with telling(f"asking the hub for {checkpoint}"):
            path = fetched(str(checkpoint), _TARGETS, _COMPANIONS)
    if path.is_file():
        return path
    found = _find(path, _TARGETS) if path.is_dir() else []
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise CheckpointError(f"{checkpoint} has several checkpoints: give the file of one of them ({names})")
    if found:
        return found[0]
    if is_hf(path):
        return path / CONFIG
    if checkpoint in IN_MODELS:
        raise CheckpointError(f"{checkpoint} {GET_MODELS}")
    raise CheckpointError(
        f"{checkpoint}: no checkpoint there. Give a file, a folder with one of {', '.join(_TARGETS)}"
        " (docs/checkpoints.md says where the official files come from) or with a transformers model"
        f" (docs/text.md), or a bundled name: {suggestion(str(checkpoint), known)}"
    )


def checkpoint_files(checkpoint: str | Path) -> dict[str, Path | None]:
    """The files of a checkpoint, by their role; None if absent.

    The roles are "target", "draft" and "vae" for MAR; "target" and "vae" for causal models; "target", "draft",
    "eagle", "tokenizer" and the folder "text_encoder" for VQ models, which are recognised by a tokenizer in the same
    folder or by their tensors. A model of `transformers` has its config.json as target, and Chameleon's decoder
    as tokenizer and a drafter if they are in the folder.

    Args:
        checkpoint: a bundled name, a folder, a target's file, or a name on the hub.

    Raises:
        CheckpointError: there is no target, or there are several. TypeError, ValueError: the argument is not a path.
    """
    target = _target_file(checkpoint)
    folder = target.parent
    files: dict[str, Path | None] = {"target": target}
    if is_hf(target):
        files |= {"draft": None, "text_encoder": None}
        files["eagle"] = _first(folder, _VQ_FILES["eagle"])
        files["tokenizer"] = _first(folder, CHAMELEON_DECODER)
        return files
    # one family's files only: another family's autoencoder may be in the same folder
    own = patterns_of(target)
    for name, patterns in own.items():
        if name != "target":
            files[name] = _first(folder, patterns)
    if "tokenizer" in own:
        encoders = filter(Path.is_dir, [folder / name for name in _TEXT_ENCODERS])
        files["text_encoder"] = next(encoders, None)
    return files


def patterns_of(target: Path) -> dict[str, tuple[str, ...]]:
    """The patterns of the files next to a target, by their role: by its tensors, or its name if it is damaged."""
    names = _names(target)
    if names:
        if IN_CAUSAL in names:
            return _SPHERE_FILES if IN_SPHERE in names and any(map(IN_AUTOENCODER.match, names)) else _CAUSAL_FILES
        if IN_GPT in names:
            return _TEXT_FILES if IN_TEXT_GPT in names else _VQ_FILES
        return _MAR_FILES
    if target.match("t2i_*"):
        return _TEXT_FILES
    if target.match("SphereAR_*.pt"):
        return _SPHERE_FILES
    if target.match("BitDance_*.pt"):
        return _CAUSAL_FILES
    has_tokenizer = bool(_find(target.parent, _VQ_FILES["tokenizer"]))
    is_vq = target.match("c2i_*") or (target.suffix != ".pth" and has_tokenizer)
    return _VQ_FILES if is_vq else _MAR_FILES


# tensors that only one family has
IN_CAUSAL, IN_SPHERE, IN_AUTOENCODER = "pos_for_diff.weight", "proj_in.weight", re.compile(r"vae\.")
IN_GPT, IN_TEXT_GPT = "tok_embeddings.weight", "cls_embedding.uncond_embedding"


def _names(target: Path) -> frozenset[str]:
    """The names of a file's tensors; none if it is damaged, which loading it reports."""
    try:
        about = target.stat()
    except (OSError, ValueError):
        return frozenset()
    return _names_once(target, about.st_size, about.st_mtime_ns)


@functools.lru_cache(maxsize=64)  # a file is asked for its family several times
def _names_once(target: Path, num_bytes: int, modified: int) -> frozenset[str]:
    return names_in(target)


def family_of(checkpoint: str | Path) -> str:
    """The family of a checkpoint, a key of `cspd.option.COMMON`. Raises as `checkpoint_files`."""
    files = checkpoint_files(checkpoint)
    if "tokenizer" in files:
        return VQModels.family
    target = files["target"]
    return CausalModels.family if target and _is_causal(target) else MARModels.family


def _is_causal(target: Path) -> bool:
    """Whether a file is of SphereAR or BitDance."""
    return patterns_of(target)["target"] == _CAUSAL_FILES["target"]


# From folders of `transformers` models to the models of a VQ engine.

SMALLER = "use a smaller model or another device"
HALF = ", or precision='bf16' (--precision bf16), which halves the weights"


def hf_models(
    path: Path,
    draft: Path | None,
    eagle: Path | None,
    vae: Path | None,
    device: str | torch.device,
    precision: str,
    max_batch: int,
) -> VQModels:
    """The models of a folder, loaded straight to a device.

    The weights keep their own type, and compute in it; with precision "bf16" they become bfloat16.

    Args:
        path: the folder. draft: the folder of a smaller model with the same codebook. eagle: the file of an EAGLE
            drafter. vae: the file of the decoder, if `transformers` lacks one and the folder does too.
        max_batch: the number of slots that must fit into memory.

    Raises:
        CheckpointError: as in `cspd.discrete.hf`. ValueError: too little memory, a library is missing, `vae` is given
            to a model that makes pixels itself, or draft and target are incompatible.
    """
    device = pick_device(device)
    dtype = torch.bfloat16 if precision == "bf16" else None
    paths = [path] if draft is None else [path, draft]
    folders = [opened(_hf_folder(each), dtype) for each in paths]
    decoder = folders[0].decoder(vae)
    # target and draft model share positions: the shorter limit of a prompt holds for both
    prefix = min(folder.config.prefix_length for folder in folders)
    for i, folder in enumerate(folders):
        folders[i] = replace(folder, config=replace(folder.config, prefix_length=prefix))
    target = folders[0]
    for folder in folders[1:]:
        check_draft(target.config, folder.config)
    drafter = load_hf_eagle(eagle, target.config, target.dtype) if eagle else None
    _check_memory(folders, drafter, device, max_batch)
    prompts = read_prompts(target)
    models = []
    for folder, own_decoder in zip(folders, (decoder, None)):
        with telling(f"loading {folder.path}{room_told(folder.num_bytes, device)}"):
            models.append(read(folder, device, own_decoder))
    target_model, tokenizer = models[0]
    draft_model = models[1][0] if draft is not None else None
    return VQModels(target_model, draft_model, drafter, tokenizer, text_encoder=prompts)  # type: ignore[arg-type]


def _hf_folder(path: Path) -> Path:
    if not is_hf(path):
        raise CheckpointError(f"{path} has no {CONFIG}: give the folder of a transformers model, like the target's")
    return path if path.is_dir() else path.parent


def _check_memory(folders: list[Folder], drafter: HFEagle | None, device: torch.device, max_batch: int) -> None:
    """Raises ValueError if weights and caches do not fit into memory."""
    target = folders[0].config
    caches = weights = 0
    for folder in folders:
        caches += cache_bytes(target, folder.config, folder.config.n_layer, folder.dtype)
        weights += folder.num_bytes
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
            f"arch, vae, draft, eagle and text_encoder need a single checkpoint, and there are several ({names}): give"
            " one of them (--checkpoint on the command line), or put the files into the folders of their targets"
        )


def load(
    *checkpoints: str | Path,
    names: Sequence[str] | None = None,
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
    """An engine with the models of a checkpoint, or of several, which share its slots. Other arguments: as in `Engine`.

    Args:
        checkpoints: bundled names, folders with official files or written by `Engine.save_pretrained`, or of an image
            model of `transformers` (docs/text.md), targets' files, or names on the Hugging Face Hub ("org/name",
            "org/name/file"); "digits32" by default. Without `names`, at most one of each family.
        arch: the target's size (`mar.checkpoint.MARS`, `cspd.discrete.registry.GPTS`,
            `cspd.causal.registry.CAUSALS`); by default inferred from the file.
        vae: the file of the autoencoder or tokenizer, if it is not in the target's folder.
        draft: a smaller model's file, for methods that draft, if it is not in the target's folder.
        eagle: the file of a VQ target's EAGLE drafter, if it is not in the target's folder.
        text_encoder: the folder of a text-to-image model's T5 encoder, if it is not in the target's folder.

    Raises:
        CheckpointError: a file is missing, damaged or of another model, or a folder has several targets.
        TypeError: a path is something else.
        ValueError: as in `Engine`, weights that do not fit into memory, an unknown arch, an EAGLE drafter for a MAR, a
            text encoder for a class-conditional model, or several checkpoints with one arch, vae, draft, eagle or text
            encoder.
        RuntimeError: as in `Engine`.
    """
    check_not_forked()
    checkpoints = checkpoints or ("digits32",)
    check_of_one(checkpoints, arch, vae, draft, eagle, text_encoder)
    named = {"vae": vae, "draft": draft, "eagle": eagle, "text_encoder": text_encoder}
    given = {name: path_of(path, name) for name, path in named.items() if path is not None}
    models: list[Models] = []
    origins = []
    for checkpoint in checkpoints:
        models.append(_models_of(checkpoint, given, arch, max_batch, device, precision, compiled))
        origin = {"checkpoint": checkpoint, "arch": arch, **given}
        origins.append({name: str(value) for name, value in origin.items() if value is not None})
    engine = Engine(
        *models,
        names=names,
        max_batch=max_batch,
        device=device,
        precision=precision,
        compiled=compiled,
        graphs=graphs,
    )
    engine.origins = dict(zip(engine.runners, origins))
    engine.loaded = functools.partial(
        load, *checkpoints, names=names, arch=arch, vae=vae, draft=draft, eagle=eagle, text_encoder=text_encoder
    )
    return engine


def _models_of(
    checkpoint: str | Path,
    given: Mapping[str, Path],
    arch: str | None,
    max_batch: int,
    device: str | torch.device,
    precision: str,
    compiled: bool,
) -> Models:
    """The models of one checkpoint, with the files `given`; other arguments as in `load`."""
    files = checkpoint_files(checkpoint)
    target = files["target"]
    assert target is not None  # or `checkpoint_files` would have raised an error
    if not is_hf(target):
        return _official_models(checkpoint, files, given, arch, pick_device(device))
    unfit = {"arch (--arch)": arch, "text_encoder (--text-encoder)": given.get("text_encoder")}
    _check_hf(checkpoint, unfit | {"compiled (--compile)": compiled or None})
    drafter = given.get("eagle", files["eagle"])
    return hf_models(target, given.get("draft"), drafter, given.get("vae"), device, precision, max_batch)


def _check_hf(checkpoint: str | Path, given: Mapping[str, object]) -> None:
    """Raises ValueError for given options (not None) that `transformers` models do not have."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{checkpoint} is a transformers model, which has no {name}: leave it out")


def _room_for(files: Mapping[str, Path], device: torch.device) -> str:
    """The memory that the weights of files take, for a message after their name; empty if it is little.

    They are read into the CPU's memory, in float32, and moved to the device.

    Raises ValueError, before reading them, if they do not fit.
    """
    weights = [file for name, file in files.items() if name != "text_encoder"]
    needed = torch.float32.itemsize * sum(map(count_numbers, weights))
    # weights pass through the CPU's memory on their way to a GPU
    for memory in {device, torch.device("cpu")}:
        free = free_bytes(memory)
        if needed > free:
            raise ValueError(
                f"{files['target']}: its models need {gibibytes(needed)}, and {memory} has {gibibytes(free)} free:"
                f" {SMALLER}"
            )
    return room_told(needed, device)


def _official_models(
    checkpoint: str | Path,
    files: Mapping[str, Path | None],
    given: Mapping[str, Path],
    arch: str | None,
    device: torch.device,
) -> MARModels | VQModels | CausalModels:
    """The models of the files in a target's folder, replaced by given ones, see `load`."""
    decoder = "tokenizer" if "tokenizer" in files else "vae"
    if decoder == "vae" and "eagle" in given:
        raise ValueError(f"{checkpoint} is not a VQ target, and eagle=... is for these: leave it out")
    is_causal = _is_causal(files["target"])  # type: ignore[arg-type]
    if is_causal and "draft" in given:
        raise ValueError(
            f"{checkpoint} is a causal model, which takes no draft model: leave out draft=... (--draft-checkpoint)"
        )
    present = {name: path for name, path in files.items() if path is not None}
    present |= given
    if "vae" in given:  # `load` calls the decoder of either family vae
        present[decoder] = given["vae"]
    if decoder not in present and not is_causal:  # a causal model's file may have its autoencoder inside
        wanted = " or ".join(patterns_of(present["target"])[decoder])
        raise CheckpointError(
            f"{checkpoint} has no autoencoder in its folder ({wanted}): give its file (vae=..., --vae on the command"
            " line)"
        )
    models: MARModels | VQModels | CausalModels
    with telling(f"loading {present['target']}{_room_for(present, device)}"):
        if is_causal:
            models = _causal_models(present, arch)
        elif decoder == "vae":
            models = _mar_models(present, arch)
        else:
            models = _vq_models(present, arch, eagle_must_fit="eagle" in given)
    if not is_remote(checkpoint):  # nothing is written to the cache of the hub's client
        models = replace(models, calibrations=present["target"].parent / CALIBRATION)
    if "text_encoder" in given and getattr(models, "text_encoder", None) is None:
        raise ValueError(f"{checkpoint} is class-conditional: leave out text_encoder=... (--text-encoder)")
    return models


def _sizes(files: Mapping[str, Path], part: str) -> dict[str, Any]:
    """The sizes that the description beside a part's own file sets."""
    return dict(described(files[part].parent).sizes.get(part, {}))


def _mar_models(files: Mapping[str, Path], arch: str | None) -> MARModels:
    about = described(files["target"].parent)
    vae = load_vae(files["vae"], sizes=_sizes(files, "vae"))
    target = load_mar(files["target"], arch, sizes=_sizes(files, "target"))
    draft = load_mar(files["draft"], sizes=_sizes(files, "draft")) if "draft" in files else None
    return MARModels(target, draft, vae, about.names(target.config.class_num))


def _causal_models(files: Mapping[str, Path], arch: str | None) -> CausalModels:
    about = described(files["target"].parent)
    target, inside = load_causal(files["target"], arch, _sizes(files, "target"))
    # a file beside BitDance's replaces the autoencoder inside it, as in the authors' code
    vae = load_autoencoder(files["vae"], _sizes(files, "vae")) if "vae" in files else inside
    if vae is None:
        wanted = " or ".join(patterns_of(files["target"])["vae"])
        beside = f", and there is no {wanted} beside it" if wanted else ""
        raise CheckpointError(
            f"{files['target']} has no autoencoder inside{beside}: give its file (vae=..., --vae on the command line)"
        )
    return CausalModels(target, vae, about.names(target.config.num_classes))


def _vq_models(files: Mapping[str, Path], arch: str | None, eagle_must_fit: bool) -> VQModels:
    """`eagle_must_fit`: keep an EAGLE drafter of another width, which otherwise belongs to another target."""
    about = described(files["target"].parent)
    target = load_gpt(files["target"], arch, _sizes(files, "target"))
    # weights fit any resolution: drafters take the target's
    own = {"block_size": target.config.block_size}
    draft = load_gpt(files["draft"], sizes={**_sizes(files, "draft"), **own}) if "draft" in files else None
    eagle = load_eagle(files["eagle"], sizes={**_sizes(files, "eagle"), **own}) if "eagle" in files else None
    # a folder may have several targets' files: a drafter of another width is not this target's
    if eagle and eagle.config.dim != target.config.dim and not eagle_must_fit:
        eagle = None
    encoder = None
    if target.config.caption_dim > 0 and "text_encoder" in files:
        encoder = TextEncoder(files["text_encoder"])
    tokenizer = load_tokenizer(files["tokenizer"], sizes=_sizes(files, "tokenizer"))
    return VQModels(target, draft, eagle, tokenizer, about.names(target.config.num_classes), encoder)


# The models of a run, in its record.


def run_settings(args: Namespace, request: Request) -> dict:
    """What images depend on besides their requests: version, rounding, and the files that a checked request uses.

    `args` has `checkpoint`, `precision`, `compile`, `graphs`, and the files that are not next to the checkpoint's:
    `vae`, `draft_checkpoint`, `eagle` and `text_encoder`.
    """
    files = checkpoint_files(args.checkpoint)
    decoder = "tokenizer" if "tokenizer" in files else "vae"
    # files that the request does not use, such as an EAGLE drafter for sjd, may change between runs
    used = {"target": files["target"], decoder: args.vae or files[decoder]}
    given = {"draft": args.draft_checkpoint, "eagle": args.eagle}
    for name in sorted(method_of(request).uses(request)):
        used[name] = given[name] or files[name]
    settings = {"version": __version__, "precision": args.precision, "compiled": args.compile, "graphs": args.graphs}
    encoder = args.text_encoder or files.get("text_encoder")
    if request.prompt is not None and encoder is not None:
        settings["text_encoder"] = TextEncoder(encoder).identity
    for name, file in used.items():
        if file is not None:
            settings[name] = _stored(file)
    return settings


def _stored(file: Path) -> dict:
    """A model file in the record of a run: its content identifies it when the run is resumed, wherever it is.

    For a `transformers` model it is all files in the directory.
    """
    more: dict = {}
    name, weights = file.name, [file]
    if is_hf(file):
        folder = (file if file.is_dir() else file.parent).resolve()
        name, weights = folder.name, weight_files(folder)
        more["folder"] = identity_of(folder)
    num_bytes = sum(each.stat().st_size for each in weights)
    return {"file": name, "bytes": num_bytes, "sha256": together([*map(content_digest, weights)]), **more}
