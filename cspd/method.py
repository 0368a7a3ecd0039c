"""Methods and their registry, the choice and checks of a request's method, and the protocol of model runners."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cspd.graphs import Graphs
from cspd.inpainting import Inpainting
from cspd.option import BUNDLED, COMMON, DEFAULTS, Option, check_integer, check_seed, method_now
from cspd.request import Request, Sequence, Stopwatch
from cspd.terminal import choice, shortened, value_of

# A method is one `Method` object, in the file that has its round. Each family of models has one model runner class:
# `MARRunner` and `VQRunner`. The runner owns models and tensors; a method decides what to compute with them.

GUARANTEES = {
    "exact": "The images have the distribution of baseline sampling (ar) with the same settings, up to floating-point"
    " error. This is proved and tested.",
    "approximate": "Close to the distribution of baseline sampling. Two distances are reported: the difference of a"
    " token from the one that baseline sampling gives for the same noise, and the divergence of its path.",
    "bounded": "The total variation distance from baseline sampling's distribution is at most the measured bound.",
    "heuristic": "No guarantee: evaluate the images.",
}
# (model runner of the method's family, sequences, stopwatch) -> the finished sequences
RunRound = Callable[[Any, list[Sequence], Stopwatch], list[Sequence]]


Prepare = Callable[[Request, Any], Request]


def as_it_is(request: Request, runner: ModelRunner) -> Request:
    """The request unchanged: nothing is left to check or to decide."""
    return request


@dataclass(frozen=True, eq=False)
class Method:
    """A decoding method.

    Attributes:
        name: the name that requests give. family: a key of `cspd.option.COMMON`, the models that it decodes.
        guarantee: a key of `GUARANTEES`, for the default settings; see `guarantee_of`.
        summary: a description in a few words. papers: titles and links, by name or arXiv number.
        run_round: runs one batched round and returns the finished sequences.
        needs: requirement in addition to the target: "draft model", "EAGLE drafter", "calibration", or "-".
        options: settings that only some methods have; an option comes after those that it depends on (`only_with`).
        mixed: names of settings that may differ between the sequences of one round.
        prepare: (request with all defaults, model runner) -> the request with the values that it leaves open, for
            example from a calibration. Raises ValueError if options that are valid one by one do not go together. It
            checks first what needs no measurement: a request that only is to be checked goes as far as that.
        of_request: the guarantee of a prepared request, if settings change it.
        advice: a warning about settings that are valid but probably not intended, with a remedy, or None. It is also
            added to the error if tokens are not finite.
        uses: the models that a resolved request needs in addition to the target: "draft", "eagle".
        token_cost: meaning of `Output.token_cost`: head "calls" per token, or which drafts were "accepted".
        explain: (resolved request, model runner) -> what was chosen and what is predicted of it, in words, or None.
        audit: (model runner, resolved requests, tokens of their finished images, share) -> what is measured at a share
            of these tokens, by the names of `cspd.summary.measured_lines`.
    """

    name: str
    family: str
    guarantee: str
    summary: str
    papers: Mapping[str, str]
    run_round: RunRound
    needs: str = "-"
    options: tuple[Option, ...] = ()
    mixed: Callable[[Request], tuple[str, ...]] = lambda request: ()
    prepare: Prepare = as_it_is
    of_request: Callable[[Request], str] | None = None
    advice: Callable[[Request], str | None] = lambda request: None
    uses: Callable[[Request], set[str]] = lambda request: set()
    token_cost: str = "accepted"
    explain: Callable[[Request, Any], str | None] = lambda request, runner: None
    audit: Callable[[Any, Several[Request], Tensor, float], dict[str, float]] = lambda *finished: {}

    def guarantee_of(self, request: Request) -> str:
        """The guarantee of a resolved request."""
        return self.of_request(request) if self.of_request else self.guarantee

    def option(self, name: str, request: Request) -> Option | None:
        """The option of this name that applies to the request's other settings, or None."""
        for option in self.options:
            if option.name == name and option.applies(request.settings):
                return option
        return None

    def fill(self, request: Request) -> Request:
        """The request with the defaults of the method's options filled in."""
        settings = dict(request.settings)
        for option in self.options:  # an option comes after those that it depends on
            is_open = settings.get(option.name) is None
            if is_open and not option.implied and option.applies(settings):
                settings[option.name] = option.default
        return dataclasses.replace(request, settings=settings)

    def round_key(self, request: Request) -> Hashable:
        """Requests with equal keys can share a round."""
        mixed = dict.fromkeys(self.mixed(request))
        alike = request.settings_alone().but(**mixed)
        return alike, request.guided, request.temperature == 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A checked request, as `Engine.checked` and `Engine.prepare` return it.

    Attributes:
        asked: the request as the user gave it. request: with family, method and defaults filled in.
        method: the method of the request. model: the name of its models in the engine.
        runner: the model runner that checked it. An engine with another runner checks the request again.
        is_decided: whether the values that may need a calibration are filled in too.
    """

    asked: Request
    request: Request
    method: Method
    model: str
    runner: ModelRunner
    is_decided: bool = False


def complete(
    request: Request,
    method: Method,
    runner: ModelRunner,
    common: tuple[Option, ...],
    model_defaults: Mapping[str, object],
) -> Request:
    """Fills in all defaults of a request, and checks its settings, one by one and together.

    Args:
        common: options that all methods of the family have.
        model_defaults: the target's default values for them.

    Raises:
        ValueError: a setting has a wrong type, is out of range, or does not go with the others; or the method needs a
            model that the engine does not have.
    """
    # Defaults first: whether an option applies depends on the values of other options.
    settings = {**model_defaults, **request.settings}
    request = method.fill(dataclasses.replace(request, settings=settings))
    if runner.num_classes:
        _check_class(request, runner.num_classes)
    else:
        _check_text(request)
    check_seed(request.seed)
    request = _with_checked_settings(request, method, common)
    for name in sorted(method.uses(request)):
        if runner.models[name] is None:
            raise ValueError(f"method={method.name!r} needs {_MISSING[name]} on the command line")
    with contextlib.suppress(_NeedsDevice):
        method.prepare(request, _WithoutDevice(runner))
    return request


class _NeedsDevice(Exception):
    pass


class _WithoutDevice:
    """A model runner for checks, which end at what measures the device, calibrates a model or takes memory."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        if name in ("tuning", "caches"):
            raise _NeedsDevice
        return getattr(self._runner, name)


