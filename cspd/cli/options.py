"""From the flags that commands share to prompts, classes, requests and engines; and `cspd methods`."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from PIL import Image

from cspd.checkpoints import family_of, is_remote, load
from cspd.cli.flags import add_like, add_plugin
from cspd.cli.listing import format_table, markdown_table, options_table
from cspd.discrete.text import missing_library
from cspd.engine import Engine
from cspd.evaluation.run import Shards, Task
from cspd.files import misfit, parse_json
from cspd.method import METHODS, Method, choose
from cspd.models import bundled
from cspd.option import REMOVED, option_names, without_removed
from cspd.pixels import PNG_TEXT
from cspd.request import Label, Request
from cspd.terminal import NO_CHARACTER, install


def run_methods(args: argparse.Namespace) -> None:
    if args.options:
        print(options_table(METHODS))
    elif args.markdown:
        print(markdown_table(METHODS))
    else:
        print(format_table(METHODS))


# The prompts of --prompts FILE, and the classes of --labels.

FORMS = (
    "--prompts takes a file with one prompt per line, in UTF-8; or .json: a list of prompts, or captions in COCO's"
    " format; or .jsonl: a prompt in each line; or .tsv with a column Prompt, such as PartiPrompts'; or a folder of"
    " .txt files"
)
GROUPS = ("category", "challenge", "tag")  # names of PartiPrompts' and GenEval's groups of prompts
COCO_NAME = re.compile(r"(?:COCO_\w+_)?(\d+)")  # image names: COCO_val2014_000000000139, 000000000139, 139
COCO_DIGITS = 12  # COCO pads numbers to this length
COCO = {"annotations": [{"image_id": (int, str), "caption": str}]}


def asked_prompts(path: Path | None, caption_seed: int | None, images: Sequence[Path] = ()) -> list[str] | None:
    """The prompts of --prompts; None without it. Raises as `read_prompts`, and ValueError for a seed alone."""
    if path is not None:
        return read_prompts(path, images, caption_seed)
    if caption_seed is not None:
        raise ValueError("--caption-seed chooses among COCO's captions of an image: add --prompts captions.json")
    return None


def read_prompts(path: Path, images: Sequence[Path] = (), caption_seed: int | None = None) -> list[str]:
    """The prompts of a file, in its order. COCO's files have several captions per image: the first one is taken.

    Args:
        images: files that the prompts belong to. If all are named as in COCO, each gets the caption of its own number.
        caption_seed: takes one of an image's captions at random, by this seed and the image's number.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is empty or has another format, a prompt is blank or damaged, or a seed has no captions
            to choose from.
    """
    if path.is_dir():
        return [" ".join(read_prompts(file, caption_seed=caption_seed)) for file in text_files(path)]
    prompts = []
    for where, entry in _entries(path, images, caption_seed):
        prompt = _text_of(entry)
        if not isinstance(prompt, str):
            raise ValueError(f"{path}: {where} has no prompt: {FORMS}")
        if not prompt.strip():
            raise ValueError(f"{path}: {where} is blank: fill it in or remove it")
        if damaged := NO_CHARACTER.search(prompt):
            raise ValueError(f"{path}: {where} contains {damaged[0]!r}, which is not a character: remove it")
        prompts.append(prompt.strip())
    if not prompts:
        raise ValueError(f"{path} is empty: {FORMS}")
    return prompts


def _text_of(entry: object) -> object:
    """The prompt of an entry, None if it has none."""
    return entry.get("prompt", entry.get("caption")) if isinstance(entry, dict) else entry


def prompt_groups(path: Path | None) -> dict[str, dict[str, str]]:
    """The groups of a valid file's prompts: for each of `GROUPS` that it has, the group of each prompt."""
    groups: dict[str, dict[str, str]] = {}
    if path is None or path.is_dir():
        return groups
    for _, entry in _entries(path):
        if not isinstance(entry, dict):
            continue
        prompt = str(_text_of(entry)).strip()
        for name in GROUPS:
            group = entry.get(name)
            if isinstance(group, str) and group.strip():
                groups.setdefault(name, {})[prompt] = group.strip()
    return groups


