"""Checks of requests to VQ models, made before any work: each error names the value, the range and the fix."""

from __future__ import annotations

import dataclasses

import torch

from cspd.discrete.cache import MOST_NODES
from cspd.discrete.draft_verify import rule_of
from cspd.discrete.drafts import EAGLE_TREE
from cspd.discrete.host import VQHost, VQModels
from cspd.discrete.rules import METRICS, NAMES
from cspd.methods import METHODS
from cspd.precision import Precision
from cspd.sequence import Request
from cspd.validation import check_choice, check_common, check_fits, check_integer, check_real, with_options

FOREIGN = ("num_iter", "cfg_schedule", "num_sampling_steps")  # settings of MAR
HIGHEST = {"chain": MOST_NODES - 1, "eagle-static": 1 + max(map(len, EAGLE_TREE)), "eagle-dynamic": 8}
WORKING = 10  # tensors [N, V] that a round may hold at once
PARAMETERS = {"uniform-rsd": {"delta", "optimal"}, "cool-sd": {"delta", "schedule", "nu", "optimal"}}
PARAMETERS |= {"lantern": {"delta", "k", "metric", "optimal"}, "lantern++": {"lam", "k", "metric", "optimal"}}
NEEDED = {"chain": "draft", "eagle-static": "eagle", "eagle-dynamic": "eagle"}


def resolve_vq(request: Request, host: VQHost) -> Request:
    """The request with every default of VQ models filled in.

    Raises:
        ValueError: a setting is of the wrong kind or out of range, or a model that is needed is not there.
    """
    names = ("cfg", "temperature", "top_k", "top_p")
    fill = {name: getattr(host.defaults, name) for name in names if getattr(request, name) is None}
    request = with_options(dataclasses.replace(request, **fill), FOREIGN)
    check_common(request, host.num_classes)
    check_integer("top_k", request.top_k, 0, 2**31 - 1, "it is how many codes are kept, 0 keeps all")
    check_real("top_p", request.top_p, "1 keeps all codes")
    if not 0 < request.top_p <= 1:
        raise ValueError(f"top_p={request.top_p} is outside 0..1: it is the mass that is kept, 1 keeps all")
    if "rule" in METHODS[request.method].options:
        _check_draft(request, host)
        _check_rule(request, host)
    return request


def _check_draft(request: Request, host: VQHost) -> None:
    if request.pd_k is not None:  # a Jacobi window
        check_integer("window", request.window, 1, MOST_NODES - 1, "it is how many codes are judged at once")
        check_integer("pd_k", request.pd_k, 1, 16, "1 drafts no siblings")
        check_integer("pd_d", request.pd_d, 0, 16, "0 drafts no siblings")
        if (request.pd_k - 1) * request.pd_d >= request.window - request.pd_d:
            raise ValueError(
                f"window={request.window} has no room for pd_k={request.pd_k} candidates at pd_d={request.pd_d} levels"
                " and a code below them: give a larger window"
            )
        if not isinstance(request.continuation, bool):
            raise ValueError(f"continuation={request.continuation!r} is not True or False")
        return
    check_choice("draft", request.draft, NEEDED)
    highest = HIGHEST[request.draft]
    check_integer("gamma", request.gamma, 1, highest, f"it is how far {request.draft!r} drafts ahead")
    if host.models[NEEDED[request.draft]] is None:
        name = {"draft": "a draft model", "eagle": "an EAGLE drafter"}[NEEDED[request.draft]]
        raise ValueError(
            f"draft={request.draft!r} needs {name} and this engine has none: give it to the engine's models, or put its"
            " file beside the target's"
        )


def _check_rule(request: Request, host: VQHost) -> None:
    check_choice("rule", request.rule, NAMES)
    for name in sorted(set().union(*PARAMETERS.values()) - PARAMETERS.get(request.rule, set())):
        if getattr(request, name) is not None:
            having = ", ".join(rule for rule, names in PARAMETERS.items() if name in names)
            raise ValueError(f"{name}={getattr(request, name)!r} is no parameter of rule {request.rule!r}: of {having}")
    for name in ("delta", "nu", "lam", "k"):
        if getattr(request, name) is not None:
            check_real(name, getattr(request, name), "see `cspd sample --help`")
    if request.optimal not in (None, True, False):
        raise ValueError(f"optimal={request.optimal!r} is not True or False")
    if request.metric is not None:
        check_choice("metric", request.metric, METRICS)
    rule = rule_of(request)
    if rule.pools:
        if host.models["tokenizer"] is None:
            raise ValueError(f"rule={request.rule!r} needs the tokenizer's codes and this engine has none: give it one")
        host.near(request.metric, rule.k)  # now, and not while others wait in a round


def check_cache(models: VQModels, max_batch: int, precision: Precision, device: torch.device) -> None:
    """Raises ValueError, before allocating, where the caches of `max_batch` slots would not fit into memory."""
    fix = "use a smaller model or another device"
    check_fits(bytes_per_slot(models, precision), max_batch, " with its key-value caches", fix, device)


def bytes_per_slot(models: VQModels, precision: Precision) -> int:
    """Estimated peak bytes a slot adds: key-value caches, and the distributions of a round."""
    config, size = models.target.config, 2 if precision.policy == "bf16" else 4
    columns = config.block_size + MOST_NODES
    gpts = [m for m in (models.target, models.draft, models.eagle) if m is not None]
    caches = sum(4 * size * len(m.layers) * columns * m.config.dim for m in gpts)  # keys, values, the null class's
    return caches + 4 * MOST_NODES * config.vocab_size * WORKING
