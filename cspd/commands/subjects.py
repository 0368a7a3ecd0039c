"""What images are to be of: classes, or texts of a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from cspd.engine import Engine
from cspd.parsing import NO_CHARACTER
from cspd.records import misfit, parse_json
from cspd.sequence import Label, Request

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
    if any(host.num_classes == 0 for host in engine.hosts.values()):
        raise ValueError(f"{command} makes images of classes, and these models make images of texts: use {instead}")
