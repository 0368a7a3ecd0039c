"""How the conditions z of an iteration's tokens are computed.

A backbone is a function (host, batch, rows) -> z float32 [G, R, D], G = 2 with the null class second where the batch is
guided. `full_conditions` evaluates the whole transformer. Under a name (`@backbone`) any sampler of MAR can take it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cspd.continuous.denoiser import Conditions, full_conditions
from cspd.method import as_it_is, nothing_more
from cspd.option import Option
from cspd.sequence import Request


@dataclass(frozen=True)
class Backbone:
    """A way to compute conditions. All but the full one are heuristic.

    Attributes:
        conditions: see above. options: settings of its own. check: raises ValueError on a bad request.
        resolve: decides what a checked request leaves open; raises ValueError on too little memory.
    """

    conditions: Conditions
    options: tuple[Option, ...] = ()
    check: Callable[[Request, Any], None] = nothing_more
    resolve: Callable[[Request, Any], Request] = as_it_is


BACKBONES: dict[str, Backbone] = {"full": Backbone(full_conditions)}  # by name


def backbone(name: str, **attributes: Any) -> Callable[[Conditions], Conditions]:
    """Names a function as a backbone that a request can ask for; attributes as in `Backbone`."""

    def named(conditions: Conditions) -> Conditions:
        BACKBONES[name] = Backbone(conditions, **attributes)
        return conditions

    return named
