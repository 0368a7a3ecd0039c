"""The options that commands share, which models and how a request is decoded, and what is made of them."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch

import cspd
from cspd.continuous import cspd_method
from cspd.continuous.calibration import DRAFTS
from cspd.discrete import rules
from cspd.discrete.validation import NEEDED
from cspd.engine import Engine
from cspd.loading import checkpoint_files, load
from cspd.precision import POLICIES
from cspd.sequence import Request
from cspd.validation import GUIDANCE_SCHEDULES
from cspd.vq.registry import GPTS
from mar.registry import MARS


def number_list(text: str) -> list[int]:
    """ "0-3,7" to [0, 1, 2, 3, 7]."""
    numbers = []
    try:
        for part in text.split(","):
            low, dash, high = part.partition("-")
            numbers.extend(range(int(low), int(high if dash else low) + 1))
    except ValueError:
        numbers = []
    if not numbers:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write it like 0-9 or 1,5,7-9")
    return numbers


def float_list(text: str) -> list[float]:
    """ "1,3" to [1.0, 3.0]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers: write it like 1,3") from None


def verify_list(text: str) -> list[str]:
    """ "parallel,sequential" to its parts."""
    if not set(text.split(",")) <= set(cspd_method.VERIFY):
        raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(cspd_method.VERIFY)}")
    return text.split(",")


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--checkpoint",
        default="digits32",
        help="an embedded name (digits32: MAR, digits32_vq: VQ), a folder with official files, or a target's file"
        " (default: digits32)",
    )
    group.add_argument("--arch", choices=[*MARS, *GPTS], help="the target's size (default: found out from the file)")
    group.add_argument("--vae", type=Path, help="the autoencoder's or tokenizer's file, where not beside the target")
    group.add_argument(
        "--draft-checkpoint",
        type=Path,
        metavar="FILE",
        help="a smaller model of the same tokens, for cspd and sd, where it is not beside the target",
    )
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    policies = "; ".join(f"{name}: {text}" for name, text in POLICIES.items())
    group.add_argument("--precision", default="fp32", choices=POLICIES, help=f"(default: %(default)s) {policies}")
    group.add_argument(
        "--compile",
        action="store_true",
        help="compile MAR's speculative rounds: half a minute on first use, then faster",
    )
    group.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")


