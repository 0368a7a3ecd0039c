"""The flags of every command, and their help.

Nothing here imports torch, so that help and typing errors appear at once. The flags of methods are made from the
methods' own options, which need torch: callers pass `parser_of` the methods whose flags are wanted.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cspd.cli.listing import Use, uses
from cspd.option import BUNDLED, DEFAULTS, FAMILIES, method_now
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
    fraction,
    host_names,
    label_list,
    label_of,
    name_list,
    nats,
    networks,
    number_list,
    part,
    path_argument,
    prompt,
    seed,
    tolerance,
    utf8,
    whole,
    word,
    word_list,
)

if TYPE_CHECKING:
    from cspd.method import Method


MOST_THREADS = 1024  # with more, OpenMP ends the process
MOST_MINUTES = 24 * 60
FIRST_RUNG = 20  # images per candidate in the first rung of `cspd tune`: FEWEST in comparison/compare.py
USUAL_NUM = 500  # images of `cspd evaluate`
PRECISIONS = ("fp32", "tf32", "bf16")  # the keys of POLICIES in device.py
SHOWN = ("num_iter", "cfg", "temperature", "num_sampling_steps")  # settings in the short help
SHOWN_OF_METHODS = {  # and these of methods; the short help cannot import the methods, since they need torch
    "--budget": ("NATS", "with --method budget: how much a token's distribution may change; 0: exact (default: 0.3)"),
    "--head-calls": ("N", "with --method calibrated: head calls per token; fewer: faster, less exact (default: 10)"),
}
CLASSES_HELP = "classes by number or name, such as 0-9 or 1,5,seven"
ABOUT = """\
Fast sampling from autoregressive image models (MAR, SphereAR, BitDance, LlamaGen and others), by
default without changing the distribution of the images."""
EXAMPLES = """\
first steps:
  cspd sample --labels 3 --out three/
      one image of the digit 3, with a bundled model; prints the speed-up over baseline sampling
  cspd sample --checkpoint emoji64 --labels faces,flags --num 20 --method calibrated --out emoji/
      20 emojis with a tenth of the diffusion head's calls; `cspd methods` lists all methods
  cspd sample --checkpoint emoji64_text --prompt "a red heart" --num 8 --out hearts/
      a bundled text-to-image model (needs: pip install '.[text]' in a clone)
  cspd sample --checkpoint mar_large/ --vae kl16.ckpt --labels 207 --out dog/
      an official MAR checkpoint; docs/checkpoints.md says where to get the files
  cspd edit --image three/00000_label3_seed0.png --keep 0.5 --label 3 --num 4 --out variations/
      variations of an image; `cspd edit --help` shows how to inpaint and outpaint
  cspd compare --methods speculative,calibrated --labels 0-9 --num 20
      the same seeds with each method and with ar; reports speed, quality and the images

`cspd COMMAND --help` shows a command's most used flags and examples, `--help-all` shows every flag.
"""

STUDY_FORMAT = """\
example:
  cspd compare --methods speculative,calibrated:head_calls=5 --labels 0-9 --num 20

A study file (YAML) has common settings at the top, then the configurations. A list of values means one
configuration per value, and two lists mean one per pair:

  num: 16                 # also labels or prompts, seed, max_batch: like the flags of these names
  num_iter: 64            # any setting of a request: cfg, temperature, window, gamma, rule, delta, ...
  configurations:
    - method: speculative
    - method: cspd
      gamma: [8, 16]
    - method: ar
      seed: 1000          # other seeds than the rest: shows how much the numbers vary by chance
      max_batch: [1, 8]   # another batch size, compared with ar of the same
      paper: {fid: 1.55}  # a paper's numbers, shown beside ours; of lists, one per configuration
    - name: the draft model alone
      method: ar
      checkpoint: draft.safetensors     # also arch, vae, draft_checkpoint, eagle: its own models

Flags on the command line override the settings at the top of the file.
"""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose short help leaves out rare flags, and whose errors suggest the flag that was meant.

    Flags cannot be abbreviated.
    """

    takes_methods = False  # whether the command has flags of methods
    methods: Sequence[Method] = ()  # the methods whose flags it has

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
        """Exits with status 2, after suggesting the valid words that were probably meant."""
        typed: list[str] = []
        valid: Collection[str] = []
        # argparse passes only the finished message, so the typed and the valid words are parsed from it
        choices = re.search(r"invalid choice: '?([^\s']*)'? \(choose from (.*)\)", message)
        if choices:
            typed = [choices[1]]
            valid = re.findall(r"[\w+.-]+", choices[2])
        elif message.startswith("unrecognized arguments: "):
            typed = [part.partition("=")[0] for part in message.split() if part.startswith("--")]
            valid = self._option_string_actions.keys()
        for wrong in typed:
            meant = closest(wrong, valid)
            if meant:
                message += f"; did you mean {meant}?"
        super().error(message)


