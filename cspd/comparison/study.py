"""What a comparison compares: configurations, by names like cspd:gamma=8 or from a small YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cspd.engine import Engine
from cspd.lookup import method_names, option_order, parse_method, with_method
from cspd.methods import COMMON, EMBEDDED
from cspd.option import check_integer
from cspd.parsing import LARGEST_SEED, MOST, choice, label_list, shortened
from cspd.sequence import Request

TARGET = ("checkpoint", "arch", "vae", "text_encoder")
MODELS = (*TARGET, "draft_checkpoint", "eagle")
SUBJECTS = ("labels", "prompts")  # of which a study has one
RUN = ("num", *SUBJECTS, "negative_prompt", "seed", "max_batch")  # of the study as a whole; of a row its seed at most
REQUEST = ("method", *option_order(), "family")  # rows are named in this order
TEXTS = ("name", "prompts", "negative_prompt", *MODELS)
OWN = ("seed", *REQUEST, *MODELS)  # what a configuration may have
ROWS = "configurations"
MOST_ROWS = 1000  # that lists of values may stand for
CHAIN = ("num_sampling_steps", "first_timestep")  # settings of plain sampling that make it an approximation too
ANY = Request(label=0)  # of models of classes
USUAL_ITERATIONS = 64  # what MAR's users run, whatever the length
FORMAT = """\
a study's file (YAML): settings of all at the top, then the configurations; a list of values stands for one
configuration each, and two lists for every pair:

  num: 16                 # and labels or prompts, seed, max_batch: as the options of these names
  num_iter: 64            # any setting of a request: cfg, temperature, window, gamma, rule, delta, ...
  configurations:
    - method: speculative
    - method: cspd
      gamma: [8, 16]
    - method: ar
      seed: 1000          # other seeds than those of the rest: how much chance moves the numbers
    - name: the draft alone
      method: ar
      checkpoint: draft.safetensors     # and arch, vae, draft_checkpoint, eagle: models of its own

options on the command line come before the file's settings at the top.
"""


@dataclass(frozen=True)
class Configuration:
    """A row of the comparison: what runs, and on which models.

    Attributes:
        name: as the table shows it.
        request: the settings; seed, and label or prompt mean nothing.
        engine: over the models, with as many slots as images are to be in flight at once.
        models: what `engine` was loaded from, values of `MODELS`. files: what images depend on beside the request.
        seed: of the first image; None: the comparison's.
    """

    name: str
    request: Request
    engine: Engine
    models: Mapping[str, object] = field(default_factory=dict)
    files: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None

    def first_seed(self, seed: int) -> int:
        """The seed of its first image, in a comparison whose own is `seed`."""
        return seed if self.seed is None else self.seed

    def plain(self) -> Request:
        """Plain sampling by its settings, those that all methods of its family have; what is plain is so already."""
        request = self.engine.check(self.request)
        if request.method == "ar":
            return request
        common = {option.name for option in COMMON[request.family]}
        own = request.settings.keys() - common
        return self.engine.check(request.but(method="ar", **dict.fromkeys(own)))

    def key(self) -> tuple:
        """Equal for configurations that approximate the same plain sampling, of the same files."""
        return self.plain(), tuple(str(self.models.get(name)) for name in TARGET)


def named_entries(names: Sequence[str]) -> list[dict]:
    """Names like "cspd:gamma=8" to entries as a study's file has them. Raises ValueError as `parse_method`."""
    entries = []
    for each in names:
        method, options = parse_method(each, {*OWN} - {"method"})
        _check(shortened(each), options, OWN)
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
    _check(f"{path}, at the top", common, (*RUN, *REQUEST, *MODELS))
    for i, entry in enumerate(entries):
        _check(f"{path}, in configuration {i + 1}", entry, ("name", *OWN))
    lists = [key for key, value in common.items() if isinstance(value, list) and key != "labels"]
    if lists:
        raise ValueError(f"{path}: {lists[0]} is a list at the top: lists of values belong to configurations")
    if all(key in common for key in SUBJECTS):
        raise ValueError(f"{path}: labels and prompts: give one of them")
    if "labels" in common:  # a list, or as --labels has them
        labels = common["labels"]
        try:
            common["labels"] = label_list(",".join(map(str, labels if isinstance(labels, list) else [labels])))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{path}: labels: {error}") from None
    for key, least, most in (("num", 1, MOST), ("seed", 0, LARGEST_SEED), ("max_batch", 1, MOST)):
        if key in common:
            check_integer(f"{path}: {key}", common[key], least, most, "see `cspd compare --help`")
    return common, entries


