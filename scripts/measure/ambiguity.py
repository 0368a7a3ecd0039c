"""Measures how ambiguous the tokens of a VQ target are, and how well its EAGLE drafter predicts them.

    python scripts/measure/ambiguity.py --out ambiguity/
    python scripts/measure/ambiguity.py --checkpoint c2i_XL_384.pt --num 1000 --out ambiguity_XL/

The target samples images (`ar`). At each of their tokens, P is the target's distribution and Q the drafter's, after the
same tokens. The program writes ambiguity.json, means over images with standard errors, and ambiguity.png:

* mass: the probability of the 1 and 10 likeliest tokens of P (LANTERN, arXiv 2410.03355, Figure 2c);
* accuracy: how often the likeliest token of P is among the 1 and 3 likeliest of Q (Figure 2a);
* total variation: between P and Q (COOL-SD, arXiv 2601.09212, Table 3);
* acceptance at depth 1: of a token drawn from Q, by the exact rule, which is 1 minus the total variation; of the
  likeliest token of Q, as EAGLE-2 drafts it, by the exact rule and by LANTERN's (its Table 2);
* P and Q at some tokens of the first image, over their 20 likeliest tokens (Figure 2b);
* images decoded from other tokens: each one of the nearest codes (Figure 3), or any code;
* total variation of P from P after a token before it was changed, by how many tokens ago (SJD-PAC, arXiv 2603.18599,
  Figure 4), and images continued with the same seed after one token was changed (its Figure 2).

Of a codebook of V codes, numbers of neighbours are the papers' shares: 100, 300 and 1000 of 16,384.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import cspd
from cspd.cli.options import read_prompts
from cspd.discrete.distributions import point, sample, without
from cspd.discrete.gpt import GPT
from cspd.discrete.registry import VQDefaults
from cspd.discrete.rules import Exact, Lantern, Rule, near_codes
from cspd.discrete.runner import VQRunner
from cspd.evaluation.images import Subject
from cspd.files import write_json
from cspd.inpainting import Inpainting
from cspd.option import VQ_OPTIONS
from cspd.origin import commit_of
from cspd.pixels import to_pil
from cspd.plots import seed_grid, stacked
from cspd.request import Output
from cspd.summary import standard_error

sys.path.append(str(Path(__file__).parents[1] / "train"))
from conditions import Inputs, features_of, inputs_of
from drafted import distributions
from train_eagle import predict

CODEBOOK = 16_384  # LlamaGen's, of which the papers' numbers of neighbours are
NEIGHBOURS, DELTAS = (100, 300, 1000), (0.05, 0.1, 0.2, 0.4)  # LANTERN's Table 2
REPLACED = 100  # the nearest codes among which a token is replaced, itself included
CHANGED = 8  # tokens of an image that are changed, one at a time
ROWS = 4  # of the image: the farthest offset of a changed token
SHOWN, LIKELIEST = 16, 20  # tokens in the heat map, and the columns of each
IMAGES = 6  # in the picture


TakeIn = Callable[[Tensor], Inputs]  # from an image's tokens [L] to the models' inputs, of both guidance branches


def share(number: int, codes: int) -> int:
    """A number of neighbours that is the same share of a codebook as in LlamaGen's, at least 1."""
    return max(1, round(number * codes / CODEBOOK))


def total_variation(P: Tensor, Q: Tensor) -> Tensor:
    return (P - Q).abs().sum(-1) / 2


def taking_in(runner: VQRunner, subjects: Sequence[Subject], number: int) -> TakeIn:
    """Makes the inputs for images of the subject of this number."""
    numbers = torch.tensor([number, number])
    is_null = torch.tensor([False, True])
    return lambda codes: inputs_of(runner, subjects, numbers, is_null, codes.repeat(2, 1))


def pair_of(runner: VQRunner, inputs: Inputs, sampling: VQDefaults) -> tuple[Tensor, Tensor]:
    """P and Q [L, V] at the tokens of an image."""
    drafted, own = predict(runner.target, runner.models["eagle"], inputs, 0.0, torch.Generator())
    P = distributions(runner.target, own, sampling)[0]
    Q = distributions(runner.target, drafted, sampling)[0]
    return P, Q


