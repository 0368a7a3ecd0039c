"""Options of requests, and what is known of each family of models before any is loaded. It imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Number
from typing import Any

from cspd.terminal import LARGEST_SEED, shortened

# Options: what a request may be given. Each is declared once, beside what uses it.
#
# Command-line flags and their help, the checks of a request, the keys of study files, the settings in JSON records and
# the tables in the docs are all read from here.

LARGEST = 3e38  # that any number may be: float32 holds it
LARGEST_INTEGER = 2**31 - 1  # that any whole number may be: arrays count with it
LARGEST_EXACT = 2**53  # up to here, every whole number is a float
_KINDS: dict[str, object] = {}  # of all options there are, by name, so that a request can tell a misspelt one


@dataclass(frozen=True, eq=False)
class Option:
    """A setting of a request.

    Attributes:
        name: of the request's setting, and of the flag (`--num-iter` for "num_iter").
        kind: int, float or bool, or the words to choose from.
        help: what it is, in a few words, for `--help`, the docs and errors.
        default: what it is where the request leaves it open; None: the model's published value, or decided later.
        implied: the default is not written into requests, but known where the option is used.
        low, high: the range of a number, both included; without `high`, as far as float32 or int32 goes.
        above: it must be larger than this.
        only_with: another option's name, and those of its values with which this one means anything.
        off: a value that asks for nothing, and may be given anyway.
        metavar: the value's name in `--help`.
    """

    name: str
    kind: type | Collection[str]
    help: str
    default: object = None
    implied: bool = False
    low: float = 0
    high: float = LARGEST
    above: float | None = None
    only_with: tuple[str, Collection[str]] | None = None
    off: object = None
    metavar: str | None = None

    def __post_init__(self) -> None:
        _KINDS[self.name] = self.kind  # of numbers the same, whoever has an option of this name

    def but(self, **changes: Any) -> Option:
        """The same option but for some attributes, such as its default."""
        return dataclasses.replace(self, **changes)

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def range(self) -> str:
        """The values that are allowed, in words."""
        if self.kind is bool:
            return "True or False"
        if not isinstance(self.kind, type):
            return ", ".join(self.kind)
        high = "" if self.high == LARGEST else f"{self.high:.15g}"
        if self.above is not None:
            return f"above {self.above:g}" + (f", at most {high}" if high else "")
        return f"{self.low:g}..{high}" if high else f"{self.low:g} or more"

    @property
    def _most(self) -> float:
        return LARGEST_INTEGER if self.kind is int and self.high == LARGEST else self.high

    def applies(self, settings: Mapping[str, object]) -> bool:
        """Whether it means anything beside a request's other settings."""
        return self.only_with is None or settings.get(self.only_with[0]) in self.only_with[1]

    def check(self, value: object) -> None:
        """Raises ValueError, with the range and the help, where a value is of the wrong kind or out of range."""
        if not self.fits(value):
            kinds = {int: "a whole number, ", float: "a number, ", bool: ""}
            kind = kinds[self.kind] if isinstance(self.kind, type) else "one of "
            wrong = f"{self.name} is missing" if value is None else f"{self.name}={shortened(value)} does not fit"
            beyond = isinstance(value, (int, float)) and value > self._most and self.high == LARGEST
            limit = f" and at most {self._most:.15g}" if beyond else ""
            raise ValueError(f"{wrong}: give {kind}{self.range}{limit} ({self.help})")

    def fits(self, value: object) -> bool:
        """Whether a value is of the right kind and in range."""
        if not isinstance(self.kind, type):
            return isinstance(value, str) and value in self.kind
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if not isinstance(value, int if self.kind is int else (int, float)):
            return False
        if not self.low <= value <= self._most:
            return False
        return self.above is None or value > self.above


def option_names() -> Collection[str]:
    """The names of all options that imported modules declared; `import cspd.checkpoints` imports every family."""
    return _KINDS


def as_setting(name: str, value: object) -> Any:
    """A setting as a request keeps it: as `plain` has it, but no number that arrays of floats cannot take.

    Small whole numbers stay as they were typed, which names of configurations show. A checked request has floats.

    Raises ValueError on a tensor that has no plain value.
    """
    setting = plain(value)
    if hasattr(setting, "tolist"):
        raise ValueError(f"{name}={shortened(setting)} does not fit: give a plain number")
    is_whole = isinstance(setting, int) and not isinstance(setting, bool)
    if _KINDS[name] is float and is_whole and abs(setting) > LARGEST_EXACT:
        with contextlib.suppress(OverflowError):  # larger than any float: checking it says so
            return float(setting)
    return setting


def plain(value: object) -> Any:
    """Python's own number of numpy's, torch's and others', and lists of their arrays; anything else as it is."""
    if hasattr(value, "tolist"):
        with contextlib.suppress(RuntimeError):  # a tensor that is sparse, or on the meta device: it stays one
            value = value.tolist()
    if isinstance(value, Number) and not isinstance(value, (bool, int, float)):  # a fraction, a decimal
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)  # type: ignore[arg-type]
    return value


def check_integer(name: str, value: object, low: int, high: int, why: str) -> None:
    """Raises ValueError, with the range and the reason, where a value is no integer in low..high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={shortened(value)} does not fit: give a whole number, {low}..{high} ({why})")


def check_seed(seed: object) -> None:
    """Raises ValueError if a seed is not an integer in 0..2**63 - 1."""
    check_integer("seed", seed, 0, LARGEST_SEED, "it keys a 64-bit generator")


# What is known of each family of models before any is loaded.
#
# These are the settings that all its methods have, its default method and its bundled checkpoint. Nothing here imports
# torch, so that `--help` appears at once.

GUIDANCE = ("linear", "constant")  # schedules of MAR's guidance scale
NUM_ITER = Option(
    "num_iter",
    int,
    "autoregressive iterations, at most one per generated token",
    low=1,
    metavar="K",
)
MAR_OPTIONS = (
    NUM_ITER,
    Option("cfg", float, "guidance scale; 1 is no guidance, 2 to 5 is usual", metavar="S"),
    Option("cfg_schedule", GUIDANCE, "guidance grows over the iterations, or is constant"),
    Option("temperature", float, "scales the denoising noise; 1 is unchanged", metavar="TAU"),
    Option(
        "num_sampling_steps",
        int,
        "denoising steps per token; MAR's default is 100",
        low=2,
        high=1000,  # the steps of training, mar.head.TRAIN_STEPS
        metavar="T",
    ),
)
VQ_OPTIONS = (
    Option("cfg", float, "guidance scale; 1 is no guidance, 2 to 5 is usual", metavar="S"),
    Option("temperature", float, "divides the logits; 1 is unchanged, 0 is greedy", metavar="TAU"),
    Option("top_k", int, "sample from the K likeliest tokens; 0: from all", metavar="K"),
    Option(
        "top_p",
        float,
        "sample from the likeliest tokens of total probability P; 1: from all",
        above=0,
        high=1,
        metavar="P",
    ),
)
COMMON: dict[str, tuple[Option, ...]] = {"MAR": MAR_OPTIONS, "VQ": VQ_OPTIONS}
BUNDLED = {"MAR": "digits32", "VQ": "digits32_vq"}  # the checkpoint that is taken by default
DEFAULTS = {"MAR": "speculative", "VQ": "speculative"}  # methods