class _Loader(yaml.SafeLoader):
    """Reads YAML; a key that is there twice is an error, where other readers let the last one win without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key in [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]:
            if key.value in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: {shortened(key.value)} is there twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check(where: str, settings: Mapping, known: Sequence[str]) -> None:
    """Raises ValueError on keys that nobody knows, and on values that no setting has."""
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{where}: {shortened(key)} is unknown: {choice(key, known)}")
        values = value if isinstance(value, list) and key != "name" else [value]
        if not values or not all(_fits(key, each) for each in values):
            text = f"text in quotes, in one line of 1..{_most(key)} letters"
            kind = text if key in TEXTS else "number, text or list of them"
            raise ValueError(f"{where}: {key}: {shortened(value)} is no {kind}")


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
        made.append((_label(entry.get("name", single.get("method")), {key: single[key] for key in shown}), single))
    return made


def _label(name: object, settings: dict) -> str:
    shown = {key: value if isinstance(value, (str, Path)) else json.dumps(value) for key, value in settings.items()}
    return ":".join([str(name), *(f"{key}={value}" for key, value in shown.items())])


def configurations(
    entries: Sequence[dict], common: dict, load: Callable[[dict], Engine], asked: Request = ANY
) -> list[Configuration]:
    """The rows of a comparison: what the entries ask for, after the baselines that are not among them.

    The baselines are plain sampling (`ar`): by the common settings, the same with MAR's usual 64 iterations, and by the
    settings of each configuration. The first of them is the first row: speed is measured against it.

    Args:
        common: settings of all, of `REQUEST` and `MODELS`; options that a configuration's method lacks do not matter.
            Without a checkpoint the first row is of the first entry's models.
        load: makes an engine of the models in a dict with a checkpoint and others of `MODELS`.
        asked: what all rows are asked for, a class or a text.

    Raises:
        ValueError: settings that do not fit the models or each other, no method, or two rows of one name.
    """
    named = [each for entry in entries for each in expand(entry)]
    for name, own in named:
        method = own.get("method", common.get("method"))
        if method not in method_names():
            raise ValueError(f"{name}: method={method!r} is unknown: {choice(method, method_names())}")
    shared = asked.but(**{key: value for key, value in common.items() if key in REQUEST})
    engines: dict[tuple, Engine] = {}

    def make(name: str, own: dict) -> Configuration:
        models = {key: value for key, value in (common | own).items() if key in MODELS and value is not None}
        models = {"checkpoint": EMBEDDED["MAR"]} | models
        place = tuple(sorted((key, str(value)) for key, value in models.items()))
        if place not in engines:
            engines[place] = load(models)
        settings = {key: value for key, value in own.items() if key in REQUEST and key != "method"}
        request = with_method(shared.but(**settings), own.get("method", shared.method)).but(**settings)
        try:
            engines[place].check(dataclasses.replace(request, seed=own.get("seed", 0)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return Configuration(name, request, engines[place], models, seed=own.get("seed"))

    usual = {} if common.get("checkpoint") else {key: value for key, value in named[0][1].items() if key in MODELS}
    plain = make("ar", {"method": "ar"} | usual)
    rows = [make(name, own) for name, own in named]
    baselines = [plain, *(_plain(row, plain) for row in rows)]
    if plain.engine.check(plain.request).num_iter is not None:  # several tokens an iteration
        most = min(USUAL_ITERATIONS, plain.engine.host.seq_len)
        slow = dataclasses.replace(plain, request=dataclasses.replace(plain.request, num_iter=most))
        baselines.insert(1, _plain(slow, plain))
    there = {row.key() for row in rows if _is_baseline(row)}
    missing: dict[tuple, Configuration] = {}
    for row in baselines:
        if row.key() not in there:
            missing.setdefault(row.key(), row)
    first = plain.key()
    rows = sorted([*missing.values(), *rows], key=lambda row: not _is_baseline(row) or row.key() != first)
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two configurations are called {name!r}: give them names of their own")
    return rows


def _plain(row: Configuration, common: Configuration) -> Configuration:
    """Plain sampling by a row's settings, named by what the common ones do not have."""
    request = row.plain()
    usual = common.engine.check(common.request)
    other = {key: getattr(request, key) for key in REQUEST if getattr(request, key) != getattr(usual, key)}
    other |= {key: row.models.get(key) for key in TARGET if row.models.get(key) != common.models.get(key)}
    shown = {key: value for key, value in other.items() if value is not None and key != "family"}
    return dataclasses.replace(row, name=_label("ar", shown or other), request=request, seed=None)


def _is_baseline(row: Configuration) -> bool:
    return row.request.method == "ar" and row.seed is None


def baselines(
    row: Configuration, rows: Sequence[Configuration], seed: int
) -> tuple[Configuration | None, Configuration | None]:
    """What a row is compared with: plain sampling of the same seeds, and of other seeds; None where there is none.

    That has the settings of `Configuration.plain`; of a row that is plain itself the first row's chain (`CHAIN`), if
    some row has it.

    Args:
        seed: of the comparison's first image.
    """
    request, files = row.key()
    chain = {name: getattr(rows[0].plain(), name) for name in CHAIN}
    keys = [(request.but(**chain), files)] if row.request.method == "ar" else []
    keys.append((request, files))

    plain = [other for other in rows if other.request.method == "ar" and other is not row]
    found = {key: [other for other in plain if other.key() == key] for key in keys}
    chosen = next(filter(None, found.values()), [])
    same = [other for other in chosen if other.first_seed(seed) == row.first_seed(seed)]
    others = [other for other in chosen if other.first_seed(seed) != row.first_seed(seed)]
    return next(iter(same), None), next(iter(others), None)
