"""The configurations of a comparison, the study's file that lists them, and the folder of their images."""

from __future__ import annotations

import argparse
import contextlib
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
from cspd.method import GUARANTEES, guarantee_of, method_names, option_order, parse_method, plain_of, with_method
from cspd.option import BUNDLED, check_integer
from cspd.request import Output, Request, to_pil
from cspd.runs import DECIDED, LAZY, MEASURED, Store, earlier_choices, missing_files
from cspd.terminal import LARGEST_SEED, MOST, choice, label_list, shortened

# A study's file (YAML), and names of configurations like cspd:gamma=8. Both give entries: settings by name.

TARGET = ("checkpoint", "arch", "vae", "text_encoder")
MODELS = (*TARGET, "draft_checkpoint", "eagle")
SUBJECTS = ("labels", "prompts")  # a study has one of them
RUN = ("num", *SUBJECTS, "negative_prompt", "seed", "max_batch")  # of the whole study; a configuration may have a seed
TEXTS = ("name", "prompts", "negative_prompt", *MODELS)
ROWS = "configurations"
MOST_ROWS = 1000  # configurations from the lists of one entry


def request_keys() -> tuple[str, ...]:
    """The settings of a request, in the order of a configuration's name."""
    return ("method", *option_order(), "family")


def own_keys() -> tuple[str, ...]:
    """The settings of a configuration."""
    return ("seed", *request_keys(), *MODELS)


def named_entries(names: Sequence[str]) -> list[dict]:
    """Entries, as in a study's file, from names like "cspd:gamma=8". Raises ValueError as `parse_method`."""
    entries = []
    for each in names:
        method, options = parse_method(each, {*own_keys()} - {"method"})
        _check(shortened(each), options, own_keys())
        entries.append({"method": method} | options)
    return entries


def read_study(path: Path) -> tuple[dict, list[dict]]:
    """The common settings of a study's file, and the entries of its configurations.

    Raises:
        ValueError: the file is missing or not YAML, or has unknown or repeated keys, or values of a wrong kind.
    """
    try:
        content = yaml.load(path.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: give a study's file, see `cspd compare --help`") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    entries = content.get(ROWS) if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{path}: a study is settings, and a list '{ROWS}' of them, see `cspd compare --help`")
    common = {key: value for key, value in content.items() if key != ROWS}
    _check(f"{path}, at the top", common, (*RUN, *request_keys(), *MODELS))
    for i, entry in enumerate(entries):
        _check(f"{path}, in configuration {i + 1}", entry, ("name", *own_keys()))
    for key, value in common.items():
        if isinstance(value, list) and key != "labels":
            raise ValueError(f"{path}: {key} is a list at the top: lists of values belong to configurations")
    if all(key in common for key in SUBJECTS):
        raise ValueError(f"{path}: labels and prompts: give one of them")
    if "labels" in common:
        common["labels"] = _labels(path, common["labels"])
    for key, least, most in (("num", 1, MOST), ("seed", 0, LARGEST_SEED), ("max_batch", 1, MOST)):
        if key in common:
            check_integer(f"{path}: {key}", common[key], least, most, "see `cspd compare --help`")
    return common, entries


def _labels(path: Path, labels: object) -> list[int | str | None]:
    """The classes of a study: a list of numbers and names, or one, or a text as for --labels. Raises ValueError."""
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

    A repeated key is an error; other readers let the last one win silently. 1:30 and 010, which are 90 and 8 in
    YAML 1.1, are texts, so that errors show them as the user typed them. 1e3 is a number, as in YAML 1.2.
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
    """Raises ValueError for unknown keys, and for values that no setting can have."""
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"{where}: {shortened(key)} is unknown: {choice(key, known)}")
        is_list = isinstance(value, list) and key != "name"
        values = value if is_list else [value]
        if values and all(_fits(key, each) for each in values):
            continue
        kind = "number, text or list of them"
        if key in TEXTS:
            kind = f"text in quotes, in one line of 1..{_longest(key)} letters"
        raise ValueError(f"{where}: {key}: {shortened(value)} is no {kind}: give one, or leave {key} out")


