"""The notebooks run from top to bottom, and are committed with small outputs."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[1] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
MOST_BYTES = 120_000
SECONDS = 600  # of one cell


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def printed(notebook):
    return [each.text for each in outputs(notebook) if each.output_type == "stream" and each.name == "stdout"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_outputs_are_small_and_without_errors(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < MOST_BYTES
    assert outputs(notebook) and all(output.output_type != "error" for output in outputs(notebook))


@pytest.mark.slow  # generates some hundred images
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path, monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.fspath(path.parents[1]))
    notebook = nbformat.read(path, as_version=4)
    committed = printed(notebook)
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    assert len(printed(notebook)) == len(committed)