class Help(argparse.Action):
    """`--help` shows the flags that are not rare, `--help METHOD` the flags of a method, `--help-all` every flag."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def, override]
        is_all = option_string == "--help-all"
        for action in parser._actions:
            of_method = getattr(action, "of_method", False)
            if values:
                is_hidden = not of_method
            else:
                is_hidden = of_method or (getattr(action, "is_rare", False) and not is_all)
            if is_hidden:
                action.help = argparse.SUPPRESS
        if parser.takes_methods and not values:
            _show_methods(parser) if is_all else _show_few(parser)
            parser._action_groups.sort(key=lambda group: group.title == "help")  # at the end
        if values:
            parser.usage = f"{parser.prog} --method {method_now(values)} [flags]"
            about = [f"{each.name} ({each.family} models, {each.guarantee}): {each.summary}" for each in parser.methods]
            families = dict.fromkeys(each.family for each in parser.methods)
            about += [f"{family} models are {FAMILIES[family]}" for family in families]
            parser.description = "\n".join(about)
            parser.epilog = f"`{parser.prog} --help` shows the flags that all methods share."
        parser.print_help()
        parser.exit()


def _show_few(parser: Parser) -> None:
    """Adds the most used flags of methods to the help."""
    group = parser.add_argument_group("methods (--help METHOD shows all flags of one)")
    for flag, (metavar, text) in SHOWN_OF_METHODS.items():
        _show(group, flag, {"metavar": metavar}, text)


def _show_methods(parser: Parser) -> None:
    """Adds the flags of methods to the help, by what has them: a flag with several meanings is shown with each."""
    family_wide = {use.option.name for use in uses()}
    names = {each.name for each in parser.methods}
    groups: dict[str, argparse._ArgumentGroup] = {}
    for use in uses(parser.methods):
        if use.option.name not in family_wide:
            section = use.section(names)
            if section not in groups:
                groups[section] = parser.add_argument_group(section)
            default = use.default()
            text = f"{use.option.help} (default: {default})" if default else use.option.help
            _show(groups[section], use.option.flag, _argument([use], several=False), text)


def _show(group: argparse._ArgumentGroup, flag: str, kind: dict, text: str) -> None:
    """Shows a flag in the help. The parser is not told of it: it has the flag already, or it ends with the help."""
    shown = argparse.ArgumentParser(add_help=False).add_argument(flag, help=text.replace("%", "%%"), **kind)
    group._group_actions.append(shown)


def help_wanted(argv: Sequence[str]) -> str | None:
    """The help that a command line asks for: "all", a method's name, or "" for the short help; None without --help."""
    # needed before argparse runs: it decides whether torch is imported
    for this, following in zip(argv, [*argv[1:], "-"]):
        if this == "--help-all":
            return "all"
        if this.startswith("--help="):
            return this.partition("=")[2]
        if this in ("-h", "--help"):
            return "" if following.startswith("-") else following
    return None


def parser_of(
    argv: Sequence[str], methods: Sequence[Method] = (), defaults: Mapping[str, object] | None = None
) -> Parser:
    """The parser for a command line: it has the flags of the command that `argv` names, and of `methods`.

    Args:
        defaults: values for flags of the command in place of their own defaults.
    """
    listed = [f"  {name:<10} {summary}" for name, (summary, _) in COMMANDS.items()]
    description = "\n".join([ABOUT, "", "commands:", *listed])
    top = Parser(prog="cspd", usage="cspd COMMAND [flags]", description=description, epilog=EXAMPLES)
    top.add_argument("-h", "--help", action="help", help="show this help")
    top.add_argument("--version", action="version", version=f"cspd {__version__}", help="show the version")
    commands = top.add_subparsers(dest="command", required=True, help=argparse.SUPPRESS, parser_class=Parser)
    for name, (_, declare) in COMMANDS.items():
        parser = commands.add_parser(name, prog=f"cspd {name}", usage=f"cspd {name} [flags]")
        # the flags of the other commands are never needed, and take time
        if [name] == argv[:1]:
            parser.methods = methods
            declare(parser)
            parser.set_defaults(**defaults or {})
            _add_help(parser)
    return top


def _add_help(parser: Parser) -> None:
    group = parser.add_argument_group("help")
    text = "show this help"
    if parser.takes_methods:
        group.add_argument(
            "-h", "--help", action=Help, nargs="?", metavar="METHOD", help=f"{text}; with a method's name, its flags"
        )
    else:
        group.add_argument("-h", "--help", action=Help, nargs=0, help=text)
    group.add_argument("--help-all", action=Help, nargs=0, help="show every flag")


def _rare(action: argparse.Action) -> None:
    """Leaves a flag out of the short help."""
    action.is_rare = True  # type: ignore[attr-defined]


# The commands.


def _sample(parser: Parser) -> None:
    parser.description = (
        "Generates images into a folder: PNGs, grid.png and samples.json with all settings and statistics.\n"
        "Run the same command again to resume an interrupted run. For many machines: --shard, --ray (docs/many.md)."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd sample --labels 3 --out three/\n"
        "  cspd sample --checkpoint emoji64 --labels faces,flags --num 20 --method calibrated --out emoji/\n"
        '  cspd sample --checkpoint emoji64_text --prompt "a red heart" --num 8 --out hearts/'
    )
    group = parser.add_argument_group("images")
    one_of = _add_subjects(group, f"{CLASSES_HELP}; none: unconditional")
    one_of.add_argument("--prompt", type=prompt, metavar="TEXT", help="one prompt, for text-to-image models")
    add_like(one_of)
    text = "number of images; classes or prompts are cycled (default: one of each)"
    group.add_argument("--num", "--num-images", type=count, metavar="N", help=text)
    _add_seed(group)
    _add_out(group, "samples", word)
    _add_heatmap(group)
    _add_parts(parser)
    _add_sampling(parser)
    _add_machine(parser)


