"""Options of requests, and the facts about each family of models that need no model. It imports no torch."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from cspd.terminal import LARGEST_SEED, shortened

# Options: the settings that a request may have. Each is declared once, next to the code that uses it.
#
# Command-line flags and their help, the checks of a request, the keys of study files, the settings in JSON records and
# the tables in the docs are all read from here.

LARGEST_FLOAT = 3e38  # of any float: float32 can hold it
LARGEST_INTEGER = 2**31 - 1  # of any integer: arrays count with int32
_NAMES: set[str] = set()  # of all declared options, so that a request notices a misspelt one
_DECIDED: set[str] = set()  # of those that are `decided`


@dataclass(frozen=True, eq=False)
class Option:
    """A setting of a request.

    Attributes:
        name: of the request's setting, and of the flag (`--num-iter` for "num_iter").
        kind: int, float, bool or str, or the words to choose from.
        help: its meaning in a few words, for `--help`, the docs and errors.
        default: the value if the request leaves it open; None: the model's default, or decided later.
        implied: the default is left out of resolved requests; the code that reads the option supplies it.
        low, high: the range of a number, both included; without `high`, the range of float32 or int32.
        above: the value must be larger than this. at_most: another setting, whose value it may not exceed.
        needs_noise: values but 0 have no meaning at temperature 0.
        only_with: the name of another option, and the values of it that this option applies to.
        off: a value that disables the option. It is valid even outside the range, or if the option does not apply.
        decided: the method chooses the value if the request leaves it open; a resumed run keeps the earlier choice.
        metavar: the value's name in `--help`.
    """

    name: str
    kind: type | Collection[str]
    help: str
    default: object = None
    implied: bool = False
    low: float = 0
    high: float = LARGEST_FLOAT
    above: float | None = None
    at_most: str | None = None
    needs_noise: bool = False
    only_with: tuple[str, Collection[str]] | None = None
    off: object = None
    decided: bool = False
    metavar: str | None = None

    def __post_init__(self) -> None:
        _NAMES.add(self.name)
        if self.decided:
            _DECIDED.add(self.name)

    def but(self, **changes: Any) -> Option:
        """The option with some attributes replaced, such as its default."""
        return dataclasses.replace(self, **changes)

    @property
    def flag(self) -> str:
        """Its flag on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def range(self) -> str:
        """The allowed values, in words."""
        off = f"{self.off}, or " if isinstance(self.off, int) and self.off < self.low else ""
        most = f", at most {self.at_most}" if self.at_most else ""
        return off + self._own_range + most

    @property
    def _own_range(self) -> str:
        if self.kind in (bool, str):
            return "True or False" if self.kind is bool else "a text"
        if not isinstance(self.kind, type):
            return ", ".join(self.kind)
        is_bounded = self.high != LARGEST_FLOAT
        if self.above is not None:
            limit = f", at most {self.high:.15g}" if is_bounded else ""
            return f"above {self.above:g}{limit}"
        return f"{self.low:g}..{self.high:.15g}" if is_bounded else f"{self.low:g} or more"

    @property
    def _largest(self) -> float:
        return LARGEST_INTEGER if self.kind is int and self.high == LARGEST_FLOAT else self.high

    def applies(self, settings: Mapping[str, object]) -> bool:
        """Whether a request's other settings allow this option."""
        if self.only_with is None:
            return True
        other, values = self.only_with
        return settings.get(other) in values

    def check(self, value: object) -> None:
        """Raises ValueError, with the range and the help, if a value has the wrong type or is out of range."""
        if self.is_off(value) or self.fits(value):
            return
        wrong = f"{self.name} is missing" if value is None else f"{self.name}={shortened(value)} is invalid"
        kind = "one of "
        if isinstance(self.kind, type):
            kind = {int: "an integer, ", float: "a number, "}.get(self.kind, "")
        limit = ""
        # The range does not mention the limits of float32 and int32: only a value beyond them needs to know.
        if isinstance(value, (int, float)) and value > self._largest and self.high == LARGEST_FLOAT:
            limit = f" and at most {self._largest:.15g}"
        raise ValueError(f"{wrong}: expected {kind}{self.range}{limit} ({self.help})")

    def check_beside(self, value: Any, settings: Mapping[str, Any]) -> None:
        """Raises ValueError if a valid value does not go with other settings, which are valid too."""
        most = settings.get(self.at_most) if self.at_most else None
        if most is not None and value > most:
            raise ValueError(f"{self.name}={value} is above {self.at_most}={most} ({self.help})")
        if self.needs_noise and value and settings.get("temperature") == 0:
            raise ValueError(f"{self.name}={value} needs temperature > 0: without noise it has no meaning")

    def is_off(self, value: object) -> bool:
        """Whether a value disables the option; False is not 0 here."""
        kinds = (int, float) if self.kind is float else type(self.off)
        return isinstance(value, kinds) and not isinstance(value, bool) and value == self.off

    def fits(self, value: object) -> bool:
        """Whether a value has the right type and is in range."""
        if not isinstance(self.kind, type):
            return isinstance(value, str) and value in self.kind
        if self.kind is str:
            return isinstance(value, str)
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if not isinstance(value, int if self.kind is int else (int, float)):
            return False
        if self.above is not None and value <= self.above:
            return False
        return self.low <= value <= self._largest


def option(meaning: str, **more: Any) -> dict[str, Any]:
    """The help, limits and other fields of `Option` for a keyword parameter: Annotated[float, option("..", high=1)]."""
    return {"help": meaning, **more}


