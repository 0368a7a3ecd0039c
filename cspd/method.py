"""Methods, the registry of them, which method a request takes, and the model runners that they run on."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cspd.files import remember
from cspd.graphs import Graphs
from cspd.option import BUNDLED, COMMON, DEFAULTS, Option, check_integer, check_seed
from cspd.request import Request, Sequence, Stopwatch
from cspd.terminal import NO_CHARACTER, choice, shortened, value_of

# What the engine knows: methods, one object each in the file that holds its round, and the runners of their models.
#
# `cspd.method` is the registry. There is one model runner a family of models, `MARRunner` and `VQRunner`.

GUARANTEES = {
    "exact": "The images have the distribution of plain sampling with the same settings, to floating-point accuracy:"
    " proved and tested.",
    "measured": "Near plain sampling's distribution, and how near is measured: the distance of a token from the one"
    " that plain sampling makes of the same noise, and the divergence of its path.",
    "bounded": "The total variation from plain sampling's distribution is at most the measured bound.",
    "heuristic": "No proof: only the images say how good it is.",
}
# (a model runner of the method's family, sequences, stopwatch) -> those that are finished
RunRound = Callable[[Any, list[Sequence], Stopwatch], list[Sequence]]


def nothing_more(request: Request, runner: ModelRunner) -> None:
    """A check of a method that has none of its own."""


def as_it_is(request: Request, runner: ModelRunner) -> Request:
    """The request, where a method leaves nothing to be decided."""
    return request


@dataclass(frozen=True, eq=False)
class Method:
    """A way to decode.

    Attributes:
        name: by which a request asks for it. family: "MAR" or "VQ", whose models it decodes.
        guarantee: a key of `GUARANTEES`; of the default settings, see `guarantee_of`.
        summary: what it does, in a few words. papers: titles and links, by name or arXiv number.
        run_round: runs one batched round, (runner, sequences, stopwatch) -> those that are finished.
        needs: what it needs beside the target: "draft model", "EAGLE drafter", "calibration", or nothing ("-").
        options: settings that only some methods have; an option follows those it depends on (`only_with`).
        mixed: settings that may differ between the sequences of one round, beside a resolved request.
        check: raises ValueError on a bad request whose options are good one by one.
        resolve: decides what a checked request leaves open.
        of_request: the guarantee of a resolved request, where settings change it.
        advice: what is wrong with the settings of a resolved request that may be meant all the same, and what to give;
            None where nothing is. It is a warning, and part of the error where tokens are not finite.
        uses: which models beside the target a resolved request needs, "draft" or "eagle".
        token_cost: what `Output.token_cost` shows of its tokens: head "calls", or which drafts were "accepted".
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
    check: Callable[[Request, Any], None] = nothing_more
    resolve: Callable[[Request, Any], Request] = as_it_is
    of_request: Callable[[Request], str] | None = None
    advice: Callable[[Request], str | None] = lambda request: None
    uses: Callable[[Request], set[str]] = lambda request: set()
    token_cost: str = "accepted"

    def guarantee_of(self, request: Request) -> str:
        """The guarantee of a resolved request."""
        return self.of_request(request) if self.of_request else self.guarantee

    def option(self, name: str, request: Request) -> Option | None:
        """The option of a name that a request's other settings choose; None where there is none."""
        return next((o for o in self.options if o.name == name and o.applies(request.settings)), None)

    def fill(self, request: Request) -> Request:
        """The request with the method's own defaults, where it leaves them open."""
        for option in self.options:
            is_open = getattr(request, option.name) is None
            if is_open and not option.implied and option.applies(request.settings):
                request = request.but(**{option.name: option.default})
        return request

    def without_foreign(self, request: Request, common: tuple[Option, ...]) -> Request:
        """The request without settings that neither this method nor its family's `common` options have."""
        own = {option.name for option in common} | {o.name for o in self.options if o.applies(request.settings)}
        return request.but(**dict.fromkeys(request.settings.keys() - own))

    def round_key(self, request: Request) -> Hashable:
        """Requests with equal keys can share a round, whatever else differs."""
        own = {"label": 0, "prompt": None, "negative_prompt": None, "seed": 0, "known": None}
        alike = request.but(**own, **dict.fromkeys(self.mixed(request)))
        return alike, request.guided, request.temperature == 0


