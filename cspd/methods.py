"""The methods by name, each with the guarantee it gives; `cspd methods` prints this table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cspd.continuous import ar, cspd_method, speculative
from cspd.discrete import ar as vq_ar
from cspd.discrete import draft_verify, jacobi
from cspd.discrete.drafts import DRAFTS
from cspd.sequence import Request


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        guarantee: "exact" (the output has the target sampler's distribution, to floating point), "bounded" (a bound on
            the total variation from it is reported) or "heuristic" (no proof); of the defaults, see `guarantee_of`.
        summary: what it does, in a few words. paper: where it comes from.
        needs: beside the target: "draft model", "EAGLE drafter", "calibration", or nothing.
        options: the request's fields that only some methods have, with their defaults.
        rounds: by family, "MAR" or "VQ": runs one batched round, (host, batch, stopwatch) -> finished sequences.
    """

    name: str
    guarantee: str
    summary: str
    paper: str
    rounds: Mapping[str, Callable]
    needs: str = "-"
    options: Mapping[str, object] = field(default_factory=dict)


# what any rule may be given; None takes the rule's own default
RULE = {"rule": "exact", "delta": None, "schedule": None, "nu": None, "lam": None, "k": None, "metric": None}
RULE |= {"optimal": None}
CSPD = {"gamma": 8, "verify": "parallel", "ratio_temperature": 42.0, "align": True, "prefill": 0.05}
CSPD |= {"chains": "ancestral", "window": None, "draft": "calibrated"}
CHAIN, STATIC, DYNAMIC = (
    {"draft": d, "gamma": g} for d, g in (("chain", 5), ("eagle-static", 5), ("eagle-dynamic", 6))
)
SJD = {"window": 64, "pd_k": 1, "pd_d": 0, "continuation": False}


def _drafted(name: str, summary: str, paper: str, needs: str, guarantee: str = "exact", **options: object) -> Method:
    """A method of VQ models that drafts and verifies; any rule and any other draft can be asked for."""
    rounds = {"VQ": jacobi.run_round if "pd_k" in options else draft_verify.run_round}
    return Method(name, guarantee, summary, paper, rounds, needs, RULE | options)


_TABLE = [
    Method(
        "ar",
        "exact",
        "plain sampling: every token of MAR by the full denoising chain, VQ codes one by one",
        "arXiv 2406.11838, 2406.06525",
        {"MAR": ar.run_round, "VQ": vq_ar.run_round},
    ),
    Method(
        "speculative",
        "exact",
        "speculation inside the diffusion head, no draft model",
        "arXiv 2501.05370",
        {"MAR": speculative.run_round},
        "calibration",
        {"window": None, "draft": "calibrated"},
    ),
    Method(
        "cspd",
        "heuristic",
        "a draft MAR proposes tokens, the target accepts or resamples",
        "arXiv 2411.11925",
        {"MAR": cspd_method.run_round},
        "draft model",
        CSPD,
    ),
    _drafted("sd", "speculative sampling of a chain by a smaller GPT", "arXiv 2211.17192", "draft model", **CHAIN),
    _drafted("eagle", "EAGLE-1: a static tree by a drafter on features", "arXiv 2401.15077", "EAGLE drafter", **STATIC),
    _drafted("eagle2", "EAGLE-2: a tree by the draft's confidence", "arXiv 2406.16858", "EAGLE drafter", **DYNAMIC),
    _drafted(
        "uniform-rsd",
        "acceptance relaxed by a constant, on EAGLE's tree",
        "COOL-SD",
        "EAGLE drafter",
        "bounded",
        **STATIC | {"rule": "uniform-rsd", "delta": 1.1},
    ),
    _drafted(
        "cool-sd",
        "acceptance relaxed by a decaying schedule, on EAGLE's tree",
        "COOL-SD",
        "EAGLE drafter",
        "bounded",
        **STATIC | {"rule": "cool-sd", "delta": 1.1},
    ),
    _drafted(
        "lantern",
        "acceptance pooled over near codes, on EAGLE-2's tree",
        "arXiv 2410.03355",
        "EAGLE drafter",
        "bounded",
        **DYNAMIC | {"rule": "lantern", "delta": 0.2, "k": 100, "optimal": False},
    ),
    _drafted(
        "lantern++",
        "the same with a relative limit, on EAGLE's tree",
        "arXiv 2502.06352",
        "EAGLE drafter",
        "bounded",
        **STATIC | {"rule": "lantern++", "lam": 1.0, "k": 10, "optimal": False},
    ),
    _drafted("sjd", "Jacobi: the target drafts a window for itself", "arXiv 2410.01699", "-", **SJD),
    _drafted(
        "sjd-pac",
        "Jacobi with proactive drafting and adaptive continuation",
        "SJD-PAC",
        "-",
        **SJD | {"pd_k": 4, "pd_d": 3, "continuation": True},
    ),
]

