"""The flags of every command, and their help.

Nothing here imports torch, so that help and typing errors appear at once. Flags that belong to methods are made from
the methods' own options, which need torch: `parser_of` is given the methods whose flags are wanted.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cspd.cli.listing import Owners, Use, uses
from cspd.option import BUNDLED, COMMON, DEFAULTS
from cspd.terminal import (
    API_KEY,
    MOST,
    __version__,
    api_key,
    box,
    closest,
    count,
    count_list,
    float_list,
    host_names,
    label_list,
    label_of,
    name_list,
    nats,
    number_list,
    place,
    seed,
    share,
    tolerance,
    whole,
    word,
    word_list,
)

if TYPE_CHECKING:
    from cspd.method import Method


MOST_THREADS = 1024  # more than this, and OpenMP ends the process
MOST_MINUTES = 24 * 60
FIRST_RUNG = 20  # images of each candidate of `cspd tune`, cspd.comparison.compare.FEWEST
USUAL_NUM = 500  # images that `cspd evaluate` samples
PRECISIONS = ("fp32", "tf32", "bf16")  # keys of cspd.device.POLICIES
SHOWN = ("num_iter", "cfg", "temperature")  # settings that the short help shows
CLASSES_HELP = "classes by number or name, like 0-9 or 1,5,seven"
ABOUT = """\
Samples autoregressive image models (MAR, LlamaGen and others) faster, by default without changing
the distribution of the images."""
EXAMPLES = """\
first steps:
  cspd sample --labels 3 --out three/
      one image of the bundled digit model, and how much faster it came than by baseline sampling
  cspd sample --checkpoint emoji64 --labels faces,flags --num 20 --method calibrated --out emoji/
      20 emojis with a tenth of the diffusion head's calls; `cspd methods` lists all methods
  cspd sample --checkpoint emoji64_text --prompt "a red heart" --num 8 --out hearts/
      a bundled text-to-image model (needs: pip install 'cspd[text]')
  cspd sample --checkpoint mar_large/ --vae kl16.ckpt --labels 207 --out dog/
      an official MAR checkpoint; checkpoints/README.md says where the files are
  cspd compare --methods speculative,calibrated --labels 0-9 --num 20
      the same seeds with each method and with ar: speed, quality and images, in a report

`cspd COMMAND --help` shows a command's usual flags and examples, `--help-all` all of them.
"""

STUDY_FORMAT = """\
a study's file (YAML): settings of all at the top, then the configurations; a list of values stands for one
configuration each, and two lists for every pair:

  num: 16                 # and labels or prompts, seed, max_batch: as the options of these names
  num_iter: 64            # any setting of a request: cfg, temperature, window, gamma, rule, delta, ...
  configurations:
    - method: speculative
    - method: cspd
      gamma: [8, 16]
    - method: ar
      seed: 1000          # other seeds than those of the rest: how much chance moves the numbers
    - name: the draft alone
      method: ar
      checkpoint: draft.safetensors     # and arch, vae, draft_checkpoint, eagle: models of its own

options on the command line come before the file's settings at the top.
"""


class Parser(argparse.ArgumentParser):
    """argparse's, but its help is short unless more is asked for, an error suggests the flag that was perhaps meant,
    and a flag is never guessed from its first letters.
    """

    takes_methods = False  # whether it has flags of methods
    methods: Sequence[Method] = ()  # whose flags it has

    def __init__(self, **options: Any) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(**{"allow_abbrev": False, "add_help": False, "formatter_class": raw, **options})

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def, override]
        """Rejects unknown arguments here: the command's own parser can suggest one of its flags."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        wrong: list[str] = []
        known: Collection[str] = []
        if choices := re.search(r"invalid choice: '?([^\s']*)'? \(choose from (.*)\)", message):
            wrong, known = [choices[1]], re.findall(r"[\w+.-]+", choices[2])
        elif message.startswith("unrecognized arguments: "):
            wrong = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
            known = [*self._option_string_actions]
        meant = [closest(word, known) for word in wrong]
        super().error("; ".join([message, *(f"did you mean {word}?" for word in meant if word)]))


