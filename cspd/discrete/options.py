"""The settings of VQ methods that take any rule or coupling."""

from __future__ import annotations

from cspd.discrete.rules import PARAMETERS, RULE
from cspd.families import VQ_OPTIONS
from cspd.option import Option

COUPLING = Option(
    "coupling",
    ("maximal", "same-image"),
    "maximal: the highest acceptance rate; same-image: accept only what ar would sample, so that each seed gives ar's"
    " image in fewer forward passes",
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