@dataclass(frozen=True, eq=False)
class Prepared:
    """A request that was checked, as `Engine.checked` and `Engine.prepare` return it.

    Attributes:
        asked: the request as it was given. request: as it runs, with family, method and defaults filled in.
        method: its method. is_decided: whether the values that may take a calibration are filled in too.
    """

    asked: Request
    request: Request
    method: Method
    is_decided: bool = False


def complete(
    request: Request, method: Method, common: tuple[Option, ...], published: Mapping[str, object], num_classes: int
) -> Request:
    """The request with all defaults filled in, its settings checked one by one.

    Args:
        common: the options of all methods of the family. published: their values, of the target.
        num_classes: 0 where the target makes images of texts.

    Raises:
        ValueError: a setting is of the wrong kind, out of range, or of no meaning beside the others.
    """
    fill = {name: value for name, value in published.items() if getattr(request, name) is None}
    request = method.fill(request.but(**fill))
    if num_classes:
        _check_class(request, num_classes)
    else:
        _check_text(request)
    check_seed(request.seed)
    shared = {option.name: option for option in common}
    settings: Mapping[str, Any] = request.settings
    floats = {}
    for name, value in settings.items():
        option = shared.get(name) or method.option(name, request)
        if option is not None:
            option.check(value)
            if option.kind is float:
                floats[name] = float(value)  # type: ignore[arg-type]
        elif not any(o.name == name and type(value) is type(o.off) and value == o.off for o in method.options):
            raise ValueError(_out_of_place(name, request, method))
    return request.but(**floats)


def _check_class(request: Request, num_classes: int) -> None:
    """Raises ValueError where a request is of no class of the target."""
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if text is not None:
            raise ValueError(
                f"{name}={shortened(text)}: these models make images of classes: leave it out and give a label, or take"
                " a model of texts (docs/text.md)"
            )
    if request.label is not None:
        check_integer("label", request.label, 0, num_classes - 1, "the target knows these classes")
    elif request.guided:
        raise ValueError(f"cfg={request.cfg!r} guides towards a class and label=None is none: leave it out, or give 1")


def _check_text(request: Request) -> None:
    """Raises ValueError where a request is of no text."""
    if request.label is not None or request.prompt is None:
        raise ValueError(
            f"label={shortened(request.label)}: these models make images of texts: give prompt=... in its place"
            " (--prompt or --prompts on the command line)"
        )
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{name}={shortened(text)} is no text: give a string")
        if text is not None and (damaged := NO_CHARACTER.search(text)):
            raise ValueError(f"{name} has {damaged[0]!r}, which is no character: remove it")
    if request.negative_prompt is not None and not request.guided:
        raise ValueError(
            f"negative_prompt={shortened(request.negative_prompt)} is what guidance leads away from, and cfg=1 is none:"
            " leave it out, or give a larger cfg"
        )


def with_tokens(request: Request, runner: ModelRunner, shape: tuple[int, ...]) -> Request:
    """The request with what is known of its image as tokens of a model runner's model, of a shape.

    Raises ValueError as `Known.as_tokens`.
    """
    if request.known is None:
        return request
    check_seed(request.seed)
    seed = torch.tensor([request.seed])
    order = runner.noise.order(seed, shape[0])[0]
    return dataclasses.replace(
        request, known=request.known.as_tokens(shape, functools.partial(runner.encode, seed=seed), order)
    )


def _out_of_place(name: str, request: Request, method: Method) -> str:
    """What is wrong with a setting that the method, or the request's other settings, have no place for."""
    value = getattr(request, name)
    wanted = [option.only_with for option in method.options if option.name == name and option.only_with]
    if not wanted:
        return f"{name}={value!r} is no option of {method.name!r}: leave it out"
    selector = wanted[0][0]
    values = " or ".join(repr(choice) for _, choices in wanted for choice in choices)
    return f"{name}={value!r} needs {selector}={values}, and it is {getattr(request, selector)!r}"