def _edit(parser: Parser) -> None:
    parser.description = (
        "Regenerates a part of an image: inpainting (--mask), variations (--keep), outpainting (--place).\n"
        "A token covers a patch of pixels and is kept only if none of them is masked. The other tokens are\n"
        "sampled given the kept ones, with any method. VQ and causal models generate in raster order: they can keep\n"
        "only the first tokens of that order. An image of another size is cropped to a square and resized.\n"
        "grid.png shows the image before and after."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd edit --image in.png --mask mask.png --label 7 --num 4 --out edited/\n"
        "      inpaints the white area of the mask\n"
        "  cspd edit --image in.png --keep 0.5 --label 7 --num 4 --out variations/\n"
        "      keeps half of the tokens\n"
        "  cspd edit --image in.png --place 8,8,16,16 --label 7 --out around/\n"
        "      outpaints around the image"
    )
    group = parser.add_argument_group("images")
    text = "the image: PNG, JPEG, WebP, BMP, TIFF or GIF (required)"
    group.add_argument("--image", type=path_argument, metavar="FILE", required=True, help=text)
    part = group.add_mutually_exclusive_group(required=True)
    _add_path(part, "--mask", "FILE", "image of the same size: white is regenerated, black is kept, as in diffusers")
    text = "keep this fraction of the tokens, chosen by the seed"
    part.add_argument("--keep", type=fraction, metavar="FRACTION", help=text)
    text = "resize the image into this box of the canvas, in pixels, and generate what surrounds it"
    part.add_argument("--place", type=box, metavar="X,Y,W,H", help=text)
    subject = group.add_mutually_exclusive_group(required=True)
    subject.add_argument("--label", type=label_of, metavar="CLASS", help="class to generate, by number or name")
    subject.add_argument("--prompt", type=prompt, metavar="TEXT", help="prompt, for text-to-image models")
    _add_negative_prompt(group)
    group.add_argument("--num", type=count, metavar="N", default=1, help="number of images (default: %(default)s)")
    _add_seed(group)
    text = (
        "paste the original pixels over the kept area, blended over a token's width at its border (default: show the"
        " kept tokens as the autoencoder decodes them)"
    )
    group.add_argument("--paste", action="store_true", help=text)
    _add_out(group, "edited")
    _add_heatmap(group)
    _add_sampling(parser)
    _add_machine(parser)


def _serve(parser: Parser) -> None:
    parser.description = (
        "Serves a web page: pick a class or write a prompt, and watch the images grow, or compare two methods on\n"
        "one seed. Programs send the requests of OpenAI's image API, at /v1. All models and clients share one\n"
        "engine. It needs: pip install '.[serve]' in a clone of the repository."
    )
    parser.epilog = """\
examples:
  cspd serve
      the bundled models, on http://127.0.0.1:8000
  cspd serve --checkpoint pretrained_models/mar/mar_large --vae pretrained_models/vae/kl16.ckpt --max-batch 16
      an official MAR checkpoint, 16 images at a time
  ssh -L 8000:127.0.0.1:8000 machine
      shows the page of a GPU machine in your own browser, without --host
  CSPD_API_KEY=$(openssl rand -hex 16) cspd serve --host 0.0.0.0
      lets in other machines that have the key: the page asks for it once

Finished images of the page are saved (--out), and shown in its gallery. Users can paint over an image to
regenerate that part. More in docs/serve.md.
"""
    group = parser.add_argument_group("models")
    _add_checkpoint(group, several=True)
    group = parser.add_argument_group("clients")
    text = (
        "address to listen on; 0.0.0.0 accepts connections from other machines: use it with an API key (default:"
        " %(default)s)"
    )
    group.add_argument("--host", type=word, default="127.0.0.1", metavar="ADDRESS", help=text)
    text = (
        "generate images only for clients that send this key. The environment variable CSPD_API_KEY does the same, and"
        " other users of this machine cannot read it (default: no key is needed)"
    )
    # the help does not show the default, which may be a key
    group.add_argument("--api-key", type=api_key, default=os.environ.get(API_KEY), metavar="KEY", help=text)
    text = "other host names under which browsers reach this server, such as a proxy's: demo.example.org,gpu1"
    group.add_argument("--allowed-hosts", type=host_names, default=[], metavar="LIST", help=text)
    text = (
        "addresses or networks of proxies, whose X-Forwarded-For tells clients apart: 127.0.0.1,10.0.0.0/8 (default:"
        " the header is ignored)"
    )
    group.add_argument("--trust-proxy", type=networks, default=[], metavar="LIST", help=text)
    text = "port to listen on; 0: any free one (default: %(default)s)"
    group.add_argument("--port", type=whole(0, 65535), metavar="PORT", default=8000, help=text)
    _add_max_batch(group)
    text = "maximum number of running and queued images, of all clients together (default: %(default)s)"
    group.add_argument("--max-requests", type=count, metavar="N", default=32, help=text)
    text = "maximum number of running and queued images of one client (default: %(default)s)"
    group.add_argument("--max-per-visitor", type=count, metavar="N", default=10, help=text)
    text = (
        "folder of the page's gallery, which all clients see; none: pictures are not saved (default: pictures/, or none"
        " if --host or --allowed-hosts let in other machines)"
    )
    group.add_argument("--out", type=path_argument, metavar="FOLDER", help=text)
    text = "refuse requests whose settings are not calibrated yet (default: all clients wait for the calibration)"
    group.add_argument("--calibrated-only", action="store_true", help=text)
    _add_machine(parser)


