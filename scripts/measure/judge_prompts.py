"""Evaluates images of captions with a classifier.

    python scripts/measure/judge_prompts.py --images samples --prompts ...

The images are a directory that `cspd sample --prompts` generated from a list of scripts/train/captions.py. The program
prints the fraction of images that are recognised as the class of the caption's own images, for captions that were
trained on, for captions that were held out as compositions, and for each class. "By chance" is the fraction if labels
were permuted.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from cspd.evaluation.images import ImageFolder, prompts_of
from cspd.evaluation.metrics import CLASSIFIERS, read_classifier

sys.path.append(str(Path(__file__).parents[1] / "train"))
from captions import read_list


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=Path("checkpoints/emoji64_text/prompts.json"))
    parser.add_argument("--classifier", type=Path, default=Path("checkpoints/emoji64/classifier.safetensors"))
    parser.add_argument("--arch", default="emoji64", choices=CLASSIFIERS, help="the classifier's sizes")
    args = parser.parse_args()
    images = ImageFolder(args.images)
    entries = {entry["prompt"]: entry for entry in read_list(args.prompts)}
    texts = prompts_of(images)
    if texts is None or not entries.keys() >= {*texts}:
        raise SystemExit(
            f"{args.images} has images that are not of {args.prompts}: generate them with cspd sample --prompts"
        )
    classifier = read_classifier(args.classifier, CLASSIFIERS[args.arch])
    with torch.inference_mode():
        predicted = [classifier(image[None] / 127.5 - 1).argmax().item() for image in images]
    labels = [entries[text]["label"] for text in texts]
    for what, is_held_out in (("trained on", False), ("held out", True)):
        own = [i for i, text in enumerate(texts) if entries[text].get("held_out", False) == is_held_out]
        if own:
            tell(f"captions {what}", *([values[i] for i in own] for values in (texts, predicted, labels)))
    for label in sorted({*labels}):
        own = [i for i, each in enumerate(labels) if each == label]
        share = sum(predicted[i] == label for i in own) / len(own)
        print(f"class {label}: {len(own)} images, {share:.1%} recognised")


def tell(what: str, texts: Sequence[str], predicted: Sequence[int], labels: Sequence[int]) -> None:
    """Prints the fraction of images that are recognised, and the fraction by chance, with labels in random order.

    The standard error is that of the mean over captions, since images of one caption are alike.
    """
    num, of_predicted, of_labels = len(labels), Counter(predicted), Counter(labels)
    chance = sum(of_predicted[label] * count for label, count in of_labels.items()) / num**2
    by_caption = defaultdict(list)
    for text, one, other in zip(texts, predicted, labels):
        by_caption[text].append(one == other)
    share = sum(map(sum, by_caption.values())) / num
    shares = [statistics.mean(found) for found in by_caption.values()]
    error = statistics.stdev(shares) / math.sqrt(len(shares)) if len(shares) > 1 else math.nan
    print(f"{what}: {num} images, {share:.1%} recognised (by chance {chance:.1%}), standard error {error:.1%}")


if __name__ == "__main__":
    main()
