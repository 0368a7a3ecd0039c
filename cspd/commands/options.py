"""The options that commands share: which models, and how a request is decoded, from the methods' own tables."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from cspd.engine import Engine
from cspd.finding import checkpoint_files, embedded, family_of
from cspd.keeping import identity_of
from cspd.listing import Use, uses
from cspd.loading import load
from cspd.lookup import choose, method_names, method_of
from cspd.method import Method
from cspd.methods import COMMON, DEFAULTS, EMBEDDED, METHODS
from cspd.option import option_names
from cspd.parsing import float_list, number_list, place, whole, word, word_list
from cspd.precision import POLICIES
from cspd.pretrained import weight_files
from cspd.sequence import Request
from cspd.version import __version__
from cspd.vq.hosted.checkpoint import CONFIG, is_hosted
from cspd.vq.registry import GPTS
from cspd.vq.text import TextEncoder, missing_library
from mar.registry import MARS

MOST_THREADS = 1024  # more than this, and OpenMP ends the process


def add_model_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """`several`: a list of checkpoints is taken, by default all embedded ones that can run here."""
    usual = _embedded_here() if several else [EMBEDDED["MAR"]]
    group = parser.add_argument_group("model")
    group.add_argument(
        "--checkpoint",
        type=word,
        nargs="+" if several else None,
        default=usual if several else usual[0],
        help="an embedded name (digits32, emoji64: MAR; digits32_vq, emoji64_text: VQ), a folder with official files or"
        " of a model of transformers, a target's file, or a name on the Hugging Face hub (org/name)"
        + ("; or several" if several else "")
        + f" (default: {' '.join(usual)})",
    )
    group.add_argument("--arch", choices=[*MARS, *GPTS], help="the target's size (default: found out from the file)")
    group.add_argument("--vae", type=place, help="the autoencoder's or tokenizer's file, where not beside the target")
    group.add_argument(
        "--draft-checkpoint",
        type=place,
        metavar="FILE",
        help="a smaller model of the same tokens, for methods that draft, where it is not beside the target",
    )
    group.add_argument(
        "--eagle",
        type=place,
        metavar="FILE",
        help="the EAGLE drafter of a VQ target, where it is not beside it; scripts/train_eagle.py makes one",
    )
    group.add_argument(
        "--text-encoder",
        type=place,
        metavar="FOLDER",
        help="for models of texts: the encoder that the target was trained with (FLAN-T5-XL of LlamaGen's own), where"
        " it is not in flan-t5-xl/ or text_encoder/ beside the target",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    policies = "; ".join(f"{name}: {text}" for name, text in POLICIES.items())
    group.add_argument("--precision", default="fp32", choices=POLICIES, help=f"(default: %(default)s) {policies}")
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile MAR's speculative rounds and VQ models' layers: half a minute on first use, then faster",
    )
    group.add_argument(
        "--graphs",
        action=argparse.BooleanOptionalAction,
        help="replay what is launched again and again as CUDA graphs (default: on a GPU; there are none on a CPU)",
    )
    add_plugin_option(group)
    group.add_argument("--threads", type=whole(1, MOST_THREADS), help="CPU threads (default: torch's)")


def _embedded_here() -> list[str]:
    """The embedded models that this installation can run: those of texts need libraries of an extra."""
    complete = {name: folder for name, folder in embedded().items() if (folder / "target.safetensors").is_file()}
    of_classes = [name for name, folder in complete.items() if not (folder / "text_encoder").is_dir()]
    return of_classes if missing_library() else [*complete]


def add_plugin_option(group: argparse._ActionsContainer) -> None:
    """Read by `load_plugins` before there is any parser."""
    group.add_argument(
        "--plugin",
        type=place,
        action="append",
        metavar="FILE",
        help="a Python file that registers methods (docs/api.md)",
    )


def load_plugins(argv: Sequence[str]) -> None:
    """Runs the files that --plugin names; the methods that they register have flags and help as all others.

    Raises:
        ValueError: a file registers nothing. FileNotFoundError, and what its own code raises.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_plugin_option(early)
    for file in early.parse_known_args(argv)[0].plugin or ():
        if not file.is_file():
            raise FileNotFoundError(f"--plugin {file}: no such file")
        before = list(METHODS)
        runpy.run_path(str(file), run_name=file.stem)
        if before == METHODS:
            raise ValueError(f"--plugin {file} registers no method: end it with cspd.register(...)")


