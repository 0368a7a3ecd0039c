"""Training programs: they train on a directory of 40 images, sample, and resume interrupted runs."""

from __future__ import annotations

import functools
import json
import os
import runpy
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import training
from latents import Guessing
from pictures import data_of
from PIL import Image
from programs import class_images, run_program
from safetensors.torch import load_file
from torch import nn
from train_mar import in_the_transformer, may_be_half
from training import MUON_FACTOR, _optimizers, export, fit

import cspd
from cspd.checkpoints import checkpoint_files
from cspd.discrete.registry import load_gpt, load_tokenizer
from mar.checkpoint import create_mar, load_mar, load_vae

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9, as setup.cfg says")
ROOT = Path(__file__).parent.parent
SIZE = 16
CLASSES = [f"class_{i}" for i in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory of 40 images in ten classes."""
    return class_images(tmp_path_factory.mktemp("data") / "images", 10, 4)


@pytest.fixture
def train(folder, tmp_path, monkeypatch):
    """A function that runs a program for two steps on the directory, and returns its file."""

    def run(program, **options):
        out = tmp_path / f"{program}.safetensors"
        given = {"data": folder, "size": SIZE, "steps": 2, "batch": 4, "run": tmp_path / program, "out": out} | options
        return run_program(program, monkeypatch, **given)

    return run


def size_of(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def test_autoencoder_and_mar(train, tmp_path):
    """Of three classes. Also `--init`: with a learning rate of 0, the weights stay."""
    train = functools.partial(train, data=class_images(tmp_path / "three", 3, 13))
    vae = train("train_vae", arch="kl_emoji64", free_nats=0.5)
    assert load_vae(vae).config.stride == 4
    options = {"arch": "mar_emoji64_draft", "images": 20, "rows": 16, "head_steps": 2, "vae": vae}
    mar = train("train_mar", **options)
    run = tmp_path / "train_mar"
    assert size_of(run / "whole" / "samples.png") == (8 * SIZE, 3 * SIZE)
    assert {path.name for path in run.rglob("*.png")} == {"curves.png", "samples.png"}
    assert json.loads((run / "head" / "log.jsonl").read_text())["step"] == 2

    for first, program, own in ((vae, "train_vae", {"arch": "kl_emoji64"}), (mar, "train_mar", options)):
        again = {"init": first, "lr": 0, "run": tmp_path / f"{program}_again", "out": tmp_path / "again.safetensors"}
        second = load_file(train(program, **own, **again))
        for name, tensor in load_file(first).items():
            if "final_layer.linear" not in name:  # the last layer of a head is fitted again
                assert torch.equal(tensor, second[name]), name
    sampled_saved_and_sampled_again({"target": mar, "vae": vae}, tmp_path)


def sampled_saved_and_sampled_again(files, tmp_path):
    """A folder of trained files, without a plugin; what is saved of it generates the same image."""
    folder = tmp_path / "trained"
    folder.mkdir()
    for part, file in files.items():
        shutil.copy(file, folder / f"{part}.safetensors")
    engine = cspd.load(folder, max_batch=1, device="cpu")
    engine.save_pretrained(tmp_path / "saved")
    images = []
    for each in (engine, cspd.load(tmp_path / "saved", max_batch=1, device="cpu")):
        assert each.classes == ["0", "1", "2"]
        images.append(each.sample(2, method="ar", num_iter=1, num_sampling_steps=2, first_timestep=950).image)
    assert images[0].shape == (3, SIZE, SIZE) and torch.equal(*images)


@pytest.mark.parametrize(
    "program, options",
    [
        ("train_mar", {"vae": "none.safetensors"}),
        ("train_mar", {"vae": ROOT / "README.md"}),
        ("train_gpt", {"tokenizer": "none.safetensors"}),
        ("train_vae", {"data": "nowhere"}),
        ("train_vae", {"init": "none.safetensors"}),
    ],
)
def test_a_missing_file_is_one_line(program, options, tmp_path, monkeypatch, capsys):
    given = {"run": tmp_path / "run", "out": tmp_path / "out.safetensors"} | options
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *flags])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(ROOT / "scripts" / "train" / f"{program}.py"), run_name="__main__")
    torch.set_flush_denormal(False)
    error = capsys.readouterr().err
    *_, missing = options.values()
    assert caught.value.code == 2 and str(missing) in error and error.count("\n") == 1


def test_too_few_rows_for_all_timesteps(train, tmp_path, capsys):
    with pytest.raises(SystemExit):
        train("train_mar", rows=1, vae=tmp_path / "none.safetensors")
    assert "--rows" in capsys.readouterr().err


@pytest.mark.slow
def test_tokenizer_gpt_and_eagle(train, tmp_path):
    tokenizer = train("train_tokenizer", out=tmp_path / "tokenizer.safetensors")  # next to the target
    assert load_tokenizer(tokenizer).config.stride == 2
    assert size_of(tmp_path / "train_tokenizer" / "samples.png")[0] == 8 * SIZE
    target = train("train_gpt", arch="gpt_digits32_draft", tokenizer=tokenizer)
    assert load_gpt(target).config.num_classes == 10
    assert train("train_eagle", checkpoint=target, images=40).exists()


@pytest.mark.slow
def test_classifier(train, capsys):
    assert train("train_classifier", arch="emoji64").exists()
    assert "class_9" in capsys.readouterr().out


def trained(run, hidden, interrupted_at=None):
    """The weights of a small model after 25 steps; Muon trains the `hidden` ones."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)

    def loss_fn(number):
        if number == interrupted_at:
            raise KeyboardInterrupt
        generator = torch.Generator().manual_seed(number)
        loss = model(torch.randn(8, 3, generator=generator)).square().mean()
        return loss, {"loss": loss.item()}

    return fit(model, loss_fn, run=run, settings={"lr": 0.1}, steps=25, lr=0.1, warmup=5, hidden=hidden)[0].weight


@pytest.mark.parametrize("hidden", [lambda name: False, lambda name: True], ids=["adamw", "muon"])
def test_an_interrupted_run_ends_with_the_same_weights(tmp_path, monkeypatch, hidden):
    monkeypatch.setattr(training, "SAVE_SECONDS", 0)
    cut, whole = tmp_path / "cut", trained(tmp_path / "whole", hidden)
    with pytest.raises(KeyboardInterrupt):
        trained(cut, hidden, interrupted_at=13)
    with (cut / "log.jsonl").open("a") as file:
        file.write('{"step": 14, "seconds": 1.0, "loss": 1.0}\n')  # logged, but not saved
    assert torch.equal(trained(cut, hidden), whole)
    steps = [json.loads(line)["step"] for line in (cut / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 26))
    with pytest.raises(SystemExit, match="--run"):  # other settings
        fit(nn.Linear(3, 2), lambda number: None, run=cut, settings={"lr": 0.2}, steps=25, lr=0.2)
    with pytest.raises(SystemExit, match="--run"):  # another optimizer
        trained(cut, lambda name: not hidden(name))


def test_muon_trains_the_transformers_matrices_and_adamw_all_else():
    model = Guessing(create_mar("mar_emoji64_draft"), 96)
    adamw, muon = _optimizers(model, in_the_transformer, lr=0.1, weight_decay=0.0)
    own = {
        optimizer: {id(p) for group in optimizer.param_groups for p in group["params"]} for optimizer in (adamw, muon)
    }
    blocks = {
        id(p)
        for stack in (model.model.encoder_blocks, model.model.decoder_blocks)
        for p in stack.parameters()
        if p.ndim == 2
    }
    assert own[muon] == blocks and own[adamw] == {id(p) for p in model.parameters()} - blocks
    assert isinstance(muon, torch.optim.Muon) and muon.param_groups[0]["peak"] == MUON_FACTOR * 0.1


PARALLEL = """
import sys, torch
from pathlib import Path
from torch import nn
from training import device_of_process, fit, is_first

device_of_process()
torch.manual_seed(0)
model = nn.Linear(3, 2)
per_step = int(sys.argv[2])  # batches of this process

def loss_fn(number):
    draws = [torch.randn(8, 3, generator=torch.Generator().manual_seed(number * per_step + i)) for i in range(per_step)]
    loss = sum(model(draw).square().mean() for draw in draws) / per_step
    return loss, {"loss": loss.item()}

model, _ = fit(model, loss_fn, run=Path(sys.argv[1]), settings={}, steps=5, lr=0.1)
if is_first():
    torch.save(model.state_dict(), Path(sys.argv[1]) / "weights.pt")
"""


CODEBOOKS = """
import sys, torch
from argparse import Namespace
from pathlib import Path
from pictures import Data
from train_tokenizer import loss_of
from training import device_of_process, rank_and_world
from cspd.discrete.registry import create_tokenizer

device = device_of_process()
rank, world = rank_and_world()
torch.manual_seed(0)
model = create_tokenizer("vq_digits32")
before = model.quantize.embedding.weight.clone()

def draw(num, seed, split):
    return torch.randn(num, 3, 8, 8, generator=torch.Generator().manual_seed(seed)), None

loss_of(model, Data([], draw), Namespace(batch=2, steps=100), device)(20 * world + rank)
after = model.quantize.embedding.weight
assert (after != before).any(1).sum() > 400
torch.save(after, Path(sys.argv[1]) / f"{rank}.pt")
"""


def run_processes(program, folder, processes, *arguments):
    """Runs the text of a program in a number of connected processes."""
    folder.mkdir()
    file = folder / "program.py"
    file.write_text(program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "scripts" / "train")])}
    subprocess.run([*command, str(file), str(folder), *arguments], check=True, env=environment)