class ModelRunner(Protocol):
    """Owns the models of a family and, in slots allocated once, the tensors of every running sequence.

    Attributes:
        family: "MAR" or "VQ". seq_len: tokens of an image. num_classes: labels are 0 .. num_classes - 1; 0: it makes
            images of texts.
        image_size: pixels of an image's side. graphs: runs what has a fixed shape. noise: functions of `cspd.noise`.
        encode: makes tokens, [L(, d)] on the CPU, of a picture (`cspd.request.Known`) for a seed, int64 [1].
    """

    family: str
    seq_len: int
    num_classes: int
    image_size: int
    encode: Callable[..., Tensor]
    graphs: Graphs
    noise: types.ModuleType

    def check(self, request: Request, method: Method) -> Request:
        """The request with all defaults filled in. Raises ValueError on a bad setting or a model that is not there."""

    def resolve(self, request: Request, method: Method) -> Request:
        """A checked request with what was left to be decided, which may take a calibration; its texts are encoded.

        Raises ValueError.
        """

    def adopt(self, other: Any) -> None:
        """Takes over what another model runner of the same models has measured."""

    def admit(self, sequences: list[Sequence]) -> None:
        """Prepares the slots of sequences that are about to run."""

    def results(self, sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [B, L(, d)], heat [B, L], bool [B, L]) of sequences.

        The last says, in generation order, which tokens are finite, or codes at all.
        """

    def decode(self, tokens: Tensor) -> Tensor | None:
        """Images [B, 3, H, W] in 0..1 of tokens; None without a decoder."""

    def so_far(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """(tokens [1, L(, d)], heat [1, L]) of a running sequence, those that are unknown as nothing, and NaN."""

    def published(self, labels: Tensor, settings: dict) -> Tensor:
        """Tokens by the sampler as the models' authors published it; settings of every method of the family."""

    def forget(self, key: Hashable) -> None:
        """Drops what methods keep of sequences of one key, none of which is left."""

    def clear(self) -> None:
        """Drops what methods keep of all sequences."""


# The registry of methods: families register theirs when they are imported, and users add their own.
#
# `cspd.method` answers questions on it. `cspd.checkpoints` imports every family.

METHODS: list[Method] = []  # by family, in the families' order, those of users last
NAMED_BY: dict[str, Callable[[Request], str | None]] = {}  # by family, see `register_family`
_BUILT_IN: list[Method] = []


def register_family(
    name: str, methods: Several[Method], named_by: Callable[[Request], str | None] = lambda request: None
) -> None:
    """Adds the methods of a family of models that `cspd.option` describes.

    Args:
        methods: in the order in which tables list them.
        named_by: the method that a request's settings name when its `method` is None; None: the family's default.
    """
    order = [*COMMON]
    _BUILT_IN.extend(methods)
    _BUILT_IN.sort(key=lambda method: order.index(method.family))
    METHODS[:] = _BUILT_IN + [method for method in METHODS if method not in _BUILT_IN]
    NAMED_BY[name] = named_by


def register(method: Method) -> None:
    """Adds a method of one's own: requests, studies and the command line (`--plugin`) have it from then on.

    One that was registered under the same name before is replaced, as where a notebook's cell is run twice.

    Raises:
        TypeError: it is no `Method`. ValueError: cspd has one of this name, or its family or guarantee is unknown.
    """
    if not isinstance(method, Method):
        raise TypeError(f"{method!r} is no method: give a cspd.method.Method, as sampling() or drafting() make them")
    for what, known in (("family", COMMON), ("guarantee", GUARANTEES)):
        if getattr(method, what) not in known:
            raise ValueError(
                f"method {method.name!r}: {what}={getattr(method, what)!r}: choose one of {', '.join(known)}"
            )
    same = [each for each in METHODS if (each.name, each.family) == (method.name, method.family)]
    if same and same[0] in _BUILT_IN:
        raise ValueError(f"method {method.name!r} is one of cspd's for {method.family}: give yours another name")
    METHODS[:] = [each for each in METHODS if each not in same] + [method]


# Which method a request is by, and the text that names one.


def method_names(families: Collection[str] = tuple(COMMON)) -> list[str]:
    """The names of the methods for these families, each once."""
    return list(dict.fromkeys(method.name for method in METHODS if method.family in families))


def option_order() -> list[str]:
    """The names of all options: those that all methods of a family have, then the others, as the methods are listed."""
    common = [option.name for options in COMMON.values() for option in options]
    special = [option.name for method in METHODS for option in method.options]
    return list(dict.fromkeys([*common, *special]))


