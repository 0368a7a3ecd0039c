"""Which method a request is by, and the text that names one."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from cspd import methods
from cspd.families import COMMON, DEFAULTS, EMBEDDED
from cspd.method import Host, Method
from cspd.parsing import choice, shortened, value_of
from cspd.sequence import Request


def method_names(families: Collection[str] = tuple(COMMON)) -> list[str]:
    """The names of the methods for these families, each once."""
    return list(dict.fromkeys(method.name for method in methods.METHODS if method.family in families))


def option_order() -> list[str]:
    """The names of all options: those that all methods of a family have, then the others, as the methods are listed."""
    common = [option.name for options in COMMON.values() for option in options]
    special = [option.name for method in methods.METHODS for option in method.options]
    return list(dict.fromkeys([*common, *special]))


def find(name: str | None, family: str | None) -> Method:
    """The method of a name for a family. Raises ValueError where there is none."""
    return _named(str(name), [str(family)], [method for method in methods.METHODS if method.family == family])


def families_for(request: Request, hosts: Mapping[str, Host]) -> list[str]:
    """The families of an engine's hosts, those first that take what a request gives: a text, or a class."""
    of_text = request.prompt is not None
    return sorted(hosts, key=lambda family: (hosts[family].num_classes == 0) != of_text)


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
    owners = [method for method in methods.METHODS if method.name == name]
    if not owners:
        raise ValueError(f"method={shortened(name)} is unknown: {choice(name, method_names(families))}")
    raise ValueError(
        f"method={name!r} does not decode {' or '.join(families)} models: choose one of"
        f" {', '.join(method_names(families))}{_other_models(owners)}"
    )


def _other_models(owners: Sequence[Method]) -> str:
    """What else to do where the methods that were meant are another family's; empty where there are none."""
    families = dict.fromkeys(method.family for method in owners)
    return "".join(f", or take {family} models, as of {EMBEDDED[family]}" for family in families)


def _default(request: Request, families: Sequence[str]) -> Method:
    """The method that the settings name to some family, or the default method of the first family."""
    for family in families:
        name = methods.NAMED_BY[family](request)
        if name is not None:
            return find(name, family)
    return find(DEFAULTS[families[0]], families[0])


def _check_options(request: Request, method: Method) -> None:
    """Raises ValueError, which says whose it is, on a setting that a method does not have."""
    for name in sorted(request.settings.keys() - _options_of(method)):
        given = f"{name}={shortened(getattr(request, name))}"
        owners = [other for other in methods.METHODS if name in _options_of(other)]
        related = [other.name for other in owners if other.family == method.family]
        if not related:
            raise ValueError(f"{given} is no setting of {method.family} models: leave it out{_other_models(owners)}")
        raise ValueError(f"{given} is no option of {method.name!r}: it belongs to {', '.join(related)}")


def _options_of(method: Method) -> set[str]:
    return {option.name for option in (*COMMON[method.family], *method.options)}


def with_method(request: Request, name: str) -> Request:
    """The request by another method, without the options that this one does not have.

    Raises:
        ValueError: there is no method of that name.
    """
    same = [m for m in methods.METHODS if m.name == name and request.family in (None, m.family)]
    if not same:
        raise ValueError(f"method={shortened(name)} is unknown: {choice(name, method_names())}")
    request = dataclasses.replace(request, method=name)
    common = tuple(option for options in COMMON.values() for option in options)
    kept = [each.without_foreign(each.fill(request), common).settings for each in same]
    settings = {key: value for key, value in request.settings.items() if any(key in each for each in kept)}
    return dataclasses.replace(request, settings=settings)


def plain_of(request: Request) -> Request:
    """Plain sampling by a checked request's settings, those that all methods of its family have; what is so stays."""
    if request.method == "ar":
        return request
    common = {option.name for option in methods.COMMON[str(request.family)]}
    return request.but(method="ar", **dict.fromkeys(request.settings.keys() - common))


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
    known = [*method_names(), *more]
    if name not in known:
        raise ValueError(f"method {shortened(name)} is unknown: {choice(name, known)}")
    settings: dict[str, object] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option in settings:
            raise ValueError(f"{shortened(text)} has {option} twice: give it once")
        if option in options and not equals:
            raise ValueError(f"{option} in {shortened(text)} has no value: write it like {name}:{option}=VALUE")
        if option not in options:
            hint = f"write it like delta=1.5; {choice(option, sorted(options))}"
            raise ValueError(f"{shortened(part)} in {shortened(text)} is no option: {hint}")
        settings[option] = value_of(value)
    return name, settings


def method_of(request: Request) -> Method:
    """The method of a checked request."""
    return find(request.method, request.family)


def guarantee_of(request: Request) -> str:
    """The guarantee of a resolved request."""
    return method_of(request).guarantee_of(request)
