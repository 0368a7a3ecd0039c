"""The emoji data set: held-out emojis, vendors' names and drawings, and the check of packages."""

from __future__ import annotations

import io
import json
from argparse import ArgumentTypeError

import emoji
import pytest
from PIL import Image


def entry(label, code, subgroup, skins=()):
    own = {"label": label, "hexcode": code, "group": 0, "subgroup": subgroup, "tags": ["tag"]}
    return own | {"skins": [dict(skin, tone=tone) for tone, skin in enumerate(skins, start=1)]}


def listed(entries):
    groups = {"groups": {"0": "all", "1": "component"}, "subgroups": {"0": "person-role", "1": "drink", "2": "tool"}}
    names = {"1F528": "HAMMER", "2615": "HOT BEVERAGE"}
    files = {"meta/groups.json": groups, "meta/unicode-names.json": names, "en/data.json": entries}
    return emoji.unicode_list({name: json.dumps(content).encode() for name, content in files.items()})


def test_a_drink_is_food_and_a_tool_an_object():
    emojis, hexcodes = listed([entry("hot beverage", "2615", 1), entry("hammer", "1F528", 2)])
    assert [emojis[code].category for code in ("2615", "1f528")] == ["food_and_plants", "objects"]
    assert hexcodes["hammer"] == "1f528"


def test_no_drawing_of_a_held_out_emoji_is_trained_on():
    skins = [{"label": "woman cook: dark skin tone", "hexcode": "B-1F3FF"}]
    roles = [entry(f"{who} {role}", f"{who}-{role}", 0) for role in range(40) for who in ("man", "woman", "person")]
    emojis, _ = listed([*roles, entry("woman cook", "B", 0, skins)])
    held_out = emoji.held_out_families(emojis)
    assert len(held_out) == 5
    assert {family for _, family in held_out} <= {str(role) for role in range(40)} | {"cook"}
    assert emojis["b-1f3ff"].family == emojis["b"].family == "cook"


def test_icons_are_found_by_code_point_or_by_name():
    body = '<path d="M0 0h8v8H0z"/>'
    table = {
        "width": 8,
        "height": 8,
        "icons": {"hammer": {"body": body}, "flag-for-france": {"body": body, "width": 16}},
    }
    table["aliases"] = {"mug": {"parent": "hammer"}, "turned": {"parent": "hammer", "hFlip": True}}
    files = {"icons.json": json.dumps(table).encode(), "chars.json": b'{"2615-fe0f": "mug"}'}
    found = dict(emoji.icons(files, {"hammer": "1f528", "flagfrance": "1f1eb-1f1f7", "turned": "0"}))
    assert found.keys() == {"1f528", "1f1eb-1f1f7", "2615"}
    assert b'viewBox="0 0 16 8"' in found["1f1eb-1f1f7"]


def test_fluent_has_no_flags_of_countries():
    files = dict.fromkeys(("assets/1f1eb-1f1f7.webp", "assets/2615-fe0f.webp", "package.json"), b"")
    assert [code for code, _ in emoji.webps(files, {})] == ["2615"]


def test_a_drawing_is_centred_on_white():
    buffer = io.BytesIO()
    drawn = Image.new("RGBA", (100, 50), (0, 0, 0, 0))
    drawn.paste((255, 0, 0, 255), (0, 0, 50, 50))
    drawn.save(buffer, "WEBP", lossless=True)
    picture = emoji.picture(buffer.getvalue())
    assert (picture.mode, picture.size) == ("RGB", (64, 64))
    colours = [picture.getpixel(place) for place in ((1, 32), (10, 32), (54, 32), (10, 10))]
    assert colours == [(255, 255, 255), (255, 0, 0), (255, 255, 255), (255, 255, 255)]


def test_a_package_with_another_digest_is_refused(tmp_path):
    (tmp_path / "emojibase-data-17.0.0.tgz").write_bytes(b"something else")
    with pytest.raises(OSError, match=r"emojibase-data-17.0.0\.tgz"):
        emoji.fetched(emoji.EMOJIBASE, tmp_path)


def test_sets_of_drawings():
    """A set may be limited to some classes; an unknown one is named."""
    every = emoji.chosen_sets("noto")["noto"]
    assert emoji.chosen_sets("noto,twemoji:flags") == {"noto": every, "twemoji": ["flags"]} and "flags" in every
    for wrong in ("openmoji", "noto:cats", ""):
        with pytest.raises(ArgumentTypeError):
            emoji.chosen_sets(wrong)
