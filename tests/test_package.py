"""The two packages: all modules and models are in one of them; `cspd env` says what is installed."""

from __future__ import annotations

import ast
import configparser
import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import cspd
from cspd import models
from cspd.cli import main
from cspd.models import IN_MODELS, bundled, bundled_folder
from mar.checkpoint import CheckpointError

ROOT = Path(__file__).parents[1]
PACKAGES = {"cspd": ROOT, "cspd-models": ROOT / "checkpoints"}  # the folder of each one's setup.cfg
MODELS = "cspd.checkpoints."


def config_of(package: str) -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(PACKAGES[package] / "setup.cfg")
    return config


def listed(package: str) -> set[str]:
    return set(config_of(package)["options"]["packages"].split())


def test_every_module_is_in_the_package_and_every_model_in_one_of_the_two():
    inits = [init for name in ("cspd", "mar") for init in (ROOT / name).rglob("__init__.py")]
    code = {".".join(init.parent.relative_to(ROOT).parts) for init in inits}
    assert code == {name for name in listed("cspd") if not name.startswith(MODELS)}
    own, others = ({name.split(".")[2] for name in listed(each) if name.startswith(MODELS)} for each in PACKAGES)
    assert others == set(IN_MODELS) and own | others == set(bundled()) and not own & others


def test_the_packages_have_all_files_of_the_bundled_models():
    there = {file for folder in bundled().values() for file in folder.rglob("*") if file.is_file()}
    for each in PACKAGES:
        for package, patterns in config_of(each)["options.package_data"].items():
            if package.startswith(MODELS):
                folder = ROOT / Path(*package.split(".")[1:])
                there -= {file for pattern in patterns.split(", ") for file in folder.glob(pattern)}
    assert not there


def test_types_of_the_public_names_are_known():
    """They are imported on first use, so that a checker of types learns them from a block of their own."""
    tree = ast.parse((ROOT / "cspd" / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    found = {
        alias.name: node.module for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert found == cspd.HOMES and {*found, "__version__"} == set(cspd.__all__)


def test_versions_agree():
    assert config_of("cspd-models")["metadata"]["version"] == cspd.__version__
    assert f"version: {cspd.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_text_installs_the_package_from_an_index_that_lacks_it():
    """With its name, pip looks on PyPI; in a clone it is a path."""
    folders = [ROOT / name for name in ("cspd", "mar", "docs", "scripts", "examples", "checkpoints")]
    files = [path for folder in folders for path in folder.rglob("*.*") if path.suffix in {".py", ".md", ".html"}]
    for path in (*files, ROOT / "README.md"):
        assert not re.search(r"cspd\[|pip install '?cspd", path.read_text()), path


def test_a_model_of_the_other_package_is_named_if_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "BUNDLED_ROOTS", (tmp_path,))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="cspd-models"):
        cspd.load("emoji64", device="cpu")
    with pytest.raises(FileNotFoundError, match="cspd-models"):
        bundled_folder("emoji64")


def test_folders_that_an_installation_left_are_no_models(monkeypatch, tmp_path):
    for name in ("own", "build", "cspd_models.egg-info"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(models, "BUNDLED_ROOTS", (tmp_path,))
    assert list(bundled()) == ["own"]


def test_env_prints_versions_the_device_and_the_models(capsys):
    assert main(["env"]) == 0
    shown = dict(line.split(":", 1) for line in capsys.readouterr().out.splitlines())
    assert shown["cspd"].strip() == cspd.__version__ and shown["Python"].strip() == platform.python_version()
    assert shown["torch"].strip() == version("torch")
    assert shown["device"].strip().startswith(("cpu, ", "cuda"))
    assert shown["bundled models"].split() == ", ".join(bundled()).split()


def test_env_prints_what_it_can_without_torch():
    """A broken installation is what such reports are about."""
    program = "import sys; sys.modules['torch'] = None; from cspd.cli import main; sys.exit(main(['env']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "device:" in done.stdout and "ModuleNotFoundError" in done.stdout and "Python:" in done.stdout
