"""Classes by name, wherever the command line takes classes."""

from __future__ import annotations

import json

import pytest

from cspd.cli import main
from cspd.evaluation.shards import Shards

QUICK = ["--num-iter", "1", "--num-sampling-steps", "2", "--cfg", "1", "--device", "cpu"]
COMMANDS = {
    "evaluate": ["evaluate", "--method", "ar", "--first-timestep", "950", *QUICK],
    "compare": ["compare", "--methods", "ar", "--first-timestep", "950", *QUICK],
    "tune": ["tune", *QUICK],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "labels, hint",
    [
        ("two,sevn", "label='sevn' is the name of no class: did you mean seven?"),
        ("two,none", "only `cspd sample` makes images of no class: leave it out"),
    ],
)
def test_what_is_no_class(command, labels, hint, tmp_path, capsys):
    assert main([*COMMANDS[command], "--labels", labels, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert hint in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_names_are_numbers(tmp_path):
    """A run that began with numbers goes on with names."""
    for labels in ("7,3", "seven,Three"):
        given = ["--labels", labels, "--num", "2", "--out"]
        assert main([*COMMANDS["evaluate"], *given, str(tmp_path / "evaluate")]) == 0
        assert main([*COMMANDS["compare"], *given, str(tmp_path / "compare")]) == 0
    assert Shards(tmp_path / "evaluate", 2).labels() == [7, 3]
    assert json.loads((tmp_path / "compare" / "comparison.json").read_text())["labels"] == [7, 3]


def test_a_study_names_classes(tmp_path, capsys):
    study = "labels: [seven, 3, sevn]\nconfigurations: [{method: ar}]\n"
    (tmp_path / "study.yaml").write_text(study)
    assert main(["compare", "--config", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out")]) == 2
    assert "label='sevn' is the name of no class: did you mean seven?" in capsys.readouterr().err
