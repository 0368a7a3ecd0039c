"""What is compared: configurations, the study's file that lists them, and the folder of their images."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import yaml
from tqdm import tqdm

from cspd.device import peak_bytes, reset_peak
from cspd.engine import Engine, OnProgress
from cspd.evaluation.images import Subject, asking_for, in_turn
from cspd.files import read_item, write_item
from cspd.method import guarantee_of, method_names, option_order, parse_method, plain_of, with_method
from cspd.option import BUNDLED, check_integer
from cspd.request import Output, Request, to_pil
from cspd.runs import DECIDED, LAZY, MEASURED, Store, earlier_choices, missing_files
from cspd.terminal import LARGEST_SEED, MOST, choice, label_list, shortened

# What a study's file says (YAML), and names of configurations like cspd:gamma=8: entries, settings by name.

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


# The images that a configuration generated in a turn, with seconds and costs, and their file.

COSTS = ("head_calls_per_token", "head_calls", "backbone_calls", "draft_backbone_calls", "step_compression", "bound")


class Chunk(NamedTuple):
    """The result of a configuration's turn: images uint8 [n, H, W, 3], seconds, and the costs of each image."""

    images: np.ndarray
    seconds: float
    peak_bytes: int
    costs: list[dict]


def cost_of(output: Output) -> dict:
    """The part of an output's statistics that a chunk has."""
    verified, accepted = map(sum, output.stats.by_lag)
    costs = {name: getattr(output.stats, name) for name in (*COSTS, LAZY, *MEASURED)}
    return costs | {"judged": verified, "accepted": accepted}


def write_chunk(path: Path, chunk: Chunk, made_of: dict) -> None:
    """Writes the images as `arr_0`, as ADM's evaluator reads them, and the rest as JSON in `chunk`."""
    rest = json.dumps(chunk._asdict() | {"images": None})
    write_item(path, {"arr_0": chunk.images, "chunk": np.frombuffer(rest.encode(), np.uint8)}, made_of)


def read_chunk(path: Path, made_of: dict, side: int) -> Chunk | None:
    """The chunk of these requests, or None if it is absent, damaged or another."""
    num = len(made_of["requests"])
    arrays = read_item(path, made_of, {"arr_0": (np.uint8, (num, side, side, 3))})
    if arrays is None:
        return None
    rest = json.loads(arrays["chunk"].tobytes())
    return Chunk(arrays["arr_0"], rest["seconds"], rest["peak_bytes"], rest["costs"])


# The configurations of a comparison, and the baseline sampling that each is compared with.

CHAIN = ("num_sampling_steps", "first_timestep")  # settings of plain sampling that make it an approximation too
ANY = Request(label=0)  # of models of classes
USUAL_ITERATIONS = 64  # what MAR's users run, whatever the length


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
        return self.engine.check(plain_of(self.engine.check(self.request)))

    def key(self) -> tuple:
        """Equal for configurations that approximate the same plain sampling, of the same files."""
        return self.plain(), tuple(str(self.models.get(name)) for name in TARGET)


