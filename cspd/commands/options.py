"""From the flags that commands share to what they ask for: plugins, requests, and an engine with its models."""

from __future__ import annotations

import argparse
import runpy
from collections.abc import Sequence
from pathlib import Path

import torch

from cspd.commands.flags import add_plugin
from cspd.engine import Engine
from cspd.finding import checkpoint_files, embedded, family_of
from cspd.keeping import identity_of
from cspd.loading import load
from cspd.lookup import choose, method_of
from cspd.method import Method
from cspd.methods import METHODS
from cspd.option import option_names
from cspd.pretrained import weight_files
from cspd.sequence import Request
from cspd.version import __version__
from cspd.vq.hosted.checkpoint import CONFIG, is_hosted
from cspd.vq.text import TextEncoder, missing_library


def embedded_here() -> list[str]:
    """The embedded models that this installation can run: those of texts need libraries of an extra."""
    complete = {name: folder for name, folder in embedded().items() if (folder / "target.safetensors").is_file()}
    of_classes = [name for name, folder in complete.items() if not (folder / "text_encoder").is_dir()]
    return of_classes if missing_library() else [*complete]


def load_plugins(argv: Sequence[str]) -> None:
    """Runs the files that --plugin names; the methods that they register have flags and help as all others.

    Raises:
        ValueError: a file registers nothing. FileNotFoundError, and what its own code raises.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_plugin(early)
    for file in early.parse_known_args(argv)[0].plugin or ():
        if not file.is_file():
            raise FileNotFoundError(f"--plugin {file}: no such file")
        before = list(METHODS)
        runpy.run_path(str(file), run_name=file.stem)
        if before == METHODS:
            raise ValueError(f"--plugin {file} registers no method: end it with cspd.register(...)")


def request_of(args: argparse.Namespace, label: int | str | None = 0, seed: int = 0, **changes: object) -> Request:
    """The request that the flags of settings ask for, with `changes`."""
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
    """The engine that the flags of models ask for."""
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
