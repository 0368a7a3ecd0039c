"""The bundled VQ models of digits agree with their card, and methods run on them, also from the command line."""

import json

import pytest
import torch
from digits import coloured_digits

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.cli import main
from cspd.evaluation.metrics import accuracy, load_classifier
from cspd.models import bundled


@pytest.fixture(scope="module")
def engine():
    return cspd.load("digits32_vq", max_batch=50, device="cpu")


def parameters(model):
    return sum(p.numel() for p in model.parameters())


def test_sizes(engine):
    models = engine.runner.models
    assert 3e6 <= parameters(models["target"]) <= 6e6 and 0.7e6 <= parameters(models["draft"]) <= 1.3e6
    assert sum(path.stat().st_size for path in bundled()["digits32_vq"].iterdir()) < 24e6


def test_tokenizer(engine):
    images, _ = coloured_digits(128, seed=10**9, split="held-out")
    tokenizer = engine.runner.models["tokenizer"]
    with torch.inference_mode():
        error = (tokenizer.decode(tokenizer.encode(images)).clamp(-1, 1) - images).square().mean()
    assert -10 * torch.log10(error / 4) > 36


@pytest.mark.slow
@pytest.mark.parametrize("method, num", [("ar", 100), ("eagle", 40)])
def test_samples_are_recognised(method, num, engine):
    outputs = engine.generate([cspd.Request(label=i % 10, seed=i, method=method) for i in range(num)])
    images, labels = torch.stack([o.image for o in outputs]), torch.tensor([o.request.label for o in outputs])
    assert accuracy(load_classifier("digits"), images, labels) >= 0.86


@pytest.mark.slow
def test_a_tree_of_one_token_drafts_one_per_forward_pass(engine):
    """LANTERN's Table 2: alpha is then the mean acceptance of EAGLE-2's first token, so pooling raises it."""
    alpha = {}
    for delta in (0.05, 0.4):
        settings = {"method": "lantern", "gamma": 1, "window": 1, "k": 31, "delta": delta}
        outputs = engine.generate([cspd.Request(label=i, seed=i, **settings) for i in range(2)])
        assert all({*o.stats.committed} <= {1, 2} for o in outputs)
        alpha[delta] = sum(o.stats.alpha for o in outputs) / 2
    assert alpha[0.05] + 0.05 < alpha[0.4]


@pytest.mark.slow
def test_drafts_are_worth_it(engine):
    """Tokens per forward pass of the target; baseline sampling has 1."""
    least = {"sd": 1.5, "eagle": 2, "eagle2": 2, "sjd": 2, "mc-sjd": 3, "sjd-pac": 3}
    for method, compression in least.items():
        outputs = engine.generate([cspd.Request(label=i, seed=i, method=method) for i in range(4)])
        assert sum(o.stats.step_compression for o in outputs) / 4 > compression, method


@pytest.mark.parametrize("metric", ["l2", pytest.param("cosine", marks=pytest.mark.slow)])
def test_random_neighbours_accept_fewer_tokens_than_near_ones(metric, engine):
    """LANTERN's Table 4, at equal k and delta: k is the same share of 512 codes as the paper's 1000 of 16,384."""
    mean = {}
    for each in (metric, "random"):
        settings = {"method": "sd", "rule": "lantern", "k": 31, "delta": 0.4, "metric": each}
        outputs = engine.generate([cspd.Request(label=i, seed=i, **settings) for i in range(2)])
        mean[each] = sum(o.stats.step_compression for o in outputs) / 2
    assert mean["random"] < mean[metric] - 0.5


def test_the_draft_model_is_a_target_too():
    engine = cspd.load(bundled()["digits32_vq"] / "draft.safetensors", max_batch=1, device="cpu")
    assert engine.runner.models["eagle"] is None  # the drafter in the directory belongs to the other target
    with pytest.raises(ValueError, match="EAGLE"):
        engine.check(cspd.Request(label=0, method="eagle"))


def test_files_are_found_by_any_name():
    files = checkpoint_files("digits32_vq")
    assert {name for name, file in files.items() if file} == {"target", "draft", "eagle", "tokenizer"}
    assert checkpoint_files(files["target"]) == files
    assert checkpoint_files("digits32").keys() == {"target", "draft", "vae"}


def test_sample_from_the_command_line(tmp_path, capsys):
    arguments = ["sample", "--checkpoint", "digits32_vq", "--labels", "3", "--num", "2", "--out", str(tmp_path)]
    arguments += ["--method", "sd", "--draft", "eagle-static", "--rule", "cool-sd", "--delta", "1.5"]
    assert main([*arguments, "--heatmap"]) == 0
    assert "guarantee" in capsys.readouterr().out
    record = json.loads((tmp_path / "samples.json").read_text())
    stats = record["images"][0]["stats"]
    assert stats["guarantee"] == "bounded" and stats["step_compression"] > 1 and stats["bound"] > 0
    assert sum(int(n) * count for n, count in stats["committed"].items()) == 256
    assert record["settings"].keys() >= {"target", "tokenizer"} and (tmp_path / "heatmap.png").exists()


@pytest.mark.slow
def test_bench_from_the_command_line(tmp_path, capsys):
    arguments = ["bench", "--vq", "--batch", "1", "--runs", "1", "--cfg", "1", "--json", str(tmp_path / "bench.json")]
    names = "sjd-pac:window=16,cool-sd:delta=1.5,published"
    assert main([*arguments, "--methods", names, "--plot", str(tmp_path / "plot.png")]) == 0
    report = json.loads((tmp_path / "bench.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == ["ar", *names.split(",")] and (tmp_path / "plot.png").stat().st_size > 1000
    assert rows["ar"]["step_compression"] == 1 < rows["sjd-pac:window=16"]["step_compression"]
    assert rows["cool-sd:delta=1.5"]["bound"] > 0 == rows["ar"]["bound"]
    assert "codes/forward" in capsys.readouterr().out


def test_both_families_in_one_engine():
    engine = cspd.load("digits32", "digits32_vq", max_batch=4, device="cpu")
    quick = {"num_iter": 4, "num_sampling_steps": 5, "window": 0}
    outputs = engine.generate([cspd.Request(1, **quick), cspd.Request(2, method="sjd-pac"), cspd.Request(3, **quick)])
    assert [o.request.family for o in outputs] == ["MAR", "VQ", "MAR"]
    assert [o.image.shape for o in outputs] == [(3, 32, 32)] * 3
    with pytest.raises(ValueError):  # a file for which of the two?
        cspd.load("digits32", "digits32_vq", vae="x")