def _compare(parser: Parser) -> None:
    parser.description = (
        "Samples the same seeds with several methods or settings, interleaved, and reports speed, cost and\n"
        "quality: a table, a plot, the images and a page with all of it (report.html). Baseline sampling (ar)\n"
        "at the same settings is always included, and also with MAR's usual 64 iterations unless you list ar.\n"
        "Run the same command again to resume an interrupted run."
    )
    parser.epilog = STUDY_FORMAT
    group = parser.add_argument_group("what to compare")
    text = (
        "any of `cspd methods`, with settings after colons: ar,cspd:gamma=16:verify=sequential,ar:num_iter=16 (default:"
        " ar,speculative)"
    )
    group.add_argument("--methods", type=name_list, metavar="LIST", help=text)
    _add_path(group, "--config", "FILE", "a study file instead of --methods, see below")
    _add_subjects(group, CLASSES_HELP)
    group.add_argument("--num", type=count, metavar="N", help="number of images per configuration (default: 20)")
    group.add_argument("--seed", type=seed, metavar="N", help="image i has seed N + i (default: 0)")
    text = "repeat N times with other seeds, and report means and standard deviations over the repeats (default: 1)"
    group.add_argument("--repeats", type=count, default=1, metavar="N", help=text)
    group.add_argument("--max-batch", type=count, metavar="N", help="images generated at once (default: 4)")
    _add_out(group, "comparison")
    group = _add_quality(parser)
    _add_clip(group)
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    _add_settings(parser, group)
    _add_machine(parser)
    # None: a study file may name the checkpoint
    parser.set_defaults(checkpoint=None)


def _tune(parser: Parser) -> None:
    parser.description = (
        "Searches for the fastest way to sample on this machine within a quality limit: for MAR among an exact\n"
        "method, plans of a few budgets, and a solver in few iterations. It prints the Pareto front of speed and\n"
        "quality and the command to run, and writes a report (report.html). Run the same command again to resume\n"
        "an interrupted search."
    )
    parser.epilog = """\
examples:
  cspd tune --max-batch 64 --tolerance fid=2%,accuracy=1%
      highest throughput; FID at most 2 % above baseline sampling's, class accuracy at most 1 % below
  cspd tune --max-batch 1 --num-iter 64 --exact --num 60
      lowest latency for a single image, exact methods only

All candidates generate 20 images, the better third of them 60, and so on up to --num. The limits are relative
to baseline sampling (ar) at your settings, which is also sampled with other seeds, to show how much the
numbers vary by chance.
"""
    # the search sets the method, but requests are made from the same attributes as in other commands
    parser.set_defaults(method=None)
    limits = parser.add_argument_group("limits (one of them)").add_mutually_exclusive_group()
    text = (
        "how much worse than baseline sampling the images may be in fid, is (Inception score) or accuracy (fraction"
        " recognised by the classifier), or in several of them with commas (default: fid=2%%)"
    )
    limits.add_argument("--tolerance", type=tolerance, metavar="LIST", help=text)
    text = "only methods that are exact, or approximate and at most D nats per token from baseline sampling"
    limits.add_argument("--divergence", type=nats, metavar="D", help=text)
    limits.add_argument("--exact", action="store_true", help="only methods with the distribution of baseline sampling")
    group = parser.add_argument_group("search")
    _add_labels(group, CLASSES_HELP)
    text = "number of images per configuration in the last rung (default: %(default)s)"
    group.add_argument("--num", type=whole(FIRST_RUNG, MOST), metavar="N", default=120, help=text)
    _add_seed(group)
    _add_max_batch(group)
    _add_out(group, "tuning")
    _add_quality(parser)
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    # nor are there flags for the options of methods
    _add_settings(parser, group, of_methods=False)
    _add_machine(parser)