def _fits(key: str, value: object) -> bool:
    """Whether a key can have a value: printable text, or a number unless the key names something."""
    if isinstance(value, str):
        return value.isprintable() and 0 < len(value.strip()) <= _longest(key)
    if value is None:
        return key != "name"
    return key not in TEXTS and isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _longest(key: str) -> int:
    return 100 if key == "name" else 4096


def expand(entry: dict) -> list[tuple[str, dict]]:
    """An entry's configurations, name and settings: one, or one for each combination of its lists' values.

    Without a name, a configuration is named by its method and its settings after colons, as `named_entries` reads it.
    Raises ValueError for more than `MOST_ROWS` combinations.
    """
    settings = {key: value for key, value in entry.items() if key != "name"}
    lists = {key: value for key, value in settings.items() if isinstance(value, list)}
    if math.prod(map(len, lists.values())) > MOST_ROWS:
        names = ", ".join(lists)
        raise ValueError(f"lists of {names} stand for more than {MOST_ROWS} configurations: give fewer values")
    expanded = []
    for values in itertools.product(*lists.values()):
        single = settings | dict(zip(lists, values))
        if "name" in entry:
            name, shown = entry["name"], {key: single[key] for key in lists}
        else:
            name, shown = single.get("method"), {key: value for key, value in single.items() if key != "method"}
        expanded.append((row_name(name, shown), single))
    return expanded


def row_name(name: object, settings: dict) -> str:
    """A name with settings after colons, as `named_entries` reads them."""
    parts = [str(name)]
    for key, value in settings.items():
        text = value if isinstance(value, (str, Path)) else json.dumps(value)
        parts.append(f"{key}={text}")
    return ":".join(parts)


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

CHAIN = ("num_sampling_steps", "first_timestep")  # settings that make baseline sampling an approximation too
ANY = Request(label=0)  # of class-conditional models
USUAL_ITERATIONS = 64  # what MAR's users run, whatever the length


@dataclass(frozen=True)
class Configuration:
    """A row of the comparison: a request's settings and the models that run it.

    Attributes:
        name: its name in the table.
        request: the settings; seed, and label or prompt mean nothing.
        engine: over the models, with as many slots as images are to be in flight at once.
        models: the sources of `engine`, values of `MODELS`. files: what images depend on besides the request.
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
        """The request of baseline sampling with the settings that all methods of the family have."""
        return self.engine.check(plain_of(self.engine.check(self.request)))

    def key(self) -> tuple:
        """Equal for configurations that approximate the same baseline sampling, with the same files."""
        return self.plain(), tuple(str(self.models.get(name)) for name in TARGET)

    def is_baseline(self) -> bool:
        """Whether it is baseline sampling with the seeds of the comparison."""
        return self.request.method == "ar" and self.seed is None


def configurations(
    entries: Sequence[dict], common: dict, load: Callable[[dict], Engine], asked: Request = ANY
) -> list[Configuration]:
    """The rows of a comparison: the baselines that the entries lack, then the configurations of the entries.

    The baselines are baseline sampling (`ar`) with the settings of each configuration. If no entry is baseline sampling
    with the common models and chain, two more are that with the common settings, and the same with MAR's usual 64
    iterations. Speed is measured against the first row: baseline sampling with the common settings, or else by the
    first entry that is baseline sampling.

    Args:
        common: settings of all, of `request_keys` and `MODELS`; a method ignores the options that it lacks.
            Without a checkpoint the first row has the first entry's models.
        load: makes an engine of the models in a dict with a checkpoint and others of `MODELS`.
        asked: the class or prompt of all rows.

    Raises:
        ValueError: settings that do not fit the models or each other, no method, or two rows of one name.
    """
    named = []
    for entry in entries:
        named += expand(entry)
    for name, own in named:
        method = own.get("method", common.get("method"))
        if method not in method_names():
            raise ValueError(f"{name}: method={method!r} is unknown: {choice(method, method_names())}")
    shared = asked.but(**{key: value for key, value in common.items() if key in request_keys()})
    engines: dict[tuple, Engine] = {}

    def make(name: str, own: dict) -> Configuration:
        models = {"checkpoint": BUNDLED["MAR"]}
        for key, value in (common | own).items():
            if key in MODELS and value is not None:
                models[key] = value
        key_of_models = tuple(sorted((key, str(value)) for key, value in models.items()))
        if key_of_models not in engines:
            engines[key_of_models] = load(models)
        engine = engines[key_of_models]
        settings = {key: value for key, value in own.items() if key in request_keys() and key != "method"}
        request = with_method(shared.but(**settings), own.get("method", shared.method)).but(**settings)
        try:
            engine.check(replace(request, seed=own.get("seed", 0)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        return Configuration(name, request, engine, models, seed=own.get("seed"))

    first_models = {}
    if not common.get("checkpoint"):
        first_models = {key: value for key, value in named[0][1].items() if key in MODELS}
    plain = make("ar", {"method": "ar"} | first_models)
    rows = _with_baselines([make(name, own) for name, own in named], plain)
    for name, number in Counter(row.name for row in rows).items():
        if number > 1:
            raise ValueError(f"two configurations are called {name!r}: give them names of their own")
    return rows


def _with_baselines(rows: list[Configuration], plain: Configuration) -> list[Configuration]:
    """The rows after the baselines that they lack, see `configurations`; the first is the reference of speed."""
    wanted = [_plain(row, plain) for row in rows]
    listed = [row for row in rows if row.is_baseline() and _differs_in_settings_only(row, plain)]
    if not listed:
        wanted = [plain, *_usual(plain), *wanted]
    existing = {row.key() for row in rows if row.is_baseline()}
    missing: dict[tuple, Configuration] = {}
    for row in wanted:
        if row.key() not in existing:
            missing.setdefault(row.key(), row)
    has_common = plain.key() in existing or plain.key() in missing
    first = plain.key() if has_common else listed[0].key()
    return sorted([*missing.values(), *rows], key=lambda row: not row.is_baseline() or row.key() != first)


def _usual(plain: Configuration) -> list[Configuration]:
    """Baseline sampling with MAR's usual 64 iterations, unless the models generate a token an iteration."""
    if plain.engine.check(plain.request).num_iter is None:
        return []
    iterations = min(USUAL_ITERATIONS, plain.engine.runner.seq_len)
    usual = replace(plain, request=replace(plain.request, num_iter=iterations))
    return [_plain(usual, plain)]