def options_of(function: Callable) -> tuple[Option, ...]:
    """The options that a function's keyword parameters declare, in their order, with their defaults."""
    hints = typing.get_type_hints(function, include_extras=True)
    declared = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind, *marks = typing.get_args(hints.get(name)) or (None,)
        if not marks or not isinstance(marks[-1], dict):
            continue
        *_, mark = marks
        fields = {"kind": _kind_of(kind), "default": parameter.default, **mark}
        declared.append(Option(name, fields.pop("kind"), fields.pop("help"), **fields))
    return tuple(declared)


def _kind_of(hint: Any) -> Any:
    """The `Option.kind` of a type: int | None is int, and Literal has the words to choose from."""
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(each for each in typing.get_args(hint) if each is not type(None))
    return hint


def decided_names() -> list[str]:
    """The names of all options that methods choose if a request leaves them open."""
    return sorted(_DECIDED)


def option_names() -> Collection[str]:
    """The names of all options that imported modules declared; `import cspd.checkpoints` imports every family."""
    return _NAMES


# Methods by their names in earlier versions, which requests, files and the command line may still give.
RENAMED = {"cspd": "mar-draft"}


def method_now(name: Any) -> Any:
    """The present name of a method."""
    return RENAMED.get(name, name) if isinstance(name, str) else name


# Settings of earlier versions, each with the only value that is left: what happens now.
REMOVED = {"verification": "steps"}
# Settings that a family took in earlier versions, though they mean nothing to it: the family, and the name.
IGNORED = (("causal", "first_timestep"),)


def without_removed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A request's settings from a file, without those that ask for nothing: None, or what is left of a removed one."""
    kept = {}
    for name, value in settings.items():
        asks_for_nothing = value in (None, REMOVED.get(name)) or (settings.get("family"), name) in IGNORED
        if not asks_for_nothing:
            kept[name] = value
    return kept


def plain(value: object) -> Any:
    """Numbers of numpy, torch, fractions and decimals as Python's int or float, arrays as lists; others unchanged."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (Fraction, Decimal)):
        return float(value)
    return value


def check_integer(name: str, value: object, low: int, high: int, why: str) -> None:
    """Raises ValueError, with the range and the reason, if a value is not an integer in low..high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name}={shortened(value)} is invalid: expected an integer, {low}..{high} ({why})")


def check_seed(seed: object) -> None:
    """Raises ValueError if a seed is not an integer in 0..2**63 - 1."""
    check_integer("seed", seed, 0, LARGEST_SEED, "it keys a 64-bit generator")


# Of each family of models: the options that all its methods have, what it is, its bundled checkpoint and its default
# method.
#
# Nothing here imports torch, so that `--help` appears at once.

BUDGET = Option(  # of methods that can trade distance from baseline sampling for speed
    "budget",
    float,
    "nats per token by which the distribution may change; 0: exact",
    needs_noise=True,
    metavar="NATS",
)
GUIDANCE = ("linear", "constant")  # schedules of MAR's guidance scale
NUM_ITER = Option(
    "num_iter",
    int,
    "autoregressive iterations, 64 by default; at most one per generated token",
    low=1,
    metavar="K",
)
STEPS_HELP = "denoising steps per token, 100 by default; causal models add one without noise"
MAR_OPTIONS = (
    NUM_ITER,
    Option(
        "cfg",
        float,
        "guidance scale; 1: none; by default the model's own (digits32: 3, emoji64: 4)",
        metavar="S",
    ),
    Option("cfg_schedule", GUIDANCE, "guidance grows over the iterations, or is constant"),
    Option("temperature", float, "scales the denoising noise; 1 leaves it unchanged", metavar="TAU"),
    Option(
        "num_sampling_steps",
        int,
        STEPS_HELP,
        low=2,
        high=1000,  # the steps of training, mar.head.TRAIN_STEPS
        metavar="T",
    ),
)
VQ_OPTIONS = (
    Option(
        "cfg",
        float,
        "guidance scale; 1: none; by default the model's own (digits32: 3, emoji64: 4)",
        metavar="S",
    ),
    Option("temperature", float, "divides the logits; 1 leaves them unchanged, 0 is greedy", metavar="TAU"),
    Option("top_k", int, "sample from the K most likely tokens; 0: from all", metavar="K"),
    Option(
        "top_p",
        float,
        "sample from the most likely tokens of total probability P; 1: from all",
        above=0,
        high=1,
        metavar="P",
    ),
)
CAUSAL_OPTIONS = (
    *MAR_OPTIONS[1:4],
    Option(
        "num_sampling_steps",
        int,
        STEPS_HELP,
        low=2,
        high=1000,
        metavar="T",
    ),
)
COMMON: dict[str, tuple[Option, ...]] = {"MAR": MAR_OPTIONS, "VQ": VQ_OPTIONS, "causal": CAUSAL_OPTIONS}
FAMILIES = {  # what they are, for people
    "MAR": "masked models: a diffusion head draws several tokens at once, in random order",
    "VQ": "LlamaGen and others: tokens are entries of a codebook, one after the other",
    "causal": "SphereAR and BitDance: a diffusion head draws one token after the other",
}
# the default checkpoints, of the families that have one
BUNDLED = {"MAR": "digits32", "VQ": "digits32_vq", "causal": "emoji64_sphere"}
DEFAULTS = {"MAR": "speculative", "VQ": "speculative", "causal": "speculative"}  # the default methods
