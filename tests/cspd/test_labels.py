"""Classes by name, wherever the command line takes classes."""

from __future__ import annotations

import argparse
import tracemalloc

import pytest

from cspd.cli import main
from cspd.evaluation.run import Shards
from cspd.terminal import MOST_LISTED, label_list, label_of

QUICK = ["--num-iter", "1", "--num-sampling-steps", "2", "--cfg", "1", "--device", "cpu"]
PLAIN = [*QUICK, "--first-timestep", "950"]


@pytest.mark.parametrize(
    "command, labels, hint",
    [
        (
            ["evaluate", "--method", "ar", *PLAIN],
            "two,sevn",
            "seven",
        ),
        (
            ["compare", "--methods", "ar", *PLAIN],
            "two,none",
            "",
        ),
        (["tune", *QUICK], "two,sevn", "seven"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_no_class(command, labels, hint, tmp_path, capsys):
    assert main([*command, "--labels", labels, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_evaluation_that_began_with_numbers_goes_on_with_names(tmp_path):
    stamps = []
    for labels in ("7,3", "seven,Three"):
        given = ["--labels", labels, "--num", "2", "--out", str(tmp_path)]
        assert main(["evaluate", "--method", "ar", *PLAIN, *given]) == 0
        stamps.append((tmp_path / "00000.npz").stat().st_mtime_ns)
    assert stamps[0] == stamps[1] and Shards(tmp_path, 2).subjects() == [7, 3]


def test_all_parts_of_a_list_count():
    tracemalloc.start()
    try:
        for text in ("0-99999," * 600 + "1", "0-99998,1,two", "a," * MOST_LISTED):
            with pytest.raises(argparse.ArgumentTypeError):
                label_list(text)
        assert tracemalloc.get_traced_memory()[1] < 50 * 2**20
    finally:
        tracemalloc.stop()
    assert len(label_list("0-99998,two")) == MOST_LISTED


@pytest.mark.parametrize(
    "text, label", [(" 3 ", 3), ("007", 7), ("none", None), (" golden retriever", "golden retriever")]
)
def test_one_class(text, label):
    assert label_of(text) == label


@pytest.mark.parametrize("text", ["0-99999", "3-", "1,2", "three,", "0-99999," * 600 + "1", "", "-", "\u0663"])
def test_lists_are_not_one_class(text):
    tracemalloc.start()
    try:
        with pytest.raises(argparse.ArgumentTypeError):
            label_of(text)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
