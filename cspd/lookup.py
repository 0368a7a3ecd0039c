"""Which method a request is by, and the text that names one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Sequence

from cspd import methods
from cspd.discrete.draft import DRAFTS
from cspd.method import Method
from cspd.sequence import Request


def method_names(families: Collection[str] = tuple(methods.COMMON)) -> list[str]:
    """The names of the methods for these families, each once."""
    return list(dict.fromkeys(method.name for method in methods.METHODS if method.family in families))


def find(name: str | None, family: str | None) -> Method:
    """The method of a name for a family. Raises ValueError where there is none."""
    return _named(str(name), [str(family)], [method for method in methods.METHODS if method.family == family])


def choose(request: Request, families: Sequence[str]) -> tuple[Request, Method]:
    """The request with method and family filled in, and the method, of the first of `families` that has it.

    Raises:
        ValueError: unknown method, one that these families do not have, or options that it does not have.
    """
    if request.family is not None and request.family not in families:
        raise ValueError(f"family={request.family!r}: this engine has models of {' and '.join(families)}")
    wanted = families if request.family is None else [request.family]
    candidates = [method for family in wanted for method in methods.METHODS if method.family == family]
    if request.method is None:
        method = _default(request, wanted)
    else:
        method = _named(request.method, wanted, candidates)
    _check_options(request, method)
    return dataclasses.replace(request, method=method.name, family=method.family), method


def _named(name: str, families: Sequence[str], candidates: Sequence[Method]) -> Method:
    for method in candidates:
        if method.name == name:
            return method
    reason = f"does not decode {' or '.join(families)} models" if name in method_names() else "is unknown"
    raise ValueError(f"method={name!r} {reason}: choose one of {', '.join(method_names(families))}")


def _default(request: Request, families: Sequence[str]) -> Method:
    """The default method of the first family, or `sd` where a draft of VQ codes is named, which says enough."""
    if "VQ" in families and isinstance(request.draft, str) and request.draft in DRAFTS:
        return find("sd", "VQ")
    return find(methods.DEFAULTS[families[0]], families[0])


def _check_options(request: Request, method: Method) -> None:
    own = {option.name for option in (*methods.COMMON[method.family], *method.options)}
    for name in sorted(request.settings.keys() - own):
        value = getattr(request, name)
        having = list(dict.fromkeys(m.name for m in methods.METHODS if name in {o.name for o in m.options}))
        if not having:
            raise ValueError(f"{name}={value!r} is no setting of {method.family} models: leave it out")
        raise ValueError(f"{name}={value!r} is no option of {method.name!r}: it belongs to {', '.join(having)}")


def with_method(request: Request, name: str) -> Request:
    """The request by another method, without the options that this one does not have.

    Raises:
        ValueError: there is no method of that name.
    """
    same = [m for m in methods.METHODS if m.name == name and request.family in (None, m.family)]
    if not same:
        raise ValueError(f"method={name!r} is unknown: choose one of {', '.join(method_names())}")
    request = dataclasses.replace(request, method=name)
    common = tuple(option for options in methods.COMMON.values() for option in options)
    kept = [each.without_foreign(each.fill(request), common).settings for each in same]
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
        options = {option.name for method in methods.METHODS for option in method.options}
    name, *parts = text.split(":")
    if name not in (*method_names(), *more):
        raise ValueError(f"method {name!r} is unknown: choose one of {', '.join([*method_names(), *more])}")
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