def _differs_in_settings_only(row: Configuration, plain: Configuration) -> bool:
    """Whether a row of baseline sampling has the models and the chain of `plain`."""
    (own, files), (common, common_files) = row.key(), plain.key()
    return files == common_files and all(getattr(own, name) == getattr(common, name) for name in CHAIN)


def _plain(row: Configuration, common: Configuration) -> Configuration:
    """Baseline sampling with a row's settings, named by those that differ from the common ones."""
    request = row.plain()
    usual = common.engine.check(common.request)
    other = {}
    for key in request_keys():
        value, typed = getattr(request, key), getattr(row.request, key)
        if value != getattr(usual, key):
            other[key] = typed if typed == value else value  # 4, and not 4.0
    for key in TARGET:
        if row.models.get(key) != common.models.get(key):
            other[key] = row.models.get(key)
    shown = {key: value for key, value in other.items() if value is not None and key != "family"}
    return replace(row, name=row_name("ar", shown or other), request=request, seed=None)


def baselines(
    row: Configuration, rows: Sequence[Configuration], seed: int
) -> tuple[Configuration | None, Configuration | None]:
    """The baseline rows that a row is compared with, of the same seeds and of other seeds, each None if missing.

    They have the settings of `Configuration.plain`. A row that is baseline sampling itself is compared with the first
    row's chain (`CHAIN`), if some row has it.

    Args:
        seed: of the comparison's first image.
    """
    request, files = row.key()
    keys = [(request, files)]
    if row.request.method == "ar":
        chain = {name: getattr(rows[0].plain(), name) for name in CHAIN}
        keys.insert(0, (request.but(**chain), files))
    chosen: list[Configuration] = []
    for key in keys:
        if not chosen:
            chosen = [each for each in rows if each.request.method == "ar" and each is not row and each.key() == key]
    same = other = None
    for each in chosen:
        if each.first_seed(seed) == row.first_seed(seed):
            same = same or each
        else:
            other = other or each
    return same, other


# The candidates of `cspd tune`: the methods, with the settings that trade quality for speed.

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
WINDOWS: dict[str, list[dict]] = {  # more candidates, if quality may not change
    "MAR": [{"method": "speculative", "window": [4, 8, 16, 24]}],
    "VQ": [{"method": "sjd", "window": [8, 16, 32]}, {"method": "sjd-pac", "window": [16, 32]}],
}