def find(name: str | None, family: str | None) -> Method:
    """The method of a name for a family. Raises ValueError where there is none."""
    return _named(str(name), [str(family)], [method for method in METHODS if method.family == family])


def families_for(request: Request, runners: Mapping[str, ModelRunner]) -> list[str]:
    """The families of an engine's runners, those first that take what a request gives: a text, or a class."""
    of_text = request.prompt is not None
    return sorted(runners, key=lambda family: (runners[family].num_classes == 0) != of_text)


def choose(request: Request, families: Several[str]) -> tuple[Request, Method]:
    """The request with method and family filled in, and the method, of the first of `families` that has it.

    Raises:
        ValueError: unknown method, one that these families do not have, or options that it does not have.
    """
    if request.family is not None and request.family not in families:
        raise ValueError(f"family={request.family!r}: this engine has models of {' and '.join(families)}")
    wanted = families if request.family is None else [request.family]
    candidates = [method for family in wanted for method in METHODS if method.family == family]
    if request.method is None:
        method = _default(request, wanted)
    else:
        method = _named(request.method, wanted, candidates)
    _check_options(request, method)
    return dataclasses.replace(request, method=method.name, family=method.family), method


def _named(name: str, families: Several[str], candidates: Several[Method]) -> Method:
    for method in candidates:
        if method.name == name:
            return method
    owners = [method for method in METHODS if method.name == name]
    if not owners:
        raise ValueError(f"method={shortened(name)} is unknown: {choice(name, method_names(families))}")
    raise ValueError(
        f"method={name!r} does not decode {' or '.join(families)} models: choose one of"
        f" {', '.join(method_names(families))}{_other_models(owners)}"
    )


def _other_models(owners: Several[Method]) -> str:
    """What else to do where the methods that were meant are another family's; empty where there are none."""
    families = dict.fromkeys(method.family for method in owners)
    return "".join(f", or take {family} models, as of {BUNDLED[family]}" for family in families)


def _default(request: Request, families: Several[str]) -> Method:
    """The method that the settings name to some family, or the default method of the first family."""
    for family in families:
        name = NAMED_BY[family](request)
        if name is not None:
            return find(name, family)
    return find(DEFAULTS[families[0]], families[0])


def _check_options(request: Request, method: Method) -> None:
    """Raises ValueError, which says whose it is, on a setting that a method does not have."""
    for name in sorted(request.settings.keys() - _options_of(method)):
        given = f"{name}={shortened(getattr(request, name))}"
        owners = [other for other in METHODS if name in _options_of(other)]
        related = [other.name for other in owners if other.family == method.family]
        if not related:
            raise ValueError(f"{given} is no setting of {method.family} models: leave it out{_other_models(owners)}")
        raise ValueError(f"{given} is no option of {method.name!r}: it belongs to {', '.join(related)}")


def _options_of(method: Method) -> set[str]:
    return {option.name for option in (*COMMON[method.family], *method.options)}


def with_method(request: Request, name: str) -> Request:
    """The request by another method, without the options that this one does not have.

    Raises:
        ValueError: there is no method of that name.
    """
    same = [m for m in METHODS if m.name == name and request.family in (None, m.family)]
    if not same:
        raise ValueError(f"method={shortened(name)} is unknown: {choice(name, method_names())}")
    request = dataclasses.replace(request, method=name)
    common = tuple(option for options in COMMON.values() for option in options)
    kept = [each.without_foreign(each.fill(request), common).settings for each in same]
    settings = {key: value for key, value in request.settings.items() if any(key in each for each in kept)}
    return dataclasses.replace(request, settings=settings)


def plain_of(request: Request) -> Request:
    """Plain sampling by a checked request's settings, those that all methods of its family have; what is so stays."""
    if request.method == "ar":
        return request
    common = {option.name for option in COMMON[str(request.family)]}
    return request.but(method="ar", **dict.fromkeys(request.settings.keys() - common))