_MISSING = {  # by the name of a model in `Method.uses`
    "draft": "a draft model, and this engine has none: give it to load(..., draft=file), or with --draft-checkpoint",
    "eagle": "an EAGLE drafter, and this engine has none: give it to load(..., eagle=file), or with --eagle",
}


def _with_checked_settings(request: Request, method: Method, common: tuple[Option, ...]) -> Request:
    shared = {option.name: option for option in common}
    checked: dict[str, Any] = {}
    options = {}
    for name, value in request.settings.items():
        checked[name] = value
        option = shared.get(name) or method.option(name, request)
        if option is None:
            _check_is_off(name, value, request, method)
            continue
        option.check(value)
        options[name] = option
        if option.kind is float:  # so that tensors and records have one type
            checked[name] = float(checked[name])
    for name, option in options.items():  # only valid values can be compared
        option.check_beside(checked[name], checked)
    return dataclasses.replace(request, settings=checked)


def _check_class(request: Request, num_classes: int) -> None:
    """Checks a request to a class-conditional model."""
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if text is not None:
            raise ValueError(
                f"{name}={shortened(text)}: class-conditional models take a label, not a prompt. Give label=..., or"
                " load a text-to-image model (docs/text.md)"
            )
    if request.label is not None:
        check_integer("label", request.label, 0, num_classes - 1, "the classes of the target")
    elif request.guided:
        raise ValueError(
            f"cfg={request.cfg!r} needs a class label, but label=None asks for an unconditional image. Give a label,"
            " omit cfg, or give cfg=1"
        )


def _check_text(request: Request) -> None:
    """Checks a request to a text-to-image model."""
    if request.label is not None or request.prompt is None:
        raise ValueError(
            f"label={shortened(request.label)}: text-to-image models take a prompt, not a label. Give prompt=..."
            " (--prompt or --prompts on the command line)"
        )
    for name in ("prompt", "negative_prompt"):
        text = getattr(request, name)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name}={shortened(text)} is not text: give a string")
    if request.negative_prompt is not None and not request.guided:
        raise ValueError(
            f"negative_prompt={shortened(request.negative_prompt)} has no effect at cfg=1, which disables guidance."
            " Omit negative_prompt, or raise cfg"
        )


def with_tokens(request: Request, runner: ModelRunner, shape: tuple[int, ...]) -> Request:
    """The request with the given part of its image encoded to tokens of `shape`.

    Raises:
        ValueError: as `Inpainting.as_tokens`, or the tokens are not the first that the runner generates.
    """
    if request.known is None:
        return request
    check_seed(request.seed)  # before it becomes a tensor
    # A mask that is a fraction of the tokens leaves the choice of tokens to the seed.
    seed = torch.tensor([request.seed])
    order = runner.noise.order(seed, shape[0])[0]
    encode = functools.partial(runner.encode, seed=seed)
    request = dataclasses.replace(request, known=request.known.as_tokens(shape, encode, order))
    if runner.in_raster_order and request.known is not None:
        _check_prefix(request, runner)
    return request