def configurations(
    entries: Sequence[dict], common: dict, load: Callable[[dict], Engine], asked: Request = ANY
) -> list[Configuration]:
    """The rows of a comparison: what the entries ask for, after the baselines that are not among them.

    The baselines are plain sampling (`ar`) by the settings of each configuration. If no entry is plain sampling by the
    common models and chain, they also are that by the common settings, and the same with MAR's usual 64 iterations.
    The first row, which speed is measured against, is plain sampling by the common settings, or else by the first entry
    that is.

    Args:
        common: settings of all, of `request_keys` and `MODELS`; options that a configuration's method lacks do not
            matter.
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
    shared = asked.but(**{key: value for key, value in common.items() if key in request_keys()})
    engines: dict[tuple, Engine] = {}

    def make(name: str, own: dict) -> Configuration:
        models = {key: value for key, value in (common | own).items() if key in MODELS and value is not None}
        models = {"checkpoint": BUNDLED["MAR"]} | models
        place = tuple(sorted((key, str(value)) for key, value in models.items()))
        if place not in engines:
            engines[place] = load(models)
        settings = {key: value for key, value in own.items() if key in request_keys() and key != "method"}
        request = with_method(shared.but(**settings), own.get("method", shared.method)).but(**settings)
        try:
            engines[place].check(dataclasses.replace(request, seed=own.get("seed", 0)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return Configuration(name, request, engines[place], models, seed=own.get("seed"))

    usual = {} if common.get("checkpoint") else {key: value for key, value in named[0][1].items() if key in MODELS}
    plain = make("ar", {"method": "ar"} | usual)
    rows = _with_baselines([make(name, own) for name, own in named], plain)
    for name, number in Counter(row.name for row in rows).items():
        if number > 1:
            raise ValueError(f"two configurations are called {name!r}: give them names of their own")
    return rows


def _with_baselines(rows: list[Configuration], plain: Configuration) -> list[Configuration]:
    """The rows after those baselines of `configurations` that are not among them; first what speed is told against."""
    baselines = [_plain(row, plain) for row in rows]
    listed = [row for row in rows if _is_baseline(row) and _differs_in_settings_only(row, plain)]
    if not listed:
        baselines = [plain, *_usual(plain), *baselines]
    there = {row.key() for row in rows if _is_baseline(row)}
    missing: dict[tuple, Configuration] = {}
    for row in baselines:
        if row.key() not in there:
            missing.setdefault(row.key(), row)
    known = {*there, *missing}
    first = plain.key() if plain.key() in known else listed[0].key()
    return sorted([*missing.values(), *rows], key=lambda row: not _is_baseline(row) or row.key() != first)


def _usual(plain: Configuration) -> list[Configuration]:
    """Plain sampling with MAR's usual 64 iterations; none of models that make a token an iteration."""
    if plain.engine.check(plain.request).num_iter is None:
        return []
    most = min(USUAL_ITERATIONS, plain.engine.runner.seq_len)
    return [_plain(dataclasses.replace(plain, request=dataclasses.replace(plain.request, num_iter=most)), plain)]


def _differs_in_settings_only(row: Configuration, plain: Configuration) -> bool:
    """Whether a row of plain sampling is of the same models as `plain`, and of the same chain."""
    (own, files), (common, common_files) = row.key(), plain.key()
    return files == common_files and all(getattr(own, name) == getattr(common, name) for name in CHAIN)


def _plain(row: Configuration, common: Configuration) -> Configuration:
    """Plain sampling by a row's settings, named by what the common ones do not have."""
    request = row.plain()
    usual = common.engine.check(common.request)
    other = {}
    for key in request_keys():
        value, typed = getattr(request, key), getattr(row.request, key)
        if value != getattr(usual, key):
            other[key] = typed if typed == value else value  # 4, and not 4.0
    other |= {key: row.models.get(key) for key in TARGET if row.models.get(key) != common.models.get(key)}
    shown = {key: value for key, value in other.items() if value is not None and key != "family"}
    return dataclasses.replace(row, name=row_name("ar", shown or other), request=request, seed=None)


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


# What `cspd tune` tries: the methods, with those of their settings that trade quality for speed.

ITERATIONS = [8, 16, 32, 64]
SEARCHED: dict[str, list[dict]] = {  # entries as a study's file has them
    "MAR": [
        {"method": "ar"},
        {"method": "speculative"},
        {"method": "calibrated", "head_calls": [8, 10, 12, 16, 25]},
        {"method": "disa"},
        {"method": "ddim", "head_calls": 10},
        {"method": "ddim", "head_calls": [10, 16], "grid": "planned"},
        {"method": "dpm-solver++", "head_calls": 10},
        {"method": "dpm-solver++", "head_calls": 10, "grid": "planned"},
        {"method": "lazymar"},
        {"method": "lazymar", "denoiser": "calibrated"},
        {"method": "gtr"},
        {"method": "gtr", "denoiser": "calibrated"},
    ],
    "VQ": [
        {"method": "speculative"},
        {"method": "sd", "gamma": [3, 5]},
        {"method": "eagle"},
        {"method": "eagle2"},
        {"method": "sjd"},
        {"method": "mc-sjd"},
        {"method": "sjd-pac"},
        {"method": "uniform-rsd"},
        {"method": "cool-sd", "delta": [1.1, 1.5]},
        {"method": "lantern"},
        {"method": "lantern++"},
        {"method": "gsd"},
    ],
}
WINDOWS: dict[str, list[dict]] = {  # beside them, where the window is all there is to choose
    "MAR": [{"method": "speculative", "window": [4, 8, 16, 24]}],
    "VQ": [{"method": "sjd", "window": [8, 16, 32]}, {"method": "sjd-pac", "window": [16, 32]}],
}


