"""What a study's file says (YAML), and names of configurations like cspd:gamma=8: entries, settings by name."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from cspd.lookup import option_order, parse_method
from cspd.option import check_integer
from cspd.parsing import LARGEST_SEED, MOST, choice, label_list, shortened

TARGET = ("checkpoint", "arch", "vae", "text_encoder")
MODELS = (*TARGET, "draft_checkpoint", "eagle")
SUBJECTS = ("labels", "prompts")  # of which a study has one
RUN = ("num", *SUBJECTS, "negative_prompt", "seed", "max_batch")  # of the study as a whole; of a row its seed at most
TEXTS = ("name", "prompts", "negative_prompt", *MODELS)
ROWS = "configurations"
MOST_ROWS = 1000  # that lists of values may stand for


def request_keys() -> tuple[str, ...]:
    """What a request may be given; rows are named in this order."""
    return ("method", *option_order(), "family")


def own_keys() -> tuple[str, ...]:
    """What a configuration may have."""
    return ("seed", *request_keys(), *MODELS)


def named_entries(names: Sequence[str]) -> list[dict]:
    """Names like "cspd:gamma=8" to entries as a study's file has them. Raises ValueError as `parse_method`."""
    entries = []
    for each in names:
        method, options = parse_method(each, {*own_keys()} - {"method"})
        _check(shortened(each), options, own_keys())
        entries.append({"method": method} | options)
    return entries


def read_study(path: Path) -> tuple[dict, list[dict]]:
    """The settings of all, and the entries of the configurations, of a study's file.

    Raises:
        ValueError: no such file, no YAML, keys that nobody knows or that are there twice, or values of a wrong kind.
    """
    try:
        content = yaml.load(path.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: give a study's file, see `cspd compare --help`") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # numbers of 5,000 digits, nothing in 1,000 brackets
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    entries = content.get(ROWS) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: a study is settings, and a list '{ROWS}' of them, see `cspd compare --help`")
    common = {key: value for key, value in content.items() if key != ROWS}
    _check(f"{path}, at the top", common, (*RUN, *request_keys(), *MODELS))
    for i, entry in enumerate(entries):
        _check(f"{path}, in configuration {i + 1}", entry, ("name", *own_keys()))
    lists = [key for key, value in common.items() if isinstance(value, list) and key != "labels"]
    if lists:
        raise ValueError(f"{path}: {lists[0]} is a list at the top: lists of values belong to configurations")
    if all(key in common for key in SUBJECTS):
        raise ValueError(f"{path}: labels and prompts: give one of them")
    if "labels" in common:
        common["labels"] = _labels(path, common["labels"])
    for key, least, most in (("num", 1, MOST), ("seed", 0, LARGEST_SEED), ("max_batch", 1, MOST)):
        if key in common:
            check_integer(f"{path}: {key}", common[key], least, most, "see `cspd compare --help`")
    return common, entries


def _labels(path: Path, labels: object) -> list[int | str | None]:
    """The classes of a study: a list of numbers and names, or one, or as --labels has them. Raises ValueError."""
    several = labels if isinstance(labels, list) else [labels]
    for each in several:
        if isinstance(each, bool) or not isinstance(each, (int, str)):
            shown = "null" if each is None else shortened(each)
            raise ValueError(f"{path}: labels: {shown} is no class: give numbers or names, or leave labels out")
    try:
        return label_list(",".join(map(str, several)))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{path}: labels: {error}") from None


class _Loader(yaml.SafeLoader):
    """Reads YAML 1.1 without its surprises.

    A key that is there twice is an error, where other readers let the last one win without a word. 1:30 and 010, which
    are 90 and 8 in YAML 1.1, are texts, so that errors show them as they were typed. 1e3 is a number, as in YAML 1.2.
    """

    def construct_number(self, node: yaml.ScalarNode) -> object:
        if ":" in node.value or re.fullmatch(r"[-+]?0[0-7_]+", node.value):
            return node.value
        return self.construct_yaml_float(node) if node.tag.endswith("float") else self.construct_yaml_int(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {shortened(key.value)} is there twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+e[-+]?\d+", re.I), [*"-+0123456789"])
for _kind in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def _check(where: str, settings: Mapping, known: Sequence[str]) -> None:
    """Raises ValueError on keys that nobody knows, and on values that no setting has."""
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{where}: {shortened(key)} is unknown: {choice(key, known)}")
        values = value if isinstance(value, list) and key != "name" else [value]
        if not values or not all(_fits(key, each) for each in values):
            text = f"text in quotes, in one line of 1..{_most(key)} letters"
            kind = text if key in TEXTS else "number, text or list of them"
            raise ValueError(f"{where}: {key}: {shortened(value)} is no {kind}: give one, or leave {key} out")


def _fits(key: str, value: object) -> bool:
    """Whether a value can be a key's: text that can be shown or, unless it names something, a number."""
    if isinstance(value, str):
        return value.isprintable() and 0 < len(value.strip()) <= _most(key)
    if value is None:
        return key != "name"
    return key not in TEXTS and isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _most(key: str) -> int:
    return 100 if key == "name" else 4096


def expand(entry: dict) -> list[tuple[str, dict]]:
    """An entry's configurations, name and settings: one, or one for each combination of its lists' values.

    Raises ValueError where the lists stand for more than `MOST_ROWS`.

    A name left out is the method's with the settings after colons, as `named_entries` reads it.
    """
    settings = {key: value for key, value in entry.items() if key != "name"}
    lists = {key: value for key, value in settings.items() if isinstance(value, list)}
    if math.prod(map(len, lists.values())) > MOST_ROWS:
        names = ", ".join(lists)
        raise ValueError(f"lists of {names} stand for more than {MOST_ROWS} configurations: give fewer values")
    made = []
    for values in itertools.product(*lists.values()):
        single = settings | dict(zip(lists, values))
        shown = lists if "name" in entry else [key for key in single if key != "method"]
        made.append((row_name(entry.get("name", single.get("method")), {key: single[key] for key in shown}), single))
    return made


def row_name(name: object, settings: dict) -> str:
    """A name with settings after colons, as `named_entries` reads them."""
    shown = {key: value if isinstance(value, (str, Path)) else json.dumps(value) for key, value in settings.items()}
    return ":".join([str(name), *(f"{key}={value}" for key, value in shown.items())])