def candidates(plain: Configuration, divergence: float | None) -> tuple[list[Configuration], dict[str, str]]:
    """Configurations that might be better than baseline sampling, and the reasons for those left out, by name.

    Args:
        plain: baseline sampling with the user's own settings, which candidates share if they have them.
        divergence: None: all are tried, with other numbers of iterations too. Otherwise only those that are known to be
            near `plain`: exact ones and, unless it is 0, measured ones. No guarantee covers another number of
            iterations, so that this stays.
    """
    usual = plain.engine.check(plain.request)
    entries = SEARCHED[usual.family]
    guarantees = GUARANTEES.keys()
    if divergence is not None:
        entries = [*entries, *WINDOWS[usual.family]]
        guarantees = ("exact", "measured") if divergence else ("exact",)
    elif usual.num_iter is not None:
        length = plain.engine.runner.seq_len
        iterations = sorted({usual.num_iter, *(number for number in ITERATIONS if number <= length)})
        entries = [{"method": entry["method"], "num_iter": iterations, **entry} for entry in entries]

    found, left_out, seen = [], {}, [usual]
    for entry in entries:
        for name, settings in expand(entry):
            try:
                request = with_method(plain.request, str(settings["method"])).but(**settings)
                row = replace(plain, name=name, request=request)
                checked = row.engine.check(row.request)
            except ValueError as error:  # such as a method that needs a draft model
                left_out[name] = str(error)
                continue
            if guarantee_of(checked) in guarantees and checked not in seen:
                found.append(row)
                seen.append(checked)
    return found, left_out


# Interleaved runs of several configurations, chunk by chunk, into a folder. An interrupted run resumes.

SCHEMA = "cspd.rounds/3"
RECORD = "run.json"
CHUNKS = "chunks"
TUNE = "tune.json"  # the report of a search
WARM_UP = 3  # rounds, before a row is timed on a CPU
TIMED = 5  # turns of a comparison that measure speed, as many as `cspd bench` has runs
MANY = 16  # images at once in later turns, which measure quality
BAR = "{l_bar}{bar}| {n:.1f}/{total} images [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
WRITTEN = ("report.html", "speed_quality.png", "comparison.png", "comparison.md", "comparison.csv", "comparison.json")


