"""What the page is told: which models and methods there are, and what is known of an image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cspd.engine import Engine
from cspd.families import COMMON, DEFAULTS
from cspd.method import GUARANTEES, Host, Method
from cspd.methods import METHODS
from cspd.option import Option
from cspd.plots import coloured
from cspd.records import link_of, png_of
from cspd.sequence import Output, Request

COLOURS = 32  # that the page makes heat maps of
NUMBERS = {  # of statistics that are shown: how they are called, and written
    "iterations": ("iterations", ".0f"),
    "backbone_calls": ("backbone calls", ".0f"),
    "lazy_backbone_calls": ("of these lazy", ".0f"),
    "head_calls": ("head calls", ".0f"),
    "head_calls_per_token": ("head calls per token", ".1f"),
    "draft_backbone_calls": ("draft backbone calls", ".0f"),
    "draft_head_calls": ("draft head calls", ".0f"),
    "step_compression": ("codes per forward", ".2f"),
    "alpha": ("drafts accepted", ".1%"),
    "bound": ("bound on the total variation", ".3g"),
    "difference": ("difference from the full chain", ".3f"),
    "divergence": ("divergence, nats per token", ".3f"),
    "audit": ("audited, nats per token", ".3f"),
}


def shown(output: Output, share: float) -> dict:
    """What the page shows of an image, finished or not.

    Args:
        share: of its tokens that are made, 0..1.

    Returns:
        "share"; "image", a data link; "heat", a list with None for NaN; "guarantee"; "seconds" of the rounds that it
        took part in, and images per second by them; "numbers", [name, text] each; "ran", the request as it runs.
    """
    seconds = sum(output.stats.seconds.values())
    return {
        "share": share,
        "image": None if output.image is None else link_of(png_of(output.pil())),
        "heat": [round(cost, 2) if math.isfinite(cost) else None for cost in output.heat.tolist()],
        "guarantee": output.stats.guarantee,
        "seconds": seconds,
        "images_per_second": share / seconds if seconds else 0.0,
        "numbers": numbers(output, share),
        "ran": repr(output.request),
        "class_name": output.class_name,
    }


def numbers(output: Output, share: float) -> list[tuple[str, str]]:
    """The statistics that say something, as (name, text)."""
    values = {name: getattr(output.stats, name) for name in NUMBERS}
    if share < 1:
        del values["head_calls_per_token"]  # a mean over all tokens
    said = {name for name, value in values.items() if value or (name == "alpha" and value is not None)}
    told = [(NUMBERS[name][0], format(values[name], NUMBERS[name][1])) for name in NUMBERS if name in said]
    window = output.request.window
    return told if window is None else [*told, ("window", f"{window}" if window else "0, nothing is drafted")]


def about(engines: Mapping[str, Engine]) -> dict:
    """What the page has to know beforehand of engines of one checkpoint each, by its name.

    Raises:
        ValueError: a model of texts has no text encoder.
    """
    shares = np.linspace(0, 1, COLOURS)[None]
    colours = np.asarray(coloured(shares))[0]
    first = next(iter(engines.values()))
    return {
        "models": [_model(engine, name) for name, engine in engines.items()],
        "guarantees": GUARANTEES,
        "colours": [f"rgb({red} {green} {blue})" for red, green, blue in colours.tolist()],
        "slots": first.num_slots,
        "machine": first.describe(),
    }


def _model(engine: Engine, name: str) -> dict:
    ((family, host),) = engine.hosts.items()
    usual = engine.check(_any(host, family=family))
    return {
        "family": family,
        "name": name,
        "image_size": host.image_size,
        "side": math.isqrt(host.seq_len),
        "classes": [engine.name_of(Request(label, family=family)) for label in range(host.num_classes)],
        "options": [_option(option, usual) for option in COMMON[family]],
        "methods": [_method(each) for each in METHODS if each.family == family and _has(engine, host, each)],
        "default": DEFAULTS[family],
        "rows": family == "VQ",
    }


def _any(host: Host, **how: Any) -> Request:
    """A request that a model takes: of a class, or of a text."""
    return Request(0, **how) if host.num_classes else Request(prompt="a picture", **how)


def _has(engine: Engine, host: Host, method: Method) -> bool:
    """Whether the engine has the models that a method needs."""
    try:
        engine.check(_any(host, method=method.name, family=method.family))
    except ValueError:
        return False
    return True


def _method(method: Method) -> dict:
    return {
        "name": method.name,
        "guarantee": method.guarantee,
        "summary": method.summary,
        "heat": method.heat,
        "options": {option.name: f"{option.range}: {option.help}" for option in method.options},
    }


def _option(option: Option, usual: Request) -> dict:
    words = None if isinstance(option.kind, type) else list(option.kind)
    return {
        "name": option.name,
        "help": f"{option.help} ({option.range})",
        "words": words,
        "default": getattr(usual, option.name),
    }