def _evaluate(parser: Parser) -> None:
    parser.description = (
        "Samples images, or takes existing ones, and measures them: FID, sFID, Inception score, KID, CMMD,\n"
        "precision, recall, density, coverage, class accuracy, FD-DINOv2 and, for prompts, CLIP score, each\n"
        "with the smallest difference that so many images can show. Run the same command again to resume an\n"
        "interrupted run, with any number of processes:\n"
        "torchrun --nproc_per_node=8 -m cspd evaluate ... (docs/evaluate.md)."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd evaluate --num 500 --out evaluation/\n"
        "  cspd evaluate --images samples/ --out measured/\n"
        "  cspd evaluate --checkpoint mar_large/ --num 50000 --weights inception.pth --ref VIRTUAL_imagenet256.npz"
    )
    group = parser.add_argument_group("images")
    text = (
        f"number of images (default: {USUAL_NUM}, or one per prompt; papers use 50000); under torchrun write"
        " --num-images"
    )
    # torchrun takes --num for an abbreviation of its own --numa-binding
    group.add_argument("--num", "--num-images", type=count, metavar="N", help=text)
    _add_subjects(group, CLASSES_HELP)
    _add_seed(group)
    _add_out(group, "evaluation", word)
    _add_parts(parser)
    text = (
        "measure the images in this directory, or in an .npz such as ADM's or .npy, instead of sampling. Classes or"
        " prompts come from the files that cspd wrote, or from --prompts, one per image in natural sort order of the"
        " file names"
    )
    _add_path(group, "--images", "FOLDER", text)
    text = "the rows of a published table, such as paper:mar, with its settings and numbers; other flags override them"
    _rare(group.add_argument("--like", type=word, metavar="paper:NAME", help=text))
    text = "with --like: check everything but the weights, and sample nothing"
    _rare(group.add_argument("--dry-run", action="store_true", help=text))
    group = parser.add_argument_group("measures")
    text = (
        "reference: an .npz with mu and sigma (for FID), an .npz with images in arr_0 as ADM's (also for KID, precision"
        " and recall), or a folder of images or of a folder for each class (default: the bundled models' training data;"
        " none for other models)"
    )
    _add_path(group, "--ref", "FILE", text)
    text = (
        "feature space: inception, or digits or emoji (the bundled classifiers). Default: inception if --weights is"
        " given; otherwise the bundled models' own. For other models inception; with prompts none without --ref"
    )
    _rare(group.add_argument("--space", metavar="NAME", help=text))
    _add_weights(group, " (default: downloaded by torch-fidelity)")
    _add_clip(group)
    text = "folder of a DINOv2 model of transformers, such as facebook/dinov2-large, for FD-DINOv2"
    _rare(_add_path(group, "--dinov2", "FOLDER", text))
    _rare(_add_path(group, "--npz", "FILE", "also write the images as an .npz for ADM's evaluator"))
    _add_sampling(parser)
    _add_machine(parser)
    # to find the flags that were given, which --images rejects if they are about sampling
    parser.set_defaults(default_of=parser.get_default)


def _bench(parser: Parser) -> None:
    parser.description = (
        "Times sampling end to end on this machine, in one process, and prints speed-ups over baseline\n"
        "sampling (ar) at the same settings."
    )
    parser.epilog = (
        "examples:\n"
        "  cspd bench --num-iter 64,16 --cfg 1,3 --batch 1,8\n"
        "  cspd bench --vq --methods speculative,eagle2:gamma=4 --json vq.json"
    )
    group = parser.add_argument_group("what to time")
    text = (
        "any of `cspd methods`, with options after colons (cool-sd:delta=1.5:gamma=4), and published, the authors'"
        " own sampler (default: published and all methods that are not heuristic)"
    )
    group.add_argument("--methods", type=name_list, metavar="LIST", help=text)
    # SUPPRESS: without the flag, the default of --checkpoint stays
    group.add_argument(
        "--vq",
        action="store_const",
        dest="checkpoint",
        const=BUNDLED["VQ"],
        default=argparse.SUPPRESS,
        help=f"the bundled VQ model: short for --checkpoint {BUNDLED['VQ']}",
    )
    text = "batch sizes (default: %(default)s)"
    group.add_argument("--batch", type=count_list, metavar="LIST", default="1,8", help=text)
    text = "timed runs of each configuration (default: %(default)s)"
    group.add_argument("--runs", type=count, metavar="N", default=5, help=text)
    text = "also report the peak memory of N requests by each method at each batch size"
    group.add_argument("--queued", type=count, metavar="N", help=text)
    _add_path(group, "--json", "FILE", "also write the numbers to this file")
    _add_path(group, "--plot", "PNG", "also write a plot of class accuracy against speed-up")
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    _add_settings(parser, group, several=("num_iter", "cfg", "gamma", "verify"))
    _add_machine(parser)