def rules_of(tokenizer: torch.nn.Module, codes: int) -> dict[str, Rule]:
    """The exact rule, and LANTERN's with the settings of its Table 2."""
    rules: dict[str, Rule] = {"exact": Exact()}
    for neighbours in NEIGHBOURS:
        k = share(neighbours, codes)
        near = near_codes(tokenizer, "l2", k)
        for delta in DELTAS:
            rules[f"lantern, k {k}, delta {delta:g}"] = Lantern(delta, k=k, near=near)
    return rules


def measured(P: Tensor, Q: Tensor, rules: dict[str, Rule]) -> dict[str, float]:
    """Means over the tokens of an image, from P and Q [L, V]."""
    likeliest = P.argmax(-1, keepdim=True)
    by_draft = Q.topk(3).indices
    is_found = by_draft == likeliest
    first = by_draft[:, :1]
    chosen = point(first.squeeze(-1), P)
    means = {
        "mass of 1": P.amax(-1),
        "mass of 10": P.topk(min(10, P.shape[-1])).values.sum(-1),
        "accuracy at 1": is_found[:, 0].float(),
        "accuracy at 3": is_found.any(-1).float(),
        "total variation": total_variation(P, Q),
        "accepted if drawn, exact": (Q * Exact().accept(P, Q)).sum(-1),
    }
    for name, rule in rules.items():
        means[f"accepted if likeliest, {name}"] = rule.accept_token(P, chosen, first).squeeze(-1)
    return {name: values.double().mean().item() for name, values in means.items()}


