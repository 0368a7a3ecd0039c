"""How far to draft: the fastest way by predicted times, or plain sampling unless it gains enough; and why, in words."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from cspd.keeping import remember
from cspd.sequence import Request

GAIN = 0.7  # drafts only if the predicted time is below this share of plain sampling's; the margin covers what the
# predictions leave out: in MAR, joins and uneven iterations took up to a quarter more where measured

Way = Mapping[str, Any]  # settings of a request: how it drafts
PLAIN: Way = {"window": 0}


class Choice(NamedTuple):
    """A way to draft, or `PLAIN`, and why it was chosen."""

    way: Way
    why: str


def is_enough(gain: float) -> bool:
    """Whether drafting is chosen where it is predicted to be so many times as fast as plain sampling."""
    return gain * GAIN > 1


def judged(way: Way, gain: float, what: str, at_best: bool = False) -> Choice:
    """A way if its gain over plain sampling is enough, and plain sampling if not.

    Args:
        what: has the gain. at_best: it has no more than that.
    """
    predicted = f"{what} is predicted to be {'at best ' if at_best else ''}{gain:.2f} times as fast"
    if is_enough(gain):
        return Choice(way, predicted)
    return Choice(PLAIN, f"{predicted}, under the {1 / GAIN:.2f} that are asked for")


class Chooser:
    """Chooses how far requests draft that leave it open, once for each kind of request."""

    def __init__(self) -> None:
        self._choices: dict[Hashable, Choice] = {}

    def choice(self, request: Request, num_slots: int) -> Choice:
        """The fastest way for what is known of a checked request and the engine, whatever else is in flight."""
        kind = self._kind(request, num_slots)
        if kind not in self._choices:
            remember(self._choices, kind, self._choose(request, num_slots))
        return self._choices[kind]

    def why(self, asked: Request, num_slots: int) -> str:
        """What to tell of the window that a checked request has run with."""
        if asked.window is not None:
            return "as asked for"
        choice = self._choices.get(self._kind(asked, num_slots))
        if choice is None:
            return "as the run began that this one went on from"
        return f"nothing was drafted: {choice.why}" if choice.way == PLAIN else choice.why

    def _kind(self, request: Request, num_slots: int) -> Hashable:
        """All that a choice depends on."""
        own = {"label": None, "prompt": None, "negative_prompt": None, "seed": 0, "known": None}
        return request.but(**own), num_slots

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """Of a request that is the first of its kind."""
        raise NotImplementedError