def _gpu_check(parser: Parser) -> None:
    parser.description = (
        "Asks three questions about this GPU, each by a command of at most --minutes. No files are needed: models\n"
        "have the official sizes and random weights.\n"
        "  right  does it compute what a CPU computes, in every mode, and read only what it may?\n"
        "  fast   how long do whole decoded images take, beside MAR's own code?\n"
        "  where  where does the time go: profiles of rounds, waits for the GPU, switches?\n"
        "Each result is written to --out at once. Repeat a command to resume it. The exit status is 1 if a case\n"
        "failed or was lost."
    )
    parser.epilog = (
        "examples:\n  cspd gpu-check right\n  cspd gpu-check fast --mar ../mar"
        "\n  cspd gpu-check where --tiny --device cpu --out tiny/"
    )
    group = parser.add_argument_group("check")
    questions = ("right", "fast", "where")
    group.add_argument("question", choices=questions, metavar=f"{{{','.join(questions)}}}", help="what to ask")
    text = (
        "minutes for the command; a case that does not fit is reported as left out, and run when the command is"
        " repeated (default: %(default)s)"
    )
    group.add_argument("--minutes", type=whole(1, MOST_MINUTES), metavar="N", default=9, help=text)
    _add_path(group, "--mar", "FOLDER", "for `fast`: a clone of github.com/LTH14/mar, to time its code, too")
    text = "small models: tries the command in a minute, also on a CPU"
    group.add_argument("--tiny", action="store_true", help=text)
    _add_device(group)
    _add_out(group, "gpu")
    group.add_argument("--show", action="store_true", help="only print the report that is in --out")


def _calibrate(parser: Parser) -> None:
    parser.description = (
        "Fits and caches the calibration that `speculative` or `calibrated` (--method) needs at these settings.\n"
        "Prints the fastest window on this device for each number of tokens (`speculative`), or the error\n"
        "against the full chain (`calibrated`). Without this command, both calibrate on first use."
    )
    parser.epilog = "example:\n  cspd calibrate --checkpoint mar_large/ --vae kl16.ckpt --method calibrated --cfg 4"
    group = _add_sampling(parser, max_batch=False)
    group.add_argument("--force", action="store_true", help="time this device again, for `speculative`")
    _add_machine(parser)


def _merge(parser: Parser) -> None:
    parser.description = (
        "Writes images.jsonl, every image's settings and digest, and grid.png for a complete run of\n"
        "`cspd sample --shard`, `cspd sample --ray` or `cspd evaluate`, and its images in other files.\n"
        "Run the same command again to resume."
    )
    parser.epilog = "example:\n  cspd merge samples/ --tar tars/"
    group = parser.add_argument_group("images")
    text = "folder of the run, or s3://BUCKET/RUN and other URLs that fsspec knows"
    group.add_argument("folder", type=word, metavar="FOLDER", help=text)
    text = "write PNGs, named as by `cspd sample`"
    group.add_argument("--png", type=word, metavar="FOLDER", help=text)
    text = "write WebDataset tars of 1,000 PNGs with their settings (pip install '.[webdataset]' in a clone)"
    group.add_argument("--tar", type=word, metavar="FOLDER", help=text)
    _add_path(group, "--npz", "FILE", "write an .npz for ADM's evaluator")
    text = "write the folder that GenEval's scorer reads; needs --prompts evaluation_metadata.jsonl"
    group.add_argument("--geneval", type=word, metavar="FOLDER", help=text)
    text = "write the folder that DPG-bench's scorer reads; needs --prompts with the folder of its prompts"
    group.add_argument("--dpg", type=word, metavar="FOLDER", help=text)
    _add_path(group, "--prompts", "PATH", "the prompts of the run, for --geneval and --dpg")


def _verify(parser: Parser) -> None:
    parser.description = (
        "Checks every image in a folder of cspd against its digest: PNGs, shards or tars. The exit status is 1\n"
        "if an image is missing or damaged."
    )
    parser.epilog = "example:\n  cspd verify samples/"
    group = parser.add_argument_group("images")
    text = "folder of `cspd sample`, `cspd evaluate` or `cspd merge`, or a URL"
    group.add_argument("folder", type=word, metavar="FOLDER", help=text)


def _methods(parser: Parser) -> None:
    parser.description = (
        "Lists the methods: the models they sample from, their guarantee, what they need, and their papers."
    )
    parser.epilog = (
        "examples:\n  cspd methods\n  cspd sample --help calibrated\n      the options of one of these methods"
    )
    group = parser.add_argument_group("form")
    group.add_argument("--markdown", action="store_true", help="print the table in docs/methods.md")
    group.add_argument("--options", action="store_true", help="print the table of all options in docs/reference.md")
    _rare(add_plugin(group))


def _env(parser: Parser) -> None:
    parser.description = "Prints versions, the device and the bundled models: paste it into a bug report."
    parser.epilog = "example:\n  cspd env"


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "sample": ("generate images into a folder", _sample),
    "edit": ("inpaint, vary or outpaint an image", _edit),
    "serve": ("serve a web page that generates images", _serve),
    "compare": ("compare methods on the same seeds: speed, quality, images", _compare),
    "tune": ("find the fastest settings for this machine within a quality limit", _tune),
    "evaluate": ("measure FID, IS, KID, precision and recall of many images", _evaluate),
    "merge": ("write the images of many machines as PNGs, .npz or tars", _merge),
    "verify": ("check a folder of images against its digests", _verify),
    "bench": ("time methods on this machine", _bench),
    "gpu-check": ("check the correctness and speed of this GPU", _gpu_check),
    "calibrate": ("calibrate a method ahead of its first use", _calibrate),
    "methods": ("list the methods and their guarantees", _methods),
    "env": ("print versions and the device, for bug reports", _env),
}


# The flags that commands share.