METHODS: dict[str, Method] = {method.name: method for method in _TABLE}
DEFAULTS = {"MAR": "speculative", "VQ": "sjd-pac"}
OPTIONS = {option for method in _TABLE for option in method.options}


def with_method(request: Request, name: str) -> Request:
    """The request by another method, without the options that this one does not have."""
    others = OPTIONS - set(METHODS[name].options)
    if name == "cspd" and request.chains != "speculative":
        others |= {"window"}
    return dataclasses.replace(request, method=name, **dict.fromkeys(others))


def parse_method(
    text: str, options: Collection[str] = OPTIONS, more: Sequence[str] = ()
) -> tuple[str, dict[str, object]]:
    """ "cool-sd:delta=1.5:gamma=4" to ("cool-sd", {"delta": 1.5, "gamma": 4}).

    Args:
        options: what may follow the name. more: names that are allowed beside the methods'.

    Raises:
        ValueError: another name, or something else follows it.
    """
    name, *parts = text.split(":")
    if name not in METHODS and name not in more:
        raise ValueError(f"method {name!r} is unknown: choose of {', '.join([*METHODS, *more])}")
    settings: dict[str, object] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option in settings:
            raise ValueError(f"{text!r} has {option} twice: give it once")
        if option not in options or not equals:
            raise ValueError(
                f"{part!r} in {text!r} is no option: write it like delta=1.5, of {', '.join(sorted(options))}"
            )
        try:
            settings[option] = json.loads(value)
        except ValueError:  # a word
            settings[option] = value
    return name, settings


def with_family(request: Request, families: list[str]) -> Request:
    """The request with method and family filled in: the first of `families` that has the method.

    Raises:
        ValueError: unknown method, or one that these families do not have.
    """
    wanted = [request.family] if request.family in families else families
    if request.family is not None and request.family not in families:
        raise ValueError(f"family={request.family!r}: this engine has models of {' and '.join(families)}")
    name = request.method
    if name is None:  # a draft of VQ codes says enough
        name = "sd" if "VQ" in wanted and request.draft in DRAFTS else DEFAULTS[wanted[0]]
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"method={name!r} is unknown: choose one of {', '.join(METHODS)}")
    able = [family for family in wanted if family in METHODS[name].rounds]
    if not able:
        fitting = ", ".join(m.name for m in _TABLE if set(m.rounds) & set(wanted))
        raise ValueError(f"method={name!r} does not decode {' or '.join(wanted)} models: choose one of {fitting}")
    return dataclasses.replace(request, method=name, family=able[0])


def guarantee_of(request: Request) -> str:
    """The guarantee of a resolved request: its method's, or its rule's, whatever the draft (docs/bounds.md)."""
    if request.rule is None:
        return METHODS[request.method].guarantee
    return draft_verify.rule_of(request).guarantee


def format_table() -> str:
    """The table of methods as text."""
    lines = [f"{'method':<12} {'models':<8} {'guarantee':<10} {'needs':<14} what it does (source)"]
    for method in _TABLE:
        families = ", ".join(method.rounds)
        columns = f"{method.name:<12} {families:<8} {method.guarantee:<10} {method.needs:<14}"
        lines.append(f"{columns} {method.summary} ({method.paper})")
    return "\n".join(lines)