def _check_prefix(request: Request, runner: ModelRunner) -> None:
    num_given = runner.seq_len - request.num_generated(runner.seq_len)
    first_generated = int(request.known.generated.argmax())  # type: ignore[union-attr]
    if first_generated < num_given:
        num_rows = math.isqrt(runner.seq_len)
        rows = first_generated // num_rows
        instead = f"the first {rows} of {num_rows} rows of tokens" if rows else "only rows at the top"
        raise ValueError(
            f"the mask keeps {num_given} of {runner.seq_len} tokens, {num_given - first_generated} of them after one"
            f" that is generated. These models generate in raster order and can keep only a prefix: keep"
            f" {instead}, or use a MAR model, which accepts any mask"
        )


def _check_is_off(name: str, value: object, request: Request, method: Method) -> None:
    """Raises ValueError unless `value` turns off an option that does not apply to the request."""
    options = [option for option in method.options if option.name == name]
    if any(option.is_off(value) for option in options):
        return
    if not options:
        raise ValueError(f"{name}={value!r} is not an option of {method.name!r}: omit {name}")
    selector = ""
    allowed = []
    for option in options:
        selector, values = option.only_with or ("", ())
        allowed += [repr(value) for value in values]
    wanted = " or ".join(allowed)
    present = getattr(request, selector)
    raise ValueError(f"{name}={value!r} needs {selector}={wanted}, but {selector}={present!r}")


class ModelRunner(Protocol):
    """Owns the models of a family and, in slots allocated once, the tensors of every running sequence.

    Attributes:
        family: a key of `cspd.option.COMMON`. in_raster_order: whether tokens are always generated in raster order.
        seq_len: tokens per image. image_size: pixels per side of an image.
        num_classes: labels are 0 .. num_classes - 1; 0 for a text-to-image model.
        at_once: images that run together, for which the request that is being resolved is planned: at most one a slot.
        models: the models by name: "target", and others, such as "draft", which are None if the engine lacks them.
        tokens: of running sequences, [number of slots, at least seq_len(, d)].
        graphs: captures and replays work of fixed shape. noise: a module with the functions of `cspd.noise`.
        tuning: the family's measurements on this device.
    """

    family: str
    in_raster_order: bool
    seq_len: int
    num_classes: int
    image_size: int
    at_once: int
    models: dict[str, Any]
    tokens: Tensor
    graphs: Graphs
    noise: types.ModuleType
    tuning: Any

    def complete(self, request: Request, method: Method) -> Request:
        """The request with all defaults filled in. Raises ValueError on a bad setting or a missing model."""

    def prepare(self, request: Request, method: Method) -> Request:
        """A complete request with all open values filled in, which may fit a calibration, and its prompts encoded.

        Raises ValueError.
        """

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of newly admitted sequences."""

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, L(, d)], per-token costs [B, L] and validity, bool [B, L], of finished sequences.

        Validity is in generation order: whether a token is finite (MAR, causal) or a codebook index (VQ).
        """

    def encode(self, known: Inpainting, seed: Tensor) -> Tensor:
        """Tokens [L(, d)], on the CPU, of a given image, for a seed, int64 [1]."""

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Decodes tokens to images [B, 3, H, W] in 0..1, or None without a decoder."""

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """Tokens [1, L(, d)] and per-token costs [1, L] of a running sequence.

        Tokens that are not generated yet are 0 (MAR) or -1 (VQ), and their cost is NaN.
        """

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Tokens by the sampler of the released code; `settings`: the values of the family's common options."""


# The registry of methods. A family registers its methods when it is imported (`cspd.checkpoints` imports them all);
# users add their own.

METHODS: list[Method] = []  # sorted by family; the methods of users last
NAMED_BY: dict[str, Callable[[Request], str | None]] = {}  # by family, see `register_family`; so are the next two
CANDIDATES: dict[str, str] = {}
EXACT_CANDIDATES: dict[str, str] = {}
_BUILT_IN: list[Method] = []


