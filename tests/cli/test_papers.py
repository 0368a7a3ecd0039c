"""`cspd evaluate --like paper:NAME`: published tables, dry and with weights."""

from __future__ import annotations

import json

import pytest
from stores import small_checkpoint

from cspd.cli import main, papers
from cspd.cli.flags import parser_of
from cspd.cli.papers import PAPERS, arguments_of, read_paper, typed_in
from cspd.method import METHODS

NAMES = [f"paper:{path.stem}" for path in sorted(PAPERS.glob("*.yaml"))]


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_checks_every_row_without_weights(name, tmp_path, capsys):
    assert main(["evaluate", "--like", name, "--dry-run", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    table = read_paper(name)
    for row in table["rows"]:
        assert row["name"] in printed and str(row["published"]["fid"]) in printed and row["checkpoint"] in printed
        words = arguments_of(table["common"] | row, [], "out")
        own = parser_of(words, METHODS).parse_args(words)
        assert own.num == 50_000 and own.cfg == row["cfg"] and str(own.checkpoint) == row["checkpoint"]
    assert not (tmp_path / "out").exists()


def test_the_four_tables_are_there():
    assert NAMES == ["paper:cspd", "paper:llamagen", "paper:mar", "paper:spherear"]


@pytest.mark.parametrize(
    "paper, wrong, named",
    [
        ("mar", ["--num-iter", "300"], "MAR-B: num_iter"),
        ("mar", ["--ref", "damaged.npz"], "damaged.npz"),
        ("spherear", ["--gamma", "3"], "SphereAR-B: gamma"),
    ],
)
def test_a_dry_run_finds_what_would_fail(paper, wrong, named, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged.npz").write_bytes(b"nothing")
    assert main(["evaluate", "--like", f"paper:{paper}", "--dry-run", *wrong]) == 2
    assert named in capsys.readouterr().err


def test_an_unknown_paper(capsys):
    assert main(["evaluate", "--like", "paper:mars"]) == 2
    assert "paper:mar" in capsys.readouterr().err


def test_the_users_arguments_override_the_published_ones():
    typed = typed_in("cspd evaluate --like paper:mar --num 64 --dry-run --out=x --cfg 2")
    assert typed == ["--num", "64", "--cfg", "2"]
    table = read_paper("paper:mar")
    words = arguments_of(table["common"] | table["rows"][0], typed, "out")
    own = parser_of(words, METHODS).parse_args(words)
    assert (own.num, own.cfg, own.num_iter) == (64, 2.0, 256)


def test_rows_with_weights_are_run_and_shown_beside_the_published_numbers(tmp_path, capsys, monkeypatch):
    """The bundled model stands in for one row; the other has no weights."""
    common = {"num": 20, "method": "ar", "num_iter": 2, "num_sampling_steps": 10, "cfg": 1.0, "max_batch": 10}
    common["space"] = "digits"
    rows = [
        {"name": "ours", "checkpoint": small_checkpoint(), "published": {"fid": 1.5}},
        {"name": "theirs", "checkpoint": "nowhere/model", "published": {"fid": 2.5}},
    ]
    table = {"paper": "0", "table": "", "family": "MAR", "common": common, "rows": rows}
    monkeypatch.setattr(papers, "read_paper", lambda name: table)
    assert main(["evaluate", "--like", "paper:toy", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "ours" / "evaluation.json").read_text())
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    low, high = report["fid_ci95"]
    assert lines["ours"][1:5] == ["1.5", f"{report['fid']:.2f}", f"[{low:.2f},", f"{high:.2f}]"]
    assert lines["theirs"][-2:] == ["no", "nowhere/model"] and not (tmp_path / "theirs").exists()