def _entries(path: Path, images: Sequence[Path] = (), caption_seed: int | None = None) -> list[tuple[str, object]]:
    """The entries of a file of prompts, each with its place in the file, for errors."""
    suffix = path.suffix.lower()
    if suffix == ".csv":  # its lines are not prompts
        raise ValueError(f"{path}: {suffix} files are not supported: {FORMS}")
    found = None
    if suffix == ".json":
        found = _parsed(path, _read(path).rstrip())
        if not isinstance(found, list):
            found = [{"caption": caption} for caption in _captions(path, found, images, caption_seed)]
            caption_seed = None
    if caption_seed is not None:
        raise ValueError(f"--caption-seed chooses among COCO's captions of an image, and {path} has none: leave it out")
    if found is not None:
        return [(f"prompt {i}", entry) for i, entry in enumerate(found, start=1)]
    if suffix == ".jsonl":
        return [(f"line {i}", _parsed(path, line, i)) for i, line in json_lines(path)]
    content = _read(path).rstrip()
    lines = [(f"line {i}", line) for i, line in enumerate(content.split("\n"), start=1) if content]
    return _table(path, lines) if suffix == ".tsv" else [*lines]


def _table(path: Path, lines: Sequence[tuple[str, str]]) -> list[tuple[str, object]]:
    """The lines of a .tsv by the names in its first one, in lower case. Quotes belong to the text."""
    if not lines:
        return []
    _, head = lines[0]
    names = [name.strip().lower() for name in head.split("\t")]
    if "prompt" not in names and "caption" not in names:
        raise ValueError(f"{path}: its first line names no column Prompt: {FORMS}")
    return [(where, dict(zip(names, line.split("\t")))) for where, line in lines[1:]]


def _read(path: Path) -> str:
    """The text of a file of prompts, in UTF-8 whatever the locale, with or without the mark that some editors write."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text in UTF-8: {FORMS}") from None
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}: {FORMS}") from None


def json_lines(path: Path) -> list[tuple[int, str]]:
    """The lines of a .jsonl file that are not blank, each with its number from 1. Raises as `read_prompts`."""
    # not splitlines(), which also splits at characters that a text in JSON may have
    lines = enumerate(_read(path).split("\n"), start=1)
    return [(number, line) for number, line in lines if line.strip()]


def text_files(folder: Path) -> list[Path]:
    """The .txt files of a folder by name. Raises ValueError if there is none."""
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ValueError(f"{folder} has no .txt files: {FORMS}")
    return files


def _parsed(path: Path, text: str, line: int = 1) -> Any:
    """The content of the JSON text that begins at a line of a file."""
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        reason = f"{error.msg}: line {line + error.lineno - 1} column {error.colno}"
    except ValueError as error:
        reason = f"line {line}: {error}"
    raise ValueError(f"{path} is not valid JSON ({reason}): {FORMS}")


def _captions(path: Path, content: Any, images: Sequence[Path], seed: int | None) -> list[str]:
    """A caption of each of `images` if their names tell it, or else of every image, in the file's order.

    It is the image's first caption, or a random one by `seed` and the image's number alone. Raises ValueError if an
    image is named as in COCO, and the file has no caption for it, or it is not COCO's.
    """
    if wrong := misfit(content, COCO):
        raise ValueError(f"{path}: unexpected value at {wrong}: {FORMS}")
    # COCO has five captions per image, in no particular order
    of_images: dict[str, list[str]] = {}
    for annotation in content["annotations"]:
        number = str(annotation["image_id"]).zfill(COCO_DIGITS)
        of_images.setdefault(number, []).append(annotation["caption"])
    captions = {}
    for number, own_captions in of_images.items():
        # Random.random() of a text is the same in every version of Python
        chosen = 0.0 if seed is None else Random(f"{seed} {number}").random()
        captions[number] = own_captions[int(chosen * len(own_captions))]
    own: list[str] = []
    for image in images:
        name = COCO_NAME.fullmatch(image.stem)
        number = name[1] if name else ""
        caption = captions.get(number.zfill(COCO_DIGITS))
        if caption is not None:
            own.append(caption)
        elif len(number) == COCO_DIGITS:  # shorter numbers may be names of any images
            raise ValueError(f"{path} has no caption for {image.name}: pass the file with the captions of these images")
    if len(own) < len(images) or not own:
        return list(captions.values())
    return own


def class_numbers(labels: Iterable[Label] | None, engine: Engine) -> list[int]:
    """The numbers of classes that are given by number or name; None: all classes.

    Raises ValueError on an unknown name, and on None: the commands that measure images need their classes.
    """
    numbers: list[int] = []
    for label in all_classes(engine) if labels is None else labels:
        if label is None:
            raise ValueError(
                "--labels none: only `cspd sample` generates unconditional images: remove none from the list"
            )
        number: Any = engine.check(Request(label)).label if isinstance(label, str) else label
        numbers.append(number)
    return numbers


def all_classes(engine: Engine) -> Sequence[int]:
    """The classes of an engine's models. A text-to-image model, which has none, refuses the class 0."""
    return range(engine.runner.num_classes) or [0]