class Help(argparse.Action):
    """`--help`: the flags that are not `rare`; `--help METHOD`: those of a method; `--help-all`: all."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def, override]
        for action in parser._actions:
            of_method = getattr(action, "of_method", False)
            is_rare = of_method or getattr(action, "is_rare", False)
            if not of_method if values else is_rare and option_string != "--help-all":
                action.help = argparse.SUPPRESS
        if values:
            parser.usage = f"{parser.prog} --method {values} [flags]"
            about = [f"{each.name} ({each.family} models, {each.guarantee}): {each.summary}" for each in parser.methods]
            parser.description = "\n".join(about)
            parser.epilog = f"`{parser.prog} --help` shows the flags that all methods share."
        parser.print_help()
        parser.exit()


def help_wanted(argv: Sequence[str]) -> str | None:
    """The help that a command line asks for: "all", a method's name, or "" for the usual flags; None without --help."""
    for this, following in zip(argv, [*argv[1:], "-"]):
        if this == "--help-all":
            return "all"
        if this.startswith("--help="):
            return this.partition("=")[2]
        if this in ("-h", "--help"):
            return "" if following.startswith("-") else following
    return None


def parser_of(argv: Sequence[str], methods: Sequence[Method] = ()) -> Parser:
    """The parser of a command line: with the flags of the command it names, and of `methods`."""
    listed = "\n".join(f"  {name:<10} {summary}" for name, (summary, _) in COMMANDS.items())
    top = Parser(
        prog="cspd", usage="cspd command [flags]", description=f"{ABOUT}\n\ncommands:\n{listed}", epilog=EXAMPLES
    )
    top.add_argument("-h", "--help", action="help", help="show this help")
    top.add_argument("--version", action="version", version=f"cspd {__version__}", help="show the version")
    commands = top.add_subparsers(dest="command", required=True, help=argparse.SUPPRESS, parser_class=Parser)
    for name, (_, declare) in COMMANDS.items():
        parser = commands.add_parser(name, prog=f"cspd {name}", usage=f"cspd {name} [flags]")
        if [name] == argv[:1]:
            parser.methods = methods
            declare(parser)
            _add_help(parser)
    return top


def _add_help(parser: Parser) -> None:
    """Adds --help and --help-all."""
    group = parser.add_argument_group("help")
    more = " or, with a method's name, the flags of that method" if parser.takes_methods else ""
    num = "?" if parser.takes_methods else 0
    group.add_argument("-h", "--help", action=Help, nargs=num, metavar="METHOD", help=f"show this help{more}")
    group.add_argument("--help-all", action=Help, nargs=0, help="show all flags")


def _rare(action: argparse.Action) -> None:
    """Leaves a flag out of the short help."""
    action.is_rare = True  # type: ignore[attr-defined]


# the commands


def _sample(parser: Parser) -> None:
    parser.description = (
        "Generates images into a folder: PNGs, grid.png and samples.json with all settings and statistics.\n"
        "The same command resumes an interrupted run."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd sample --labels 3 --out three/\n"
        "  cspd sample --checkpoint emoji64 --labels faces,flags --num 20 --method calibrated --out emoji/\n"
        "  cspd sample --checkpoint digits32_vq --draft eagle-static --rule cool-sd --delta 1.1 --out cool/\n"
        '  cspd sample --checkpoint emoji64_text --prompt "a red heart" --num 8 --out hearts/'
    )
    group = parser.add_argument_group("images")
    one_of = _add_subjects(group, f"{CLASSES_HELP}; none: unconditional (default: 0-9)", labels="0-9")
    one_of.add_argument("--prompt", type=word, metavar="TEXT", help="one prompt, for text-to-image models")
    group.add_argument(
        "--num", type=count, metavar="N", help="number of images; classes or prompts are cycled (default: one of each)"
    )
    _add_seed(group)
    group.add_argument("--out", type=place, metavar="FOLDER", default=Path("samples"), help="(default: %(default)s/)")
    _add_overwrite(group)
    _rare(group.add_argument("--heatmap", action="store_true", help="also write heatmap.png: the cost of every token"))
    _add_sampling(parser)
    _add_machine(parser)