def candidates(plain: Configuration, divergence: float | None) -> tuple[list[Configuration], dict[str, str]]:
    """Configurations that might be better than plain sampling, and the reasons for those that are left out, by name.

    Args:
        plain: plain sampling by the user's own settings, which candidates share as far as they have them.
        divergence: None, and all are tried, with other numbers of iterations too. Otherwise only those that are known
            to be near `plain`: exact ones and, unless it is 0, measured ones. No guarantee covers another number of
            iterations, so that this stays.
    """
    usual = plain.engine.check(plain.request)
    entries = SEARCHED[usual.family]
    if divergence is not None:
        entries = [*entries, *WINDOWS[usual.family]]
    elif usual.num_iter is not None:
        length = plain.engine.runner.seq_len
        iterations = sorted({usual.num_iter, *(number for number in ITERATIONS if number <= length)})
        entries = [{"method": entry["method"], "num_iter": iterations, **entry} for entry in entries]

    found, left_out, there = [], {}, [usual]
    for name, settings in [each for entry in entries for each in expand(entry)]:
        try:
            row = replace(plain, name=name, request=_request(plain.request, settings))
            request = row.engine.check(row.request)
        except ValueError as error:  # such as a method that needs a draft model
            left_out[name] = str(error)
            continue
        near = divergence is None or guarantee_of(request) in (("exact", "measured") if divergence else ("exact",))
        if near and request not in there:
            found.append(row)
            there.append(request)
    return found, left_out


def _request(plain: Request, settings: Mapping[str, object]) -> Request:
    """Plain sampling's request, with a candidate's settings. Raises ValueError where these models lack the method."""
    return with_method(plain, str(settings["method"])).but(**settings)


# Runs of several configurations, chunk by chunk in turn, into a folder; one that was cut off goes on.

SCHEMA = "cspd.rounds/3"
RECORD = "run.json"
CHUNKS = "chunks"
TUNE = "tune.json"  # of a search
WARM_UP = 3  # rounds, before a row is timed on a CPU
TIMED = 5  # turns of a comparison that speed is told by, as many as `cspd bench` has runs
MANY = 16  # images at once in later turns, which are for quality
BAR = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
WRITTEN = ("report.html", "speed_quality.png", "comparison.png", "comparison.md", "comparison.csv", "comparison.json")


