"""The configurations of a comparison, the study's file that lists them, and the folder of their images."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from tqdm import tqdm

from cspd.device import peak_bytes, reset_peak
from cspd.engine import Engine, OnProgress
from cspd.evaluation.images import Subject, asking_for, in_turn
from cspd.files import NUMBER, Place, misfit, parse_json, read_item, write_item
from cspd.method import (
    CANDIDATES,
    EXACT_CANDIDATES,
    GUARANTEES,
    guarantee_of,
    option_order,
    parse_method,
    plain_of,
    with_method,
)
from cspd.option import BUNDLED, check_integer, decided_names, method_now
from cspd.request import Output, Request
from cspd.runs import Store, earlier_choices, missing_files
from cspd.summary import LAZY, MEASURED, OPTIONAL
from cspd.terminal import LARGEST_SEED, MOST, choice, label_list, progress_bar, shortened

# A study's file (YAML), and names of configurations like mar-draft:gamma=8. Both give entries, which are settings by
# name; a list of values makes an entry several configurations.

TARGET = ("checkpoint", "arch", "vae", "text_encoder")
MODELS = (*TARGET, "draft_checkpoint", "eagle")
SUBJECTS = ("labels", "prompts")  # a study has one of them
RUN = ("num", *SUBJECTS, "negative_prompt", "seed", "max_batch")  # of the whole study
OWN_RUN = ("seed", "max_batch")  # a configuration may have its own
TEXTS = ("name", "prompts", "negative_prompt", *MODELS)
ROWS = "configurations"
PUBLISHED = ("alpha", "step_compression", "speed_up", "fid", "inception_score", "clip_score")  # numbers of a paper
HELP = "see `cspd compare --help`"


def request_keys() -> tuple[str, ...]:
    """The settings of a request, in the order of a configuration's name."""
    # a function, since a plug-in may add options after the import
    return ("method", *option_order(), "family")


def own_keys() -> tuple[str, ...]:
    """The settings of a configuration."""
    return (*OWN_RUN, *request_keys(), *MODELS)


def named_entries(names: Sequence[str]) -> list[dict]:
    """Entries, as in a study's file, from names like "mar-draft:gamma=8". Raises ValueError as `parse_method`."""
    entries = []
    for name in names:
        method, options = parse_method(name, {*own_keys()} - {"method"})
        _check_keys(shortened(name), options, own_keys())
        entries.append({"method": method} | options)
    return entries


def read_study(path: Path) -> tuple[dict, list[dict]]:
    """The common settings of a study's file, and the entries of its configurations.

    Raises:
        ValueError: the file is missing or not YAML, or has unknown or repeated keys, or values of a wrong type.
    """
    content = _read_yaml(path)
    common = dict(content) if isinstance(content, dict) else {}
    entries = common.pop(ROWS, None)
    is_list = isinstance(entries, list) and len(entries) > 0
    are_settings = is_list and all(isinstance(entry, dict) for entry in entries)
    if not are_settings:
        raise ValueError(f"{path}: a study has settings and a list '{ROWS}', whose entries are settings too, {HELP}")

    valid = (*RUN, *request_keys(), *MODELS)
    _check_keys(f"{path}, at the top", common, valid)
    valid = ("name", "paper", *own_keys())
    for number, entry in enumerate(entries, 1):
        where = f"{path}, in configuration {number}"
        _check_keys(where, {key: value for key, value in entry.items() if key != "paper"}, valid)
        _check_published(where, entry)
    _check_common(path, common)
    if "labels" in common:
        common["labels"] = _labels(path, common["labels"])
    return common, entries


