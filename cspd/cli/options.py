"""From the flags that commands share to what they ask for: plugins, subjects, requests, and an engine."""

from __future__ import annotations

import argparse
import re
import runpy
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from cspd.checkpoints import checkpoint_files, family_of, load
from cspd.cli.flags import add_plugin
from cspd.cli.listing import format_table, markdown_table, options_table
from cspd.discrete.hf import CONFIG, is_hf
from cspd.discrete.text import TextEncoder, missing_library
from cspd.engine import Engine
from cspd.files import identity_of, misfit, parse_json, weight_files
from cspd.method import METHODS, Method, choose, method_of
from cspd.models import bundled
from cspd.option import option_names
from cspd.request import Label, Request
from cspd.terminal import NO_CHARACTER, __version__

# `cspd methods`: what can be run, and what each method guarantees.


def run_methods(args: argparse.Namespace) -> None:
    table = options_table if args.options else markdown_table if args.markdown else format_table
    print(table(METHODS))


# What images are to be of: classes, or texts of a file.

FORMS = "give --prompts a file with one text a line; or .json: a list of texts, or captions as COCO has them"
OTHERS = (".jsonl", ".csv", ".tsv")  # whose lines are no texts
COCO_NAME = re.compile(r"(?:COCO_\w+_)?(\d+)")  # of a picture: COCO_val2014_000000000139, 000000000139, 139
COCO_DIGITS = 12  # of a number as COCO writes it
COCO = {"annotations": [{"image_id": (int, str), "caption": str}]}


def read_prompts(path: Path, images: Sequence[Path] = ()) -> list[str]:
    """The texts of a file, in its order: one a line, or of a .json file, see `FORMS`.

    Of COCO's captions each image's first is taken.

    Args:
        images: pictures that have the texts. Where they are COCO's own, by their names, each has its own caption.

    Raises:
        OSError: the file cannot be read. ValueError: it has no texts, one that is blank or damaged, or another form.
    """
    try:
        content = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8: {FORMS}") from None
    except OSError as error:
        raise OSError(f"{path}: {error.strerror}: {FORMS}") from None
    if path.suffix.lower() in OTHERS:
        raise ValueError(f"{path}: {path.suffix} is not read: {FORMS}")
    is_json = path.suffix.lower() == ".json"
    if is_json:
        texts = _texts_of_json(path, content, images)
    else:
        texts = content.rstrip().split("\n")  # nowhere else, as editors do
    if not any(texts):
        raise ValueError(f"{path} is empty: {FORMS}")
    for number, text in enumerate(texts, start=1):
        where = f"{path}: {'text' if is_json else 'line'} {number}"
        if not text.strip():
            raise ValueError(f"{where} is blank: give it a text or remove it")
        if damaged := NO_CHARACTER.search(text):
            raise ValueError(f"{where} has {damaged[0]!r}, which is no character: remove it")
    return [text.strip() for text in texts]


def _texts_of_json(path: Path, content: str, images: Sequence[Path]) -> list[str]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): {FORMS}") from None
    if isinstance(found, list):
        texts = [_text_of(entry) for entry in found]
        wrong = misfit(texts, [str])
    else:
        wrong = misfit(found, COCO)
        texts = [] if wrong else _first_captions(path, found["annotations"], images)
    if wrong:
        raise ValueError(f"{path}: {wrong} is of another form: {FORMS}")
    return texts


def _text_of(entry: object) -> object:
    """The text of a list's entry: it, or its "prompt" or "caption"."""
    return entry.get("prompt", entry.get("caption")) if isinstance(entry, dict) else entry


