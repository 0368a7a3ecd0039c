"""The house: imports run down from floor to floor and in no circle, and what a reader is told of it is so."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import planted_bugs
import pytest

from cspd.cli.listing import markdown_table, options_table
from cspd.method import METHODS

ROOT = Path(__file__).parent.parent
# A room is a file of cspd/, or a folder of it. It may import rooms on the floors below, and itself.
FLOORS = {
    "entry": ["cspd", "cspd.__main__"],
    8: ["cspd.cli"],
    7: ["cspd.comparison", "cspd.gpu_check", "cspd.pipeline", "cspd.ray"],
    6: ["cspd.checkpoints", "cspd.evaluation", "cspd.seams", "cspd.serving", "cspd.speed"],
    5: ["cspd.engine", "cspd.masked", "cspd.discrete", "cspd.causal"],
    4: ["cspd.continuous", "cspd.models"],
    3: ["cspd.heads", "cspd.method", "cspd.tuner", "cspd.runs", "cspd.summary", "cspd.origin", "cspd.noise"],
    2: ["cspd.request", "cspd.inpainting", "cspd.device", "cspd.files", "cspd.kernels"],
    1: ["cspd.option", "cspd.terminal", "cspd.pixels", "cspd.graphs", "cspd.plots", "cspd.transformer", "mar"],
}
# options have the words of their errors from the terminal, slow compilers say there that they are at work, and pictures
# carry the version; a request holds its given part
BESIDE = {(f"cspd.{name}", "cspd.terminal") for name in ("option", "graphs", "pixels")}
BESIDE |= {("cspd.request", "cspd.inpainting")}
LEVEL = {room: level for level, rooms in enumerate(reversed(FLOORS.values())) for room in rooms}
LONGEST = 19  # modules in a chain of imports, from the command line down; five of them are the head's samplers


def modules() -> dict[str, Path]:
    """The packages' modules by name; a package's own is its __init__."""
    files = [*(ROOT / "cspd").rglob("*.py"), *(ROOT / "mar").rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files)}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2]) if module.startswith("cspd") else "mar"


def imports(name: str, file: Path, known: set[str]) -> set[str]:
    """The modules of ours that a module imports, anywhere in it, or names in a string."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & known or {node.module}
            found |= {node.module} if inside - known else set()
        elif isinstance(node, ast.JoinedStr) and (first := node.values[0]) and isinstance(first, ast.Constant):
            assert not first.value.startswith(("cspd.", "mar.")), f"{name}: a module's name is written out"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return (found & known) - {name}


@functools.cache
def graph() -> dict[str, set[str]]:
    """What each module imports, without the package itself: it has what users import, and every import runs it."""
    known = modules()
    return {name: imports(name, file, set(known)) - {"cspd"} for name, file in known.items()}


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in modules()} == set(LEVEL)


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_run_down(name):
    own = room_of(name)
    for other in graph()[name]:
        room = room_of(other)
        is_below = room == own or LEVEL[room] < LEVEL[own] or (own, room) in BESIDE
        assert is_below, f"{name} imports {other}, which is not below it"


def test_no_circle_and_no_long_chain():
    length: dict[str, int] = {}
    for name in TopologicalSorter(graph()).static_order():  # raises CycleError
        length[name] = 1 + max((length[other] for other in graph()[name]), default=0)
    assert max(length[name] for name in length if name != "cspd.__main__") <= LONGEST


def between(text: str, marker: str) -> str:
    return text.split(f"<!-- {marker} -->")[1].split(f"<!-- /{marker} -->")[0].strip()


def test_docs_have_the_tables_of_methods_and_options():
    """Made by `cspd methods --markdown` and `--options`."""
    assert between((ROOT / "docs" / "methods.md").read_text(), "methods") == markdown_table(METHODS)
    assert between((ROOT / "docs" / "reference.md").read_text(), "options") == options_table(METHODS)


def test_the_table_of_planted_bugs_fits_the_package():
    assert planted_bugs.stale(planted_bugs.BUGS) == []


def test_the_order_of_imports_does_not_depend_on_folders_of_runs(tmp_path):
    """`cspd serve` writes pictures/ beside the code: it is not what scripts import by this name."""
    for folder in ("pictures", "cspd"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.png").touch()
    imports = "from pictures import Data\nfrom torch import Tensor\n\nfrom cspd import load\n"
    (tmp_path / "script.py").write_text(imports)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "script.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
