"""What images are of, as runs and reports keep it: a class by its number, or a text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from cspd.sequence import Request

Subject = int | str


def asking_for(request: Request, subject: Subject) -> Request:
    """The request, for an image of another class or text."""
    return request.but(prompt=subject) if isinstance(subject, str) else request.but(label=subject)


def subject_of(request: Request) -> Subject:
    """What a checked request is for an image of."""
    return request.label if request.prompt is None else request.prompt


def in_turn(subjects: Sequence[Subject], num: int) -> list[Subject]:
    """The subjects of `num` images, over and over."""
    return list(islice(cycle(subjects), num))


def are_texts(subjects: Sequence[Subject] | None) -> bool:
    """Whether they are texts; None, where they are not known, are not."""
    return bool(subjects) and isinstance(subjects[0], str)