def _first_captions(path: Path, annotations: list[dict], images: Sequence[Path]) -> list[str]:
    """One caption of each image: of these where all have one by their names, else of all in the file's order.

    Raises ValueError where an image is named as COCO's are, and the file has no caption of it.
    """
    captions: dict[str, str] = {}
    for annotation in annotations:
        captions.setdefault(str(annotation["image_id"]).zfill(COCO_DIGITS), annotation["caption"])
    own = []
    for image in images:
        number = COCO_NAME.fullmatch(image.stem)
        own.append(captions.get(number[1].zfill(COCO_DIGITS)) if number else None)
        if number and own[-1] is None and len(number[1]) == COCO_DIGITS:
            raise ValueError(f"{path} has no caption of {image.name}: give the captions of these pictures")
    return own if own and None not in own else [*captions.values()]


def class_numbers(labels: Iterable[Label], engine: Engine) -> list[int]:
    """Classes by number, where some are given by a name that an engine's models have.

    Raises ValueError where they have no such name, and on None: what is measured has a class.
    """
    labels = list(labels)
    if None in labels:
        raise ValueError("--labels has none, and only `cspd sample` makes images of no class: leave it out")
    return [engine.check(Request(label)).label if isinstance(label, str) else label for label in labels]


def check_classes(engine: Engine, command: str, instead: str) -> None:
    """Raises ValueError where an engine has a model of texts: `command` makes images of classes."""
    if any(runner.num_classes == 0 for runner in engine.runners.values()):
        raise ValueError(f"{command} makes images of classes, and these models make images of texts: use {instead}")


# From the flags that commands share to what they ask for: plugins, requests, and an engine with its models.


def bundled_here() -> list[str]:
    """The bundled models that this installation can run: those of texts need libraries of an extra."""
    complete = {name: folder for name, folder in bundled().items() if (folder / "target.safetensors").is_file()}
    of_classes = [name for name, folder in complete.items() if not (folder / "text_encoder").is_dir()]
    return of_classes if missing_library() else [*complete]


def load_plugins(argv: Sequence[str]) -> None:
    """Runs the files that --plugin names; the methods that they register have flags and help as all others.

    Raises:
        ValueError: a file is not Python, or registers nothing. FileNotFoundError, and what its own code raises.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_plugin(early)
    for file in early.parse_known_args(argv)[0].plugin or ():
        if not file.is_file():
            raise FileNotFoundError(f"--plugin {file}: no such file")
        before = list(METHODS)
        try:
            runpy.run_path(str(file), run_name=file.stem)
        except SyntaxError as error:
            raise ValueError(f"--plugin {file} is not a Python program ({error}): give a .py file") from error
        if before == METHODS:
            raise ValueError(f"--plugin {file} registers no method: end it with cspd.register(...)")


def request_of(args: argparse.Namespace, label: int | str | None = 0, seed: int = 0, **changes: object) -> Request:
    """The request that the flags of settings ask for, with `changes`."""
    given = {name: getattr(args, name) for name in sorted(option_names()) if hasattr(args, name)}
    return Request(label, seed, getattr(args, "method", None), **given | changes)


def check_method(args: argparse.Namespace) -> Method:
    """The method that is asked for, which is known before loading.

    Raises ValueError where the checkpoint's models lack it or an option.
    """
    return choose(request_of(args), [family_of(args.checkpoint)])[1]


def run_settings(args: argparse.Namespace, request: Request) -> dict:
    """What images depend on beside their requests: version, rounding, and the files that a checked request uses."""
    files = checkpoint_files(args.checkpoint)
    decoder = "tokenizer" if "tokenizer" in files else "vae"
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
    """By what a run knows the file of a model again; of a model of `transformers`, all files of its folder."""
    more: dict = {}
    weights = [file]
    if is_hf(file):
        file = file / CONFIG if file.is_dir() else file
        weights = weight_files(file.parent)
        more["folder"] = identity_of(file.parent)
    file, size = file.resolve(), sum(each.stat().st_size for each in weights)
    return {"file": str(file), "bytes": size, "modified": file.stat().st_mtime_ns, **more}


def load_engine(args: argparse.Namespace, max_batch: int) -> Engine:
    """The engine that the flags of models ask for."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return load(
        args.checkpoint,
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