def _add_path(group: argparse._ActionsContainer, flag: str, metavar: str, text: str) -> argparse.Action:
    return group.add_argument(flag, type=path_argument, metavar=metavar, help=text)


def _add_labels(group: argparse._ActionsContainer, text: str) -> None:
    """Adds --labels. Without it, or without its value, it is None."""
    text += " (default: all)"
    group.add_argument("--labels", type=label_list, nargs="?", metavar="LIST", help=text)


def _add_subjects(group: argparse._ArgumentGroup, labels_help: str) -> argparse._MutuallyExclusiveGroup:
    """Adds --labels and --prompts, which exclude each other."""
    one_of = group.add_mutually_exclusive_group()
    _add_labels(one_of, labels_help)
    text = "prompts for text-to-image models: one per line, or .json such as COCO captions (docs/text.md)"
    _add_path(one_of, "--prompts", "FILE", text)
    text = "a random one of each image's COCO captions, by this seed (default: the first)"
    _rare(group.add_argument("--caption-seed", type=seed, metavar="N", help=text))
    _add_negative_prompt(group)
    return one_of


def _add_negative_prompt(group: argparse._ArgumentGroup) -> None:
    text = "guidance steers away from this prompt (default: the model's null caption)"
    _rare(group.add_argument("--negative-prompt", type=utf8, metavar="TEXT", help=text))


def _add_seed(group: argparse._ArgumentGroup) -> None:
    text = "image i has seed N + i (default: %(default)s)"
    group.add_argument("--seed", type=seed, metavar="N", default=0, help=text)


def _add_max_batch(group: argparse._ArgumentGroup) -> None:
    text = "images generated at once (default: %(default)s)"
    group.add_argument("--max-batch", type=count, metavar="N", default=8, help=text)


def _add_out(group: argparse._ArgumentGroup, folder: str, kind: Callable[[str], object] = path_argument) -> None:
    """Adds --out. `kind`: `word` for commands that take URLs too, which a Path would change."""
    text = "output folder (default: %(default)s/)"
    group.add_argument("--out", type=kind, metavar="FOLDER", default=Path(folder), help=text)
    text = "replace a run with other settings in --out"
    _rare(group.add_argument("--overwrite", action="store_true", help=text))


def _add_parts(parser: Parser) -> None:
    """Adds flags that divide a run among processes and machines."""
    group = parser.add_argument_group("many machines (docs/many.md)")
    text = "make only this part, I from 0 to N - 1, such as the index of a job array; parts may run at any time"
    _rare(group.add_argument("--shard", type=part, metavar="I/N", help=text))
    text = (
        "a Ray cluster makes the images: auto, ray://HOST:10001, or local for this machine (pip install '.[ray]' in a"
        " clone)"
    )
    _rare(group.add_argument("--ray", type=word, metavar="ADDRESS", help=text))


def _add_heatmap(group: argparse._ArgumentGroup) -> None:
    text = "also write heatmap.png: the cost of every generated token"
    _rare(group.add_argument("--heatmap", action="store_true", help=text))


