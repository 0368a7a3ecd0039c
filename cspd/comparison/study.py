"""What a comparison compares: configurations, and plain sampling that each is compared with."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cspd.comparison.study_file import MODELS, TARGET, expand, request_keys, row_name
from cspd.engine import Engine
from cspd.families import EMBEDDED
from cspd.lookup import method_names, plain_of, with_method
from cspd.parsing import choice
from cspd.sequence import Request

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
        models = {"checkpoint": EMBEDDED["MAR"]} | models
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
    most = min(USUAL_ITERATIONS, plain.engine.host.seq_len)
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