@dataclass
class Turns:
    """Configurations that make their images in turn, into a folder that is claimed.

    Attributes:
        rows: the configurations. plans: the settings that each runs by. parts: the requests of each, turn by turn.
        folder: of the images. settings: what they belong to.
        bar: counts images, those that were there from its beginning on.
        failed: why rows gave no images, by their numbers; None: none may fail.
        made: the chunks that are there, by row and turn. warm: the rows that have run before.
        wide: engines for turns of more images than an engine's slots, by that engine.
    """

    rows: Sequence[Configuration]
    plans: list[Request]
    parts: list[list[list[Request]]]
    folder: Path
    settings: dict
    bar: tqdm
    failed: dict[int, str] | None = None
    made: dict[tuple[int, int], Chunk] = field(default_factory=dict)
    warm: set[int] = field(default_factory=set)
    wide: dict[Engine, Engine] = field(default_factory=dict)

    def make(self, num: int, chosen: Sequence[int] | None = None) -> list[list[Chunk]]:
        """The chunks of all rows, or the `chosen`, in order, up to `num` images, the end of a rung.

        Existing chunks are read. Rows that have failed are left out.

        Raises:
            FloatingPointError, torch.OutOfMemoryError: a row gave no image, and none may fail.
        """
        chosen = range(len(self.rows)) if chosen is None else chosen
        ends = itertools.accumulate(map(len, self.parts[0]))
        turns = [i for i, end in enumerate(ends) if end <= num]
        order = {}
        for i in turns:
            for k in range(len(chosen)):  # another row begins each turn
                r = chosen[(i + k) % len(chosen)]
                if (r, i) not in self.made:
                    order[_file(r, i)] = r, i
        for file in missing_files(self.folder, order, lambda file: self._find(*order[file])):
            r, i = order[file]
            if r not in (self.failed or ()):
                self.bar.set_postfix_str(self.rows[r].name)
                with _failing(r, self.failed):
                    self._make(r, i)
        return [[self.made[r, i] for i in turns] for r in chosen if r not in (self.failed or ())]

    def _find(self, r: int, i: int) -> bool:
        """Reads the chunk of a row's turn, if an earlier run has generated it."""
        side = self.rows[r].engine.runners[self.plans[r].family].image_size
        chunk = read_chunk(self.folder / _file(r, i), self._made_of(r, i), side)
        if chunk is None:
            return False
        self.made[r, i] = chunk
        self.bar.initial = self.bar.n = self.bar.n + len(chunk.images)
        return True

    def _made_of(self, r: int, i: int) -> dict:
        requests = [_given(request) for request in self.parts[r][i]]
        return {"settings": self.settings, "configuration": self.rows[r].name, "requests": requests}

    def _make(self, r: int, i: int) -> None:
        row, requests = self.rows[r], self.parts[r][i]
        if r not in self.warm and len(requests) <= row.engine.num_slots:  # as turns that speed is told by
            self.bar.set_postfix_str(f"{row.name}: warming up")
            self._warm_up(row.engine, requests)
            self.warm.add(r)
        for request in requests:
            row.engine.resolve(request)  # a text is encoded once, whichever row comes first
        self.made[r, i] = self._chunk(row, requests)
        write_chunk(self.folder / _file(r, i), self.made[r, i], self._made_of(r, i))

    def _warm_up(self, engine: Engine, requests: list[Request]) -> None:
        """Runs requests for the first time, which takes longer: all, if kernels are chosen or compiled for shapes."""
        if engine.device.type == "cuda" or engine.compiled:
            engine.generate(requests)
            return
        tickets = [engine.add_request(request) for request in requests]
        for _ in range(WARM_UP):
            engine.step()
        for ticket in tickets:
            engine.cancel(ticket)

    def _chunk(self, row: Configuration, requests: list[Request]) -> Chunk:
        """A row's chunk; one of more images than its engine has slots is made by an engine with more, if that fits."""
        showing, own = self._showing(row.name), row.engine
        if len(requests) <= own.num_slots:
            return _timed(row, requests, showing)
        try:
            if own not in self.wide:
                self.wide[own] = own.with_slots(len(requests))
            return _timed(replace(row, engine=self.wide[own]), requests, showing)
        except (ValueError, torch.OutOfMemoryError):  # too little memory
            self.wide[own] = own
            return _timed(row, requests, showing)

    def _showing(self, name: str) -> OnProgress:
        """Moves the bar with the images of a turn."""
        before, shares = self.bar.n, {}

        def show(request: Request, share: float, preview: object) -> None:
            shares[request] = share
            done = sum(shares.values())
            self.bar.set_postfix_str(name, refresh=False)
            self.bar.n = before + done
            self.bar.update(0)

        return show


@contextlib.contextmanager
def taking_turns(
    rows: Sequence[Configuration],
    subjects: Sequence[Subject],
    rungs: Sequence[int],
    seed: int,
    store: Store,
    *,
    overwrite: bool = False,
    written: Sequence[str] = WRITTEN,
    may_fail: bool = False,
    timed: int | None = None,
    progress: bool = True,
) -> Iterator[Turns]:
    """Claims a folder for what several configurations make, after all their requests are checked, and shows a bar.

    Image i has the i-th of the subjects, classes or texts, in turn, and as its seed the i-th from `seed` on, or from
    the configuration's own. In a turn every one makes its next B images, B being its engine's slots, one after the
    other; who begins changes every turn. After `timed` turns, if that is given, turns have `MANY` images: they are for
    quality, and what is told of speed is by the turns of B.

    Args:
        rungs: numbers of images, rising; turns begin anew after each, so that one may be the last for some rows.
        written: what else will be in the folder. may_fail: a row that gives no images is no error.

    Raises:
        ValueError: a bad request, an engine without autoencoder, or as `Store.claim`.
    """
    num = rungs[-1]
    if num < 1:
        raise ValueError(f"{num} images compare nothing: give 1 or more")
    for row in rows:  # all, before anything is made
        for subject in sorted(set(subjects)):
            row.engine.check(asking_for(row.request, subject).but(seed=row.first_seed(seed)))
        row.engine.check(row.request.but(seed=row.first_seed(seed) + num - 1))
    _check_seeds({row.first_seed(seed): row.name for row in rows}, num)
    size = rows[0].engine.num_slots
    settings = {"machine": rows[0].engine.describe(), "max_batch": size, "labels": list(subjects), "seed": seed}
    asked = {
        row.name: {"request": settings_of(row.request), "files": row.files, "seed": row.first_seed(seed)}
        for row in rows
    }
    settings |= {"order": [row.name for row in rows], "configurations": asked}
    record = {"schema": SCHEMA, "settings": settings, "windows": {}}
    turns = _turns(rungs, size, timed)
    files = [_file(r, i) for r in range(len(rows)) for i in range(len(turns))]
    earlier = store.claim(record, [*files, *written], overwrite)
    earlier_windows = earlier["windows"] if earlier else {}
    with tqdm(total=num * len(rows), unit=" image", bar_format=BAR, disable=not progress) as bar:
        failed: dict[int, str] | None = {} if may_fail else None
        plans = _plans(rows, earlier_windows, bar, failed)
        for row, plan in zip(rows, plans):
            record["windows"][row.name] = {name: getattr(plan, name) for name in DECIDED}
        store.begin(record)
        parts = []
        for row, plan in zip(rows, plans):
            seeds = itertools.count(row.first_seed(seed))
            requests = [asking_for(plan, subject).but(seed=next(seeds)) for subject in in_turn(subjects, num)]
            parts.append([requests[turn] for turn in turns])
        yield Turns(rows, plans, parts, store.folder, settings, bar, failed)
        bar.set_postfix_str("")  # no row is under way any more


