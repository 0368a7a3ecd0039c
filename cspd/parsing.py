"""Numbers and words from the text that users type: on the command line and in study files."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection


def number_list(text: str) -> list[int]:
    """ "0-3,7" to [0, 1, 2, 3, 7]."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            low, dash, high = part.partition("-")
            numbers.extend(range(int(low), int(high if dash else low) + 1))
    except ValueError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write it like 0-9 or 1,5,7-9")
    return numbers


def float_list(text: str) -> list[float]:
    """ "1,3" to [1.0, 3.0]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write it like 1,3") from None


def word_list(words: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of "parallel,sequential" to its parts, each one of `words`."""

    def parse(text: str) -> list[str]:
        if not set(text.split(",")) <= set(words):
            raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(words)}")
        return text.split(",")

    return parse


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
