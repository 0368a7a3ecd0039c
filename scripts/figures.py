"""The figures of the house: size, density and imports of the code, and what one `cspd sample` passes through.

    python scripts/figures.py            # of this checkout
    python scripts/figures.py --static   # only the figures that need no run

Syntax nodes are those of Python's `ast` without operators and contexts; nodes per line are counted over lines of code,
without comments and docstrings. A module that is named in a string counts as imported.
"""

from __future__ import annotations

import argparse
import ast
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
WITHOUT_MEANING = (ast.expr_context, ast.operator, ast.cmpop, ast.boolop, ast.unaryop)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# Runs `cspd sample --labels 3`. Prints the number of modules whose functions were called, and how often its request was
# checked. The command also times baseline sampling, which is another request.
TRACED = """
import sys, threading
from pathlib import Path
root, out = Path(sys.argv[1]), sys.argv[2]
called, checks = set(), []
def watch(frame, event, argument):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(str(root)) and code.co_name != "<module>":
        called.add(code.co_filename)
        if code.co_name == "complete" and code.co_filename.endswith("method.py"):
            checks.append(frame.f_locals["method"].name)
threading.setprofile(watch)
sys.setprofile(watch)
from cspd.cli import main
status = main(["sample", "--labels", "3", "--out", out])
sys.setprofile(None)
packages = (str(root / "cspd"), str(root / "mar"))
print("TRACED", status, sum(name.startswith(packages) for name in called), checks.count(checks[0]))
"""


def module_files() -> dict[str, Path]:
    """The files of both packages by module name."""
    files = [*(ROOT / "cspd").rglob("*.py"), *(ROOT / "mar").rglob("*.py")]
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files)}


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of `known` that a module imports anywhere, or names in a string."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found & known


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Imports between modules, without those of the package `cspd` itself: every import of a module runs it."""
    return {name: imports(tree, set(trees)) - {name, "cspd"} for name, tree in trees.items()}


def longest_chain(graph: dict[str, set[str]]) -> int:
    """The number of modules in the longest chain of imports; 0 if there is a circle."""
    length: dict[str, int] = {}
    try:
        for name in TopologicalSorter(graph).static_order():
            length[name] = 1 + max((length[other] for other in graph[name]), default=0)
    except CycleError:
        return 0
    return max(length.values())


def header_lines(tree: ast.Module) -> int:
    """Lines of a module's docstring and of the imports after it."""
    lines = 0
    for index, node in enumerate(tree.body):
        is_docstring = index == 0 and isinstance(node, ast.Expr)
        if not is_docstring and not isinstance(node, (ast.Import, ast.ImportFrom)):
            break
        lines += node.end_lineno - node.lineno + 1
    return lines


def docstring_lines(tree: ast.Module) -> int:
    documented = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    return sum(node.body[0].end_lineno - node.body[0].lineno + 1 for node in documented)


def static_figures() -> Iterator[tuple[str, str]]:
    """(name, figure) of everything that is read from the files."""
    files = module_files()
    texts = {name: file.read_text() for name, file in files.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    comments = sum(line.startswith("#") for line in lines)
    filled = sum(bool(line) for line in lines) - comments
    code = filled - sum(map(docstring_lines, trees.values()))
    nodes = sum(not isinstance(node, WITHOUT_MEANING) for tree in trees.values() for node in ast.walk(tree))
    graph = import_graph(trees)
    chain = longest_chain(graph)
    yield "files", str(len(files))
    yield "lines", str(len(lines))
    yield "syntax nodes", str(nodes)
    yield "nodes per line of code", f"{nodes / code:.2f}"
    yield "comment lines per 100 lines", f"{100 * comments / filled:.1f}"
    yield "docstring and import header, % of lines", f"{100 * sum(map(header_lines, trees.values())) / len(lines):.1f}"
    yield "imports between modules", str(sum(map(len, graph.values())))
    yield "longest chain of imports", str(chain) if chain else "endless: there is a circle"
    yield "lines of tests", str(sum(len(file.read_text().splitlines()) for file in (ROOT / "tests").rglob("*.py")))
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    yield "words of docs", str(sum(len(file.read_text().split()) for file in documents))
    plugins = (ROOT / "examples").glob("own_*.py")
    yield "lines of the plug-ins", ", ".join(str(len(file.read_text().splitlines())) for file in plugins)


def measured_figures() -> Iterator[tuple[str, str]]:
    """(name, figure) of everything that is found by running the command line."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", TRACED, str(ROOT), folder]
        printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (traced,) = (line.split() for line in printed.splitlines() if line.startswith("TRACED"))
    yield "modules that `cspd sample --labels 3` calls", traced[2]
    yield "checks of its request", traced[3]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "cspd", "--version"], cwd=ROOT, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    yield "CPU seconds of `cspd --version`", f"{seconds:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--static", action="store_true", help="leave out the figures that need a run")
    args = parser.parse_args()
    figures = [*static_figures()]
    if not args.static:
        figures += measured_figures()
    for name, figure in figures:
        print(f"{name:<44} {figure}")


if __name__ == "__main__":
    main()
