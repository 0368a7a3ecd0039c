"""Judges images of a list of captions by a classifier: python scripts/judge_prompts.py --images samples --prompts ...

The images are a folder that `cspd sample --prompts` has made of a list that scripts/captions.py has written. Told is
which share is recognised as the class that the caption's own pictures are in: of captions that were trained on, and of
those held out in composition, in all and class by class. "By chance": the share if captions were dealt out anew.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from captions import read_list

from cspd.evaluation.images import ImageFolder, prompts_of
from cspd.evaluation.metrics import CLASSIFIERS, read_classifier


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
        raise SystemExit(f"{args.images} has other images than of {args.prompts}: make them by cspd sample --prompts")
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
    """Prints the share of images that are recognised, and by chance: with the labels in any other order.

    The standard error is by the spread of the captions, since images of one caption are alike.
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