def parse_method(
    text: str, options: Collection[str] | None = None, more: Several[str] = ()
) -> tuple[str, dict[str, object]]:
    """ "cool-sd:delta=1.5:gamma=4" to ("cool-sd", {"delta": 1.5, "gamma": 4}).

    Args:
        options: what may follow the name; by default the options of methods. more: names allowed beside the methods'.

    Raises:
        ValueError: another name, or something else follows it.
    """
    if options is None:
        options = {option.name for method in METHODS for option in method.options}
    name, *parts = text.split(":")
    known = [*method_names(), *more]
    if name not in known:
        raise ValueError(f"method {shortened(name)} is unknown: {choice(name, known)}")
    settings: dict[str, object] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option in settings:
            raise ValueError(f"{shortened(text)} has {option} twice: give it once")
        if option in options and not equals:
            raise ValueError(f"{option} in {shortened(text)} has no value: write it like {name}:{option}=VALUE")
        if option not in options:
            hint = f"write it like delta=1.5; {choice(option, sorted(options))}"
            raise ValueError(f"{shortened(part)} in {shortened(text)} is no option: {hint}")
        settings[option] = value_of(value)
    return name, settings


def method_of(request: Request) -> Method:
    """The method of a checked request."""
    return find(request.method, request.family)


def guarantee_of(request: Request) -> str:
    """The guarantee of a resolved request."""
    return method_of(request).guarantee_of(request)


# How far to draft: the fastest way by predicted times, or plain sampling unless it gains enough; and why, in words.

GAIN = 0.7  # drafts only if the predicted time is below this share of plain sampling's; the margin covers what the
# predictions leave out: in MAR, joins and uneven iterations took up to a quarter more where measured

DraftConfig = Mapping[str, Any]  # settings of a request: how it drafts
PLAIN: DraftConfig = {"window": 0}


class Choice(NamedTuple):
    """A way to draft, or `PLAIN`, and why it was chosen."""

    way: DraftConfig
    why: str


def is_enough(gain: float) -> bool:
    """Whether drafting is chosen where it is predicted to be so many times as fast as plain sampling."""
    return gain * GAIN > 1


def judged(way: DraftConfig, gain: float, what: str, at_best: bool = False) -> Choice:
    """A way if its gain over plain sampling is enough, and plain sampling if not.

    Args:
        what: has the gain. at_best: it has no more than that.
    """
    predicted = f"{what} is predicted to be {'at best ' if at_best else ''}{gain:.2f} times as fast"
    if is_enough(gain):
        return Choice(way, predicted)
    return Choice(PLAIN, f"{predicted}, under the {1 / GAIN:.2f} that are asked for")


class Chooser:
    """Chooses how far requests draft that leave it open, once for each kind of request."""

    def __init__(self) -> None:
        self._choices: dict[Hashable, Choice] = {}

    def choice(self, request: Request, num_slots: int) -> Choice:
        """The fastest way for what is known of a checked request and the engine, whatever else is in flight."""
        kind = self._kind(request, num_slots)
        if kind not in self._choices:
            remember(self._choices, kind, self._choose(request, num_slots))
        return self._choices[kind]

    def why(self, asked: Request, num_slots: int) -> str:
        """What to tell of the window that a checked request has run with."""
        if asked.window is not None:
            return "as asked for"
        choice = self._choices.get(self._kind(asked, num_slots))
        if choice is None:
            return "as the run began that this one went on from"
        return f"nothing was drafted: {choice.why}" if choice.way == PLAIN else choice.why

    def _kind(self, request: Request, num_slots: int) -> Hashable:
        """All that a choice depends on."""
        own = {"label": None, "prompt": None, "negative_prompt": None, "seed": 0, "known": None}
        return request.but(**own), num_slots

    def _choose(self, request: Request, num_slots: int) -> Choice:
        """Of a request that is the first of its kind."""
        raise NotImplementedError


def choices(axis: str, table: Mapping[str, Any], meaning: str, default: str, **defaults: object) -> list[Option]:
    """An option that chooses by name, and the options of each choice; `defaults` are values of those of the default.

    A default without options of its own need not be written into requests.
    """
    options = [Option(axis, tuple(table), meaning, default=default, implied=not table[default].options)]
    for name, part in table.items():
        own = defaults if name == default else {}
        options += [option.but(only_with=(axis, (name,))) for option in _with_defaults(part.options, own)]
    return options


def _with_defaults(options: tuple[Option, ...], defaults: Mapping[str, object]) -> list[Option]:
    return [option.but(default=defaults.get(option.name, option.default)) for option in options]


PUBLISHED = "published"  # MAR's or LlamaGen's sampler as published, `mar.model` and `cspd.discrete.gpt`
