"""What was measured of a sampler: kept with its images, averaged over them, and told."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from stores import small_checkpoint

import cspd
from cspd.cli import bench, main
from cspd.cli.evaluate import SAMPLING
from cspd.comparison import study
from cspd.comparison.compare import speed_of
from cspd.comparison.study import Configuration
from cspd.evaluation.run import SIZE, Shards, arrays_of
from cspd.files import misfit
from cspd.request import Output, RoundStats
from cspd.runs import MEASURED, STATS, measured, measured_lines, summary_of

NUM, SEED = 20, 5  # images: a file of 16, and one of 4
AUDITS = np.linspace(0.4, 0.6, NUM)
ERROR = AUDITS.std(ddof=1) / NUM**0.5
KNOWN = {"difference": 0.046, "divergence": 0.54}
TITLES = {"difference": "0.046", "divergence": "0.540", "audit": "0.500", "+- s.e.": f"{ERROR:.3f}"}  # of the benchmark
HELD_OUT = RoundStats(guarantee="measured", **KNOWN)


def stats_of(num):
    """Of images, each with an audit of its own and the error of that."""
    return [dataclasses.replace(HELD_OUT, audit=audit, audit_error=0.3) for audit in AUDITS[:num]]


def outputs(num=NUM):
    made = []
    for i, stats in enumerate(stats_of(num)):
        request = cspd.Request(0, SEED + i, "speculative", family="MAR")
        made.append(Output(request, torch.zeros(4, 2), torch.zeros(3, 4, 4), torch.zeros(4), stats))
    return made


@pytest.mark.parametrize(
    "stats, means",
    [
        (stats_of(NUM), KNOWN | {"audit": 0.5, "audit_error": ERROR}),  # which has what differs between the images
        (stats_of(1), KNOWN | {"audit": 0.4, "audit_error": 0.3}),
        ([HELD_OUT] * 3, KNOWN | {"audit": None, "audit_error": None}),
        ([RoundStats()] * 3, dict.fromkeys(MEASURED)),
        ([RoundStats(), *stats_of(1)], KNOWN | {"audit": 0.4, "audit_error": 0.3}),
    ],
)
def test_what_was_measured_is_averaged_over_the_images(stats, means):
    assert measured([each.to_dict() for each in stats]) == pytest.approx(means)


def test_images_of_older_versions_have_nothing_measured():
    older = {name: value for name, value in RoundStats().to_dict().items() if name not in MEASURED}
    assert misfit(older, STATS) is None
    assert measured([older]) == dict.fromkeys(MEASURED)
    assert measured_lines({}) == []
    assert misfit(HELD_OUT.to_dict() | {"audit": "much"}, STATS) == "audit"


def test_shards_keep_it(tmp_path):
    manifest = {"labels": [0], "seed": SEED}
    shards = Shards(tmp_path, NUM, manifest)
    made = outputs()
    for shard in (1, 0):  # of two processes
        shards.write(shard, arrays_of(made[shard * SIZE : (shard + 1) * SIZE]))
    assert shards.missing(4) == []
    summary = json.loads(json.dumps(summary_of(list(shards.stats()), NUM, 2.0))) | {"processes": 2}
    assert {name: summary[name] for name in MEASURED} == pytest.approx(KNOWN | {"audit": 0.5, "audit_error": ERROR})
    assert summary["guarantee"] == "measured" and misfit(summary, SAMPLING) is None
    assert [line[:2] for line in measured_lines(summary)] == [
        ("difference", "0.046"),
        ("divergence", "0.540"),
        ("audit", "0.500"),
    ]
    assert f"+- {ERROR:.3f} nats per token" in measured_lines(summary)[2][2]


def test_chunks_of_a_comparison_keep_it(digits, tmp_path):
    made = outputs()
    made[0].stats.lazy_backbone_calls = NUM
    row = Configuration("made up", made[0].request, digits.with_slots(NUM))
    images, made_of = np.zeros((NUM, 4, 4, 3), np.uint8), {"requests": [{}] * NUM}
    chunk = study.Chunk(images, 1.0, 7, [study.cost_of(output) for output in made])
    study.write_chunk(tmp_path / "chunk.npz", chunk, made_of)
    chunk = study.read_chunk(tmp_path / "chunk.npz", made_of, 4)
    told = speed_of(row, made[0].request, [chunk], [chunk])
    wanted = KNOWN | {"audit": 0.5, "lazy_backbone_calls": 1.0}
    assert {name: told[name] for name in wanted} == pytest.approx(wanted) and "audit_error" not in told
    assert told["audit_ci95"] == pytest.approx([0.5 - 1.96 * ERROR, 0.5 + 1.96 * ERROR], rel=1e-3)


def test_bench_tells_it_of_all_runs():
    request = cspd.Request(0, num_iter=4, cfg=1.0)
    audited = [vars(stats) for stats in stats_of(NUM)]
    runs = [{"seconds": 1.0, "guarantee": "measured", "stats": some} for some in (audited[:8], audited[8:])]
    plain = [{"seconds": 2.0, "guarantee": "exact", "first_timestep": 950, "stats": [vars(RoundStats())]}] * 2
    rows = [bench._row("ar", 8, request, plain, plain), bench._row("calibrated", 8, request, runs, plain)]
    assert {name: rows[1][name] for name in MEASURED} == pytest.approx(KNOWN | {"audit": 0.5, "audit_error": ERROR})
    machine = dict.fromkeys(("device", "threads", "torch", "precision"), "")
    report = {"machine": machine, "runs": 2, "rows": json.loads(json.dumps(rows)), "memory": []}
    text = bench.format_bench(report)
    titles, first, second = text.splitlines()[2:5]
    assert "first t" in titles and "950" in first and "950" not in second
    place = {title: slice(titles.index(title), titles.index(title) + len(title)) for title in TITLES}
    assert {title: second[where].strip() for title, where in place.items()} == TITLES
    assert not any(first[where].strip() for where in place.values())
    assert "medians of 2 runs (least..most holds the true median with 50%)" in text
    assert "; one run of each\n" in bench.format_bench(report | {"runs": 1})


def test_memory_is_measured_without_a_warning(digits, recwarn):
    """Of a setting that nobody gave."""
    assert bench._memory(digits, cspd.Request(0, cfg=1.0), 1, 1)["peak_bytes"] > 0
    assert not list(recwarn)


def run(command, out, *more):
    options = ["--num-iter", "2", "--num-sampling-steps", "10", "--cfg", "1", "--num", "2", "--labels", "3,4"]
    assert main([command, "--checkpoint", small_checkpoint(), *options, *more, "--out", str(out)]) == 0


def test_samples_go_on_with_the_head_calls_that_were_chosen(tmp_path, capsys):
    for lost in (None, tmp_path / "00001_label4_seed1.png"):
        if lost:
            before = lost.read_bytes()
            lost.unlink()
        run("sample", tmp_path, "--method", "calibrated", "--divergence", "0.3", "--audit", "0.5")
        assert not lost or lost.read_bytes() == before
    record = json.loads((tmp_path / "samples.json").read_text())
    assert record["summary"]["images_made"] == 1 and record["summary"]["guarantee"] == "measured"
    told = measured_lines(record["summary"])
    assert [title for title, _, _ in told] == ["difference", "divergence", "audit"]
    text = capsys.readouterr().out
    assert "guarantee: measured" in text
    assert all(f"{title} {value} {meaning}" in text for title, value, meaning in told)


def test_lazy_calls_are_told(tmp_path, capsys):
    run("sample", tmp_path, "--method", "lazymar", "--warmup", "0")
    text = capsys.readouterr().out
    assert "2 backbone calls (1 lazy)" in text and "guarantee: heuristic" in text


def test_evaluations_go_on_with_the_head_calls_that_were_chosen(tmp_path, capsys):
    for _ in range(2):
        run("evaluate", tmp_path, "--method", "calibrated")
        report = json.loads((tmp_path / "evaluation.json").read_text())
        assert report["sampling"]["images_made"] == 2 and report["sampling"]["divergence"] is not None
        assert "difference " in capsys.readouterr().out


@pytest.mark.slow
def test_comparisons_tell_what_was_measured(tmp_path):
    methods = "calibrated:divergence=0.3:audit=0.5,calibrated:seed=10"
    run("compare", tmp_path, "--methods", methods)
    written = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()}
    run("compare", tmp_path, "--methods", methods)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "chunks").iterdir()} == written
    rows = json.loads((tmp_path / "comparison.json").read_text())["rows"]
    plain, audited, other = (row for row in rows if row["settings"]["num_iter"] == 2)
    assert [row["guarantee"] for row in (plain, audited, other)] == ["exact", "measured", "measured"]
    assert plain["difference"] is None and audited["difference"] > 0
    assert audited["audit"] > 0 and other["audit"] is None
    assert audited["pixel_difference"] >= 0 and other["pixel_difference"] is None  # of other seeds
