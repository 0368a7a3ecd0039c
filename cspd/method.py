"""What the engine knows: methods, one object each in the file that holds its round, and the hosts of their models.

`cspd.methods` is the registry. There is one host a family of models, `MARHost` and `VQHost`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from cspd.classes import ClassNames
from cspd.graphs import Graphs
from cspd.option import Option, check_integer, check_seed
from cspd.parsing import NO_CHARACTER, shortened
from cspd.precision import Precision, Stopwatch
from cspd.sequence import Request, Sequence

GUARANTEES = {
    "exact": "The images have the distribution of plain sampling with the same settings, to floating-point accuracy:"
    " proved and tested.",
    "measured": "Near plain sampling's distribution, and how near is measured: the distance of a token from the one"
    " that plain sampling makes of the same noise, and the divergence of its path.",
    "bounded": "The total variation from plain sampling's distribution is at most the measured bound.",
    "heuristic": "No proof: only the images say how good it is.",
}
# (a host of the method's family, sequences, stopwatch) -> those that are finished
RunRound = Callable[[Any, list[Sequence], Stopwatch], list[Sequence]]


def nothing_more(request: Request, host: Host) -> None:
    """A check of a method that has none of its own."""


def as_it_is(request: Request, host: Host) -> Request:
    """The request, where a method leaves nothing to be decided."""
    return request


@dataclass(frozen=True, eq=False)
class Method:
    """A way to decode.

    Attributes:
        name: by which a request asks for it. family: "MAR" or "VQ", whose models it decodes.
        guarantee: a key of `GUARANTEES`; of the default settings, see `guarantee_of`.
        summary: what it does, in a few words. papers: titles and links, by name or arXiv number.
        run_round: runs one batched round, (host, sequences, stopwatch) -> those that are finished.
        needs: what it needs beside the target: "draft model", "EAGLE drafter", "calibration", or nothing ("-").
        options: settings that only some methods have; an option follows those it depends on (`only_with`).
        mixed: settings that may differ between the sequences of one round, beside a resolved request.
        check: raises ValueError on a bad request whose options are good one by one.
        resolve: decides what a checked request leaves open.
        of_request: the guarantee of a resolved request, where settings change it.
        advice: what is wrong with the settings of a resolved request that may be meant all the same, and what to give;
            None where nothing is. It is a warning, and part of the error where tokens are not finite.
        uses: which models beside the target a resolved request needs, "draft" or "eagle".
        heat: what `Output.heat` shows of its tokens: head "calls", or which drafts were "accepted".
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
    heat: str = "accepted"

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


def with_tokens(request: Request, host: Host, shape: tuple[int, ...]) -> Request:
    """The request with what is known of its image as tokens of a host's model, of a shape.

    Raises ValueError as `Known.as_tokens`.
    """
    if request.known is None:
        return request
    check_seed(request.seed)
    seed = torch.tensor([request.seed])
    order = host.noise.order(seed, shape[0])[0]
    return dataclasses.replace(
        request, known=request.known.as_tokens(shape, functools.partial(host.encode, seed=seed), order)
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


class Host(Protocol):
    """Owns the models of a family and, in slots allocated once, the tensors of every running sequence.

    Attributes:
        family: "MAR" or "VQ". seq_len: tokens of an image. num_classes: labels are 0 .. num_classes - 1; 0: it makes
            images of texts.
        image_size: pixels of an image's side. graphs: runs what has a fixed shape. noise: functions of `cspd.noise`.
        encode: makes tokens, [L(, d)] on the CPU, of a picture (`cspd.known.Known`) for a seed, int64 [1].
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
        """Takes over what another host of the same models has measured."""

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


class Models(Protocol):
    """The models of a family: a dataclass of modules, and of their classes' names. `MARModels`, `VQModels`."""

    family: ClassVar[str]

    @property
    def classes(self) -> ClassNames:
        """The names of the classes."""

    def check(self) -> None:
        """Raises ValueError where the models do not fit each other."""

    def host(
        self,
        num_slots: int,
        device: torch.device,
        precision: Precision,
        noise: types.ModuleType,
        *,
        compiled: bool = False,
        graphs: Graphs | None = None,
        cache: Path | None = None,
    ) -> Host:
        """A host of these models, which fit and are on the device already. Raises ValueError on too little memory."""


def modules_of(models: Models) -> dict[str, nn.Module]:
    """The modules of a family's models, by name, without those that are not there."""
    parts = {field.name: getattr(models, field.name) for field in dataclasses.fields(models)}  # type: ignore[arg-type]
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}


def placed(models: Any, device: torch.device) -> Any:
    """The models on a device, in eval mode and frozen."""
    modules = {name: module.to(device).eval().requires_grad_(False) for name, module in modules_of(models).items()}
    return dataclasses.replace(models, **modules)