def register_family(
    name: str,
    methods: Several[Method],
    named_by: Callable[[Request], str | None] = lambda request: None,
    *,
    candidates: str,
    exact_candidates: str,
) -> None:
    """Adds the methods of a family of models; `cspd.option` has the family's options.

    Args:
        methods: in the order of the tables that list them.
        named_by: the name of the method that the settings of a request without `method` imply, or None for the default.
        candidates: those of `cspd tune`, names of methods with the settings that trade quality for speed.
        exact_candidates: more of them, if quality may not change.
    """
    order = [*COMMON]
    _BUILT_IN.extend(methods)
    _BUILT_IN.sort(key=lambda method: order.index(method.family))
    # A plug-in may have registered its methods before this family was imported.
    METHODS[:] = _BUILT_IN + [method for method in METHODS if method not in _BUILT_IN]
    NAMED_BY[name], CANDIDATES[name], EXACT_CANDIDATES[name] = named_by, candidates, exact_candidates


def register(method: Method) -> None:
    """Adds a user's method. Requests, studies and the command line (`--plugin`) can use it from then on.

    A user's method of the same name is replaced, so that a notebook cell can run twice.

    Raises:
        TypeError: not a `Method`.
        ValueError: a built-in method has this name, or the family or guarantee is unknown.
    """
    if not isinstance(method, Method):
        raise TypeError(f"{method!r} is not a method: give a cspd.method.Method, as sampling() and drafting() return")
    for field, valid in (("family", COMMON), ("guarantee", GUARANTEES)):
        value = getattr(method, field)
        if value not in valid:
            raise ValueError(f"method {method.name!r}: {field}={value!r}: choose one of {', '.join(valid)}")
    others = []  # `METHODS` changes in place: other modules imported the list itself
    for other in METHODS:
        if (other.name, other.family) != (method.name, method.family):
            others.append(other)
        elif other in _BUILT_IN:
            raise ValueError(f"{method.name!r} is a built-in method for {method.family}: give yours another name")
    METHODS[:] = [*others, method]


# The method of a request, and methods named in text.


def _methods_of(families: Iterable[str]) -> list[Method]:
    """The methods of these families, family by family."""
    return [method for family in families for method in METHODS if method.family == family]


def method_names(families: Iterable[str] = tuple(COMMON)) -> list[str]:
    """The names of the methods of these families, without duplicates."""
    names = [method.name for method in _methods_of(families)]
    return list(dict.fromkeys(names))


def option_order() -> list[str]:
    """The names of all options: first those of all methods of a family, then the methods' own."""
    common = [option.name for options in COMMON.values() for option in options]
    special = [option.name for method in METHODS for option in method.options]
    return list(dict.fromkeys([*common, *special]))


def find(name: str | None, family: str | None) -> Method:
    """The method of this name for a family. Raises ValueError if there is none."""
    return _named(method_now(str(name)), [str(family)])


def models_for(request: Request, runners: Mapping[str, ModelRunner]) -> list[str]:
    """The names of an engine's models, first of those that take the request's prompt, or its label."""

    def takes_the_other(name: str) -> bool:
        takes_prompts = runners[name].num_classes == 0
        return takes_prompts != (request.prompt is not None)

    return sorted(runners, key=takes_the_other)  # stable: otherwise in the engine's order


def choose(request: Request, families: Several[str]) -> tuple[Request, Method]:
    """The request with method and family filled in, and the method: of the first of `families` that has it.

    Raises:
        ValueError: the method is unknown or not of these families, or it lacks an option of the request.
    """
    if request.family is not None:
        if request.family not in families:
            raise ValueError(f"family={request.family!r}: this engine has models of {' and '.join(families)}")
        families = [request.family]
    method = _default(request, families) if request.method is None else _named(request.method, families)
    _check_options(request, method)
    return dataclasses.replace(request, method=method.name, family=method.family), method


def _named(name: str, families: Several[str]) -> Method:
    for method in _methods_of(families):
        if method.name == name:
            return method
    owners = [method for method in METHODS if method.name == name]
    valid = method_names(families)
    if not owners:
        raise _unknown(name, valid)
    models = " or ".join(families)
    remedy = f"choose one of {', '.join(valid)}{_other_models(owners)}"
    raise ValueError(f"method={name!r} does not decode {models} models: {remedy}")


def _unknown(name: str, valid: list[str]) -> ValueError:
    return ValueError(f"method={shortened(name)} is unknown: {choice(name, valid)}")


def _other_models(owners: Several[Method]) -> str:
    """A remedy to append to an error if the intended methods belong to other families; else empty."""
    remedy = ""
    for family in dict.fromkeys(method.family for method in owners):
        example = f" such as {BUNDLED[family]}" if family in BUNDLED else ""
        remedy += f", or use {family} models{example}"
    return remedy


def _default(request: Request, families: Several[str]) -> Method:
    """The method that the settings imply, or the default method of the first family."""
    for family in families:
        name = NAMED_BY[family](request)
        if name is not None:
            return find(name, family)
    return find(DEFAULTS[families[0]], families[0])


