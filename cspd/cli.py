"""The command line: `cspd sample`, `cspd compare` and the others, as `cspd --help` has them."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import sys

from cspd.parsing import Parser
from cspd.stopping import Stopped, follow_launcher, stoppable
from cspd.telling import telling
from cspd.version import __version__

BROKEN_PIPE = 141  # as a shell has it of a process that SIGPIPE ended
EPILOG = """\
examples:
  cspd sample --labels 0-9 --num 40 --out samples/
      40 images of the embedded digits model: PNGs, grid.png and samples.json
  cspd sample --checkpoint emoji64 --labels faces,flags --num 20 --method calibrated --out emoji/
      the embedded emojis, by 10 calls of the diffusion head for each token in place of 100
  cspd sample --checkpoint pretrained_models/mar/mar_large --vae pretrained_models/vae/kl16.ckpt --labels 207 --out dog/
      an official MAR checkpoint (checkpoints/README.md says where to get one)
  cspd sample --checkpoint digits32_vq --draft eagle-static --rule cool-sd --delta 1.1
      VQ codes: any draft with any acceptance rule; `--method cool-sd` is such a pair by its published name
  cspd sample --checkpoint emoji64_text --prompt "a red heart" --num 8 --out hearts/
      the embedded model of texts; LlamaGen's, Janus-Pro, Anole, Lumina-mGPT and Emu3: docs/text.md
  cspd edit --image in.png --mask mask.png --label 207 --num 4 --out edited/
      makes what is white in the mask anew; `--keep 0.5`: variations; `--place 64,64,128,128`: what is around a picture
  cspd serve
      a page in the browser: two methods side by side, inpainting with a brush, many visitors on one engine
  cspd compare --methods speculative,cspd:gamma=8,cspd:gamma=16 --num 20 --out comparison/
      the same seeds by each, and by plain sampling: speed, cost, quality, whether the distributions differ, pictures
  cspd tune --max-batch 64 --tolerance fid=2%
      the fastest way to sample on this machine whose FID is at most 2 % worse, and what else there is to choose from
  cspd evaluate --num 500 --out evaluation/
      FID, Inception score, KID, precision, recall and class accuracy of 500 images; many GPUs: docs/evaluate.md
  cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8
      how fast this machine is, against plain MAR and MAR's sampler as published; `cspd bench --vq`: VQ methods
  cspd gpu-check --out gpu.json --minutes 9
      whether this GPU computes what a CPU does, and how fast every size is on it; no files are needed
  cspd calibrate --checkpoint pretrained_models/mar/mar_large --vae pretrained_models/vae/kl16.ckpt
      what `speculative` does on first use, ahead of time
  cspd methods
      what can be run, and what each method guarantees
"""


def _parser() -> argparse.ArgumentParser:
    from cspd.commands import (
        bench,
        calibrate,
        compare,
        edit,
        evaluate,
        gpu_check,
        methods,
        sample,
        serve,
        tune,
    )  # takes seconds: see `main`

    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="cspd",
        description="Fast sampling of autoregressive image models, with tested guarantees.",
        epilog=EPILOG,
        formatter_class=raw,
    )
    parser.add_argument("--version", action="version", version=f"cspd {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for command in (sample, edit, serve, compare, tune, evaluate, bench, gpu_check, calibrate, methods):
        command.add(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status.

    That is 0, or 1 where a check failed, or 2 after an error of the user's, which is printed in one line, or 128 + n
    after signal n, with what was done and how to go on.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show does not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with stoppable():  # before anything is imported that takes time
            follow_launcher()
            return _run(argv)
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":  # one of several processes speaks for all
            print(f"cspd: stopped{stop.done and ': '}{stop.done}", file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:  # `cspd methods | head -1`: nobody reads on, and nobody is to be told when Python flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(argv: list[str] | None) -> int:
    with telling("starting") if sys.stderr.isatty() else contextlib.nullcontext():
        import torch

        from cspd.commands.options import load_plugins

    try:
        load_plugins(sys.argv[1:] if argv is None else argv)
        args = _parser().parse_args(argv)
        args.line = shlex.join(["cspd", *(sys.argv[1:] if argv is None else argv)])  # as reports name it
        status = args.run(args)
        sys.stdout.flush()  # while an error can still be told
    except BrokenPipeError:
        raise
    except (ValueError, OSError, FloatingPointError, torch.OutOfMemoryError) as error:
        print(f"cspd: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except Stopped as stop:
        if stop.done:
            anew = " without --overwrite" if args.overwrite else ""
            stop.done += f"; the same command{anew} goes on from here"
        raise
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