def _add_quality(parser: Parser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("quality (default: the bundled models' classifier)")
    _add_path(group, "--ref", "FILE", "reference: statistics (.npz as ADM's) or image folder")
    _add_weights(group)
    return group


def _add_weights(group: argparse._ArgumentGroup, default: str = "") -> None:
    _add_path(group, "--weights", "FILE", f"weights of Inception-v3, the file of torch-fidelity{default}")


def _add_clip(group: argparse._ArgumentGroup) -> None:
    text = "a CLIP model, such as openai/clip-vit-large-patch14: scores how well images match prompts, and gives CMMD"
    _rare(_add_path(group, "--clip", "FOLDER", text))


def _add_sampling(parser: Parser, max_batch: bool = True) -> argparse._ArgumentGroup:
    """Adds flags of the model, the method and its settings."""
    group = parser.add_argument_group("sampling")
    _add_checkpoint(group)
    defaults = " and ".join(dict.fromkeys(DEFAULTS.values()))
    text = f"sampling method, see `cspd methods` (default: {defaults})"
    group.add_argument("--method", type=word, metavar="NAME", help=text)
    _add_settings(parser, group)
    if max_batch:
        _add_max_batch(group)
    return group


def _add_checkpoint(group: argparse._ArgumentGroup, several: bool = False) -> None:
    """Adds --checkpoint and the flags of companion files. `several`: it takes a list, by default all bundled models."""
    models = (
        "a bundled model (digits32, emoji64: MAR; digits32_vq, emoji64_text: VQ; emoji64_sphere: causal), a folder of"
        " official or transformers' files, a file, or a Hub name (org/name)"
    )
    if several:
        text = f"{models}; or several of them (default: all bundled models that can run here)"
        group.add_argument("--checkpoint", type=word, nargs="+", metavar="MODEL", help=text)
    else:
        text = f"{models} (default: {BUNDLED['MAR']})"
        group.add_argument("--checkpoint", type=word, metavar="MODEL", default=BUNDLED["MAR"], help=text)
    _add_path(group, "--vae", "FILE", "autoencoder or tokenizer, if not next to the model")
    text = "the model's size, such as mar_base, sphere_ar_b or llamagen_xl (default: read from the file)"
    _rare(group.add_argument("--arch", type=word, metavar="NAME", help=text))
    text = "draft model for methods that need one: a smaller model for the same tokens, if not next to the model"
    _rare(_add_path(group, "--draft-checkpoint", "FILE", text))
    text = "EAGLE drafter of a VQ model, if not next to the model; scripts/train/train_eagle.py trains one"
    _rare(_add_path(group, "--eagle", "FILE", text))
    text = (
        "text encoder that a text-to-image model was trained with (FLAN-T5-XL for LlamaGen), if not in flan-t5-xl/ or"
        " text_encoder/ next to the model"
    )
    _rare(_add_path(group, "--text-encoder", "FOLDER", text))
    _rare(add_plugin(group))


def add_plugin(group: argparse._ActionsContainer) -> argparse.Action:
    """Adds --plugin, which `cspd.cli.options.load_plugins` reads before all other flags."""
    text = "a Python file that registers methods (docs/reference.md) or sizes of models (docs/finetuned.md)"
    return group.add_argument("--plugin", type=path_argument, action="append", metavar="FILE", help=text)


def add_like(group: argparse._ActionsContainer) -> argparse.Action:
    """Adds --like, which `cspd.cli.options.defaults_like` reads before all other flags."""
    text = "generate this PNG of cspd again; other flags change it"
    return group.add_argument("--like", type=path_argument, metavar="PNG", help=text)


def _add_device(group: argparse._ArgumentGroup) -> None:
    text = "auto, cpu, cuda or cuda:N (default: %(default)s)"
    group.add_argument("--device", metavar="NAME", default="auto", help=text)


def _add_machine(parser: Parser) -> None:
    """Adds flags of the device and how it computes."""
    group = parser.add_argument_group("machine")
    _add_device(group)
    text = "fp32: float32 for all tokens; tf32, bf16: faster on a GPU (docs/exactness.md) (default: %(default)s)"
    group.add_argument("--precision", default="fp32", choices=PRECISIONS, metavar="NAME", help=text)
    text = "compile MAR's backbone, the steps of ar and speculative, and VQ layers: minutes on first use, then faster"
    _rare(group.add_argument("--compile", action="store_true", help=text))
    text = "capture fixed-shape work as CUDA graphs (default: enabled on NVIDIA GPUs; not available on CPU)"
    _rare(group.add_argument("--graphs", action=argparse.BooleanOptionalAction, help=text))
    text = "CPU threads (default: torch's)"
    group.add_argument("--threads", type=whole(1, MOST_THREADS), metavar="N", help=text)


def _add_settings(
    parser: Parser, group: argparse._ArgumentGroup, several: Collection[str] = (), of_methods: bool = True
) -> None:
    """Adds flags for the settings of a request: those of whole families, and those of the parser's `methods`.

    `several`: names of settings that take a list of values.
    """
    parser.takes_methods = of_methods
    special = parser.add_argument_group(
        "options of methods (for exact methods they change which image a seed gives, but not the distribution)"
    )
    family_wide = {use.option.name for use in uses()}
    meanings: dict[str, list[Use]] = {}
    for use in uses(parser.methods if of_methods else ()):
        meanings.setdefault(use.option.name, []).append(use)
    for name, same_name in meanings.items():
        is_family_wide = name in family_wide
        # the owner is left out of the text if it is every family, or the one method whose help was asked for
        is_owner_clear = same_name[0].is_of_all_families or (len(parser.methods) == 1 and not is_family_wide)
        text = _help(same_name, with_owners=not is_owner_clear)
        if name in several:
            text += "; or a list with commas, to time each value"
        owner = group if is_family_wide else special
        action = owner.add_argument(same_name[0].option.flag, help=text, **_argument(same_name, name in several))
        action.of_method = not is_family_wide  # type: ignore[attr-defined]
        if name not in SHOWN:
            _rare(action)


def _argument(same_name: list[Use], several: bool) -> dict:
    """How argparse takes an option: its type, or the words that any of its meanings allows."""
    option = same_name[0].option
    if option.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if isinstance(option.kind, type):
        parse = {int: number_list, float: float_list}.get(option.kind, option.kind) if several else option.kind
        return {"type": parse, "metavar": option.metavar or option.name.upper()}
    # which words a method accepts is checked with the request
    kinds = [use.option.kind for use in same_name]
    words = list(dict.fromkeys(word for kind in kinds if not isinstance(kind, type) for word in kind))
    return {"type": word_list(words), "metavar": ",".join(words)} if several else {"choices": words}


def _help(same_name: list[Use], with_owners: bool) -> str:
    """The help text of an option: each of its meanings, who has it, and the default there."""
    parts = []
    for use in same_name:
        owners = use.owners() if with_owners else use.condition()
        text = f"{owners}: {use.option.help}" if owners else use.option.help
        default = use.default()
        # each meaning has its own default, so argparse's is not used
        parts.append(f"{text} (default: {default})" if default else text)
    return "; ".join(parts).replace("%", "%%")
