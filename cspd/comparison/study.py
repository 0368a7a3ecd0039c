"""What a comparison compares: configurations, by names like cspd:gamma=8 or from a small YAML file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cspd.engine import Engine
from cspd.lookup import method_names, parse_method, with_method
from cspd.option import check_integer, option_names
from cspd.parsing import number_list
from cspd.sequence import Request

TARGET = ("checkpoint", "arch", "vae")
MODELS = (*TARGET, "draft_checkpoint")
RUN = ("num", "labels", "seed", "max_batch")  # of the study as a whole; a configuration can have a seed of its own
REQUEST = ("method", *option_names(), "family")  # in the order of declaration, which rows are named in
OWN = ("seed", *REQUEST, *MODELS)  # what a configuration may have
ROWS = "configurations"
EMBEDDED = "digits32"  # the checkpoint of those that name none
USUAL_ITERATIONS = 64  # what MAR's users run, whatever the length
FORMAT = """\
a study's file (YAML): settings of all at the top, then the configurations; a list of values stands for one
configuration each, and two lists for every pair:

  num: 16                 # and labels, seed, max_batch: as the options of these names
  num_iter: 64            # any setting of a request: cfg, temperature, window, gamma, rule, delta, ...
  configurations:
    - method: speculative
    - method: cspd
      gamma: [8, 16]
    - method: ar
      seed: 1000          # other seeds than those of the rest: how much chance moves the numbers
    - name: the draft alone
      method: ar
      checkpoint: draft.safetensors     # and arch, vae, draft_checkpoint: models of its own

options on the command line come before the file's settings at the top.
"""


@dataclass(frozen=True)
class Configuration:
    """A row of the comparison: what runs, and on which models.

    Attributes:
        name: as the table shows it.
        request: the settings; label and seed mean nothing.
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

    def key(self) -> tuple:
        """Equal for configurations that sample alike if plainly: by their settings and the target's files."""
        plain = with_method(self.engine.check(self.request), "ar")
        files = tuple(str(self.models.get(name)) for name in TARGET)
        return self.engine.check(plain), files


def named_entries(text: str) -> list[dict]:
    """ "ar,cspd:gamma=8" to entries as a study's file has them. Raises ValueError on an unknown method or option."""
    entries = []
    for each in text.split(","):
        method, options = parse_method(each, {*OWN} - {"method"})
        entries.append({"method": method} | options)
    return entries


def read_study(path: Path) -> tuple[dict, list[dict]]:
    """The settings of all, and the entries of the configurations, of a study's file.

    Raises:
        ValueError: no such file, no YAML, or keys that nobody knows.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: give a study's file, see `cspd compare --help`") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    entries = content.get(ROWS) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: a study is settings, and a list '{ROWS}' of them, see `cspd compare --help`")
    common = {key: value for key, value in content.items() if key != ROWS}
    _check_keys(path, "at the top", common, (*RUN, *REQUEST, *MODELS))
    for i, entry in enumerate(entries):
        _check_keys(path, f"in configuration {i + 1}", entry, ("name", *OWN))
    if "labels" in common:  # a list, or as --labels has them
        labels = common["labels"]
        try:
            common["labels"] = number_list(",".join(map(str, labels if isinstance(labels, list) else [labels])))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{path}: labels: {error}") from None
    for key, least in (("num", 1), ("seed", 0), ("max_batch", 1)):
        if key in common:
            check_integer(f"{path}: {key}", common[key], least, 2**63 - 1, "see `cspd compare --help`")
    for key, value in [pair for each in (common, *entries) for pair in each.items()]:
        values = value if isinstance(value, list) else [value]
        if not values or not all(each is None or isinstance(each, (str, int, float)) for each in values):
            raise ValueError(f"{path}: {key}: {value!r} is no number, text or list of them")
    lists = [key for key, value in common.items() if isinstance(value, list) and key != "labels"]
    if lists:
        raise ValueError(f"{path}: {lists[0]} is a list at the top: lists of values belong to configurations")
    return common, entries


def _check_keys(path: Path, where: str, settings: dict, known: Sequence[str]) -> None:
    unknown = [str(key) for key in settings if key not in known]
    if unknown:
        raise ValueError(f"{path}: {', '.join(unknown)} {where} is unknown: choose of {', '.join(known)}")


def expand(entry: dict) -> list[tuple[str, dict]]:
    """An entry's configurations, name and settings: one, or one for each combination of its lists' values.

    A name left out is the method's with the settings after colons, as `named_entries` reads it.
    """
    settings = {key: value for key, value in entry.items() if key != "name"}
    lists = {key: value for key, value in settings.items() if isinstance(value, list)}
    made = []
    for values in itertools.product(*lists.values()):
        single = settings | dict(zip(lists, values))
        shown = lists if "name" in entry else [key for key in single if key != "method"]
        made.append((_label(entry.get("name", single.get("method")), {key: single[key] for key in shown}), single))
    return made


def _label(name: object, settings: dict) -> str:
    words = (
        f"{key}={value if isinstance(value, (str, Path)) else json.dumps(value)}" for key, value in settings.items()
    )
    return ":".join([str(name), *words])


def configurations(entries: Sequence[dict], common: dict, load: Callable[[dict], Engine]) -> list[Configuration]:
    """The rows of a comparison: what the entries ask for, after the baselines that are not among them.

    The baselines are plain sampling (`ar`): by the common settings, the same with MAR's usual 64 iterations, and by the
    settings of each configuration. The first of them is the first row: speed is measured against it.

    Args:
        common: settings of all, of `REQUEST` and `MODELS`; options that a configuration's method lacks do not matter.
            Without a checkpoint the first row is of the first entry's models.
        load: makes an engine of the models in a dict with a checkpoint and others of `MODELS`.

    Raises:
        ValueError: settings that do not fit the models or each other, no method, or two rows of one name.
    """
    named = [each for entry in entries for each in expand(entry)]
    for name, own in named:
        method = own.get("method", common.get("method"))
        if method not in method_names():
            raise ValueError(f"{name}: method={method!r} is unknown: choose one of {', '.join(method_names())}")
    shared = Request(label=0, **{key: value for key, value in common.items() if key in REQUEST})
    engines: dict[tuple, Engine] = {}

    def make(name: str, own: dict) -> Configuration:
        models = {key: value for key, value in (common | own).items() if key in MODELS and value is not None}
        models = {"checkpoint": EMBEDDED} | models
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
    request = row.engine.check(with_method(row.engine.check(row.request), "ar"))
    usual = common.engine.check(common.request)
    other = {key: getattr(request, key) for key in REQUEST if getattr(request, key) != getattr(usual, key)}
    other |= {key: row.models.get(key) for key in TARGET if row.models.get(key) != common.models.get(key)}
    shown = {key: value for key, value in other.items() if value is not None and key != "family"}
    return dataclasses.replace(row, name=_label("ar", shown or other), request=request, seed=None)


def _is_baseline(row: Configuration) -> bool:
    return row.request.method == "ar" and row.seed is None


def baseline(row: Configuration, rows: Sequence[Configuration]) -> Configuration:
    """The row that samples plainly by a row's own settings, and seeds if there is one: what it is compared with."""
    plain = [other for other in rows if other.request.method == "ar" and other.key() == row.key()]
    paired = [other for other in plain if other.seed == row.seed and row.request.method != "ar"]
    return next(iter(paired), next(other for other in plain if other.seed is None))
