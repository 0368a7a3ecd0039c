"""Classes by name, wherever the command line takes classes."""

from __future__ import annotations

import json

import pytest

from cspd.cli import main
from cspd.evaluation.shards import Shards

QUICK = ["--num-iter", "1", "--num-sampling-steps", "2", "--cfg", "1", "--device", "cpu"]
PLAIN = [*QUICK, "--first-timestep", "950"]


@pytest.mark.parametrize(
    "command, labels, hint",
    [
        (["evaluate", "--method", "ar", *PLAIN], "two,sevn", "label='sevn' is the name of no class: did you mean seven?"),
        (["compare", "--methods", "ar", *PLAIN], "two,none", "only `cspd sample` makes images of no class: leave it out"),
        (["tune", *QUICK], "two,sevn", "label='sevn' is the name of no class: did you mean seven?"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_no_class(command, labels, hint, tmp_path, capsys):
    assert main([*command, "--labels", labels, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_evaluation_that_began_with_numbers_goes_on_with_names(tmp_path, capsys):
    for labels in ("7,3", "seven,Three"):
        given = ["--labels", labels, "--num", "2", "--out", str(tmp_path)]
        assert main(["evaluate", "--method", "ar", *PLAIN, *given]) == 0
    assert "all were there already" in capsys.readouterr().out
    assert Shards(tmp_path, 2).labels() == [7, 3]


def test_a_study_names_classes(tmp_path):
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text("labels: [seven, 3]\nnum: 2\nconfigurations: [{method: ar}]\n")
    assert main(["compare", "--config", str(file), *PLAIN, "--out", str(out)]) == 0
    assert json.loads((out / "comparison.json").read_text())["labels"] == [7, 3]
