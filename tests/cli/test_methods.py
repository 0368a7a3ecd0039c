"""The methods from the command line: heat maps, records, timings, calibrations, and errors in one line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image
from stores import small_checkpoint

from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.continuous import calibrations, tuning
from cspd.tuner import Times

QUICK = ["--num-iter", "2", "--num-sampling-steps", "6", "--cfg", "1"]
FILES = checkpoint_files("digits32")
SIDE, MARGIN, TOKENS = 128, 4, 8  # of an image in a heat map, in pixels, and tokens a side
GREY = (128, 128, 128)


def sample(out, *more, labels="0-2"):
    return main(["sample", "--labels", labels, "--out", str(out), *QUICK, *more])


def read(path):
    """JSON as every reader takes it: Python's own lets NaN pass."""
    return json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{path} holds {text}"))


def costs_in(record):
    """Token costs [N, 64] of a record."""
    return np.array([image["token_cost"] for image in record["images"]], dtype=float)


class HeatMap:
    """heatmap.png: each image next to its tokens, and a legend in the strip below."""

    def __init__(self, out):
        picture = Image.open(out / "heatmap.png").convert("RGB")
        self.pixels = np.asarray(picture)
        strip = picture.crop((0, picture.height - 30, *picture.size))
        self.legend = {colour for _, colour in strip.getcolors(10**6)}
        for i, path in enumerate(sorted(out.glob("*_label*.png"))):
            assert (self._part(i, 0)[::4, ::4] == np.asarray(Image.open(path))).all()

    def _part(self, index, right):
        left = MARGIN + index * (2 * SIDE + MARGIN) + right
        return self.pixels[MARGIN : MARGIN + SIDE, left : left + SIDE]

    def tokens(self, index):
        """The colours of an image's tokens [64]; each is of one colour all over."""
        size = SIDE // TOKENS
        blocks = self._part(index, SIDE).reshape(TOKENS, size, TOKENS, size, 3).swapaxes(1, 2).reshape(64, -1, 3)
        assert (blocks == blocks[:, :1]).all()
        return [tuple(colour) for colour in blocks[:, 0].tolist()]

    def is_blank(self, index):
        return set(self.tokens(index)) == {GREY}


def viridis(value):
    return tuple(int(channel) for channel in colormaps["viridis"](value, bytes=True)[:3])


def test_heat_map_and_record_of_speculative_sampling(tmp_path, capsys):
    assert sample(tmp_path, "--window", "4", "--heatmap") == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("heatmap.png", "% of the drafts were accepted", "window 4: "))
    record = read(tmp_path / "samples.json")
    token_cost = costs_in(record)
    low, high = token_cost.min(), token_cost.max()
    assert token_cost.shape == (3, 64) and 2 <= low < high <= 6
    heat_map = HeatMap(tmp_path)
    for i, values in enumerate(token_cost):
        assert heat_map.tokens(i) == [viridis((value - low) / (high - low)) for value in values]
    assert {viridis(fraction) for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)} <= heat_map.legend

    for image, values in zip(record["images"], token_cost):
        assert not {"by_lag", "by_step", "by_rank"} & set(image["stats"])
        assert (image["request"]["method"], image["request"]["window"]) == ("speculative", 4)
        assert image["stats"]["head_calls_per_token"] == pytest.approx(values.mean())
    summary = record["summary"]
    assert summary["head_calls_per_token"] == pytest.approx(token_cost.mean()) and summary["head_calls_per_token"] < 6
    alphas = [image["stats"]["alpha"] for image in record["images"]]
    assert summary["alpha"] == pytest.approx(np.mean(alphas)) and 0 < summary["alpha"] < 1
    totals = {name: np.array(counts) for name, counts in summary["judged_and_accepted"].items()}
    shapes = {name: counts.shape for name, counts in totals.items()}
    assert shapes == {"by_lag": (2, 4), "by_step": (2, 6), "by_rank": (2, 0)}
    assert totals["by_lag"].sum(1).tolist() == totals["by_step"].sum(1).tolist()


def test_heat_map_and_record_of_cspd(tmp_path, capsys):
    """The target is its own draft model: with so few steps, another one would get no token right."""
    own = ["--method", "mar-draft", "--draft-checkpoint", str(FILES["target"]), "--gamma", "2"]
    assert sample(tmp_path, *own, "--heatmap", labels="3,4") == 0
    record = read(tmp_path / "samples.json")
    token_cost = costs_in(record)
    heat_map = HeatMap(tmp_path)
    colours = {0.0: viridis(0.0), 1.0: viridis(1.0)}
    for i, values in enumerate(token_cost):
        assert np.isnan(values).sum() == 4  # the prefill
        assert heat_map.tokens(i) == [colours.get(value, GREY) for value in values]
    assert {*colours.values(), GREY} <= heat_map.legend
    summary = record["summary"]
    assert 0 < summary["alpha"] < 1 and summary["alpha"] == pytest.approx(np.nanmean(token_cost))
    assert f"{summary['alpha']:.1%}" in capsys.readouterr().out
    (verified, accepted), by_rank = summary["judged_and_accepted"]["by_lag"], summary["judged_and_accepted"]["by_rank"]
    assert verified == [60, 60] and sum(accepted) == np.nansum(token_cost) == sum(by_rank[1])
    assert by_rank[0] == [0] * 4 + [2] * 60
    assert (summary["iterations_per_image"], summary["draft_backbone_calls_per_image"]) == (1 + 30, 60)


