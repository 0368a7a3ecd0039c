"""The settings that every method of VQ codes has, and those of methods that take any rule or coupling."""

from __future__ import annotations

from cspd.discrete.rules import PARAMETERS, RULE
from cspd.option import Option

VQ_OPTIONS = (
    Option("cfg", float, "guidance scale; 1 is no guidance, 2 to 5 is usual", metavar="S"),
    Option("temperature", float, "divides the logits; 1 is the model's own, 0 takes the likeliest code", metavar="TAU"),
    Option("top_k", int, "likeliest codes that are kept; 0 keeps all", metavar="K"),
    Option("top_p", float, "mass of the likeliest codes that are kept; 1 keeps all", above=0, high=1, metavar="P"),
)
COUPLING = Option(
    "coupling",
    ("maximal", "same-image"),
    "what is accepted: as much of a draft as can be, or what ar draws: same seed, same image as ar, fewer forwards",
    default="maximal",
    implied=True,
    only_with=("rule", ("exact",)),
    off="maximal",
)
MIXED = tuple(option.name for option in VQ_OPTIONS)  # may differ between the sequences of a round


def coupling_option(default: str) -> Option:
    """`COUPLING` of a method; one that is not everyone's is written into requests."""
    return COUPLING.but(default=default, implied=default == COUPLING.default)


def rule_options(rule: str = "exact", **defaults: object) -> tuple[Option, ...]:
    """The options of a method that takes any rule: by default `rule`, with these values of its parameters."""
    options = [RULE.but(default=rule)]
    for name, parameters in PARAMETERS.items():
        for option in parameters:
            own = defaults.get(option.name)
            if option.fits(own):
                option = option.but(default=own, implied=False)
            options.append(option.but(only_with=("rule", (name,))))
    return tuple(options)