def _edit(parser: Parser) -> None:
    parser.description = (
        "Regenerates a part of an image: inpainting (--mask), variations (--keep), outpainting (--place).\n"
        "A token covers a patch of pixels and is kept only if none of them is masked. The other tokens are\n"
        "sampled given the kept ones, with any method. VQ models generate in raster order, so they can keep\n"
        "only the first tokens of that order. An image of another size is cropped to a square and resized.\n"
        "grid.png shows it before and after."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd edit --image in.png --mask mask.png --label 7 --num 4 --out edited/\n"
        "  cspd edit --image in.png --keep 0.5 --label 7 --num 4 --out variations/\n"
        "  cspd edit --image in.png --place 8,8,16,16 --label 7 --out around/"
    )
    group = parser.add_argument_group("images")
    group.add_argument(
        "--image", type=place, metavar="FILE", required=True, help="PNG, JPEG, WebP, BMP, TIFF or GIF (required)"
    )
    where = group.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--mask",
        type=place,
        metavar="FILE",
        help="image of the same size: white is regenerated, black is kept, as in diffusers",
    )
    where.add_argument(
        "--keep", type=share, metavar="FRACTION", help="keep this fraction of the tokens, chosen by the seed"
    )
    where.add_argument(
        "--place",
        type=box,
        metavar="X,Y,W,H",
        help="resize the image into this box of the canvas, in pixels, and generate what surrounds it",
    )
    what = group.add_mutually_exclusive_group(required=True)
    what.add_argument("--label", type=label_of, metavar="CLASS", help="class to generate, by number or name")
    what.add_argument("--prompt", type=word, metavar="TEXT", help="prompt, for text-to-image models")
    _add_negative_prompt(group)
    group.add_argument("--num", type=count, metavar="N", default=1, help="number of images (default: %(default)s)")
    _add_seed(group)
    group.add_argument(
        "--paste",
        action="store_true",
        help="paste the original pixels over the kept area, blended over a token's width at its border (default: show"
        " the kept tokens as the autoencoder decodes them)",
    )
    group.add_argument("--out", type=place, metavar="FOLDER", default=Path("edited"), help="(default: %(default)s/)")
    _add_overwrite(group)
    _rare(
        group.add_argument("--heatmap", action="store_true", help="also write heatmap.png: the cost of every new token")
    )
    _add_sampling(parser)
    _add_machine(parser)