@pytest.mark.slow
def test_processes_share_a_step(tmp_path):
    """Two processes with one batch each take the steps of one process with two."""
    weights = []
    for processes in (1, 2):
        run = tmp_path / str(processes)
        run_processes(PARALLEL, run, processes, str(2 // processes))
        weights.append(torch.load(run / "weights.pt")["weight"])
    torch.testing.assert_close(*weights)


@pytest.mark.slow
def test_processes_share_a_codebook(tmp_path):
    """Unused codes are moved to the same vectors in all processes."""
    run_processes(CODEBOOKS, tmp_path / "run", 2)
    assert torch.equal(*(torch.load(tmp_path / "run" / f"{rank}.pt") for rank in range(2)))


def test_half_precision_of_a_stored_head_costs_nothing(tmp_path):
    """The first denoising step multiplies errors by 316; x_t has unit variance."""
    model = load_mar(checkpoint_files("digits32")["draft"])
    file = tmp_path / "mar.safetensors"
    export(model, file, "mar_digits32_draft", 0.0, half=may_be_half)
    assert file.stat().st_size < 2.2 * sum(p.numel() for p in model.parameters())
    x, z, t = torch.randn(500, 16), torch.randn(500, 96), torch.full((500,), 999)
    stored, whole = (each.head(x, t, z)[:, :16] for each in (load_mar(file), model))
    error = (stored - whole).square().mean().sqrt()
    assert 316 * error < 0.15  # it is 0.5 if every layer is in half precision


def data(folder, size=SIZE, upright="", augment=1.0):
    return data_of(Namespace(data=str(folder), size=size, upright=upright, augment=augment))


def test_images_are_augmented(folder):
    own = data(folder, upright="class_0,class_3")
    assert own.classes == CLASSES
    images, labels = own.draw(200, 5, "train")
    assert images.shape == (200, 3, SIZE, SIZE) and images.min() >= -1 and images.max() <= 1
    assert torch.bincount(labels).tolist() == [20] * 10
    again, _ = own.draw(200, 5, "train")
    assert torch.equal(images, again)

    # the left half is white unless an image is mirrored
    brightness = images.mean(dim=(1, 2))
    mirrored = brightness[:, 0] < brightness[:, -1]
    upright = (labels == 0) | (labels == 3)
    assert not mirrored[upright].any()
    assert 0.35 < mirrored[~upright].float().mean() < 0.65


def test_a_share_of_the_augmentation(folder):
    """With 0 training images are those of the files, mirrored or not; with less, they differ less from them."""
    shown = {}
    for augment in (0.0, 0.3, 1.0):
        own = data(folder, upright=",".join(CLASSES), augment=augment)
        shown[augment] = own.draw(100, 5, "train")[0]
    still = {image.numpy().tobytes() for image in shown[0.0]}
    assert len(still) <= 100 * 9 // 10 and len({image.numpy().tobytes() for image in shown[1.0]}) == 100
    with pytest.raises(ValueError):
        data(folder, augment=1.5)


def test_held_out_images(folder, tmp_path):
    own = data(folder)
    drawn = {
        split: {image.numpy().tobytes() for image in own.draw(100, 1, split)[0]} for split in ("train", "held-out")
    }
    assert len(drawn["held-out"]) == 10  # one of each class, not augmented
    for split in ("train", "held_out"):
        (tmp_path / split).mkdir()
        for name in CLASSES[:3]:
            (tmp_path / split / name).symlink_to(folder / name)
    split_by_the_user = data(tmp_path)
    assert split_by_the_user.classes == CLASSES[:3]
    assert len({image.numpy().tobytes() for image in split_by_the_user.draw(100, 1, "held-out")[0]}) == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"upright": "faces"}, "--upright"),
        ({"folder": "digits"}, "--size"),
        ({"folder": "digits", "size": 32, "upright": "3"}, "--upright"),
        ({"folder": "nowhere"}, "nowhere"),
    ],
)
def test_bad_data(folder, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        data(**{"folder": folder} | options)
