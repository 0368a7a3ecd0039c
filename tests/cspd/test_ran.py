"""What reports say of the run: models, machine, command, commit."""

from __future__ import annotations

import hashlib
import json
import subprocess
from datetime import datetime
from pathlib import Path

import torch
from comparisons import NAMES

from cspd import runs
from cspd.checkpoints import checkpoint_files
from cspd.device import describe
from cspd.terminal import __version__


def test_what_ran_is_told(comparison):
    out, report = comparison
    told = report["ran"]
    files = checkpoint_files("digits32")
    assert [model["role"] for model in told["models"]] == ["target", "vae", "draft"]
    for model in told["models"]:
        path = files[model["role"]]
        assert (model["file"], model["bytes"]) == (path.name, path.stat().st_size)
        assert model["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    target, vae, draft = told["models"]
    names = [row["name"] for row in report["rows"]]
    assert target["configurations"] == vae["configurations"] == names
    assert draft["configurations"] == [name for name in names if name.startswith("cspd")]
    assert target["parameters"] > 4 * draft["parameters"] > 2e6 and vae["parameters"] > 5e5
    assert told["command"].startswith("cspd compare --num-iter 4 ") and told["command"].endswith(f"--out {out}")
    assert (told["versions"]["cspd"], told["versions"]["torch"]) == (__version__, torch.__version__)
    assert told["machine"]["device"] == describe(torch.device("cpu"))["device"] and told["machine"]["threads"] >= 1
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(told["date"])).total_seconds()) < 3600

    page = (out / "report.html").read_text()
    for text in (target["sha256"][:12], draft["file"], told["date"], f"(of {NAMES[-1]})"):
        assert text in page
    home = str(Path(runs.__file__).parents[1])  # where the models are: nobody has given it
    assert home not in page and home not in json.dumps(report)


def test_the_commit_is_that_of_the_checkout_which_has_the_file(tmp_path, monkeypatch):
    def git(*arguments):
        setting = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        told = subprocess.run(["git", "-C", tmp_path, *setting, *arguments], capture_output=True, text=True, check=True)
        return told.stdout.strip()

    file = tmp_path / "inside" / "ran.py"
    file.parent.mkdir()
    file.write_text("1")
    assert runs.commit_of(file) is None  # no checkout
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "empty")
    assert runs.commit_of(file) is None  # one that does not have it, as of a project that uses the package
    git("add", ".")
    git("commit", "-q", "-m", "all")
    git("tag", "v1")
    commit = git("rev-parse", "HEAD")
    assert runs.commit_of(file) == commit and len(commit) == 40
    file.write_text("2")
    assert runs.commit_of(file) == f"{commit}-dirty"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runs.commit_of(file) is None  # no git


def test_paths_are_named_without_their_folders():
    settings = {"version": "0", "target": {"file": "/home/someone/target.safetensors", "bytes": 3}}
    named = {"version": "0", "target": {"file": "target.safetensors", "bytes": 3}}
    assert runs.without_folders(settings) == runs.without_folders(named) == named