def _serve(parser: Parser) -> None:
    parser.description = (
        "Serves a page: pick a class or write a prompt, and watch two methods generate it side by side. Each\n"
        "model has one engine, whose slots are shared by the requests of all clients. It needs FastAPI and\n"
        "uvicorn: pip install 'cspd[serve]'."
    )
    parser.epilog = """\
examples:
  cspd serve
      the bundled models, on http://127.0.0.1:8000
  cspd serve --checkpoint pretrained_models/mar/mar_large --vae pretrained_models/vae/kl16.ckpt --max-batch 16
      an official MAR checkpoint, 16 images at a time
  ssh -L 8000:127.0.0.1:8000 machine
      shows the page of a machine that has a GPU in your own browser, without --host
  CSPD_API_KEY=$(openssl rand -hex 16) cspd serve --host 0.0.0.0
      lets other machines in, if they have the key: the page asks for it once

The page shows each image while it is generated, the cost of every token and the guarantee of each method.
Users can paint over an image to regenerate that part. docs/serve.md has more.
"""
    group = parser.add_argument_group("models")
    _add_checkpoint(group, several=True)
    group = parser.add_argument_group("clients")
    group.add_argument(
        "--host",
        type=word,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on; 0.0.0.0 lets other machines in: give an API key too (default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        type=api_key,
        default=os.environ.get(API_KEY),
        metavar="KEY",
        help=f"serve images only to clients that send this key. The environment variable {API_KEY} does the same, and"
        " other users of this machine cannot read it",
    )
    group.add_argument(
        "--allowed-hosts",
        type=host_names,
        default=[],
        metavar="LIST",
        help="other names of this server in the addresses that browsers show, such as a proxy's: demo.example.org,gpu1",
    )
    group.add_argument(
        "--port", type=whole(0, 65535), metavar="PORT", default=8000, help="0: any free one (default: %(default)s)"
    )
    _add_max_batch(group)
    group.add_argument(
        "--max-requests",
        type=count,
        metavar="N",
        default=32,
        help="images running and queued, of all clients (default: %(default)s)",
    )
    group.add_argument(
        "--max-per-visitor", type=count, metavar="N", default=4, help="the same of one client (default: %(default)s)"
    )
    _add_machine(parser)


def _compare(parser: Parser) -> None:
    parser.description = (
        "Generates the same seeds with several methods or settings, in turn, and writes what each costs and\n"
        "gives: a table, a plot, the images and a report of all of it (report.html). Baseline sampling (ar)\n"
        "at the same settings is always among them, and also with MAR's usual 64 iterations unless you list ar.\n"
        "The same command resumes an interrupted run."
    )
    parser.epilog = STUDY_FORMAT
    group = parser.add_argument_group("what to compare")
    group.add_argument(
        "--methods",
        type=name_list,
        metavar="LIST",
        help="any of `cspd methods`, settings after colons: ar,cspd:gamma=16:verify=sequential,ar:num_iter=16"
        " (default: ar,speculative)",
    )
    group.add_argument("--config", type=place, metavar="FILE", help="a study's file in place of --methods, see below")
    _add_subjects(group, f"{CLASSES_HELP} (default: 0-9)")
    group.add_argument("--num", type=count, metavar="N", help="images of each (default: 20)")
    group.add_argument("--seed", type=seed, metavar="N", help="of the first image; the next has the next (default: 0)")
    group.add_argument("--max-batch", type=count, metavar="N", help="images generated at once (default: 4)")
    group.add_argument(
        "--out", type=place, metavar="FOLDER", default=Path("comparison"), help="(default: %(default)s/)"
    )
    _add_overwrite(group)
    group = _add_judge(parser)
    _add_clip(group)
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    _add_settings(parser, group)
    _add_machine(parser)
    parser.set_defaults(checkpoint=None)


def _tune(parser: Parser) -> None:
    parser.description = (
        "Searches methods, their settings and numbers of iterations for the fastest way to sample on this\n"
        "machine that keeps the limits. It prints the Pareto front of speed and quality and the command to\n"
        "run, and writes a report (report.html). The same command resumes an interrupted search."
    )
    parser.epilog = """\
examples:
  cspd tune --max-batch 64 --tolerance fid=2%,accuracy=1%
      for many images: an FID at most 2 % above baseline sampling's, and at most 1 % fewer recognised
  cspd tune --max-batch 1 --num-iter 64 --exact --num 60
      lowest latency for a single image, exact methods only

All candidates generate 20 images, the better third of them 60, and so on up to --num. The limits are relative
to baseline sampling (ar) at your settings, which is also sampled with other seeds, to show what chance does.
"""
    parser.set_defaults(method=None)
    group = parser.add_argument_group("limits (one of them)").add_mutually_exclusive_group()
    group.add_argument(
        "--tolerance",
        type=tolerance,
        metavar="LIST",
        help="how much worse than baseline sampling: fid, is (Inception score), accuracy (fraction recognised), or"
        " several with commas (default: fid=2%%)",
    )
    group.add_argument(
        "--divergence",
        type=nats,
        metavar="D",
        help="only methods that are exact, or measured to be at most D nats per token from baseline sampling",
    )
    group.add_argument("--exact", action="store_true", help="only methods that keep baseline sampling's distribution")
    group = parser.add_argument_group("search")
    group.add_argument(
        "--labels", type=label_list, metavar="LIST", default="0-9", help=f"{CLASSES_HELP} (default: 0-9)"
    )
    group.add_argument(
        "--num",
        type=whole(FIRST_RUNG, MOST),
        metavar="N",
        default=120,
        help="images of each configuration in the last rung (default: %(default)s)",
    )
    _add_seed(group)
    _add_max_batch(group)
    group.add_argument("--out", type=place, metavar="FOLDER", default=Path("tuning"), help="(default: %(default)s/)")
    _add_overwrite(group)
    _add_judge(parser)
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    _add_settings(parser, group, of_methods=False)  # the search sets the methods' own
    _add_machine(parser)


def _evaluate(parser: Parser) -> None:
    parser.description = (
        "Samples images, or takes a folder of them, and measures them: FID, Inception score, KID, precision,\n"
        "recall, class accuracy and, for prompts, CLIP score. Image i has seed SEED + i. The same command\n"
        "resumes an interrupted run, with any number of processes:\n"
        "torchrun --nproc_per_node=8 -m cspd evaluate ... (docs/evaluate.md)."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd evaluate --num 500 --out evaluation/\n"
        "  cspd evaluate --images samples/ --out measured/\n"
        "  cspd evaluate --checkpoint mar_large/ --num 50000 --weights inception.pth --ref VIRTUAL_imagenet256.npz"
    )
    group = parser.add_argument_group("images")
    group.add_argument(
        "--num",
        "--num-images",  # torchrun takes --num for a short form of its own --numa-binding
        type=count,
        metavar="N",
        help=f"number of images (default: {USUAL_NUM}, or one of each prompt; in papers 50000); under torchrun write"
        " --num-images",
    )
    _add_subjects(group, f"{CLASSES_HELP} (default: all of the model)")
    _add_seed(group)
    group.add_argument(
        "--out",
        type=place,
        metavar="FOLDER",
        default=Path("evaluation"),
        help="for images and numbers (default: %(default)s/)",
    )
    _add_overwrite(group)
    group.add_argument(
        "--images",
        type=place,
        metavar="FOLDER",
        help="measure the images in this directory instead of sampling. Classes or prompts come from the files that"
        " `cspd sample` wrote, or from --prompts, one per image in natural sort order of the file names",
    )
    group = parser.add_argument_group("measures")
    group.add_argument(
        "--ref",
        type=place,
        metavar="FILE",
        help="the reference: an .npz with mu and sigma (for FID) or with images in arr_0 (for KID, precision and recall"
        " too), as ADM's, or a folder of images (default: the bundled models' training data, or none)",
    )
    _rare(
        group.add_argument(
            "--space",
            metavar="NAME",
            help="feature space: digits, emoji (the bundled classifiers') or inception (default: inception with"
            " --weights; or the bundled models' own; for other images the one of their size, such as digits for 32x32,"
            " or inception; for other images of prompts none without --ref)",
        )
    )
    group.add_argument(
        "--weights",
        type=place,
        metavar="FILE",
        help="Inception-v3 as torch-fidelity publishes it (default: its own download)",
    )
    _add_clip(group)
    _rare(
        group.add_argument(
            "--npz", type=place, metavar="FILE", help="also write the images as ADM's evaluator reads them"
        )
    )
    _add_sampling(parser)
    _add_machine(parser)
    parser.set_defaults(default_of=parser.get_default)


def _bench(parser: Parser) -> None:
    parser.description = (
        "Times sampling end to end on this machine, in one process, as speed-ups over baseline sampling (ar)."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8\n"
        "  cspd bench --vq --methods speculative,eagle2:gamma=4 --json vq.json"
    )
    group = parser.add_argument_group("what to time")
    group.add_argument(
        "--methods",
        type=name_list,
        metavar="LIST",
        help="against ar: any of `cspd methods`, options after colons (cool-sd:delta=1.5:gamma=4), and published, the"
        " authors' sampler (default: all methods but heuristic ones, and published)",
    )
    group.add_argument(
        "--vq",
        action="store_const",
        dest="checkpoint",
        const=BUNDLED["VQ"],
        default=argparse.SUPPRESS,
        help=f"the bundled VQ models: short for --checkpoint {BUNDLED['VQ']}",
    )
    group.add_argument(
        "--batch", type=count_list, metavar="LIST", default="1,8", help="batch sizes (default: %(default)s)"
    )
    group.add_argument("--runs", type=count, metavar="N", default=5, help="timed runs of each (default: %(default)s)")
    group.add_argument(
        "--queued", type=count, metavar="N", help="also report the peak memory of N requests at each batch size"
    )
    group.add_argument("--json", type=place, metavar="FILE", help="also write the numbers here")
    group.add_argument("--plot", type=place, metavar="PNG", help="also draw class accuracy against speed-up here")
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    _add_settings(parser, group, several=("num_iter", "cfg", "gamma", "verify"))
    _add_machine(parser)


def _gpu_check(parser: Parser) -> None:
    parser.description = (
        "Checks that a GPU computes what a CPU does and that no round waits for the host, and times all sizes\n"
        "with random weights; no files are needed. Every result is in --out as soon as it is there. The same\n"
        "command resumes an interrupted check. The exit status is 1 if something failed."
    )
    group = parser.add_argument_group("check")
    group.add_argument(
        "--out", type=place, metavar="FILE", default=Path("gpu.json"), help="the report (default: %(default)s)"
    )
    group.add_argument(
        "--minutes",
        type=whole(1, MOST_MINUTES),
        metavar="N",
        default=9,
        help="time budget for the whole check; cases that do not fit are reported as skipped, and run when the command"
        " is repeated (default: %(default)s)",
    )
    group.add_argument("--tiny", action="store_true", help="small models, in seconds, on a CPU too: try the command")
    _add_device(group)
    group.add_argument("--overwrite", action="store_true", help="start again if --out exists")
    group.add_argument("--show", type=place, metavar="FILE", help="print the tables of this report, and do nothing")


def _calibrate(parser: Parser) -> None:
    parser.description = (
        "Fits and caches the calibration that `speculative` or `calibrated` (--method) needs at these settings.\n"
        "Prints the fastest window on this device for each number of tokens (`speculative`), or the error\n"
        "against the full chain (`calibrated`)."
    )
    parser.epilog = "example:\n  cspd calibrate --checkpoint mar_large/ --vae kl16.ckpt --method calibrated --cfg 4"
    group = _add_sampling(parser, max_batch=False)
    group.add_argument("--force", action="store_true", help="time this device again, for `speculative`")
    _add_machine(parser)


def _methods(parser: Parser) -> None:
    parser.description = "Lists the methods: which models they decode, what they guarantee, what they need, and papers."
    group = parser.add_argument_group("form")
    group.add_argument("--markdown", action="store_true", help="as the table in docs/methods.md")
    group.add_argument("--options", action="store_true", help="the options of a request, as the table in docs/api.md")
    _rare(add_plugin(group))


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "sample": ("generate images into a folder", _sample),
    "edit": ("inpaint, vary or outpaint an image", _edit),
    "serve": ("show a page in the browser", _serve),
    "compare": ("compare methods on the same seeds: speed, quality, images", _compare),
    "tune": ("find the fastest settings for this machine within limits", _tune),
    "evaluate": ("measure FID, IS, KID, precision and recall of many images", _evaluate),
    "bench": ("time sampling on this machine", _bench),
    "gpu-check": ("check correctness and speed on this GPU", _gpu_check),
    "calibrate": ("prepare a method ahead of its first use", _calibrate),
    "methods": ("list the methods and their guarantees", _methods),
}


