"""The methods from the command line: heat maps, records, comparisons, timings, calibrations, errors in one line."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from matplotlib import colormaps
from PIL import Image

from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.heads import tuning
from cspd.heads.tuning import Costs

QUICK = ["--num-iter", "2", "--num-sampling-steps", "6", "--cfg", "1"]
FILES = checkpoint_files("digits32")
SIDE, MARGIN, TOKENS = 128, 4, 8  # of an image in a heat map, in pixels, and tokens a side
GREY = (128, 128, 128)


def sample(out, *more, labels="0-2"):
    return main(["sample", "--labels", labels, "--out", str(out), *QUICK, *more])


def read(path):
    """JSON as every reader takes it: Python's own lets NaN pass."""
    return json.loads(path.read_text(), parse_constant=lambda text: pytest.fail(f"{path} holds {text}"))


def cells(picture, index):
    """Colours of an image's tokens [64, 3] in a heat map; each is of one colour all over."""
    part = shown(picture, index, SIDE)
    blocks = part.reshape(TOKENS, SIDE // TOKENS, TOKENS, SIDE // TOKENS, 3).swapaxes(1, 2).reshape(64, -1, 3)
    assert (blocks == blocks[:, :1]).all()
    return blocks[:, 0]


def shown(picture, index, right=0):
    """What is shown of an image: itself or, at the right, its tokens."""
    left = MARGIN + index * (2 * SIDE + MARGIN) + right
    return np.asarray(picture.convert("RGB"))[MARGIN : MARGIN + SIDE, left : left + SIDE]


def legend(out):
    """heatmap.png, where images are beside their tokens, and colours in the strip below."""
    token_cost = Image.open(out / "heatmap.png").convert("RGB")
    for i, path in enumerate(sorted(out.glob("*_label*.png"))):
        assert (shown(token_cost, i)[::4, ::4] == np.asarray(Image.open(path))).all()
    return token_cost, {
        colour for _, colour in token_cost.crop((0, token_cost.height - 30, *token_cost.size)).getcolors(10**6)
    }


def colour(name, value):
    return tuple(int(channel) for channel in colormaps[name](value, bytes=True)[:3])


def test_heat_map_and_record_of_speculative_sampling(tmp_path, capsys):
    assert sample(tmp_path, "--window", "4", "--heatmap") == 0
    out = capsys.readouterr().out
    for text in ("heatmap.png", "% of the drafts were accepted", "window 4: "):
        assert text in out
    record = read(tmp_path / "samples.json")
    token_cost = np.array([image["token_cost"] for image in record["images"]])
    assert token_cost.shape == (3, 64) and 2 <= token_cost.min() < token_cost.max() <= 6
    picture, strip = legend(tmp_path)
    low, high = token_cost.min(), token_cost.max()
    for i, values in enumerate(token_cost):
        expected = [colour("viridis", (value - low) / (high - low)) for value in values]
        assert cells(picture, i).tolist() == [list(c) for c in expected]
    assert {colour("viridis", share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)} <= strip

    summary, stats = record["summary"], [image["stats"] for image in record["images"]]
    for image, values in zip(record["images"], token_cost):
        assert not {"by_lag", "by_step", "by_rank"} & set(image["stats"])
        assert (image["request"]["method"], image["request"]["window"]) == ("speculative", 4)
        assert image["stats"]["head_calls_per_token"] == pytest.approx(values.mean())
    assert summary["head_calls_per_token"] == pytest.approx(token_cost.mean()) and summary["head_calls_per_token"] < 6
    assert summary["alpha"] == pytest.approx(np.mean([s["alpha"] for s in stats])) and 0 < summary["alpha"] < 1
    totals = {name: np.array(table) for name, table in summary["judged_and_accepted"].items()}
    assert {name: table.shape for name, table in totals.items()} == {
        "by_lag": (2, 4),
        "by_step": (2, 6),
        "by_rank": (2, 0),
    }
    assert totals["by_lag"].sum(1).tolist() == totals["by_step"].sum(1).tolist()


def test_heat_map_and_record_of_cspd(tmp_path, capsys):
    """With the target as its own draft, which at so few steps is what makes some tokens right."""
    own = ["--method", "cspd", "--draft-checkpoint", str(FILES["target"]), "--gamma", "2"]
    assert sample(tmp_path, *own, "--heatmap", labels="3,4") == 0
    record = read(tmp_path / "samples.json")
    token_cost = np.array([image["token_cost"] for image in record["images"]], dtype=float)
    picture, strip = legend(tmp_path)
    colours = {0.0: colour("viridis", 0.0), 1.0: colour("viridis", 1.0)}
    for i, values in enumerate(token_cost):
        assert np.isnan(values).sum() == 4  # the prefill
        assert [tuple(c) for c in cells(picture, i).tolist()] == [colours.get(value, GREY) for value in values]
    assert {*colours.values(), GREY} <= strip
    summary = record["summary"]
    assert 0 < summary["alpha"] < 1 and summary["alpha"] == pytest.approx(np.nanmean(token_cost))
    assert f"{summary['alpha']:.1%}" in capsys.readouterr().out
    (judged, accepted), by_rank = summary["judged_and_accepted"]["by_lag"], summary["judged_and_accepted"]["by_rank"]
    assert judged == [60, 60] and sum(accepted) == np.nansum(token_cost) == sum(by_rank[1])
    assert by_rank[0] == [0] * 4 + [2] * 60
    assert (summary["iterations_per_image"], summary["draft_backbone_calls_per_image"]) == (1 + 30, 60)


def test_heat_of_images_from_a_run_without_it_is_blank(tmp_path, capsys):
    assert sample(tmp_path, "--window", "4") == 0
    assert not (tmp_path / "heatmap.png").exists()
    before = read(tmp_path / "samples.json")
    assert all("token_cost" not in image for image in before["images"])
    assert sample(tmp_path, "--window", "4", "--heatmap") == 0
    assert "3 " in capsys.readouterr().out
    picture, _ = legend(tmp_path)
    assert all((cells(picture, i) == GREY).all() for i in range(3))

    (tmp_path / before["images"][1]["file"]).unlink()
    assert sample(tmp_path, "--window", "4", "--heatmap") == 0
    picture, _ = legend(tmp_path)
    assert [bool((cells(picture, i) == GREY).all()) for i in range(3)] == [True, False, True]
    after = read(tmp_path / "samples.json")
    assert [image["stats"]["alpha"] for image in after["images"]] == pytest.approx(
        [image["stats"]["alpha"] for image in before["images"]]
    )
    assert after["summary"]["alpha"] == pytest.approx(before["summary"]["alpha"])


def test_bench_times_methods_and_settings(tmp_path, capsys):
    path = tmp_path / "bench.json"
    swept = ["--num-iter", "4,2", "--cfg", "1", "--gamma", "8", "--verify", "parallel,sequential", "--batch", "1"]
    rest = ["--window", "2", "--prefill", "0.9", "--num-sampling-steps", "6", "--runs", "1", "--json", str(path)]
    plot = tmp_path / "plot.svg"
    assert main(["bench", "--methods", "speculative,published,cspd", *swept, *rest, "--plot", str(plot)]) == 0
    assert plot.read_text().startswith("<?xml")  # what its suffix says
    report = read(path)
    assert report["ran"]["command"].startswith("cspd bench --methods speculative,published,cspd")
    assert {model["role"] for model in report["ran"]["models"]} == {"target", "vae", "draft"}
    names = ["ar", "speculative", "published", "ar K=8", "cspd 8 parallel", "cspd 8 sequential"]
    assert [row["name"] for row in report["rows"]] == names * 2
    text = capsys.readouterr().out
    for row in report["rows"]:
        spread, name = row["speed_up"], row["name"]
        assert 0 < spread["min"] <= spread["median"] <= spread["max"]
        assert (spread["median"] == 1) == (name == "ar")
        assert 0 <= row["accuracy"] <= 1  # the bundled checkpoint's classifier judges
        assert row["images_per_second"] == pytest.approx(1 / row["seconds"]["median"])
        assert row.get("window") == (2 if name == "speculative" else None)  # cspd's chains are ancestral
        if "cspd" in name:
            assert 0 <= row["alpha"] <= 1 and row["draft_backbone_calls"] >= 6  # of 64 tokens, 58 are the target's
        assert text.count(name) >= 2
    by_name = {row["name"]: row for row in report["rows"][:6]}  # at K = 4
    assert (by_name["ar"]["backbone_calls"], by_name["ar K=8"]["backbone_calls"]) == (4, 8)
    assert by_name["cspd 8 parallel"]["backbone_calls"] == 4 + 1 and by_name["cspd 8 parallel"]["alpha"] is not None
    assert by_name["ar"]["head_calls_per_token"] == 6 > by_name["speculative"]["head_calls_per_token"]
    assert "accuracy" in by_name["published"] and "class acc." in text
    assert report["runs"] == 1 and report["memory"][0]["peak_bytes"] > 2**20


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A copy of the checkpoint without a calibration, and a cache directory of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("target", "vae"):
        shutil.copy(FILES[name], folder)
    return folder


def test_calibrate_prepares_once(place, tmp_path, monkeypatch, capsys):
    done = []

    def counted(name, function):
        return lambda *args, **kwargs: done.append(name) or function(*args, **kwargs)

    steps, rounds = {"ancestral": [1e-3, 9e-3], "start": [1e-5, 1e-3]}, {"inputs": [8, 1024], "round": [1e-3, 2e-2]}
    device = Costs(rows=[1, 128], table_size=10**6, **steps, **rounds)  # measuring takes seconds
    monkeypatch.setattr(tuning, "fit", counted("fit", tuning.fit))
    monkeypatch.setattr(tuning, "measure", counted("measure", lambda *args: device))
    arguments = ["calibrate", "--checkpoint", str(place), "--num-sampling-steps", "12", "--cfg", "1"]
    assert main(arguments) == 0
    assert sorted(done) == ["fit", "measure"]
    (file,) = (place / "calibration").iterdir()
    measured = tmp_path / "cache" / "cspd" / "costs.json"
    assert file.suffix == ".safetensors" and read(measured)
    first, stamps = capsys.readouterr().out, (file.stat().st_mtime_ns, measured.stat().st_mtime_ns)
    assert str(place / "calibration") in first and str(measured.parent) in first

    assert main(arguments) == 0  # from the files
    assert len(done) == 2 and capsys.readouterr().out == first
    assert (file.stat().st_mtime_ns, measured.stat().st_mtime_ns) == stamps
    calls = [float(line.split()[-1]) for line in first.splitlines() if line.startswith("  window")]
    assert len(calls) > 5 and calls == sorted(calls, reverse=True) and 2 <= calls[-1] < calls[0] < 12

    assert main([*arguments, "--force"]) == 0  # measures the device, keeps the calibration
    assert done[2:] == ["measure"] and len(read(measured)) == 1
    assert main(["calibrate", "--checkpoint", str(place), "--num-sampling-steps", "6", "--cfg", "1"]) == 0
    assert done[3:] == ["fit"] and len(list((place / "calibration").iterdir())) == 2


def test_a_calibration_goes_to_the_cache_where_the_checkpoint_is_not_writable(place, tmp_path, capsys):
    (place / "calibration").write_text("no folder")
    assert sample(tmp_path / "out", "--checkpoint", str(place), "--window", "2", labels="1") == 0
    assert [file.suffix for file in (tmp_path / "cache" / "cspd").glob("calibration-*")] == [".safetensors"]


def test_methods_shows_what_they_need(capsys):
    assert main(["methods"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    column = header.index("needs")
    lines = lines[: lines.index("")]  # then come the papers
    needs = {tuple(line.split()[:2]): line[column:].split("  ")[0] for line in lines}
    assert needs["ar", "MAR"] == needs["ar", "VQ"] == needs["speculative", "VQ"] == "-"
    assert (needs["speculative", "MAR"], needs["cspd", "MAR"]) == ("calibration", "draft model")
    assert ["heuristic" in line for line in lines if line.startswith("cspd")] == [True]


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("sample --method ar --gamma 4", "gamma"),
        ("sample --method ar --window 4", "speculative"),
        ("sample --method speculative --no-align", "align"),
        ("sample --method speculative --prefill 0.1", "speculative"),
        ("sample --window 7", "window"),
        ("sample --window 4 --temperature 0", "window"),
        ("sample --method cspd --window 4", "chains"),
        ("sample --method cspd --temperature 0", "temperature"),
        ("sample --method cspd --gamma 65", "gamma"),
        ("sample --method cspd --prefill 2", "prefill"),
        ("sample --method cspd --ratio-temperature 0", "ratio_temperature"),
        ("sample --method cspd --draft-checkpoint nowhere.safetensors", "nowhere.safetensors"),
        ("sample --method nope", "speculative"),
        ("compare --methods ar,nope", "speculative"),
        ("compare --methods ar,sd", "speculative"),
        ("compare --methods speculative --window 4 --temperature 0", "window"),
        ("bench --methods nope", "speculative"),
        ("bench --methods cspd --gamma 0", "gamma"),
        ("bench --methods cspd:gamma=0", "gamma"),
        ("bench --methods published:delta=1", "published"),
        ("bench --methods speculative:window=[[[", "window"),
        ("bench --methods cspd --gamma 99 --batch 1 --runs 1", "gamma"),
        ("calibrate --gamma 4", "speculative"),
        ("calibrate --temperature 0", "temperature"),
        ("calibrate --num-sampling-steps 2", "num_sampling_steps"),
    ],
)
def test_bad_combinations_are_rejected_in_one_line(arguments, hint, tmp_path, capsys):
    command, *rest = arguments.split()
    out = ["--out", str(tmp_path)] if command in ("sample", "compare") else []
    assert main([command, *QUICK, *out, *rest]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cspd:")]
    assert len(error) == 1 and hint in error[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, hint",
    [
        ("sample --method cspd --verify serial", "--verify"),
        ("sample --method cspd --chains fast", "--chains"),
        ("sample --draft none", "--draft"),
        ("bench --verify parallel,serial", "--verify"),
        ("bench --gamma 8;16", "--gamma"),
        ("sample --method cspd --gamma 8,16", "--gamma"),
    ],
)
def test_words_that_are_no_choice_show_the_choices(arguments, hint, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert hint in capsys.readouterr().err.splitlines()[-1]


def test_a_checkpoint_without_a_draft_says_where_to_put_one(place, tmp_path, capsys):
    assert sample(tmp_path / "out", "--checkpoint", str(place), "--method", "cspd") == 2
    error = capsys.readouterr().err
    assert "draft" in error and "--draft-checkpoint" in error and error.count("\n") == 1
