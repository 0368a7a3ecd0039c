"""Samplers of MAR: a choice on each of three axes. Published methods are points on them.

* order: which tokens when, `cspd.continuous.schedule`.
* backbone: how their conditions z are computed, `cspd.continuous.backbone`.
* denoiser: how a token is drawn from z, `cspd.continuous.denoiser`.

A method that is named for its denoiser takes any order and backbone; the others take any denoiser too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from cspd.continuous import ar
from cspd.continuous.backbone import BACKBONES, Backbone
from cspd.continuous.denoiser import DENOISERS, Denoiser
from cspd.continuous.host import MARHost
from cspd.continuous.schedule import ORDERS, Order
from cspd.method import Method
from cspd.option import Option
from cspd.precision import Stopwatch
from cspd.sequence import Request, Sequence

MEANING = {
    "order": "which tokens when: MAR's random order, or one after the other of a checkerboard's colours",
    "backbone": "how the transformer is evaluated: in full, or with what earlier iterations left",
    "denoiser": "how a token is drawn from its condition",
}


class Point(NamedTuple):
    """A choice on each axis, by name."""

    order: str
    backbone: str
    denoiser: str

    def of(self, request: Request) -> Point:
        """What a request chooses, and this where it leaves that open."""
        return Point(*(getattr(request, axis) or usual for axis, usual in self._asdict().items()))

    @property
    def parts(self) -> tuple[Order, Backbone, Denoiser]:
        return ORDERS[self.order], BACKBONES[self.backbone], DENOISERS[self.denoiser]

    @property
    def guarantee(self) -> str:
        """The denoiser's, where nothing else is changed."""
        is_plain = self.order == "random" and self.backbone == "full"
        return DENOISERS[self.denoiser].guarantee if is_plain else "heuristic"


def choices(axis: str, table: Mapping[str, Any], meaning: str, default: str, **defaults: object) -> list[Option]:
    """An option that chooses by name, and the options of each choice; `defaults` are values of those of the default.

    A default without options of its own need not be written into requests.
    """
    options = [Option(axis, tuple(table), meaning, default=default, implied=not table[default].options)]
    for name, choice in table.items():
        own = defaults if name == default else {}
        options += [option.but(only_with=(axis, (name,))) for option in _with_defaults(choice.options, own)]
    return options


def _with_defaults(options: tuple[Option, ...], defaults: Mapping[str, object]) -> list[Option]:
    return [option.but(default=defaults.get(option.name, option.default)) for option in options]


def run_round(usual: Point, host: MARHost, batch: list[Sequence], watch: Stopwatch) -> list[Sequence]:
    """Runs the next iteration of every sequence by its backbone and denoiser and returns those that are finished."""
    _, backbone, denoiser = usual.of(batch[0].request).parts
    if denoiser.run_round is not None:
        return denoiser.run_round(host, batch, watch, backbone.conditions)
    return ar.run_round(host, batch, watch, backbone=backbone.conditions, denoise=denoiser.denoise)


def check(usual: Point, request: Request, host: MARHost) -> None:
    """Raises ValueError where a choice on some axis does not fit the rest."""
    for part in usual.of(request).parts:
        part.check(request, host)


def resolve(usual: Point, request: Request, host: MARHost) -> Request:
    """The request with what its backbone and its denoiser decide."""
    _, backbone, denoiser = usual.of(request).parts
    return denoiser.resolve(backbone.resolve(request, host), host)


def sampling(
    name: str,
    summary: str,
    papers: dict[str, str],
    *,
    order: str = "random",
    backbone: str = "full",
    denoiser: str = "ancestral",
    any_denoiser: bool = False,
    **defaults: object,
) -> Method:
    """A sampler: a point on the axes.

    Args:
        order, backbone, denoiser: by name. any_denoiser: a request may choose another.
        defaults: values of their options.
    """
    usual = Point(order, backbone, denoiser)
    options = [
        *choices("order", ORDERS, MEANING["order"], order, **defaults),
        *choices("backbone", BACKBONES, MEANING["backbone"], backbone, **defaults),
    ]
    if any_denoiser:
        options += choices("denoiser", DENOISERS, MEANING["denoiser"], denoiser, **defaults)
    else:
        options += _with_defaults(DENOISERS[denoiser].options, defaults)
    return Method(
        name=name,
        family="MAR",
        guarantee=usual.guarantee,
        summary=summary,
        papers=papers,
        run_round=functools.partial(run_round, usual),
        needs=DENOISERS[denoiser].needs,
        options=tuple(options),
        mixed=lambda request: DENOISERS[usual.of(request).denoiser].mixed,
        check=functools.partial(check, usual),
        resolve=functools.partial(resolve, usual),
        of_request=lambda request: usual.of(request).guarantee,
        advice=lambda request: DENOISERS[usual.of(request).denoiser].advice(request),
        heat="calls",
    )
