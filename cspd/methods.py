"""The list of methods, and the questions that are asked of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Sequence

from cspd.continuous import ar, cspd_method, speculative
from cspd.continuous.host import MAR_OPTIONS
from cspd.discrete import ar as vq_ar
from cspd.discrete import jacobi, published
from cspd.discrete.host import VQ_OPTIONS
from cspd.method import Method
from cspd.option import Option
from cspd.sequence import Request

METHODS: list[Method] = [
    ar.METHOD,
    speculative.METHOD,
    cspd_method.METHOD,
    vq_ar.METHOD,
    published.SD,
    published.EAGLE,
    published.EAGLE2,
    published.UNIFORM_RSD,
    published.COOL_SD,
    published.LANTERN,
    published.LANTERN_PLUS,
    jacobi.SJD,
    jacobi.SJD_PAC,
]
COMMON: dict[str, tuple[Option, ...]] = {"MAR": MAR_OPTIONS, "VQ": VQ_OPTIONS}  # options of all methods of a family
DEFAULTS = {"MAR": "speculative", "VQ": "sjd-pac"}


def names(families: Collection[str] = tuple(COMMON)) -> list[str]:
    """The names of the methods for these families, each once."""
    return list(dict.fromkeys(method.name for method in METHODS if method.family in families))


def find(name: str | None, family: str | None) -> Method:
    """The method of a name for a family. Raises ValueError where there is none."""
    return _named(str(name), [str(family)], [method for method in METHODS if method.family == family])


def choose(request: Request, families: Sequence[str]) -> tuple[Request, Method]:
    """The request with method and family filled in, and the method, of the first of `families` that has it.

    Raises:
        ValueError: unknown method, one that these families do not have, or options that it does not have.
    """
    if request.family is not None and request.family not in families:
        raise ValueError(f"family={request.family!r}: this engine has models of {' and '.join(families)}")
    wanted = families if request.family is None else [request.family]
    candidates = [method for family in wanted for method in METHODS if method.family == family]
    if request.method is None:
        method = _default(request, wanted, candidates)
    else:
        method = _named(request.method, wanted, candidates)
    _check_options(request, method)
    return dataclasses.replace(request, method=method.name, family=method.family), method


def _named(name: str, families: Sequence[str], candidates: Sequence[Method]) -> Method:
    for method in candidates:
        if method.name == name:
            return method
    reason = f"does not decode {' or '.join(families)} models" if name in names() else "is unknown"
    raise ValueError(f"method={name!r} {reason}: choose one of {', '.join(names(families))}")


def _default(request: Request, families: Sequence[str], candidates: Sequence[Method]) -> Method:
    """The default method of the first family; another exact one where only that has the options that are given."""
    defaults = [find(DEFAULTS[family], family) for family in families]
    exact = [method for method in candidates if method.guarantee == "exact"]
    return next((method for method in [*defaults, *exact] if _takes(method, request)), defaults[0])


def _takes(method: Method, request: Request) -> bool:
    """Whether a method has all options that a request gives, and the words it chooses."""
    options = [*COMMON[method.family], *method.options]
    for name, value in request.settings.items():
        same = [option for option in options if option.name == name]
        if not same or not any(isinstance(option.kind, type) or value in option.kind for option in same):
            return False
    return True


def _check_options(request: Request, method: Method) -> None:
    own = {option.name for option in (*COMMON[method.family], *method.options)}
    for name in request.settings.keys() - own:
        value = getattr(request, name)
        having = list(dict.fromkeys(m.name for m in METHODS if name in {o.name for o in m.options}))
        if not having:
            raise ValueError(f"{name}={value!r} is no setting of {method.family} models: leave it out")
        raise ValueError(f"{name}={value!r} is no option of {method.name!r}: it belongs to {', '.join(having)}")


def with_method(request: Request, name: str) -> Request:
    """The request by another method, without the options that this one does not have.

    Raises:
        ValueError: there is no method of that name.
    """
    same = [m for m in METHODS if m.name == name and request.family in (None, m.family)]
    if not same:
        raise ValueError(f"method={name!r} is unknown: choose one of {', '.join(names())}")
    request = dataclasses.replace(request, method=name)
    kept = [each.without_foreign(each.fill(request), COMMON[each.family]).settings for each in same]
    settings = {key: value for key, value in request.settings.items() if any(key in each for each in kept)}
    return dataclasses.replace(request, settings=settings)


def parse_method(
    text: str, options: Collection[str] | None = None, more: Sequence[str] = ()
) -> tuple[str, dict[str, object]]:
    """ "cool-sd:delta=1.5:gamma=4" to ("cool-sd", {"delta": 1.5, "gamma": 4}).

    Args:
        options: what may follow the name; by default the options of methods. more: names allowed beside the methods'.

    Raises:
        ValueError: another name, or something else follows it.
    """
    if options is None:
        options = {option.name for method in METHODS for option in method.options}
    name, *parts = text.split(":")
    if name not in (*names(), *more):
        raise ValueError(f"method {name!r} is unknown: choose one of {', '.join([*names(), *more])}")
    settings: dict[str, object] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option in settings:
            raise ValueError(f"{text!r} has {option} twice: give it once")
        if option not in options or not equals:
            raise ValueError(
                f"{part!r} in {text!r} is no option: write it like delta=1.5, one of {', '.join(sorted(options))}"
            )
        try:
            settings[option] = json.loads(value)
        except ValueError:  # a word
            settings[option] = value
    return name, settings


def method_of(request: Request) -> Method:
    """The method of a checked request."""
    return find(request.method, request.family)


def guarantee_of(request: Request) -> str:
    """The guarantee of a resolved request."""
    return method_of(request).guarantee_of(request)


def format_table() -> str:
    """The methods as text."""
    lines = [f"{'method':<12} {'models':<6} {'guarantee':<10} {'needs':<14} what it does (source)"]
    for method in METHODS:
        columns = f"{method.name:<12} {method.family:<6} {method.guarantee:<10} {method.needs:<14}"
        lines.append(f"{columns} {method.summary} (arXiv {', '.join(method.papers)})")
    titles = {number: title for method in METHODS for number, title in method.papers.items()}
    return "\n".join([*lines, "", *(f"arXiv {number}  {title}" for number, title in titles.items())])


def markdown_table() -> str:
    """The methods as README has them."""
    rows = [("method", "models", "guarantee", "needs", "what it does", "paper"), ("---",) * 6]
    for method in METHODS:
        name = f"`{method.name}`" + (" (default)" if DEFAULTS[method.family] == method.name else "")
        papers = ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in method.papers)
        rows.append((name, method.family, method.guarantee, method.needs, method.summary, papers))
    return _markdown(rows)


def options_table() -> str:
    """The options as docs/api.md has them: of every method of a family, then of some methods."""
    rows = [("option", "of", "values", "default", "what it is"), ("---",) * 5]
    for option, owners in grouped_options():
        default = "" if option.default is None else f"{option.default}"
        rows.append((f"`{option.name}`", ", ".join(owners), option.range, default, option.help))
    return _markdown(rows)


def _markdown(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def grouped_options() -> list[tuple[Option, list[str]]]:
    """All options, each with whose it is: families, or methods that have it with the same default."""
    owners: dict[tuple, tuple[Option, list[str]]] = {}
    for family, options in COMMON.items():
        for option in options:
            owners.setdefault((option.name, option.help), (option, []))[1].append(family)
    for method in METHODS:
        for option in method.options:
            key = option.name, option.help, option.default, option.only_with
            owners.setdefault(key, (option, []))[1].append(method.name)
    return list(owners.values())