def check_classes(engine: Engine, command: str, instead: str) -> None:
    """Raises ValueError if the engine holds a text-to-image model: `command` supports class-conditional models only."""
    if any(runner.num_classes == 0 for runner in engine.runners.values()):
        raise ValueError(f"{command} supports class-conditional models only: use {instead} for text-to-image models")


# Plugins, requests, and engines with their models.


def bundled_here() -> list[str]:
    """The bundled models that this installation can run: text-to-image models need the libraries of an extra."""
    without_texts = missing_library() is not None
    names = []
    for name, folder in bundled().items():
        is_complete = (folder / "target.safetensors").is_file()
        needs_library = (folder / "text_encoder").is_dir()
        if is_complete and not (needs_library and without_texts):
            names.append(name)
    return names


def load_plugins(argv: Sequence[str]) -> None:
    """Runs the files of --plugin, before the flags are parsed: the methods that they register have flags too.

    Raises:
        ValueError: a file is not Python.
        FileNotFoundError: a file does not exist. Errors of the file's own code are passed on.
    """
    # a parser of this one flag: the other flags are not known before the plugins have run
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_plugin(early)
    for file in early.parse_known_args(argv)[0].plugin or ():
        if not file.is_file():
            raise FileNotFoundError(f"--plugin {file}: there is no such file")
        try:
            runpy.run_path(str(file), run_name=file.stem)
        except SyntaxError as error:
            raise ValueError(f"--plugin {file} is not a Python program ({error}): give a .py file") from error


# `cspd sample --like`: the settings in a PNG are the defaults of the flags.

FILES_OF_MODELS = ("checkpoint", "arch", "vae", "draft", "eagle", "text_encoder")  # arguments of `cspd.load`
PNG_SHAPE = {
    "version": str,
    "models": dict.fromkeys([f"{name}?" for name in (*FILES_OF_MODELS, "precision")], str),
    "request": {"seed": int, "method": str},
}
FLAG_OF = {"draft": "draft_checkpoint", "compiled": "compile"}  # of arguments of `cspd.load` with other names


def defaults_like(argv: Sequence[str]) -> dict:
    """The values of flags that generate the picture of --like again; empty without this flag.

    Raises:
        ValueError: the file cannot be read, carries no settings, was made from a given image, or by models of the hub
            that the user does not name. OSError.
    """
    # a parser of these flags, since the values are the defaults of the other flags
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_like(early)
    early.add_argument("--checkpoint")
    given = early.parse_known_args(argv)[0]
    path = given.like
    if path is None:
        return {}
    remedy = "give a PNG that `cspd sample`, `cspd merge` or Output.save wrote"
    try:
        with Image.open(path, formats=["PNG"]) as picture:
            settings = parse_json(picture.text[PNG_TEXT])
    except FileNotFoundError:
        raise FileNotFoundError(f"--like {path}: there is no such file") from None
    except Exception as error:  # Pillow raises almost anything on a damaged file
        raise ValueError(f"--like {path}: its settings cannot be read ({error}): {remedy}") from None
    wrong = misfit(settings, PNG_SHAPE)
    if wrong:
        raise ValueError(f"--like {path}: unexpected value at {wrong} of its settings: {remedy}")
    asked = without_removed(settings["request"])
    if "known" in asked:
        raise ValueError(
            f"--like {path}: a part of this image was given, which the file does not hold: use `cspd edit`"
        )
    # the picture may come from anybody: it sets no other flag, and has nothing fetched
    checkpoint = settings["models"].get("checkpoint")
    if given.checkpoint is None and is_remote(checkpoint):
        raise ValueError(
            f"--like {path}: it was made by {checkpoint} of the Hugging Face Hub, which is fetched only if you name it"
            f" too: add --checkpoint {checkpoint}"
        )
    for name in asked.keys() & REMOVED.keys():
        raise ValueError(
            f"--like {path}: {name}={asked[name]!r} is gone: use the version of cspd that made the picture"
        )
    defaults: dict[str, Any] = {"labels": [asked.get("label")]}
    for name in ("prompt", "negative_prompt", "seed", "method", *option_names()):
        defaults[name] = asked.get(name)
    for name in (*FILES_OF_MODELS, "precision", "compiled"):
        if name in settings["models"]:
            defaults[FLAG_OF.get(name, name)] = settings["models"][name]
    return defaults


