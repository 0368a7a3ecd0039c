"""Images with captions, for training text-to-image models, and a list of captions to evaluate such a model with.

python scripts/train/captions.py --captions data/emoji64/captions.json --out checkpoints/emoji64_text/prompts.json

Half of the list is held out from training as compositions: each word of such a caption occurs in other names of its
class, but no other name of the class has all of its words. The other half are captions of the same kind that are
trained on. The list depends on captions.json only.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from random import Random
from typing import NamedTuple

from emoji import digest
from pictures import Data, drawing
from torchvision.datasets.folder import default_loader

from cspd.files import misfit, read_json, write_json

SHAPE = {str: {"name": str, "tags": [str]}}
SHOWN = '{"name": "red heart", "tags": []}'
LIST = [{"prompt": str, "label": int}]
WITH_KEYWORDS = 0.5  # the fraction of prompts that have keywords
MOST_KEYWORDS = 3
BEGINNINGS = ("", "", "", "a ", "an ", "the ")  # people write articles, but names have none
SIDES = re.compile(r"\b(left|right)", re.IGNORECASE)  # mirroring the image would make the name wrong

IN_OTHERS = 2  # the fewest other names of its class that each word of a held-out name occurs in
HELD_OUT_EVERY = 5  # one in five of the names that can be held out is


class Caption(NamedTuple):
    """A name, its keywords, the class of its images, and their files."""

    name: str
    tags: list[str]
    category: str
    files: list[Path]


def read_captions(path: Path) -> list[Caption]:
    """The captions in a file, sorted by class and name, without those of the images in held_out/.

    The file maps paths of images, relative to its directory, to {"name": ..., "tags": [...]}. The name of an image's
    directory is its class.

    Raises:
        ValueError: the file has another form, or no captions. OSError: it cannot be read.
    """
    content = read_json(path)
    if wrong := misfit(content, SHAPE):
        raise ValueError(f'{path}: {wrong} is invalid: expected the form {{"train/class/image.png": {SHOWN}}}')
    found: dict[tuple[str, str], Caption] = {}
    for relative, about in sorted(content.items()):
        file = path.parent / relative
        if not relative.startswith("held_out/"):
            key = file.parent.name, about["name"]
            found.setdefault(key, Caption(about["name"], about["tags"], file.parent.name, [])).files.append(file)
    if not found:
        raise ValueError(f"{path} has no captions of images outside held_out/: pass another --captions")
    return [found[key] for key in sorted(found)]


def pictures_of(captions: Sequence[Caption], upright: Sequence[str], size: int, augment: float = 1.0) -> Data:
    """The images of captions; the index of a caption is their label.

    In training images are mirrored, unless the name has "left" or "right", or the class is in `upright`.
    """
    paths = [[str(file) for file in caption.files] for caption in captions]
    mirrored = [caption.category not in upright and not SIDES.search(caption.name) for caption in captions]
    draw = drawing(default_loader, {"train": paths, "held-out": paths}, mirrored, size, augment)
    return Data([caption.name for caption in captions], draw)


def labels_of(captions: Sequence[Caption]) -> list[int]:
    """The index of each caption, once for each of its images."""
    return [label for label, caption in enumerate(captions) for _ in caption.files]


def text_of(caption: Caption, random: Random) -> str:
    """A random prompt for a caption: its name, alone or with some of its keywords."""
    words = [caption.name]
    if random.random() < WITH_KEYWORDS:
        most = min(MOST_KEYWORDS, len(caption.tags))
        words += random.sample(caption.tags, random.randint(min(1, most), most))
    return random.choice(BEGINNINGS) + " ".join(words)


def words_of(name: str) -> frozenset[str]:
    """The words of a name, without order, case and punctuation."""
    return frozenset(re.findall(r"[\w’'-]+", name.lower()))


def pairs_of_class(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of names of a class: a composition to hold out, and one to train on."""
    count = Counter(word for name in names for word in words_of(name))
    every = [words_of(name) for name in names]

    def is_composed(name: str) -> bool:
        words = words_of(name)
        is_new = sum(words <= other for other in every) == 1
        return len(words) > 1 and is_new and all(count[word] > IN_OTHERS for word in words)

    composed = sorted(filter(is_composed, names), key=digest)
    whole = len(composed) // HELD_OUT_EVERY * HELD_OUT_EVERY
    for name, trained_on in zip(composed[:whole:HELD_OUT_EVERY], composed[1:whole:HELD_OUT_EVERY]):
        if is_composed(name):  # also without the names that were held out before
            count.subtract(words_of(name))
            yield name, trained_on


def listed(captions: Sequence[Caption], num: int) -> list[dict]:
    """`num` captions, every other one held out, from all classes in turn as long as they have some."""
    by_class = defaultdict(list)
    for caption in captions:
        by_class[caption.category].append(caption.name)
    labels = {category: label for label, category in enumerate(sorted(by_class))}
    of_classes = [[(category, pair) for pair in pairs_of_class(names)] for category, names in sorted(by_class.items())]
    in_turn = filter(None, chain.from_iterable(zip_longest(*of_classes)))
    return [
        {"prompt": name, "label": labels[category], "held_out": is_held_out}
        for category, pair in islice(in_turn, num // 2)
        for name, is_held_out in zip(pair, (True, False))
    ]


def read_list(path: Path) -> list[dict]:
    """The list that `main` wrote. Raises ValueError if the file has another form, OSError if it cannot be read."""
    entries = read_json(path)
    if wrong := misfit(entries, LIST):
        raise ValueError(f"{path}: {wrong} is invalid: pass a list that scripts/train/captions.py wrote")
    return entries


def held_out_names(entries: Sequence[dict]) -> set[str]:
    """The captions of a list that are held out from training."""
    return {entry["prompt"] for entry in entries if entry.get("held_out")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=Path, default=Path("data/emoji64/captions.json"))
    parser.add_argument("--num", type=int, default=200, help="number of captions (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/emoji64_text/prompts.json"))
    args = parser.parse_args()
    if args.num < 2 or args.num % 2:
        parser.error(f"--num {args.num}: half of them are held out, so pass an even number")
    captions = read_captions(args.captions)
    entries = listed(captions, args.num)
    if len(entries) < args.num:
        raise SystemExit(f"--num {args.num}: {args.captions} has only {len(entries)} such captions: pass fewer")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, entries)
    categories = sorted({caption.category for caption in captions})
    print(f"{args.out}: {len(entries)} captions, half of them held out:")
    for label, count in sorted(Counter(entry["label"] for entry in entries).items()):
        print(f"  {categories[label]}: {count}")


if __name__ == "__main__":
    main()
