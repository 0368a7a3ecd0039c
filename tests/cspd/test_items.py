"""Arrays in files are read as they were written, or not at all."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest

from cspd.files import DIGEST, read_item, write_item
from cspd.runs import differences

SEEDS = {"seeds": [3, 4, 5]}
LIKE = {"images": (np.uint8, (3, 2)), "labels": (np.integer, (3,))}
ARRAYS = {"images": np.arange(6, dtype=np.uint8).reshape(3, 2), "labels": np.arange(3), "text": np.array("any")}


def test_an_item_is_read_as_it_was_written(tmp_path):
    write_item(tmp_path / "0.npz", ARRAYS, SEEDS)
    found = read_item(tmp_path / "0.npz", SEEDS, LIKE)
    assert found.keys() == ARRAYS.keys() and all((found[name] == ARRAYS[name]).all() for name in ARRAYS)
    assert read_item(tmp_path / "absent.npz", SEEDS, LIKE) is None
    np.savez(tmp_path / "old.npz", **ARRAYS)  # of a version without digests
    assert read_item(tmp_path / "old.npz", SEEDS, LIKE).keys() == ARRAYS.keys()
    for other in ({"images": ARRAYS["images"][:2]}, {"images": ARRAYS["images"].astype(int)}, {"labels": np.arange(2)}):
        np.savez(tmp_path / "old.npz", **ARRAYS | other)
        assert read_item(tmp_path / "old.npz", SEEDS, LIKE) is None


def test_a_flipped_bit_is_noticed(tmp_path):
    path = tmp_path / "0.npz"
    write_item(path, ARRAYS, SEEDS)
    whole = path.read_bytes()
    for place in range(0, len(whole), 13):  # a bit anywhere; where nobody reads, nothing is lost
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        arrays = read_item(path, SEEDS, LIKE)
        assert arrays is None or (arrays["images"] == ARRAYS["images"]).all()


@pytest.mark.parametrize("same", [{"cfg": 3.0, "seed": 2**53 + 1}, {"cfg": 3, "seed": 2**53 + 1, "window": None}])
def test_settings_that_do_not_differ_keep_their_items(tmp_path, same):
    """A study may say 3 and then 3.0, and a later version may have a setting more, which is left open."""
    settings, path = {"request": {"seed": 2**53 + 1, "cfg": 3}}, tmp_path / "0.npz"
    write_item(path, ARRAYS, settings)
    assert differences(settings, {"request": same}) == []
    assert read_item(path, {"request": same}, LIKE)
    for other in ({"cfg": 3.5}, {"seed": 2**53}, {"window": 2}):
        assert read_item(path, {"request": same | other}, LIKE) is None


def huge(path):
    """An archive whose header declares 2^60 bytes."""
    header = {"descr": "|u1", "fortran_order": False, "shape": (2**60,)}
    with zipfile.ZipFile(path, "w") as archive, archive.open("images.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-30]),
        lambda path: path.write_bytes(b"half"),
        lambda path: np.savez(path, **ARRAYS | {"images": np.array([{}, [1]], object)}),
        lambda path: np.save(path.open("wb"), np.zeros(3)),
        lambda path: np.savez(path, others=np.arange(3)),
        lambda path: np.savez(path, **ARRAYS, **{DIGEST: np.array("another")}),
        lambda path: np.savez(path, **dict(np.load(path)) | {"images": 255 - ARRAYS["images"]}),
        lambda path: write_item(path, ARRAYS, {"seeds": [4, 5, 6]}),
        huge,
    ],
    ids="empty cut text objects array others digest inverted seeds huge".split(),
)
def test_a_damaged_item_or_one_of_others_is_none(tmp_path, damage):
    path = tmp_path / "0.npz"
    write_item(path, ARRAYS, SEEDS)
    assert read_item(path, SEEDS, LIKE)
    damage(path)
    assert read_item(path, SEEDS, LIKE) is None