def add_method_option(parser: argparse.ArgumentParser) -> None:
    defaults = ", ".join(f"{name} of {family}" for family, name in DEFAULTS.items())
    group = parser.add_argument_group("method")
    group.add_argument("--method", choices=method_names(), help=f"see `cspd methods` (default: {defaults} models)")


def add_request_options(
    parser: argparse.ArgumentParser, several: Collection[str] = (), only_common: bool = False
) -> None:
    """Flags of all options of a request; of those in `several` a list is taken, where settings are swept.

    `only_common`: those that all methods of a family have.
    """
    common = parser.add_argument_group("decoding (default: what the model's authors published)")
    special = parser.add_argument_group(
        "options of some methods (an exact method's images depend on them, their distribution does not)"
    )
    shared = {option.name for options in COMMON.values() for option in options}
    by_name: dict[str, list[Use]] = {}
    for use in uses():
        if use.option.name in shared or not only_common:
            by_name.setdefault(use.option.name, []).append(use)
    for name, same in by_name.items():
        group = common if name in shared else special
        group.add_argument(same[0].option.flag, help=_help(same), **_argument(same, name in several))


def _argument(same: list[Use], several: bool) -> dict:
    """How argparse takes an option: its type, or the words of all methods that have one of this name."""
    option = same[0].option
    if option.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(option.kind, type):
        parse = {int: number_list, float: float_list}[option.kind] if several else option.kind
        return {"type": parse, "metavar": option.metavar or option.name.upper()}
    words = list(dict.fromkeys(word for use in same for word in use.option.kind))
    return {"type": word_list(words), "metavar": ",".join(words)} if several else {"choices": words}


def _help(same: list[Use]) -> str:
    """What an option is to each of its owners, and their defaults."""
    parts = [
        f"{use.whose}: {use.option.help}" + (f" (default: {use.default()})" if use.default() else "") for use in same
    ]
    return "; ".join(parts).replace("%", "%%")


def request_of(args: argparse.Namespace, label: int | str | None = 0, seed: int = 0, **changes: object) -> Request:
    """The request that the options of `add_request_options` ask for, with `changes`."""
    given = {name: getattr(args, name) for name in sorted(option_names()) if hasattr(args, name)}
    return Request(label, seed, getattr(args, "method", None), **given | changes)


def check_method(args: argparse.Namespace) -> Method:
    """The method that is asked for, which is known before loading.

    Raises ValueError where the checkpoint's models lack it or an option.
    """
    return choose(request_of(args), [family_of(args.checkpoint)])[1]


def run_settings(args: argparse.Namespace, request: Request) -> dict:
    """What images depend on beside their requests: version, rounding, and the files that a checked request uses."""
    files = checkpoint_files(args.checkpoint)
    decoder = "tokenizer" if "tokenizer" in files else "vae"
    used = {"target": files["target"], decoder: args.vae or files[decoder]}
    given = {"draft": args.draft_checkpoint, "eagle": args.eagle}
    for name in sorted(method_of(request).uses(request)):
        used[name] = given[name] or files[name]
    settings = {"version": __version__, "precision": args.precision, "compiled": args.compile, "graphs": args.graphs}
    encoder = args.text_encoder or files.get("text_encoder")
    if request.prompt is not None and encoder is not None:
        settings["text_encoder"] = TextEncoder(encoder).identity
    for name, file in used.items():
        if file is not None:
            settings[name] = _stored(file)
    return settings


def _stored(file: Path) -> dict:
    """By what a run knows the file of a model again; of a model of `transformers`, all files of its folder."""
    more: dict = {}
    weights = [file]
    if is_hosted(file):
        file = file / CONFIG if file.is_dir() else file
        weights = weight_files(file.parent)
        more["folder"] = identity_of(file.parent)
    file, size = file.resolve(), sum(each.stat().st_size for each in weights)
    return {"file": str(file), "bytes": size, "modified": file.stat().st_mtime_ns, **more}


def load_engine(args: argparse.Namespace, max_batch: int) -> Engine:
    """The engine that the options of `add_model_options` ask for."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return load(
        args.checkpoint,
        arch=args.arch,
        vae=args.vae,
        draft=args.draft_checkpoint,
        eagle=args.eagle,
        text_encoder=args.text_encoder,
        max_batch=max_batch,
        device=args.device,
        precision=args.precision,
        compiled=args.compile,
        graphs=args.graphs,
    )