# the flags that commands share


def _add_subjects(
    group: argparse._ArgumentGroup, labels_help: str, labels: str | None = None
) -> argparse._MutuallyExclusiveGroup:
    """Flags of classes, and of prompts, of which one may be given. `labels`: the default."""
    one_of = group.add_mutually_exclusive_group()
    one_of.add_argument("--labels", type=label_list, metavar="LIST", default=labels, help=labels_help)
    one_of.add_argument(
        "--prompts",
        type=place,
        metavar="FILE",
        help="prompts for text-to-image models: one per line, or .json such as COCO captions (docs/text.md)",
    )
    _add_negative_prompt(group)
    return one_of


def _add_negative_prompt(group: argparse._ArgumentGroup) -> None:
    text = "guidance steers away from this prompt (default: the model's null caption)"
    _rare(group.add_argument("--negative-prompt", metavar="TEXT", help=text))


def _add_seed(group: argparse._ArgumentGroup) -> None:
    text = "of the first image; the next has the next (default: %(default)s)"
    group.add_argument("--seed", type=seed, metavar="N", default=0, help=text)


def _add_max_batch(group: argparse._ArgumentGroup) -> None:
    text = "images generated at once (default: %(default)s)"
    group.add_argument("--max-batch", type=count, metavar="N", default=8, help=text)


