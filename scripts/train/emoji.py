"""Builds the emoji data set, 64x64 RGB on white in 10 classes, from npm packages: python scripts/train/emoji.py

It has the drawings of seven vendors, whose licences allow a trained model to be shipped. Sets that require derived
works to be under the same licence (OpenMoji, EmojiOne 1) or forbid reuse (Apple, Facebook) are left out. One emoji in
ten is held out, in the drawings of all vendors and with both genders and every skin tone.

Packages are fetched once with `npm pack`, and their digests are checked. An interrupted run can be resumed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from PIL import Image
from tqdm import tqdm

from cspd.files import write_json
from cspd.runs import write_png

SIZE, DRAWN = 64, 60  # pixels of an image, and of the emoji in its middle
HELD_OUT_EVERY = 10

LEFT_OUT = ("sky-weather", "place-map", "body-parts", "hair-style", "skin-tone")  # they look like none of the classes
# each class has the subgroups of Unicode's list that begin with one of these; the first match counts
CLASSES = {
    "animals": ("animal-",),
    "faces": ("face-", "cat-face", "monkey-face"),
    "flags": ("country-flag", "flag", "subdivision-flag"),
    "food_and_plants": ("food-", "drink", "plant-"),
    "hands": ("hand",),
    "people": ("person", "family"),
    "places": ("place-", "hotel"),
    "symbols": (
        *("emotion", "heart", "alphanum", "arrow", "av-symbol", "currency", "gender", "geometric", "keycap", "math"),
        *("other-symbol", "punctuation", "religion", "transport-sign", "warning", "zodiac"),
    ),
    "vehicles": ("transport-air", "transport-ground", "transport-water"),
    "objects": ("",),
}
TONES = 5
NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


class Package(NamedTuple):
    """An npm package: its name and version, and the SHA-256 of its file."""

    name: str
    version: str
    sha256: str


class Vendor(NamedTuple):
    """A set of drawings. `read` yields hexadecimal code points without variation selectors, and SVG or WebP content."""

    package: Package
    licence: str
    author: str
    read: Callable[[dict[str, bytes], dict[str, str]], Iterator[tuple[str, bytes]]]


def hexcode(text: str) -> str:
    """Code points in lower case, joined by hyphens, without the variation selector that some vendors add."""
    return "-".join(part for part in text.lower().split("-") if part != "fe0f")


def squashed(name: str) -> str:
    """A normalised name, which is the same for all vendors' spellings."""
    name = re.sub(r"flag-for-(flag-)?", "flag-", name.lower())
    return re.sub(r"[^a-z0-9]", "", name)