@dataclass
class InterleavedRuns:
    """Configurations that take turns to generate their images, into a claimed folder.

    Attributes:
        rows: the configurations. plans: the resolved settings of each. parts: the requests of each, turn by turn.
        folder: of the images. settings: those that the chunks belong to.
        bar: counts images, existing ones from its beginning on.
        failed: the reason of each row that gave no images, by its number; None: none may fail.
        made: the existing chunks, by row and turn. warm: the rows that have run before.
        wide: for each engine, the one that runs turns of more images than its slots.
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
        if r not in self.warm and len(requests) <= row.engine.num_slots:  # a turn that may measure speed
            self.bar.set_postfix_str(f"{row.name}: warming up")
            self._warm_up(row.engine, requests)
            self.warm.add(r)
        for request in requests:
            row.engine.resolve(request)  # encodes a prompt once, before any row is timed
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
        """A row's chunk. More images than the row's engine has slots run on a wider engine, if memory allows."""
        show, own = self._progress(row.name), row.engine
        if len(requests) <= own.num_slots:
            return _timed(row, requests, show)
        try:
            if own not in self.wide:
                self.wide[own] = own.with_slots(len(requests))
            return _timed(replace(row, engine=self.wide[own]), requests, show)
        except (ValueError, torch.OutOfMemoryError):  # too little memory
            self.wide[own] = own
            return _timed(row, requests, show)

    def _progress(self, name: str) -> OnProgress:
        """A callback that moves the bar with the images of a turn."""
        before, fractions = self.bar.n, {}

        def show(request: Request, fraction: float, preview: object) -> None:
            fractions[request] = fraction
            self.bar.set_postfix_str(name, refresh=False)
            self.bar.n = before + sum(fractions.values())
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
) -> Iterator[InterleavedRuns]:
    """Checks all requests of several configurations, claims a folder for their images, and shows a bar.

    Image i has the i-th of the subjects, classes or prompts, over and over, and the i-th seed from `seed` on, or from
    the configuration's own. In a turn each configuration generates its next B images, one after the other, where B is
    the number of its engine's slots; another one begins each turn. After `timed` turns, if given, turns have `MANY`
    images: they measure quality, and the turns of B images measure speed.

    Args:
        rungs: rising numbers of images. A turn ends with each, so that any may be the last for some rows.
        written: other files of the folder. may_fail: a row that gives no images is not an error.

    Raises:
        ValueError: a bad request, an engine without autoencoder, or as `Store.claim`.
    """
    num = rungs[-1]
    _check_rows(rows, subjects, seed, num)
    settings = _settings(rows, subjects, seed)
    turns = _turns(rungs, settings["max_batch"], timed)
    files = [_file(r, i) for r in range(len(rows)) for i in range(len(turns))]
    record = {"schema": SCHEMA, "settings": settings, "windows": {}}
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
            requests = []
            for i, subject in enumerate(in_turn(subjects, num)):
                requests.append(asking_for(plan, subject).but(seed=row.first_seed(seed) + i))
            parts.append([requests[turn] for turn in turns])
        yield InterleavedRuns(rows, plans, parts, store.folder, settings, bar, failed)
        bar.set_postfix_str("")


def _check_rows(rows: Sequence[Configuration], subjects: Sequence[Subject], seed: int, num: int) -> None:
    """Raises ValueError for a bad request of any row, before an image is generated."""
    if num < 1:
        raise ValueError(f"{num} images compare nothing: give 1 or more")
    for row in rows:
        first = row.first_seed(seed)
        for subject in sorted(set(subjects)):
            row.engine.check(asking_for(row.request, subject).but(seed=first))
        row.engine.check(row.request.but(seed=first + num - 1))
    _check_seeds({row.first_seed(seed): row.name for row in rows}, num)


def _settings(rows: Sequence[Configuration], subjects: Sequence[Subject], seed: int) -> dict:
    """Everything that the images of a comparison depend on."""
    configurations = {}
    for row in rows:
        configurations[row.name] = {
            "request": settings_of(row.request),
            "files": row.files,
            "seed": row.first_seed(seed),
        }
    return {
        "machine": rows[0].engine.describe(),
        "max_batch": rows[0].engine.num_slots,
        "labels": list(subjects),
        "seed": seed,
        "order": [row.name for row in rows],
        "configurations": configurations,
    }


def _plans(
    rows: Sequence[Configuration], earlier_windows: dict, bar: tqdm, failed: dict[int, str] | None
) -> list[Request]:
    """The resolved requests of rows, with the choices of an earlier run. Failures are added to `failed`."""
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
    """Adds an error of a row's own settings to `failed`, if rows may fail."""
    try:
        yield
    except (ValueError, FloatingPointError, torch.OutOfMemoryError) as error:
        if failed is None:
            raise
        failed[r] = " ".join(str(error).split())


def _turns(rungs: Sequence[int], size: int, timed: int | None) -> list[slice]:
    """The images of each turn, see `taking_turns`."""
    turns: list[slice] = []
    for first, end in itertools.pairwise([0, *rungs]):
        while first < end:
            is_timed = timed is None or len(turns) < timed
            last = first + (size if is_timed else max(size, MANY))
            turns.append(slice(first, min(end, last)))
            first = turns[-1].stop
    return turns


def comparison_store(out: Path) -> Store:
    """The folder of a comparison."""
    return Store(out, RECORD, SCHEMA, {"settings": dict, "windows": {str: dict}}, compared=("settings",))


def _file(row: int, turn: int) -> str:
    return f"{CHUNKS}/{row:02d}-{turn:05d}.npz"


def _check_seeds(names: dict[int, str], num: int) -> None:
    """Raises ValueError if some, but not all images of two rows have the same seeds."""
    seeds = sorted(names)
    for low, high in itertools.pairwise(seeds):
        if high - low < num:
            raise ValueError(
                f"{names[high]!r}: its seeds {high}..{high + num - 1} overlap those of {names[low]!r},"
                f" {low}..{low + num - 1}: begin with {low + num} or more, or with the same"
            )


def settings_of(request: Request) -> dict:
    """A request's settings that are not None, without its seed and its class or prompt."""
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
