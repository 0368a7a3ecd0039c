"""Methods of models with a diffusion head, as choices on a few axes: by name, each from a table of parts.

Every family has the axis "denoiser": how a token is drawn from its condition. A family with more of them (MAR) has
"backbone" (how conditions are computed) and others. A named method is a choice on each axis; on some of them a request
may choose otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from cspd.continuous.rows import Denoiser, full_conditions, run_plain_round
from cspd.method import Method, Part, choices, with_defaults
from cspd.option import Option
from cspd.request import Request, Sequence, Stopwatch

MARS_OWN = {"order": "random", "backbone": "full"}  # with these a method is as exact as its denoiser


class Axis(NamedTuple):
    """The parts that a request can choose from, by name, and what it chooses, for `--help`."""

    parts: Mapping[str, Part]
    meaning: str


@dataclass(frozen=True)
class Point:
    """A choice on each axis.

    Attributes:
        axes: by name; "denoiser" is the last one. names: of the parts that are chosen unless a request says otherwise.
    """

    axes: Mapping[str, Axis]
    names: Mapping[str, str]

    def name(self, axis: str, request: Request) -> str:
        """The part's name that a request has on an axis."""
        return request.settings.get(axis) or self.names[axis]  # type: ignore[return-value]

    def part(self, axis: str, request: Request) -> Any:
        return self.axes[axis].parts[self.name(axis, request)]

    def denoiser(self, request: Request) -> Denoiser:
        return self.part("denoiser", request)

    def options(self, free: Collection[str], **defaults: object) -> list[Option]:
        """Of all parts on the axes in `free`, and of the chosen ones on the others; `defaults` replace theirs."""
        options = []
        for axis, usual in self.names.items():
            own = self.axes[axis]
            if axis in free:
                options += choices(axis, own.parts, own.meaning, usual, **defaults)
            else:
                options += with_defaults(own.parts[usual].options, defaults)
        return options

    def guarantee(self, request: Request) -> str:
        """The denoiser's guarantee if nothing else is approximate."""
        is_plain = all(self.name(axis, request) == name for axis, name in MARS_OWN.items() if axis in self.axes)
        return self.denoiser(request).guarantee if is_plain else "heuristic"

    def prepare(self, request: Request, runner: Any) -> Request:
        """As `Method.prepare`, by all its parts; the denoiser, which may measure, is the last."""
        for axis in self.axes:
            request = self.part(axis, request).prepare(request, runner)
        return request

    def run_round(self, runner: Any, batch: list[Sequence], watch: Stopwatch) -> list[Sequence]:
        """Runs the next iteration of every sequence; returns the finished sequences."""
        request = batch[0].request
        conditions = self.part("backbone", request).conditions if "backbone" in self.axes else full_conditions
        denoiser = self.denoiser(request)
        if denoiser.run_round is not None:
            return denoiser.run_round(runner, batch, watch, conditions)
        return run_plain_round(runner, batch, watch, backbone=conditions, denoise=denoiser.denoise)


def method_of(
    family: str,
    axes: Mapping[str, Axis],
    baseline: Mapping[str, str],
    name: str,
    summary: str,
    papers: Mapping[str, str],
    *,
    free: Collection[str],
    **chosen: Any,
) -> Method:
    """A named method.

    Args:
        baseline: the names of the parts that `ar` has.
        free: the axes on which a request may choose another part.
        chosen: names of other parts by axis, and defaults of their options.
    """
    point = Point(axes, {axis: chosen.pop(axis, usual) for axis, usual in baseline.items()})
    usual = Request()
    return Method(
        name=name,
        family=family,
        guarantee=point.guarantee(usual),
        summary=summary,
        papers=papers,
        run_round=point.run_round,
        needs=point.denoiser(usual).needs,
        options=tuple(point.options(free, **chosen)),
        mixed=lambda request: point.denoiser(request).mixed,
        prepare=point.prepare,
        of_request=point.guarantee,
        advice=lambda request: point.denoiser(request).advice(request),
        token_cost="calls",
    )