def request_of(args: argparse.Namespace, label: int | str | None = 0, seed: int = 0, **changes: object) -> Request:
    """The request of the flags for settings, with `changes`."""
    # a command has flags for some options only; an option without a flag stays open
    given = {name: getattr(args, name) for name in sorted(option_names()) if hasattr(args, name)}
    return Request(label, seed, getattr(args, "method", None), **given | changes)


def check_method(args: argparse.Namespace) -> Method:
    """The method that the flags ask for, without loading models.

    Raises ValueError if the checkpoint's models do not have it, or it does not have an option.
    """
    return choose(request_of(args), [family_of(args.checkpoint)])[1]


def load_engine(args: argparse.Namespace, max_batch: int, named: Mapping[str, str] | None = None) -> Engine:
    """The engine of the flags for models and the machine; `named`: of several checkpoints, by name."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return load(
        *(named.values() if named else [args.checkpoint]),
        names=[*named] if named else None,
        arch=args.arch,
        vae=args.vae,
        draft=args.draft_checkpoint,
        eagle=args.eagle,
        text_encoder=args.text_encoder,
        max_batch=max_batch,
        device=args.device,
        precision=args.precision,
        compiled=args.compile,
        graphs=args.graphs,
    )


# Workers of --ray ADDRESS, which have no command line.

FILES = ("checkpoint", "vae", "draft_checkpoint", "eagle", "text_encoder", "plugin")


def on_ray(args: argparse.Namespace, task_of: Callable[[argparse.Namespace], Task], num: int) -> tuple[Shards, dict]:
    """Makes the images of a run on a Ray cluster; returns them and a summary.

    `task_of` runs in each worker.

    Raises ValueError if Ray is not installed, the number of images is 0, or as `cspd.ray.sample`.
    """
    try:
        from cspd import ray
    except ModuleNotFoundError as missing:
        raise ValueError(f"--ray needs {missing.name}: {install('ray')}") from None
    if args.shard or "WORLD_SIZE" in os.environ:
        raise ValueError("--ray divides the work itself: leave out --shard and torchrun")
    if not num:  # all classes, which only loaded models tell
        raise ValueError("--ray needs the number of images: give --num, or --labels LIST")
    ray.connect(args.ray)
    own = {name: value for name, value in vars(args).items() if not callable(value)}
    # workers have other current folders
    for name in FILES:
        own[name] = _resolved(own.get(name))
    num_gpus = 0 if args.device == "cpu" else ray.gpus_of_an_engine()
    workers = ray.Workers(num_gpus, args.threads or 1, max_batch=args.max_batch)
    prepare = functools.partial(_task_of_worker, task_of, argparse.Namespace(**own))
    return ray.make(prepare, num, args.out, workers, overwrite=args.overwrite)


def _resolved(value: Any) -> Any:
    if isinstance(value, list):
        return [_resolved(each) for each in value]
    is_local = value is not None and Path(value).exists()
    return type(value)(Path(value).resolve()) if is_local else value


def _task_of_worker(task_of: Callable[[argparse.Namespace], Task], args: argparse.Namespace) -> Task:
    load_plugins([f"--plugin={file}" for file in args.plugin or ()])
    return task_of(args)