def _add_overwrite(group: argparse._ArgumentGroup) -> None:
    text = "replace the run with other settings that is in --out"
    _rare(group.add_argument("--overwrite", action="store_true", help=text))


def _add_judge(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("quality (default: the bundled models' classifier)")
    text = "reference: statistics (.npz as ADM's) or a folder of images"
    group.add_argument("--ref", type=place, metavar="FILE", help=text)
    text = "Inception-v3 as torch-fidelity publishes it"
    group.add_argument("--weights", type=place, metavar="FILE", help=text)
    return group


def _add_clip(group: argparse._ArgumentGroup) -> None:
    text = "a CLIP model, such as openai/clip-vit-large-patch14: scores how well images match their prompts"
    _rare(group.add_argument("--clip", type=place, metavar="FOLDER", help=text))


def _add_sampling(parser: Parser, max_batch: bool = True) -> argparse._ArgumentGroup:
    """Flags of the model, the method and its settings."""
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    defaults = " and ".join(dict.fromkeys(DEFAULTS.values()))
    text = f"`cspd methods` lists them (default: {defaults})"
    group.add_argument("--method", type=word, metavar="NAME", help=text)
    _add_settings(parser, group)
    if max_batch:
        _add_max_batch(group)
    return group


def _add_checkpoint(group: argparse._ArgumentGroup, several: bool = False) -> None:
    """The model, and the files that it is of. `several`: a list is taken, by default all bundled models that run."""
    usual = "all that can run here" if several else BUNDLED["MAR"]
    group.add_argument(
        "--checkpoint",
        type=word,
        nargs="+" if several else None,
        metavar="MODEL",
        default=None if several else usual,
        help="a bundled model (digits32, emoji64: MAR; digits32_vq, emoji64_text: VQ), a folder of official files or of"
        " a transformers model, a file, or a name on the Hugging Face hub (org/name)"
        + ("; or several" if several else "")
        + f" (default: {usual})",
    )
    text = "the autoencoder or tokenizer, if it is not next to the model"
    group.add_argument("--vae", type=place, metavar="FILE", help=text)
    text = "the model's size, such as mar_base or llamagen_xl (default: from the file)"
    _rare(group.add_argument("--arch", type=word, metavar="NAME", help=text))
    text = "a smaller model of the same tokens, for methods that draft, if it is not next to the model"
    _rare(group.add_argument("--draft-checkpoint", type=place, metavar="FILE", help=text))
    text = "the EAGLE drafter of a VQ model, if it is not next to the model; scripts/train_eagle.py trains one"
    _rare(group.add_argument("--eagle", type=place, metavar="FILE", help=text))
    text = (
        "the text encoder that a text-to-image model was trained with (FLAN-T5-XL for LlamaGen), if it is not in"
        " flan-t5-xl/ or text_encoder/ next to the model"
    )
    _rare(group.add_argument("--text-encoder", type=place, metavar="FOLDER", help=text))
    _rare(add_plugin(group))


def add_plugin(group: argparse._ActionsContainer) -> argparse.Action:
    """Read by `cspd.cli.options.load_plugins` before there is any other flag."""
    text = "a Python file that registers methods (docs/api.md)"
    return group.add_argument("--plugin", type=place, action="append", metavar="FILE", help=text)


def _add_device(group: argparse._ArgumentGroup) -> None:
    text = "auto, cpu, cuda or cuda:N (default: %(default)s)"
    group.add_argument("--device", metavar="NAME", default="auto", help=text)


def _add_machine(parser: Parser) -> None:
    """Flags of the device and how it computes."""
    group = parser.add_argument_group("machine")
    _add_device(group)
    text = "fp32: float32 throughout; tf32 and bf16: faster on a GPU (docs/precision.md) (default: %(default)s)"
    group.add_argument("--precision", default="fp32", choices=PRECISIONS, metavar="NAME", help=text)
    text = "compile MAR's speculative rounds and VQ models' layers: half a minute on first use, then faster"
    _rare(group.add_argument("--compile", action="store_true", help=text))
    text = "capture fixed-shape work as CUDA graphs (default: enabled on CUDA; not available on CPU)"
    _rare(group.add_argument("--graphs", action=argparse.BooleanOptionalAction, help=text))
    text = "CPU threads (default: torch's)"
    _rare(group.add_argument("--threads", type=whole(1, MOST_THREADS), metavar="N", help=text))


def _add_settings(
    parser: Parser, group: argparse._ArgumentGroup, several: Collection[str] = (), of_methods: bool = True
) -> None:
    """Flags of a request's settings: of whole families, and of the parser's `methods`.

    `several`: settings that are swept, for which a list is taken.
    """
    parser.takes_methods = of_methods
    special = parser.add_argument_group(
        "options of methods (for exact methods they change which image a seed gives, but not the distribution)"
    )
    family_wide = {use.option.name for use in uses()}
    by_name: dict[str, list[Use]] = {}
    for use in uses(parser.methods if of_methods else ()):
        by_name.setdefault(use.option.name, []).append(use)
    for name, same in by_name.items():
        owner = group if name in family_wide else special
        of_one = len(parser.methods) == 1 and name not in family_wide
        text = _help(same, without_owner=of_one or same[0].whose.owners == [*COMMON])
        action = owner.add_argument(same[0].option.flag, help=text, **_argument(same, name in several))
        action.of_method = name not in family_wide  # type: ignore[attr-defined]
        if name not in SHOWN:
            _rare(action)


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


def _help(same: list[Use], without_owner: bool) -> str:
    """What an option is to each of its owners, and their defaults."""
    parts = []
    for use in same:
        whose = f"{Owners(selected=use.whose.selected) if without_owner else use.whose}"
        default = f" (default: {use.default()})" if use.default() else ""
        parts.append(f"{whose}{whose and ': '}{use.option.help}{default}")
    return "; ".join(parts).replace("%", "%%")
