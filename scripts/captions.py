"""Pictures with captions, what models of texts are trained on; and a list of captions to judge such a model by.

python scripts/captions.py --captions data/emoji64/captions.json --out checkpoints/emoji64_text/prompts.json

Half of the list is held out from training in composition: each word of such a caption is in others of its class, and
all of its words together are in the name of no other of its class. The other half has captions of the same kind that
are trained on. Both are the same for the same captions.json.
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
WITH_KEYWORDS = 0.5  # share of texts
MOST_KEYWORDS = 3
BEGINNINGS = ("", "", "", "a ", "an ", "the ")  # people write them, and names have none
SIDES = re.compile(r"\b(left|right)", re.IGNORECASE)  # what a mirrored picture would contradict

IN_OTHERS = 2  # names of its class that each word of a held-out name must be in
HELD_OUT_EVERY = 5  # of the names that could be


class Caption(NamedTuple):
    """A name, the keywords that go with it, the class of its pictures, and their files."""

    name: str
    tags: list[str]
    category: str
    files: list[Path]


def read_captions(path: Path) -> list[Caption]:
    """The captions of a file, by class and name, without those of the pictures in held_out/.

    The file maps pictures, by their places beside it, to {"name": ..., "tags": [...]}. The folder that a picture is in
    is its class.

    Raises:
        ValueError: the file has another form, or no captions. OSError: it cannot be read.
    """
    content = read_json(path)
    if wrong := misfit(content, SHAPE):
        raise ValueError(f'{path}: {wrong} is not as it should be: give {{"train/class/picture.png": {SHOWN}}}')
    found: dict[tuple[str, str], Caption] = {}
    for place, about in sorted(content.items()):
        file = path.parent / place
        if not place.startswith("held_out/"):
            key = file.parent.name, about["name"]
            found.setdefault(key, Caption(about["name"], about["tags"], file.parent.name, [])).files.append(file)
    if not found:
        raise ValueError(f"{path} has no captions of pictures outside held_out/: give another --captions")
    return [found[key] for key in sorted(found)]


def pictures_of(captions: Sequence[Caption], upright: Sequence[str], size: int) -> Data:
    """Their pictures, labelled by the captions' numbers.

    They are mirrored unless the name tells left from right, or the class is one of `upright`.
    """
    paths = [[str(file) for file in caption.files] for caption in captions]
    mirrored = [caption.category not in upright and not SIDES.search(caption.name) for caption in captions]
    draw = drawing(default_loader, {"train": paths, "held-out": paths}, mirrored, size)
    return Data([caption.name for caption in captions], draw)


def labels_of(captions: Sequence[Caption]) -> list[int]:
    """The captions' numbers, each as often as it has pictures."""
    return [label for label, caption in enumerate(captions) for _ in caption.files]


def text_of(caption: Caption, random: Random) -> str:
    """What a picture is called in one step of training: its name, with some of its keywords or alone."""
    words = [caption.name]
    if random.random() < WITH_KEYWORDS:
        most = min(MOST_KEYWORDS, len(caption.tags))
        words += random.sample(caption.tags, random.randint(min(1, most), most))
    return random.choice(BEGINNINGS) + " ".join(words)


def words_of(name: str) -> frozenset[str]:
    """The words of a name, whatever their order and punctuation."""
    return frozenset(re.findall(r"[\w’'-]+", name.lower()))


def pairs_of_class(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names of a class to be held out in composition, each with one of the same kind that is not."""
    count = Counter(word for name in names for word in words_of(name))
    every = [words_of(name) for name in names]

    def is_composed(name: str) -> bool:
        words = words_of(name)
        is_new = sum(words <= other for other in every) == 1
        return len(words) > 1 and is_new and all(count[word] > IN_OTHERS for word in words)

    composed = sorted(filter(is_composed, names), key=digest)
    whole = len(composed) // HELD_OUT_EVERY * HELD_OUT_EVERY
    for name, trained_on in zip(composed[:whole:HELD_OUT_EVERY], composed[1:whole:HELD_OUT_EVERY]):
        if is_composed(name):  # still, without those before it
            count.subtract(words_of(name))
            yield name, trained_on


def listed(captions: Sequence[Caption], num: int) -> list[dict]:
    """`num` captions, every other one held out, of all classes that have such as equally as they allow."""
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
    """What `main` has written. Raises ValueError where the file has another form, OSError where it cannot be read."""
    entries = read_json(path)
    if wrong := misfit(entries, LIST):
        raise ValueError(f"{path}: {wrong} is not as it should be: give a list that scripts/captions.py has written")
    return entries


def held_out_names(entries: Sequence[dict]) -> set[str]:
    """The captions that a list keeps from training."""
    return {entry["prompt"] for entry in entries if entry.get("held_out")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captions", type=Path, default=Path("data/emoji64/captions.json"))
    parser.add_argument("--num", type=int, default=200, help="how many captions (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("checkpoints/emoji64_text/prompts.json"))
    args = parser.parse_args()
    if args.num < 2 or args.num % 2:
        parser.error(f"--num {args.num}: half of them are held out, so give an even number")
    captions = read_captions(args.captions)
    entries = listed(captions, args.num)
    if len(entries) < args.num:
        raise SystemExit(f"{args.captions} has {len(entries)} such captions, not --num {args.num}: give fewer")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(args.out, entries)
    categories = sorted({caption.category for caption in captions})
    print(f"{args.out}: {len(entries)} captions, half of them held out:")
    for label, count in sorted(Counter(entry["label"] for entry in entries).items()):
        print(f"  {categories[label]}: {count}")


if __name__ == "__main__":
    main()