def _plans(
    rows: Sequence[Configuration], earlier_windows: dict, bar: tqdm, failed: dict[int, str] | None
) -> list[Request]:
    """The resolved requests of rows, by what an earlier run has decided; which rows failed is written down."""
    plans = []
    for r, row in enumerate(rows):
        bar.set_postfix_str(f"{row.name}: preparing")
        choices = earlier_choices(row.request.settings, earlier_windows.get(row.name))
        plans.append(row.engine.check(row.request.but(**choices)))
        with _failing(r, failed):
            plans[r] = row.engine.resolve(plans[r])
    return plans


@contextlib.contextmanager
def _failing(r: int, failed: dict[int, str] | None) -> Iterator[None]:
    """What a row raises for its own settings is written down, if rows may fail."""
    try:
        yield
    except (ValueError, FloatingPointError, torch.OutOfMemoryError) as error:
        if failed is None:
            raise
        failed[r] = " ".join(str(error).split())


def _turns(rungs: Sequence[int], size: int, timed: int | None) -> list[slice]:
    """Which images are made in each turn, see `taking_turns`."""
    turns: list[slice] = []
    for first, end in itertools.pairwise([0, *rungs]):
        while first < end:
            is_timed = timed is None or len(turns) < timed
            turns.append(slice(first, min(end, first + (size if is_timed else max(size, MANY)))))
            first = turns[-1].stop
    return turns


def comparison_store(out: Path) -> Store:
    """The folder of a comparison."""
    return Store(out, RECORD, SCHEMA, {"settings": dict, "windows": {str: dict}}, compared=("settings",))


def _file(row: int, turn: int) -> str:
    return f"{CHUNKS}/{row:02d}-{turn:05d}.npz"


def _check_seeds(names: dict[int, str], num: int) -> None:
    """Raises ValueError where some, but not all images of two rows have the same seeds."""
    seeds = sorted(names)
    for low, high in itertools.pairwise(seeds):
        if high - low < num:
            raise ValueError(
                f"{names[high]!r}: its seeds {high}..{high + num - 1} overlap those of {names[low]!r},"
                f" {low}..{low + num - 1}: begin with {low + num} or more, or with the same"
            )


def settings_of(request: Request) -> dict:
    """A request's settings that are not None, without its seed and what it is of."""
    return {key: value for key, value in _given(request).items() if key not in ("label", "prompt", "seed")}


def _given(request: Request) -> dict:
    return {key: value for key, value in request.to_dict().items() if value is not None}


def _timed(row: Configuration, requests: list[Request], on_progress: OnProgress) -> Chunk:
    reset_peak(row.engine.device)
    start = time.perf_counter()
    outputs = row.engine.generate(requests, on_progress=on_progress)
    seconds, peak = time.perf_counter() - start, peak_bytes(row.engine.device)
    if outputs[0].image is None:
        raise ValueError(f"{row.name}: an engine without autoencoder makes no images to compare")
    images = np.stack([np.asarray(to_pil(output.image)) for output in outputs])
    return Chunk(images, seconds, peak, [cost_of(output) for output in outputs])