def changed_tokens(P: Tensor, codes: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Positions int64 [CHANGED] of an image, not its last, and tokens drawn from P there without the image's own."""
    length = len(codes)
    positions = torch.randperm(length - 1, generator=generator)[:CHANGED].to(codes.device)
    others = without(P[positions], codes[positions])
    uniforms = torch.rand(len(positions), generator=generator).to(codes.device)
    return positions, sample(others, uniforms)


def moved_by_offset(
    target: GPT, take_in: TakeIn, P: Tensor, codes: Tensor, changes: tuple[Tensor, Tensor], sampling: VQDefaults
) -> Tensor:
    """Total variation of P from P before one token was changed: sums over the changes, and how many terms they have.

    float64 [2, L], by offset, which is 1 for the token after the changed one.
    """
    length = len(codes)
    sums = torch.zeros(2, length, dtype=torch.float64)
    for position, token in zip(*(each.tolist() for each in changes)):
        other = codes.clone()
        other[position] = token
        features = features_of(target, take_in(other))[:, -length:]
        distance = total_variation(distributions(target, features, sampling)[0], P)
        num_after = length - 1 - position
        sums[0, 1 : 1 + num_after] += distance[position + 1 :].double().cpu()
        sums[1, 1 : 1 + num_after] += 1
    return sums


def replaced(codes: Tensor, near: Tensor, generator: torch.Generator) -> Tensor:
    """Tokens [L], each one of itself and its neighbours near [V, k - 1], all equally likely."""
    candidates = torch.cat([codes.unsqueeze(-1), near[codes]], -1)
    choice = torch.randint(candidates.shape[-1], (len(codes), 1), generator=generator).to(codes.device)
    return candidates.gather(-1, choice).squeeze(-1)


def continued(engine: cspd.Engine, output: Output, position: int, token: int) -> Tensor:
    """The image that the same seed gives after the token at a position was changed."""
    tokens = output.tokens.clone()
    tokens[position] = token
    is_open = torch.arange(len(tokens)) > position
    [other] = engine.generate([output.request.but(known=Inpainting.of(tokens, is_open))])
    return other.image


def pixel_difference(images: Tensor, others: Tensor) -> float:
    """Root mean square difference of images in 0..1, in units of 0..255."""
    return 255 * (images - others).square().mean().sqrt().item()


def heat_maps(P: Tensor, Q: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """P and Q [SHOWN, LIKELIEST] at evenly spaced tokens, over the likeliest tokens of both, in the order of P."""
    rows = torch.linspace(0, len(P) - 1, SHOWN).long().to(P.device)
    P, Q = P[rows], Q[rows]
    columns = (P + Q).topk(min(LIKELIEST, P.shape[-1])).indices
    P, Q = P.gather(-1, columns), Q.gather(-1, columns)
    order = P.argsort(-1, descending=True)
    return P.gather(-1, order).cpu().numpy(), Q.gather(-1, order).cpu().numpy()


def plotted(means: dict[str, dict], by_offset: Sequence[float], maps: tuple[np.ndarray, np.ndarray]) -> Image.Image:
    """Bars of the means, heat maps of P and Q, and the total variation by offset."""
    figure = Figure(figsize=(13, 4.2), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    bars, target, drafter, curve = figure.subplots(1, 4, width_ratios=(2.2, 1, 1, 1.6))
    values = [each["mean"] for each in means.values()]
    errors = [each["standard_error"] or 0 for each in means.values()]
    bars.barh(range(len(means)), values, xerr=errors, color="tab:blue")
    bars.set_yticks(range(len(means)), list(means), fontsize=7)
    bars.invert_yaxis()
    bars.set(xlim=(0, 1), title="means over tokens")
    highest = max(each.max() for each in maps)
    for axes, values_of_map, title in ((target, maps[0], "target, P"), (drafter, maps[1], "drafter, Q")):
        shown = axes.imshow(values_of_map, vmin=0, vmax=highest, aspect="auto")
        axes.set(title=title, xlabel="likeliest tokens", xticks=[], yticks=[])
    target.set_ylabel("some tokens of an image")
    figure.colorbar(shown, ax=drafter)
    curve.plot(range(1, 1 + len(by_offset)), by_offset)
    curve.set(ylim=(0, None), xlabel="tokens since the changed one", title="total variation of P")
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="digits32_vq", help="the target: a name, directory or file")
    parser.add_argument("--eagle", help="its drafter (default: the one next to it)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, for a text-to-image target")
    parser.add_argument("--num", type=int, default=20, help="images (default: %(default)s)")
    parser.add_argument("--max-batch", type=int, default=10, help="images sampled at once (default: %(default)s)")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument("--out", type=Path, required=True, help="the directory of the results")
    for option in VQ_OPTIONS:
        parser.add_argument(option.flag, type=option.kind, metavar=option.metavar, help=option.help)
    args = parser.parse_args()
    args.settings = {option.name: getattr(args, option.name) for option in VQ_OPTIONS}
    args.settings = {name: value for name, value in args.settings.items() if value is not None}
    if args.num < 1 or args.settings.get("temperature") == 0:
        parser.error("--num must be at least 1, and --temperature above 0: at 0, P and Q are point masses")
    return args


def main() -> None:
    args = arguments()
    engine = cspd.load(args.checkpoint, eagle=args.eagle, max_batch=args.max_batch, device=args.device)
    if engine.runner.models.get("eagle") is None:
        raise SystemExit(f"{args.checkpoint} has no EAGLE drafter: give --eagle FILE, see scripts/train/train_eagle.py")
    report, picture = measure(engine, args)
    args.out.mkdir(parents=True, exist_ok=True)
    report = {"checkpoint": args.checkpoint, "commit": commit_of(Path(__file__)), **report}
    write_json(args.out / "ambiguity.json", report)
    picture.save(args.out / "ambiguity.png")
    for name, found in report["means"].items():
        error = "" if found["standard_error"] is None else f" +- {found['standard_error']:.4f}"
        print(f"{name:<48} {found['mean']:.4f}{error}")
    for name, difference in report["pixel_difference"].items():
        print(f"{name}: root mean square difference of pixels {difference:.1f} of 255")
    near_offsets = ", ".join(f"{distance:.3f}" for distance in report["total_variation_by_offset"][:8])
    print(f"total variation of P 1, 2, .. 8 tokens after a changed token: {near_offsets}")


@torch.inference_mode()
def measure(engine: cspd.Engine, args: argparse.Namespace) -> tuple[dict, Image.Image]:
    """The report, and the picture."""
    runner, generator = engine.runner, torch.Generator().manual_seed(0)
    subjects: Sequence[Subject] = read_prompts(args.prompts) if args.prompts else range(runner.num_classes)
    numbers = [i % len(subjects) for i in range(args.num)]
    asked = {"prompts" if args.prompts else "labels": [subjects[number] for number in numbers]}
    outputs = engine.sample(**asked, seed=range(args.num), method="ar", **args.settings)
    sampling = dataclasses.replace(runner.defaults, **args.settings)

    tokenizer, vocabulary = runner.models["tokenizer"], runner.config.vocab_size
    rules = rules_of(tokenizer, vocabulary)
    nearest = near_codes(tokenizer, "l2", share(REPLACED, vocabulary))[:, : share(REPLACED, vocabulary) - 1]
    by_image: dict[str, list[float]] = defaultdict(list)
    offsets = torch.zeros(2, runner.seq_len, dtype=torch.float64)
    others: dict[str, list[Tensor]] = defaultdict(list)
    for i, (output, number) in enumerate(zip(outputs, numbers)):
        codes = output.tokens.to(runner.device)
        take_in = taking_in(runner, subjects, number)
        P, Q = pair_of(runner, take_in(codes), sampling)
        for name, mean in measured(P, Q, rules).items():
            by_image[name].append(mean)
        changes = changed_tokens(P, codes, generator)
        offsets += moved_by_offset(runner.target, take_in, P, codes, changes, sampling)
        others["near codes"].append(replaced(codes, nearest, generator))
        others["any codes"].append(torch.randint(vocabulary, codes.shape, generator=generator).to(codes.device))
        if i == 0:
            maps = heat_maps(P, Q)
        if i < IMAGES:
            first = changes[0].argmin()  # the earliest of them changes most
            others["a changed token"].append(continued(engine, output, *(each[first].item() for each in changes)))

    images = {"sampled": torch.stack([output.image for output in outputs])}
    for name in ("near codes", "any codes"):
        images[name] = runner.decode(torch.stack(others[name])).cpu()
    images["a changed token"] = torch.stack(others["a changed token"])
    farthest = min(runner.seq_len - 1, ROWS * runner.config.grid)
    by_offset = (offsets[0] / offsets[1].clamp(min=1))[1 : 1 + farthest].tolist()
    report = reported(by_image, by_offset, images, sampling)
    return report, pictured(report, maps, images)


def reported(
    by_image: dict[str, list[float]], by_offset: list[float], images: dict[str, Tensor], sampling: VQDefaults
) -> dict:
    """The report, from the means of each image and the images [n, 3, H, W] by their name."""
    means = {}
    for name, values in by_image.items():
        means[name] = {"mean": sum(values) / len(values), "standard_error": standard_error(values)}
    differences = {}
    for name in ("near codes", "any codes"):
        differences[name] = pixel_difference(images["sampled"], images[name])
    return {
        "images": len(images["sampled"]),
        "settings": {option.name: getattr(sampling, option.name) for option in VQ_OPTIONS},
        "means": means,
        "total_variation_by_offset": by_offset,
        "pixel_difference": differences,
    }


def pictured(report: dict, maps: tuple[np.ndarray, np.ndarray], images: dict[str, Tensor]) -> Image.Image:
    """The plots of a report, and the first images below."""
    rows = [(name, [to_pil(image) for image in own[:IMAGES]]) for name, own in images.items()]
    titles = [f"image {i}" for i in range(min(IMAGES, report["images"]))]
    plots = plotted(report["means"], report["total_variation_by_offset"], maps)
    return stacked([plots, seed_grid(rows, titles)])


if __name__ == "__main__":
    main()
