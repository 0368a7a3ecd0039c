"""The registry of methods: families register theirs when they are imported, and users add their own.

`cspd.lookup` answers questions on it. `cspd.loading` imports every family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cspd.families import COMMON
from cspd.method import GUARANTEES, Method
from cspd.sequence import Request

METHODS: list[Method] = []  # by family, in the families' order, those of users last
NAMED_BY: dict[str, Callable[[Request], str | None]] = {}  # by family, see `register_family`
_BUILT_IN: list[Method] = []


def register_family(
    name: str, methods: Sequence[Method], named_by: Callable[[Request], str | None] = lambda request: None
) -> None:
    """Adds the methods of a family of models that `cspd.families` describes.

    Args:
        methods: in the order in which tables list them.
        named_by: the method that a request's settings name when its `method` is None; None: the family's default.
    """
    order = [*COMMON]
    _BUILT_IN.extend(methods)
    _BUILT_IN.sort(key=lambda method: order.index(method.family))
    METHODS[:] = _BUILT_IN + [method for method in METHODS if method not in _BUILT_IN]
    NAMED_BY[name] = named_by


def register(method: Method) -> None:
    """Adds a method of one's own: requests, studies and the command line (`--plugin`) have it from then on.

    One that was registered under the same name before is replaced, as where a notebook's cell is run twice.

    Raises:
        TypeError: it is no `Method`. ValueError: cspd has one of this name, or its family or guarantee is unknown.
    """
    if not isinstance(method, Method):
        raise TypeError(f"{method!r} is no method: give a cspd.method.Method, as sampling() or drafting() make them")
    for what, known in (("family", COMMON), ("guarantee", GUARANTEES)):
        if getattr(method, what) not in known:
            raise ValueError(
                f"method {method.name!r}: {what}={getattr(method, what)!r}: choose one of {', '.join(known)}"
            )
    same = [each for each in METHODS if (each.name, each.family) == (method.name, method.family)]
    if same and same[0] in _BUILT_IN:
        raise ValueError(f"method {method.name!r} is one of cspd's for {method.family}: give yours another name")
    METHODS[:] = [each for each in METHODS if each not in same] + [method]