def _read_yaml(path: Path) -> object:
    try:
        return yaml.load(path.read_bytes(), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: give a study's file, {HELP}") from error
    except (yaml.YAMLError, ValueError) as error:
        message = " ".join(str(error).split())
        raise ValueError(f"{path} is not valid YAML: {message}") from error


def _check_common(path: Path, common: dict) -> None:
    """Raises ValueError for settings that cannot be at the top of a study's file."""
    for key, value in common.items():
        if isinstance(value, list) and key != "labels":
            raise ValueError(f"{path}: {key} is a list at the top: only configurations may have lists of values")
    if "labels" in common and "prompts" in common:
        raise ValueError(f"{path}: labels and prompts exclude each other: give only one of them")
    ranges = {"num": (1, MOST), "seed": (0, LARGEST_SEED), "max_batch": (1, MOST)}
    for key, (low, high) in ranges.items():
        if key in common:
            check_integer(f"{path}: {key}", common[key], low, high, HELP)


def _labels(path: Path, labels: object) -> list[int | str | None]:
    """The classes of a study: a list of numbers and names, one of them, or a text as for --labels."""
    several = labels if isinstance(labels, list) else [labels]
    text = ",".join(map(str, several))
    try:
        return label_list(text)
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{path}: labels: {error}") from None


class _Loader(yaml.SafeLoader):
    """Reads YAML with the numbers of YAML 1.2, and rejects repeated keys, of which PyYAML silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                line = key.start_mark.line + 1
                raise ValueError(f"line {line}: {shortened(key.value)} is given twice")
        return super().construct_mapping(node, deep)


# In YAML 1.1, which PyYAML reads, 1e3 is a text, 1:30 is 90 and 010 is 8. In YAML 1.2 only the first is a number.
NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$",
    "tag:yaml.org,2002:float": r"[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.(inf|nan)$",
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _tag, _pattern in NUMBERS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern), [*"-+.0123456789"])


def _check_keys(where: str, settings: Mapping, valid: Sequence[str]) -> None:
    """Raises ValueError for unknown keys, and for values of a wrong type."""
    for key, value in settings.items():
        if key not in valid:
            raise ValueError(f"{where}: {shortened(key)} is unknown: {choice(key, valid)}")
        types: tuple[type, ...] = (str, int, float)
        kind = "a number or a text"
        if key in TEXTS:
            types = (str,)
            kind = "a text in quotes"
        values = value if isinstance(value, list) else [value]
        is_valid = all(each is None or isinstance(each, types) for each in values)
        if not is_valid or not values:
            raise ValueError(f"{where}: {key}={shortened(value)} is invalid: give {kind}, or leave {key} out")


def _check_published(where: str, entry: dict) -> None:
    """Raises ValueError unless "paper" has numbers, one of each name or one for each of the configurations."""
    paper = entry.get("paper", {})
    if not isinstance(paper, dict):
        raise ValueError(f"{where}: paper={shortened(paper)} is invalid: give numbers by name, as in {{fid: 2}}")
    num = len(expand({**entry, "paper": {}}))
    for name, value in paper.items():
        if name not in PUBLISHED:
            raise ValueError(f"{where}, paper: {shortened(name)} is unknown: {choice(name, PUBLISHED)}")
        numbers = value if isinstance(value, list) else [value] * num
        if len(numbers) != num or not all(type(each) in NUMBER for each in numbers):
            raise ValueError(f"{where}, paper: {name} needs a number, or {num} for as many configurations")


def expand(entry: dict) -> list[tuple[str, dict]]:
    """An entry's configurations, name and settings: one, or one for each combination of its lists' values.

    Without a name, a configuration is named by its method and its settings after colons, as `named_entries` reads it.
    Lists in "paper" have a number for each configuration, in their order.
    """
    settings = {key: value for key, value in entry.items() if key not in ("name", "paper")}
    lists = {key: value for key, value in settings.items() if isinstance(value, list)}
    # the last list varies fastest
    expanded = []
    for values in itertools.product(*lists.values()):
        combination = dict(zip(lists, values))
        single = settings | combination
        if "name" in entry:
            name = row_name(entry["name"], combination)
        else:
            shown = {key: value for key, value in single.items() if key != "method"}
            name = row_name(method_now(single.get("method")), shown)
        expanded.append((name, single))
    for i, (_, single) in enumerate(expanded):
        numbers = entry.get("paper", {}).items()
        if numbers:
            single["paper"] = {key: each[i] if isinstance(each, list) else each for key, each in numbers}
    return expanded


def row_name(name: object, settings: dict) -> str:
    """A name with settings after colons, as `named_entries` reads them."""
    parts = [str(name)]
    for key, value in settings.items():
        text = value if isinstance(value, (str, Path)) else json.dumps(value)  # true, not True
        parts.append(f"{key}={text}")
    return ":".join(parts)


# The images that a configuration generated in one turn, with seconds and costs, and their file.

COSTS = ("head_calls_per_token", "head_calls", "backbone_calls", "draft_backbone_calls", "step_compression", "bound")


SECONDS = ("draft_seconds", "target_seconds")  # of the rounds that an image took part in
COUNTS = ("by_rank", "committed", "resample_tries")  # statistics of drafts that a chunk sums over its images


CHUNK = {  # the JSON of its file; older ones lack what has a question mark
    "seconds": NUMBER,
    "peak_bytes": int,
    "costs": [
        {
            **dict.fromkeys(COSTS, OPTIONAL),
            **{f"{name}?": NUMBER for name in SECONDS},
            "judged": NUMBER,
            "accepted": NUMBER,
        }
    ],
    "counts?": {"by_rank": [[int]], "committed": {str: int}, "resample_tries": int},
}


class Chunk(NamedTuple):
    """The result of a configuration's turn: n images, and the costs of each.

    Attributes:
        images: uint8 [n, H, W, 3]. seconds: of the whole turn. peak_bytes: memory.
        counts: the statistics in `COUNTS`, summed over the images; None in files of older versions.
    """

    images: np.ndarray
    seconds: float
    peak_bytes: int
    costs: list[dict]
    counts: dict | None = None


def cost_of(output: Output) -> dict:
    """The statistics of an output that its chunk keeps."""
    costs = {name: getattr(output.stats, name) for name in (*COSTS, LAZY, *MEASURED)}
    verified, accepted = map(sum, output.stats.by_lag)
    costs["judged"] = verified
    costs["accepted"] = accepted
    seconds = output.stats.seconds
    costs["draft_seconds"] = seconds["draft"]
    costs["target_seconds"] = seconds["backbone"] + seconds["head"] + seconds["other"]
    return costs


def summed(counts: Sequence[Mapping]) -> dict:
    """The sums of statistics of the names in `COUNTS`."""
    committed: Counter[str] = Counter()
    by_rank: list[list[int]] = [[], []]
    for each in counts:
        committed.update({str(tokens): rounds for tokens, rounds in each["committed"].items()})  # as JSON has them
        pairs = zip(by_rank, each["by_rank"])
        by_rank = [[a + b for a, b in itertools.zip_longest(*pair, fillvalue=0)] for pair in pairs]
    tries = sum(each["resample_tries"] for each in counts)
    return {"by_rank": by_rank, "committed": dict(committed), "resample_tries": tries}


def write_chunk(path: Place, chunk: Chunk, made_of: dict) -> None:
    """Writes the images as `arr_0`, as ADM's evaluator reads them, and the rest as JSON in `chunk`."""
    rest = chunk._asdict()
    rest["images"] = None
    encoded = json.dumps(rest).encode()
    arrays = {"arr_0": chunk.images, "chunk": np.frombuffer(encoded, np.uint8)}
    write_item(path, arrays, made_of)


def read_chunk(path: Place, made_of: dict, side: int) -> Chunk | None:
    """The chunk of these requests, or None if it is absent, damaged, or has other images."""
    shape = (len(made_of["requests"]), side, side, 3)
    arrays = read_item(path, made_of, {"arr_0": (np.uint8, shape)})
    if arrays is None:
        return None
    with contextlib.suppress(LookupError, ValueError):
        rest = parse_json(arrays["chunk"].tobytes().decode())
        if misfit(rest, CHUNK) is None:
            return Chunk(arrays["arr_0"], *(rest.get(name) for name in Chunk._fields[1:]))
    return None


# The configurations of a comparison, and the baseline sampling that each is compared with.

CHAIN = ("num_sampling_steps", "first_timestep")  # settings that make baseline sampling an approximation too
ANY = Request(label=0)  # of class-conditional models
USUAL_ITERATIONS = 64  # MAR's default, whatever the sequence length


@dataclass(frozen=True)
class Configuration:
    """A row of the comparison: a request's settings and the models that run it.

    Attributes:
        name: in the table.
        request: the settings. Its seed, and its class or prompt, are ignored.
        engine: over the models, with as many slots as images may be in flight at once.
        models: where the engine's models come from, by the names of `MODELS`.
        files: the fingerprints of the files that images depend on, by role.
        seed: of the first image. None: the comparison's.
        paper: a paper's numbers for it, by the names in `PUBLISHED`.
    """

    name: str
    request: Request
    engine: Engine
    models: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    paper: Mapping[str, float] = field(default_factory=dict)

    def first_seed(self, seed: int) -> int:
        """The seed of its first image, in a comparison that begins with `seed`."""
        return seed if self.seed is None else self.seed

    def plain(self) -> Request:
        """Baseline sampling with those of its settings that all methods of the family have; defaults filled in."""
        checked = self.engine.check(self.request)
        return self.engine.check(plain_of(checked))

    def key(self) -> tuple:
        """Equal for configurations with the same baseline sampling, files and batch size."""
        # not the draft model's files: it changes how fast an image comes, not what baseline sampling is
        target_files = tuple(str(self.models.get(name)) for name in TARGET)
        return self.plain(), (*target_files, self.engine.num_slots)

    def is_baseline(self) -> bool:
        """Whether it is baseline sampling with the seeds of the comparison."""
        return self.request.method == "ar" and self.seed is None


def _sharing(load: Callable[[dict], Engine]) -> Callable[[dict, int | None], Engine]:
    """Gives an engine of models and a batch size, by default that of `load`; rows with the same files share one."""
    engines: dict[tuple, Engine] = {}

    def engine_of(models: dict, max_batch: int | None) -> Engine:
        sources = tuple(sorted((key, str(value)) for key, value in models.items()))
        if (sources, None) not in engines:
            engines[sources, None] = load(models)
        engine = engines[sources, None]
        if max_batch is None or max_batch == engine.num_slots:
            return engine
        if (sources, max_batch) not in engines:
            engines[sources, max_batch] = engine.with_slots(max_batch)
        return engines[sources, max_batch]

    return engine_of


def configurations(
    entries: Sequence[dict], common: dict, load: Callable[[dict], Engine], asked: Request = ANY
) -> list[Configuration]:
    """The rows of a comparison: the baselines that the entries lack, then the configurations of the entries.

    The baselines are baseline sampling (`ar`) with the settings of each configuration. If no entry is baseline sampling
    with the common models and chain, two more are added: that with the common settings, and the same with MAR's usual
    64 iterations. The first row is baseline sampling with the common settings, or else the first entry that is baseline
    sampling; `speed_baseline` is the row that a row's speed is measured against.

    Args:
        common: settings of all, of `request_keys` and `MODELS`; a method ignores the options that it lacks.
            Without a checkpoint the first row has the first entry's models.
        load: makes an engine of the models in a dict with a checkpoint and others of `MODELS`.
        asked: the class or prompt of all rows.

    Raises:
        ValueError: settings are incompatible with the models or with each other, a method is missing, or two rows have
            the same name.
    """
    shared = asked.but(**_those_of(request_keys(), common))
    engine_of = _sharing(load)

    def make(name: str, own: dict, request: Request) -> Configuration:
        models = {"checkpoint": BUNDLED["MAR"]}
        for key, value in _those_of(MODELS, common | own).items():
            if value is not None:
                models[key] = value
        max_batch = own.get("max_batch")
        if max_batch is not None:
            check_integer(f"{name}: max_batch", max_batch, 1, MOST, HELP)
        engine = engine_of(models, max_batch)
        seed = own.get("seed")
        with _naming(name):
            engine.check(request.but(seed=0 if seed is None else seed))
        return Configuration(name, request, engine, models, seed=seed, paper=own.get("paper", {}))

    named = []
    for entry in entries:
        named += expand(entry)
    # all requests before any model: a mistake is found before models are loaded
    requests = [_request(name, own, shared) for name, own in named]
    _, first_settings = named[0]
    first_own = {}
    if not common.get("checkpoint"):
        first_own = _those_of(MODELS, first_settings)
    if all("max_batch" in own for _, own in named):
        first_own["max_batch"] = first_settings["max_batch"]
    plain = make("ar", first_own, with_method(shared, "ar"))
    rows = [make(name, own, request) for (name, own), request in zip(named, requests)]
    rows = _with_baselines(rows, plain)

    numbers = Counter(row.name for row in rows)
    name, number = numbers.most_common(1)[0]
    if number > 1:
        raise ValueError(f"{number} configurations are called {name!r}: give each a name of its own")
    return rows


def _those_of(keys: Sequence[str], settings: Mapping) -> dict:
    return {key: value for key, value in settings.items() if key in keys}


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Names the configuration in a ValueError."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _request(name: str, own: dict, shared: Request) -> Request:
    """The request of a configuration's own settings and the shared ones that its method has."""
    settings = _those_of(request_keys(), own)
    method = settings.pop("method", shared.method)
    with _naming(name):
        request = with_method(shared.but(**settings), method)
    # shared settings that the method lacks are gone; its own ones are back, and an error when the request is checked
    return request.but(**settings)


def _with_baselines(rows: list[Configuration], plain: Configuration) -> list[Configuration]:
    """The rows after the baselines that they lack, see `configurations`. Speed is measured against the first."""
    # two rows have equal keys if the same baseline serves both
    wanted = [_plain(row, plain) for row in rows]
    existing = {row.key() for row in rows if row.is_baseline()}
    listed = [row for row in rows if row.is_baseline() and _has_models_and_chain(row, plain)]
    if not listed:
        wanted = [plain, *_usual(plain), *wanted]
    added = []
    for row in wanted:
        key = row.key()
        if key not in existing:
            existing.add(key)
            added.append(row)

    first = plain.key()
    if first not in existing:
        first = listed[0].key()
    reference = []
    others = []
    for row in [*added, *rows]:
        if row.is_baseline() and row.key() == first:
            reference.append(row)
        else:
            others.append(row)
    return reference + others


def _usual(plain: Configuration) -> list[Configuration]:
    """Baseline sampling with MAR's usual 64 iterations; [] if the models generate one token per iteration."""
    if plain.engine.check(plain.request).num_iter is None:
        return []
    iterations = min(USUAL_ITERATIONS, plain.engine.runner.seq_len)
    usual = replace(plain, request=plain.request.but(num_iter=iterations))
    return [_plain(usual, plain)]


def _has_models_and_chain(row: Configuration, plain: Configuration) -> bool:
    """Whether a row of baseline sampling has the models and the denoising chain of `plain`."""
    own, files = row.key()
    common, common_files = plain.key()
    own_chain = [getattr(own, name) for name in CHAIN]
    common_chain = [getattr(common, name) for name in CHAIN]
    return files == common_files and own_chain == common_chain


def _plain(row: Configuration, common: Configuration) -> Configuration:
    """Baseline sampling with a row's settings, named by those that differ from the common ones."""
    request = row.plain()
    usual = common.engine.check(common.request)
    other = {}
    for key in request_keys():
        value = getattr(request, key)
        typed = getattr(row.request, key)
        if value != getattr(usual, key) and key != "family":
            other[key] = typed if typed == value else value  # 4 and not 4.0, as in the names of earlier runs
    for key in TARGET:
        value = row.models.get(key)
        if value != common.models.get(key):
            other[key] = value
    if row.engine.num_slots != common.engine.num_slots:
        other["max_batch"] = row.engine.num_slots
    # a setting that only the common ones have, as in "vae=null", is shown only if no other differs
    shown = {key: value for key, value in other.items() if value is not None}
    name = row_name("ar", shown or other)
    return replace(row, name=name, request=request, seed=None, paper={})


def speed_baseline(row: Configuration, rows: Sequence[Configuration]) -> Configuration:
    """The row that a row's speed is measured against, with the same batch size if there is one.

    It is baseline sampling with the first row's settings; for methods other than `ar`, of their own target.
    """
    first = rows[0]
    request, files = first.key()
    if row.request.method != "ar":
        _, files = row.key()
    wanted = request, (*files[:-1], row.engine.num_slots)
    return next((each for each in rows if each.is_baseline() and each.key() == wanted), first)


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
        # a shorter chain approximates the first row's; any other `ar` is its own baseline, with other seeds
        first = rows[0].plain()
        chain = {name: getattr(first, name) for name in CHAIN}
        keys.insert(0, (request.but(**chain), files))
    others = [each for each in rows if each.request.method == "ar" and each is not row]
    found: list[Configuration] = []
    for key in keys:
        found = found or [each for each in others if each.key() == key]

    # with the same seeds, images are compared pair by pair
    same_seeds = other_seeds = None
    for each in found:
        if each.first_seed(seed) == row.first_seed(seed):
            same_seeds = same_seeds or each
        else:
            other_seeds = other_seeds or each
    return same_seeds, other_seeds


# The candidates of `cspd tune`, which each family registers.


def candidates(plain: Configuration, divergence: float | None) -> tuple[list[Configuration], dict[str, str]]:
    """Configurations that might be better than baseline sampling, and the reasons for those left out, by name.

    Args:
        plain: baseline sampling with the user's own settings, which candidates share if they have them.
        divergence: None: all of them. 0: exact methods only. More, in nats per token: measured ones too, and a plan of
            this budget in place of those of others.
    """
    usual = plain.engine.check(plain.request)
    family: Any = usual.family
    names = CANDIDATES[family].split()
    guarantees = tuple(GUARANTEES)
    if divergence is not None:
        names += EXACT_CANDIDATES[family].split()
        guarantees = ("exact", "approximate") if divergence else ("exact",)
        if any(name.startswith("budget") for name in names):
            names = [name for name in names if not name.startswith("budget")]
            names.append(f"budget:budget={divergence:g}")

    # a model may lack what a method needs, such as a draft model
    found = []
    left_out = {}
    seen = [usual]
    for entry in named_entries(names):
        settings = dict(entry)
        method = settings.pop("method")
        name = row_name(method, settings)
        try:
            request = with_method(plain.request, method).but(**settings)
            checked = plain.engine.check(request)
        except ValueError as error:
            left_out[name] = str(error)
            continue
        # a method's options may come down to the same request as an earlier candidate's
        if guarantee_of(checked) in guarantees and checked not in seen:
            found.append(replace(plain, name=name, request=request))
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
WRITTEN = (
    "report.html",
    "speed_quality.png",
    "acceptance.png",
    "comparison.png",
    "worst.png",
    "comparison.md",
    "comparison.csv",
    "comparison.json",
)


class Comparison(NamedTuple):
    """What is compared.

    Attributes:
        subjects: classes or prompts, cycled: image i of each row has subjects[i % len(subjects)].
        seed: of the first image of each row that has no seed of its own; the next image has the next seed.
    """

    rows: Sequence[Configuration]
    subjects: Sequence[Subject]
    seed: int


@dataclass
class InterleavedRuns:
    """Configurations that take turns to generate their images, into a claimed folder.

    Attributes:
        rows: the configurations. plans: the resolved settings of each.
        parts: the requests of each row, turn by turn.
        folder: of the images. settings: everything that the images depend on.
        bar: counts images; existing ones are at its beginning.
        may_fail: whether a row may give no images. failed: the reasons of rows that gave none, by row.
        made: the existing chunks, by row and turn. warm: the rows that have run before.
        wide: for each engine, the one that runs turns of more images than it has slots.
    """

    rows: Sequence[Configuration]
    plans: list[Request]
    parts: list[list[list[Request]]]
    folder: Place
    settings: dict
    bar: tqdm
    may_fail: bool
    failed: dict[int, str]
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
        turns = {}
        for r in chosen:
            ends = itertools.accumulate(map(len, self.parts[r]))
            turns[r] = sum(end <= num for end in ends)
        order = self._order(turns)
        # a damaged file counts as missing
        for file in missing_files(self.folder, order, lambda file: self._find(*order[file])):
            r, i = order[file]
            if r in self.failed:
                continue
            self.bar.set_postfix_str(self.rows[r].name)
            with _failing(r, self.failed, self.may_fail):
                self._make(r, i)

        chunks = []
        for r in chosen:
            if r not in self.failed:
                chunks.append([self.made[r, i] for i in range(turns[r])])
        return chunks

    def _order(self, turns: Mapping[int, int]) -> dict[str, tuple[int, int]]:
        """The row and the turn of each file that is not read yet, in the order in which images are generated.

        `turns`: the number of turns of each row; rows of larger batches have fewer.
        """
        order = {}
        chosen = [*turns]
        for i in range(max(turns.values(), default=0)):
            for k in range(len(chosen)):
                r = chosen[(i + k) % len(chosen)]  # another row begins each turn: none is always the first
                if i < turns[r] and (r, i) not in self.made:
                    order[_file(r, i)] = r, i
        return order

    def _find(self, r: int, i: int) -> bool:
        """Reads the chunk of a row's turn, if an earlier run has generated it."""
        family: Any = self.plans[r].family
        side = self.rows[r].engine.runners[family].image_size
        chunk = read_chunk(self.folder / _file(r, i), self._made_of(r, i), side)
        if chunk is None:
            return False
        self.made[r, i] = chunk
        # tqdm leaves `initial` out of the rate, since these images took no time
        self.bar.n += len(chunk.images)
        self.bar.initial = self.bar.n
        return True

    def _made_of(self, r: int, i: int) -> dict:
        return {
            "settings": self.settings,
            "configuration": self.rows[r].name,
            "requests": [_given(request) for request in self.parts[r][i]],
        }

    def _make(self, r: int, i: int) -> None:
        """Generates and writes the chunk of a row's turn."""
        row = self.rows[r]
        requests = self.parts[r][i]
        measures_speed = len(requests) <= row.engine.num_slots
        if measures_speed and r not in self.warm:
            self.bar.set_postfix_str(f"{row.name}: warming up")
            _warm_up(row.engine, requests)
            self.warm.add(r)
        for request in requests:
            row.engine.resolve(request)  # encodes a prompt once, before any row is timed
        if measures_speed:
            chunk = _timed(row, requests, self._progress(row.name))
        else:
            chunk = self._wide_chunk(row, requests)
        self.made[r, i] = chunk
        write_chunk(self.folder / _file(r, i), chunk, self._made_of(r, i))

    def _wide_chunk(self, row: Configuration, requests: list[Request]) -> Chunk:
        """A chunk of more images than the row's engine has slots: by a wider engine, if memory allows."""
        own = row.engine
        show = self._progress(row.name)
        # an image does not depend on its batch, up to rounding
        try:
            if own not in self.wide:
                self.wide[own] = own.with_slots(len(requests))
            return _timed(replace(row, engine=self.wide[own]), requests, show)
        except (ValueError, torch.OutOfMemoryError):  # too little memory
            self.wide[own] = own
            return _timed(row, requests, show)

    def _progress(self, name: str) -> OnProgress:
        """A callback that moves the bar with the images of a turn."""
        before = self.bar.n
        fractions = {}

        def show(request: Request, fraction: float, preview: object) -> None:
            fractions[request] = fraction
            self.bar.set_postfix_str(name, refresh=False)
            done = sum(fractions.values())
            self.bar.n = before + done
            self.bar.update(0)

        return show


@contextlib.contextmanager
def taking_turns(
    comparison: Comparison,
    rungs: Sequence[int],
    store: Store,
    *,
    overwrite: bool = False,
    written: Sequence[str] = WRITTEN,
    may_fail: bool = False,
    timed: int | None = None,
    progress: bool = True,
) -> Iterator[InterleavedRuns]:
    """Checks all requests of several configurations, claims a folder for their images, and shows a bar.

    In a turn each configuration generates its next B images, one after the other, where B is the
    number of its engine's slots; another one begins each turn. If `timed` is given, only the first `timed` turns
    measure speed. Later turns have `MANY` images: they measure quality.

    Args:
        rungs: rising numbers of images. A turn ends with each, so that any may be the last for some rows.
        written: other files of the folder.
        may_fail: a row that gives no images is not an error.

    Raises:
        ValueError: a request is invalid, an engine lacks an autoencoder, or as `Store.claim`.
    """
    rows, subjects, seed = comparison
    num = rungs[-1]
    _check_rows(comparison, num)
    settings = _settings(comparison)
    # every name is claimed before the first image, so that nothing of somebody else is overwritten
    turns = [_turns(rungs, row.engine.num_slots, timed) for row in rows]
    files = []
    for r, own_turns in enumerate(turns):
        files += [_file(r, i) for i in range(len(own_turns))]
    record: dict[str, Any] = {"schema": SCHEMA, "settings": settings, "windows": {}}
    earlier = store.claim(record, [*files, *written], overwrite)
    earlier_windows = earlier["windows"] if earlier else {}
    with progress_bar(total=num * len(rows), unit=" image", bar_format=BAR, disable=not progress) as bar:
        failed: dict[int, str] = {}
        plans = []
        for r, row in enumerate(rows):
            bar.set_postfix_str(f"{row.name}: preparing")
            choices = earlier_choices(row.request.settings, earlier_windows.get(row.name))
            plan = row.engine.check(row.request.but(**choices))
            with _failing(r, failed, may_fail):
                plan = row.engine.resolve(plan, num)
            plans.append(plan)
            # images depend on the window: a resumed run takes the same one again
            record["windows"][row.name] = {name: getattr(plan, name) for name in decided_names()}
        store.begin(record)

        parts = []
        for row, plan, own_turns in zip(rows, plans, turns):
            requests = _requests(plan, subjects, row.first_seed(seed), num)
            parts.append([requests[turn] for turn in own_turns])
        yield InterleavedRuns(rows, plans, parts, store.folder, settings, bar, may_fail, failed)
        bar.set_postfix_str("")


def _requests(plan: Request, subjects: Sequence[Subject], first_seed: int, num: int) -> list[Request]:
    """The request of each image of a row."""
    requests = []
    for i, subject in enumerate(in_turn(subjects, num)):
        request = asking_for(plan, subject)
        requests.append(request.but(seed=first_seed + i))
    return requests


def _check_rows(comparison: Comparison, num: int) -> None:
    """Raises ValueError for an invalid request of any row, before an image is generated."""
    rows, subjects, seed = comparison
    if num < 1:
        raise ValueError(f"num={num} is invalid: a comparison needs at least 1 image")
    names = {}
    for row in rows:
        first = row.first_seed(seed)
        last = first + num - 1
        names[first] = row.name
        for subject in dict.fromkeys(subjects):
            request = asking_for(row.request, subject)
            row.engine.check(request.but(seed=first))
        row.engine.check(row.request.but(seed=last))
    # rows that share only some of their seeds would be neither paired nor independent
    for low, high in itertools.pairwise(sorted(names)):
        if high - low < num:
            free = low + num
            own = f"{names[high]!r}: its seeds {high}..{high + num - 1}"
            others = f"those of {names[low]!r}, {low}..{free - 1}"
            raise ValueError(f"{own} overlap {others}: begin with {free} or more, or with the same seed")


def _settings(comparison: Comparison) -> dict:
    """Everything that the images of a comparison depend on."""
    rows, subjects, seed = comparison
    configurations = {}
    for row in rows:
        configurations[row.name] = {
            "request": settings_of(row.request),
            "files": row.files,
            "seed": row.first_seed(seed),
            **own_batch(row, rows),
        }
    return {
        "machine": rows[0].engine.describe(),
        "max_batch": rows[0].engine.num_slots,
        "labels": list(subjects),
        "seed": seed,
        "order": [row.name for row in rows],
        "configurations": configurations,
    }


def own_batch(row: Configuration, rows: Sequence[Configuration]) -> dict:
    """A row's batch size, as settings, if it is not the first row's."""
    size = row.engine.num_slots
    return {} if size == rows[0].engine.num_slots else {"max_batch": size}


@contextlib.contextmanager
def _failing(r: int, failed: dict[int, str], may_fail: bool) -> Iterator[None]:
    """Adds an error of a row's own settings to `failed`, if rows may fail."""
    try:
        yield
    except (ValueError, FloatingPointError, torch.OutOfMemoryError) as error:
        if not may_fail:
            raise
        failed[r] = " ".join(str(error).split())


def _turns(rungs: Sequence[int], size: int, timed: int | None) -> list[slice]:
    """The images of each turn, see `taking_turns`."""
    turns: list[slice] = []
    first = 0
    for rung in rungs:
        while first < rung:
            is_timed = timed is None or len(turns) < timed
            length = size if is_timed else max(size, MANY)
            end = min(rung, first + length)
            turns.append(slice(first, end))
            first = end
    return turns


def comparison_store(out: Path) -> Store:
    """The folder of a comparison."""
    fields = {"settings": dict, "windows": {str: dict}}
    return Store(out, RECORD, SCHEMA, fields, compared=("settings",))


def _file(row: int, turn: int) -> str:
    return f"{CHUNKS}/{row:02d}-{turn:05d}.npz"


def settings_of(request: Request) -> dict:
    """A request's settings that are not None, without its seed and its class or prompt."""
    settings = _given(request)
    for key in ("label", "prompt", "seed"):
        settings.pop(key, None)
    return settings


def _given(request: Request) -> dict:
    return {key: value for key, value in request.to_dict().items() if value is not None}


def _warm_up(engine: Engine, requests: list[Request]) -> None:
    """Runs a few rounds that are not timed: the first ones take longer."""
    if engine.device.type == "cuda" or engine.compiled:
        engine.generate(requests)  # all rounds: each may meet a shape to capture or to compile for
        return
    tickets = [engine.add_request(request) for request in requests]
    for _ in range(WARM_UP):
        engine.step()
    for ticket in tickets:
        engine.cancel(ticket)


def _timed(row: Configuration, requests: list[Request], on_progress: OnProgress) -> Chunk:
    # decoding is included, writing files is not
    reset_peak(row.engine.device)
    start = time.perf_counter()
    outputs = row.engine.generate(requests, on_progress=on_progress)
    seconds = time.perf_counter() - start
    peak = peak_bytes(row.engine.device)
    if outputs[0].image is None:
        raise ValueError(f"{row.name}: there are no images to compare: give the engine an autoencoder")
    images = [np.asarray(output.pil()) for output in outputs]
    costs = [cost_of(output) for output in outputs]
    counts = summed([{name: getattr(output.stats, name) for name in COUNTS} for output in outputs])
    return Chunk(np.stack(images), seconds, peak, costs, counts)