def test_images_of_a_run_without_a_heat_map_are_blank_in_it(tmp_path):
    assert sample(tmp_path, "--window", "4") == 0
    assert not (tmp_path / "heatmap.png").exists()
    before = read(tmp_path / "samples.json")
    assert all("token_cost" not in image for image in before["images"])
    (tmp_path / before["images"][1]["file"]).unlink()
    assert sample(tmp_path, "--window", "4", "--heatmap") == 0
    heat_map = HeatMap(tmp_path)
    assert [heat_map.is_blank(i) for i in range(3)] == [True, False, True]
    after = read(tmp_path / "samples.json")
    assert after["summary"]["alpha"] == pytest.approx(before["summary"]["alpha"])


def test_bench_times_methods_and_settings(tmp_path, capsys):
    path, plot = tmp_path / "bench.json", tmp_path / "plot.svg"
    swept = ["--num-iter", "4,2", "--cfg", "1", "--gamma", "8", "--verify", "parallel,sequential", "--batch", "1"]
    rest = ["--window", "2", "--prefill", "0.9", "--num-sampling-steps", "6", "--runs", "1", "--json", str(path)]
    assert main(["bench", "--methods", "speculative,published,cspd", *swept, *rest, "--plot", str(plot)]) == 0
    assert plot.read_text().startswith("<?xml")
    report = read(path)
    assert report["ran"]["command"].startswith("cspd bench --methods speculative,published,cspd")
    assert {model["role"] for model in report["ran"]["models"]} == {"target", "vae", "draft"}
    names = ["ar", "speculative", "published", "ar K=8", "mar-draft 8 parallel", "mar-draft 8 sequential"]
    assert [row["name"] for row in report["rows"]] == names * 2
    text = capsys.readouterr().out
    assert "class acc." in text
    for row in report["rows"]:
        name = row["name"]
        assert text.count(name) >= 2
        assert 0 <= row["accuracy"] <= 1  # by the classifier of the bundled model
        assert row.get("window") == (2 if name == "speculative" else None)  # the chains of mar-draft are ancestral
        if "mar-draft" in name:
            assert 0 <= row["alpha"] <= 1 and row["draft_backbone_calls"] >= 6  # the target generates 58 of 64 tokens
    by_name = {row["name"]: row for row in report["rows"][:6]}  # at K = 4
    assert (by_name["ar"]["backbone_calls"], by_name["ar K=8"]["backbone_calls"]) == (4, 8)
    assert by_name["mar-draft 8 parallel"]["backbone_calls"] == 4 + 1
    assert by_name["ar"]["head_calls_per_token"] == 6 > by_name["speculative"]["head_calls_per_token"]


def test_bench_times_all_methods_and_memory(tmp_path, capsys):
    path = tmp_path / "bench.json"
    arguments = ["--window", "0", "--batch", "1,2", "--runs", "2", "--queued", "3", "--json", str(path)]
    checkpoint = ["--checkpoint", small_checkpoint()]
    assert main(["bench", *checkpoint, *QUICK, *arguments]) == 0
    report = read(path)
    names = ("ar", "speculative", "calibrated", "budget", "published")
    assert [(row["name"], row["batch"]) for row in report["rows"]] == [(n, batch) for batch in (1, 2) for n in names]
    for row in report["rows"]:
        for measure in ("seconds", "speed_up"):
            assert 0 < row[measure]["min"] <= row[measure]["median"] <= row[measure]["max"]
        assert row["speed_up"]["median"] == 1 or row["name"] != "ar"
        assert row["images_per_second"] == pytest.approx(row["batch"] / row["seconds"]["median"])
    peaks = [(peak["name"], peak["slots"], peak["requests"]) for peak in report["memory"]]
    methods = [row["name"] for row in report["rows"] if row["batch"] == 1 and row["name"] != "published"]
    queued = [[(name, slots, 3) for name in methods] for slots in (1, 2)]
    assert peaks == [("ar", 1, 1), *queued[0], ("ar", 2, 2), *queued[1]]
    assert report["memory"][0]["peak_bytes"] > 2**20
    assert "x ar" in capsys.readouterr().out
    assert main(["bench", *checkpoint, "--plot", str(tmp_path / "plot.png")]) == 2  # before minutes of timing
    assert "classifier" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the checkpoint without a calibration, and a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    for name in ("target", "vae"):
        shutil.copy(FILES[name], model)
    return model


