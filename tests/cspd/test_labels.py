"""Classes by name, wherever the command line takes classes."""

from __future__ import annotations

import pytest

from cspd.cli import main
from cspd.comparison.study_file import read_study
from cspd.evaluation.shards import Shards

QUICK = ["--num-iter", "1", "--num-sampling-steps", "2", "--cfg", "1", "--device", "cpu"]
PLAIN = [*QUICK, "--first-timestep", "950"]


@pytest.mark.parametrize(
    "command, labels, hint",
    [
        (
            ["evaluate", "--method", "ar", *PLAIN],
            "two,sevn",
            "label='sevn' is the name of no class: did you mean seven?",
        ),
        (
            ["compare", "--methods", "ar", *PLAIN],
            "two,none",
            "only `cspd sample` makes images of no class: leave it out",
        ),
        (["tune", *QUICK], "two,sevn", "label='sevn' is the name of no class: did you mean seven?"),
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


def test_a_study_names_classes(tmp_path):
    (tmp_path / "study.yaml").write_text("labels: [seven, 3, 8-9]\nconfigurations: [{method: ar}]\n")
    assert read_study(tmp_path / "study.yaml")[0]["labels"] == ["seven", 3, 8, 9]
