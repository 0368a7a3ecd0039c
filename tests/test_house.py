"""The house: imports run down from room to room and in no circle, and what a reader is told of it is so."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from cspd.listing import markdown_table, options_table
from cspd.methods import METHODS

ROOT = Path(__file__).parent.parent
ROOMS = [  # a room may import from those below it, and within itself; rooms of one line are beside each other
    ["cspd", "cspd.__main__"],
    ["cspd.cli"],
    ["cspd.commands"],
    ["cspd.listing"],
    ["cspd.gpu_check"],
    ["cspd.comparison", "cspd.bench", "cspd.serving", "cspd.speed"],
    ["cspd.evaluation"],
    ["cspd.loading"],
    ["cspd.finding"],
    ["cspd.engine"],
    ["cspd.streaming", "cspd.saving"],
    ["cspd.flight"],
    ["cspd.finishing", "cspd.scheduler"],
    ["cspd.continuous", "cspd.discrete"],
    ["cspd.lookup"],
    ["cspd.methods"],
    ["cspd.vq"],
    ["cspd.method"],
    ["cspd.precision"],
    ["cspd.choosing", "cspd.summary", "cspd.plots", "cspd.scatter"],
    ["cspd.sequence"],
    ["cspd.keeping", "cspd.machine", "cspd.ran", "cspd.store"],
    ["cspd.items", "cspd.lock"],
    ["cspd.families"],
    ["cspd.option"],
    [
        "cspd.classes",
        "cspd.graphs",
        "cspd.known",
        "cspd.noise",
        "cspd.pixels",
        "cspd.records",
        "cspd.stopping",
        "cspd.telling",
        "cspd.transfer",
        "cspd.turns",
        "cspd.version",
    ],
    ["cspd.hub", "cspd.kernels", "cspd.parsing", "cspd.pretrained"],
    ["mar"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def modules() -> dict[str, Path]:
    """The packages' modules by name; a package's own is its __init__."""
    files = [*(ROOT / "cspd").rglob("*.py"), *(ROOT / "mar").rglob("*.py")]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files)}


def room_of(module: str) -> str:
    return module if module.count(".") < 1 else ".".join(module.split(".")[:2]) if module.startswith("cspd.") else "mar"


def imports(name: str, file: Path, known: set[str]) -> set[str]:
    """The modules of ours that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & known or {node.module}
            found |= {node.module} if inside - known else set()
    return (found & known) - {name}


@functools.cache
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(name, file, set(known)) for name, file in known.items()}


def test_every_module_is_in_a_room():
    assert {room_of(name) for name in modules()} == set(LEVEL) | {"mar"}


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_run_down(name):
    own = room_of(name)
    for other in graph()[name] - {"cspd"}:  # the package itself has what users import, and every import runs it
        room = room_of(other)
        assert room == own or LEVEL[room] > LEVEL[own], f"{name} imports {other}, which is not below it"


def test_no_circle():
    whole = {name: others - {"cspd"} for name, others in graph().items()}
    assert len([*TopologicalSorter(whole).static_order()]) == len(whole)  # else it raises CycleError


def between(text: str, marker: str) -> str:
    return text.split(f"<!-- {marker} -->")[1].split(f"<!-- /{marker} -->")[0].strip()


def test_docs_have_the_methods_table():
    """Made by `cspd methods --markdown`."""
    assert between((ROOT / "docs" / "methods.md").read_text(), "methods") == markdown_table(METHODS)


def test_docs_have_the_options_table():
    """Made by `cspd methods --options`."""
    assert between((ROOT / "docs" / "api.md").read_text(), "options") == options_table(METHODS)