def add_request_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Options of a request; `several` values of K, guidance, gamma and verify where settings are swept."""
    one = {"type": int}, {"type": float}, {"type": int}, {"choices": cspd_method.VERIFY}
    lists = (
        {"type": number_list},
        {"type": float_list},
        {"type": number_list},
        {"type": verify_list},
    )
    num_iter, cfg, gamma, verify = lists if several else one
    group = parser.add_argument_group("decoding (default: what the model's authors published)")
    group.add_argument(
        "--num-iter",
        metavar="K",
        help="autoregressive iterations, 1 .. number of tokens (of cspd: its guidance and prefill)",
        **num_iter,
    )
    group.add_argument("--cfg", metavar="S", help="guidance scale; 1 is no guidance", **cfg)
    group.add_argument("--cfg-schedule", choices=GUIDANCE_SCHEDULES, help="how guidance runs over the iterations")
    group.add_argument(
        "--temperature", type=float, metavar="TAU", help="of MAR's denoising noise, or of the codes' distribution"
    )
    group.add_argument("--num-sampling-steps", type=int, metavar="T", help="denoising steps a token")
    group.add_argument("--top-k", type=int, metavar="K", help="VQ: likeliest codes that are kept; 0: all")
    group.add_argument("--top-p", type=float, metavar="P", help="VQ: mass of the likeliest codes that are kept; 1: all")
    group = parser.add_argument_group(
        "how far ahead, and by what (an exact method's images depend on it, its law does not)"
    )
    group.add_argument(
        "--window",
        type=int,
        metavar="W",
        help="speculative: denoising steps drafted ahead (default: this device's fastest; 0: none); Jacobi: codes"
        " judged at once (default: 64)",
    )
    drafts = "; ".join(f"{name}: {text}" for name, text in DRAFTS.items())
    group.add_argument(
        "--draft",
        choices=[*DRAFTS, *NEEDED],
        help=f"speculative: how the head's output is guessed (default: calibrated) {drafts}. VQ: {', '.join(NEEDED)}",
    )
    defaults = "cspd 8,16" if several else "cspd 8, chain and EAGLE 5, EAGLE-2 6"
    group.add_argument(
        "--gamma", help=f"tokens a draft model drafts a round, or a tree's height (default: {defaults})", **gamma
    )
    group.add_argument("--pd-k", type=int, metavar="K", help="Jacobi: candidates a level of the comb (sjd-pac: 4)")
    group.add_argument("--pd-d", type=int, metavar="D", help="Jacobi: levels of the comb (sjd-pac: 3)")
    group.add_argument(
        "--continuation",
        action=argparse.BooleanOptionalAction,
        help="Jacobi: keep codes after a rejection where they can be (sjd-pac does)",
    )
    group = parser.add_argument_group("how drafted VQ codes are accepted (any rule with any draft)")
    group.add_argument("--rule", choices=rules.NAMES, help="(default: the method's)")
    group.add_argument("--delta", type=float, help="uniform-rsd, cool-sd: relaxation; lantern: mass of the neighbours")
    group.add_argument("--schedule", choices=rules.SCHEDULES, help="cool-sd: of the relaxation (default: exponential)")
    group.add_argument("--nu", type=float, help="cool-sd: its decay (default: 0.7)")
    group.add_argument("--lam", type=float, help="lantern++: neighbours' mass over the code's own (the paper's less 1)")
    group.add_argument("--k", type=int, help="lantern, lantern++: neighbours at most")
    group.add_argument("--metric", choices=rules.METRICS, help="lantern, lantern++: of neighbours (default: l2)")
    group.add_argument(
        "--optimal",
        action=argparse.BooleanOptionalAction,
        help="resample from G* (default), or as the papers' code does (default of lantern, lantern++)",
    )
    group = parser.add_argument_group("cspd")
    group.add_argument(
        "--verify",
        help="parallel: from the verified prefix; sequential: after each other (default: parallel)",
        **verify,
    )
    group.add_argument(
        "--ratio-temperature",
        type=float,
        metavar="X",
        help="tempers the last step's ratio (default: 42; 1: the paper's)",
    )
    group.add_argument("--no-align", action="store_true", help="draft and target denoise with noise of their own")
    group.add_argument(
        "--prefill", type=float, metavar="P", help="share of tokens the target makes first (default: 0.05)"
    )
    group.add_argument("--chains", choices=cspd_method.CHAINS, help="how both models denoise (default: ancestral)")


def request_of(args: argparse.Namespace, label: int = 0, seed: int = 0, **changes: object) -> Request:
    """The request that the options of `add_request_options` ask for, with `changes`."""
    names = [f.name for f in dataclasses.fields(Request) if hasattr(args, f.name)]
    settings = {name: getattr(args, name) for name in names if name not in ("label", "seed")} | changes
    return Request(label=label, seed=seed, align=False if args.no_align else None, **settings)


def run_settings(args: argparse.Namespace, request: Request) -> dict:
    """What images depend on beside their requests: version, rounding, and the files that a checked request uses."""
    files = checkpoint_files(args.checkpoint)
    decoder = "tokenizer" if "tokenizer" in files else "vae"
    used = {"target": files["target"], decoder: args.vae or files[decoder]}
    if request.method == "cspd" or request.draft == "chain":
        used["draft"] = args.draft_checkpoint or files["draft"]
    if request.draft in ("eagle-static", "eagle-dynamic"):
        used["eagle"] = files["eagle"]
    settings = {"version": cspd.__version__, "precision": args.precision, "compiled": args.compile}
    for name, file in used.items():
        if file is not None:
            file = file.resolve()
            settings[name] = {"file": str(file), "bytes": file.stat().st_size, "modified": file.stat().st_mtime_ns}
    return settings


def load_engine(args: argparse.Namespace, max_batch: int) -> Engine:
    """The engine that the options of `add_model_options` ask for."""
    if args.threads:
        torch.set_num_threads(args.threads)
    return load(
        args.checkpoint,
        arch=args.arch,
        vae=args.vae,
        draft=args.draft_checkpoint,
        max_batch=max_batch,
        device=args.device,
        precision=args.precision,
        compiled=args.compile,
    )