def icons(files: dict[str, bytes], hexcodes: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """The SVGs of an Iconify package. Older packages name their icons, without the code points."""
    table = json.loads(files["icons.json"])
    bodies = {name: icon for name, icon in table["icons"].items()}
    renamed = {name: alias["parent"] for name, alias in table.get("aliases", {}).items() if alias.keys() == {"parent"}}
    listed = {name: hexcode(code) for code, name in json.loads(files.get("chars.json", b"{}")).items()}
    for name in [*bodies, *renamed]:
        code = listed.get(name) or hexcodes.get(squashed(name))
        icon = bodies[renamed.get(name, name)]
        if code is None:
            continue
        width, height = (icon.get(side, table[side]) for side in ("width", "height"))
        box = f"{icon.get('left', 0)} {icon.get('top', 0)} {width} {height}"
        yield code, f'<svg {NAMESPACES} viewBox="{box}">{icon["body"]}</svg>'.encode()


def webps(files: dict[str, bytes], hexcodes: dict[str, str]) -> Iterator[tuple[str, bytes]]:
    """The drawings of a package with one WebP per emoji, without flags of countries, which are not Microsoft's."""
    for name, content in files.items():
        code = hexcode(Path(name).stem)
        if name.endswith(".webp") and not re.match("1f1[ef].-1f1", code):
            yield code, content


EMOJIBASE = Package(
    "emojibase-data", "17.0.0", "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a"
)  # MIT: names and groups
VENDORS = {
    "noto": Vendor(
        Package("@iconify-json/noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
        "Apache-2.0",
        "Google, Noto Emoji",
        icons,
    ),
    "noto-v1": Vendor(
        Package("@iconify-json/noto-v1", "1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37"),
        "Apache-2.0",
        "Google, Noto Emoji 1",
        icons,
    ),
    "twemoji": Vendor(
        Package("@iconify-json/twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"),
        "CC-BY-4.0",
        "Twitter and contributors, Twemoji",
        icons,
    ),
    "emojione": Vendor(
        Package("@iconify-json/emojione", "1.2.3", "26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e"),
        "CC-BY-4.0",
        "EmojiOne 2 and EmojiTwo",
        icons,
    ),
    "fxemoji": Vendor(
        Package("@iconify-json/fxemoji", "1.2.2", "f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef"),
        "CC-BY-4.0",
        "Mozilla, FxEmojis",
        icons,
    ),
    "fluent-flat": Vendor(
        Package(
            "@iconify-json/fluent-emoji-flat",
            "1.2.6",
            "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
        ),
        "MIT",
        "Microsoft, Fluent Emoji",
        icons,
    ),
    "fluent-3d": Vendor(
        Package(
            "@lobehub/fluent-emoji-3d", "1.1.0", "c1bb7eee7de090205a232518a9ab4adb3df458bfbe8a1f78232991194c8b2e58"
        ),
        "MIT",
        "Microsoft, Fluent Emoji",
        webps,
    ),
}


class Emoji(NamedTuple):
    """An emoji of the Unicode list.

    Attributes:
        family: all emojis of a family are held out together. tone: of the skin, 1 to 5, or None.
    """

    name: str
    category: str
    family: str
    tags: list[str]
    tone: int | None


def fetched(package: Package, folder: Path) -> dict[str, bytes]:
    """The files of a package by path, from `folder` or from npm's registry.

    Raises:
        OSError: npm is missing or fails, or the file has another digest.
    """
    file = folder / f"{package.name.lstrip('@').replace('/', '-')}-{package.version}.tgz"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", f"{package.name}@{package.version}", "--pack-destination", str(folder.resolve())]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise FileNotFoundError("npm, which fetches packages, is not installed: install Node.js") from error
        except subprocess.CalledProcessError as error:
            raise OSError(f"{package.name} cannot be fetched: {error.stderr.strip()}") from error
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != package.sha256:
        raise OSError(f"{file} differs from version {package.version} on npm: delete the file and run again")
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            member_file = archive.extractfile(member)  # None for a directory
            if member_file is not None:
                files[member.name.split("/", 1)[1]] = member_file.read()
    return files


def unicode_list(files: dict[str, bytes]) -> tuple[dict[str, Emoji], dict[str, str]]:
    """All emojis by code points, and code points by normalised name."""
    groups = json.loads(files["meta/groups.json"])
    names = json.loads(files["meta/unicode-names.json"])
    emojis, hexcodes = {}, {squashed(name): hexcode(code) for code, name in names.items()}
    for entry in json.loads(files["en/data.json"]):
        if "subgroup" not in entry:  # a letter that flags are spelled with
            continue
        subgroup = groups["subgroups"][str(entry["subgroup"])]
        if subgroup.startswith(LEFT_OUT):
            continue
        category = next(name for name, starts in CLASSES.items() if subgroup.startswith(starts))
        family = re.sub(r"\b(wo)?m[ae]n\b|\bperson\b|\bpeople\b", "", entry["label"])
        for variant in [entry, *entry.get("skins", [])]:
            tone = variant.get("tone")
            code = hexcode(variant["hexcode"])
            emojis[code] = Emoji(variant["label"], category, " ".join(family.split()), entry.get("tags", []), tone)
            hexcodes[squashed(variant["label"])] = code
    return emojis, hexcodes


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def held_out_families(emojis: dict[str, Emoji]) -> set[tuple[str, str]]:
    """Every tenth family of each class, in the order of their digests."""
    by_class = defaultdict(set)
    for emoji in emojis.values():
        by_class[emoji.category].add(emoji.family)
    held_out = set()
    for category, families in by_class.items():
        ordered = sorted(families, key=digest)
        held_out |= {(category, family) for family in ordered[::HELD_OUT_EVERY]}
    return held_out


def picture(content: bytes) -> Image.Image:
    """An SVG or WebP in the middle of a white square."""
    if content.startswith(b"<svg"):
        import resvg_py

        content = bytes(resvg_py.svg_to_bytes(svg_string=content.decode(), width=2 * DRAWN))
    drawn = Image.open(io.BytesIO(content)).convert("RGBA")
    drawn.thumbnail((DRAWN, DRAWN), Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (SIZE, SIZE), "white")
    corner = ((SIZE - drawn.width) // 2, (SIZE - drawn.height) // 2)
    canvas.alpha_composite(drawn, corner)
    return canvas.convert("RGB")


def wanted(code: str, emoji: Emoji, vendor: str) -> bool:
    """Whether an emoji is in the data set. One of five skin tones is enough: there are many people anyway."""
    if emoji.tone is None:
        return True
    return emoji.tone == 1 + digest(f"{emoji.family} {vendor}") % TONES


def chosen_sets(given: str) -> dict[str, list[str]]:
    """The classes of each set of drawings in --sets, such as fluent-flat,twemoji:flags."""
    chosen: dict[str, list[str]] = defaultdict(list)
    for each in given.split(","):
        vendor, _, category = each.partition(":")
        if vendor not in VENDORS or (category and category not in CLASSES):
            known = f"the sets are {', '.join(VENDORS)}; the classes are {', '.join(CLASSES)}"
            raise argparse.ArgumentTypeError(f"{each}: {known}")
        chosen[vendor] += [category] if category else CLASSES
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path, default=Path("data/packages"), help="directory of fetched files")
    parser.add_argument("--out", type=Path, default=Path("data/emoji64"), help="gets train/, held_out/, captions.json")
    parser.add_argument(
        "--sets",
        type=chosen_sets,
        default=",".join(VENDORS),
        help="sets of drawings, separated by commas; twemoji:flags has those of a class only (default: all)",
    )
    args = parser.parse_args()

    emojis, hexcodes = unicode_list(fetched(EMOJIBASE, args.packages))
    held_out = held_out_families(emojis)
    captions = {}
    for vendor, classes in args.sets.items():
        package, _, _, read = VENDORS[vendor]
        found = dict(read(fetched(package, args.packages), hexcodes))
        drawn = sorted(code for code in found if code in emojis and emojis[code].category in classes)
        codes = [code for code in drawn if wanted(code, emojis[code], vendor)]
        for code in tqdm(codes, desc=vendor):
            emoji = emojis[code]
            split = "held_out" if (emoji.category, emoji.family) in held_out else "train"
            path = Path(split) / emoji.category / f"{code}_{vendor}.png"
            captions[str(path)] = {"name": emoji.name, "tags": emoji.tags, "vendor": vendor}
            file = args.out / path
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                write_png(file, picture(found[code]))
    write_json(args.out / "captions.json", captions)
    print(f"{args.out}: {len(captions)} images")


if __name__ == "__main__":
    main()