def _check_options(request: Request, method: Method) -> None:
    """Raises ValueError on a setting that the method does not have, naming the methods that have it."""
    foreign = request.settings.keys() - _options_of(method)
    if not foreign:
        return
    name = min(foreign)
    given = f"{name}={shortened(request.settings[name])}"
    owners = [other for other in METHODS if name in _options_of(other)]
    related = [other.name for other in owners if other.family == method.family]
    if related:
        raise ValueError(f"{given} is not an option of {method.name!r}: omit it, or use method {' or '.join(related)}")
    remedy = f"omit {name}{_other_models(owners)}"
    raise ValueError(f"{given} is not a setting of {method.family} models: {remedy}")


def _options_of(method: Method) -> set[str]:
    return {option.name for option in (*COMMON[method.family], *method.options)}


def with_method(request: Request, name: str) -> Request:
    """The request with another method, without the options that this method does not have.

    Raises:
        ValueError: there is no method of that name.
    """
    name = method_now(name)
    families = COMMON if request.family is None else [request.family]
    candidates = [method for method in _methods_of(families) if method.name == name]
    if not candidates:
        raise _unknown(name, method_names())
    request = dataclasses.replace(request, method=name)
    valid = {option.name for options in COMMON.values() for option in options}
    # The default values of the new method's options decide which of its other options apply.
    for method in candidates:
        settings = method.fill(request).settings
        valid.update(option.name for option in method.options if option.applies(settings))
    return _without(request, request.settings.keys() - valid)


def _without(request: Request, names: Iterable[str]) -> Request:
    """The request without these settings."""
    return request.but(**dict.fromkeys(names))


def plain_of(request: Request) -> Request:
    """The `ar` request with the same family-wide settings as a checked request, without method-specific ones."""
    if request.method == "ar":
        return request
    common = {option.name for option in COMMON[str(request.family)]}
    return _without(request.but(method="ar"), request.settings.keys() - common)


def parse_method(
    text: str,
    options: Collection[str] | None = None,
    more: Several[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Parses "cool-sd:delta=1.5:gamma=4" to ("cool-sd", {"delta": 1.5, "gamma": 4}).

    Args:
        options: names that may follow; by default, the options of all methods.
        more: valid names in addition to those of the methods.

    Raises:
        ValueError: the name or an option is unknown, or an option has no value.
    """
    if options is None:
        options = {option.name for method in METHODS for option in method.options}
    given = shortened(text)
    name, *parts = text.split(":")
    name = method_now(name)
    valid = [*method_names(), *more]
    if name not in valid:
        raise _unknown(name, valid)
    settings: dict[str, object] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option not in options:
            hint = f"write options like delta=1.5; {choice(option, sorted(options))}"
            raise ValueError(f"{shortened(part)} in {given} is not an option: {hint}")
        if not equals:
            raise ValueError(f"{option} in {given} has no value: write it like {name}:{option}=VALUE")
        if option in settings:
            raise ValueError(f"{given} has {option} twice: give it once")
        settings[option] = value_of(value)
    return name, settings


def method_of(request: Request) -> Method:
    """The method of a checked request."""
    return find(request.method, request.family)


def guarantee_of(request: Request) -> str:
    """The guarantee of a resolved request."""
    return method_of(request).guarantee_of(request)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a request chooses by name, from a table of its kind.

    Attributes:
        options: its own settings. prepare: as of `Method`, for these settings.
    """

    options: tuple[Option, ...] = ()
    prepare: Prepare = as_it_is


def choices(
    axis: str,
    table: Mapping[str, Part],
    meaning: str,
    default: str,
    **defaults: object,
) -> list[Option]:
    """The options of a choice by name: first the choice itself, then the options of each part in `table`.

    Args:
        axis: name of the choice. meaning: its help text.
        default: the default part. It is left out of resolved requests if it has no options.
        defaults: values that replace the defaults of its options.
    """
    is_implied = not table[default].options
    options = [Option(axis, tuple(table), meaning, default=default, implied=is_implied)]
    for name, part in table.items():
        own = with_defaults(part.options, defaults) if name == default else part.options
        for option in own:
            options.append(option.but(only_with=(axis, (name,))))
    return options


def with_defaults(options: tuple[Option, ...], defaults: Mapping[str, object]) -> list[Option]:
    """The options with some defaults replaced, by name."""
    changed = []
    for option in options:
        default = defaults.get(option.name, option.default)
        changed.append(option.but(default=default))
    return changed


# a name for the samplers of the released code, in `mar.model` and `cspd.discrete.gpt`
PUBLISHED = "published"