def test_calibrate_prepares_once(folder, tmp_path, monkeypatch, capsys):
    done = []

    def counted(name, function):
        return lambda *args, **kwargs: done.append(name) or function(*args, **kwargs)

    curves = {"ancestral": [[1, 128], [1e-3, 9e-3]], "start": [[1, 128], [1e-5, 1e-3]]}
    curves["round"] = [[8, 1024], [1e-3, 2e-2]]
    device = Times({work: np.array(curve) for work, curve in curves.items()})  # measuring takes seconds
    monkeypatch.setattr(calibrations, "fit", counted("fit", calibrations.fit))
    monkeypatch.setattr(tuning, "time_head", counted("time", lambda *args: device))
    arguments = ["calibrate", "--checkpoint", str(folder), "--num-sampling-steps", "12", "--cfg", "1"]
    assert main(arguments) == 0
    assert sorted(done) == ["fit", "time"]
    (file,) = (folder / "calibration").iterdir()
    (measured,) = (tmp_path / "cache" / "cspd").glob("times-*")
    assert file.suffix == measured.suffix == ".safetensors"
    first, written = capsys.readouterr().out, (file.stat().st_ino, measured.stat().st_ino)
    assert str(folder / "calibration") in first and str(measured.parent) in first

    assert main(arguments) == 0  # from the files
    assert len(done) == 2 and capsys.readouterr().out == first
    assert (file.stat().st_ino, measured.stat().st_ino) == written  # their times are those of their last use
    calls = [float(line.split()[-1]) for line in first.splitlines() if line.startswith("  window")]
    assert len(calls) > 5 and calls == sorted(calls, reverse=True) and 2 <= calls[-1] < calls[0] < 12

    assert main([*arguments, "--force"]) == 0  # measures the device, keeps the calibration
    assert done[2:] == ["time"] and len(list(measured.parent.glob("times-*"))) == 1
    assert main(["calibrate", "--checkpoint", str(folder), "--num-sampling-steps", "6", "--cfg", "1"]) == 0
    assert done[3:] == ["fit"] and len(list((folder / "calibration").iterdir())) == 2


def test_a_calibration_goes_to_the_cache_where_the_checkpoint_is_not_writable(folder, tmp_path, capsys):
    (folder / "calibration").write_text("no folder")
    assert sample(tmp_path / "out", "--checkpoint", str(folder), "--window", "2", labels="1") == 0
    assert [file.suffix for file in (tmp_path / "cache" / "cspd").glob("calibration-*")] == [".safetensors"]


def test_methods_are_listed_with_guarantees_and_needs(capsys):
    assert main(["methods"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    column = header.index("needs")
    rows = {}
    for line in lines[: lines.index("")]:  # then the meanings of the guarantees
        name, models, guarantee, _ = line.split(maxsplit=3)
        rows[name, models] = guarantee, line[column:].split("  ")[0]
    assert rows["ar", "MAR"] == rows["ar", "VQ"] == rows["speculative", "VQ"] == ("exact", "-")
    assert rows["speculative", "MAR"] == ("exact", "calibration")
    assert rows["mar-draft", "MAR"] == ("heuristic", "draft model")
    assert rows["cool-sd", "VQ"] == ("bounded", "EAGLE drafter")


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("sample --method ar --window 4", "speculative"),
        ("sample --method speculative --no-align", "align"),
        ("sample --window 4 --temperature 0", "window"),
        ("sample --method cspd --window 4", "chains"),
        ("sample --method cspd --gamma 65", "gamma"),
        ("sample --method cspd --draft-checkpoint nowhere.safetensors", "nowhere.safetensors"),
        ("compare --methods ar,sd", "speculative"),
        ("bench --methods cspd --gamma 99 --batch 1 --runs 1", "gamma"),
        ("bench --methods published:delta=1", "published"),
        ("calibrate --temperature 0", "temperature"),
    ],
)
def test_bad_combinations_are_rejected_in_one_line(arguments, hint, tmp_path, capsys):
    command, *rest = arguments.split()
    out = ["--out", str(tmp_path)] if command in ("sample", "compare") else []
    assert main([command, *QUICK, *out, *rest]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cspd:")]
    assert len(error) == 1 and hint in error[0]
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_a_draft_says_where_to_put_one(folder, tmp_path, capsys):
    assert sample(tmp_path / "out", "--checkpoint", str(folder), "--method", "mar-draft") == 2
    error = capsys.readouterr().err
    assert "draft" in error and "--draft-checkpoint" in error and error.count("\n") == 1
