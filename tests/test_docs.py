"""The docs: links lead somewhere, tables are as their sources say, and commands and programs run or at least parse."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import results
import site_hooks

from cspd.cli import _parse, main
from cspd.continuous.denoisers import DENOISERS
from cspd.discrete import rules
from cspd.discrete.drafts import DRAFTS
from cspd.heads import SAMPLERS
from cspd.masked import cspd as cspd_method
from cspd.method import METHODS
from mar.checkpoint import MARS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
STUDIES = sorted((ROOT / "scripts" / "studies").glob("*.yaml"))
CARDS = sorted((ROOT / "checkpoints").glob("**/*.md"))
BLOCK = re.compile(r"^ *```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LANGUAGES = {"sh", "python", "yaml", "json", "text"}
# why no test runs a block; all others are run
TITLES = {
    *("installs", "minutes to hours", "runs until Ctrl-C"),
    *("needs official weights", "needs your weights", "needs a GPU", "needs a cluster"),
    *("needs docker", "needs a running server", "needs Ray"),
}
FEW = 4  # images of a command that a test runs
LAUNCHER = re.compile(r"torchrun .*?-m cspd ")


@dataclass(frozen=True)
class Block:
    page: Path
    language: str
    title: str
    text: str


def blocks() -> list[Block]:
    return [Block(page, *found) for page in PAGES for found in BLOCK.findall(page.read_text())]


def lines_of(block: Block) -> list[str]:
    """The commands of a block, with its variables put in."""
    variables: dict[str, str] = {}
    lines = []
    for line in block.text.replace("\\\n", " ").splitlines():
        for name, value in variables.items():
            line = line.replace(f"${name}", value)
        assigned = re.fullmatch(r"\s*([A-Z0-9]+)=(?:\"(.*)\"|(\S*))", line)
        if assigned:
            variables[assigned[1]] = assigned[2] or assigned[3]
        elif line.strip():
            lines.append(line.strip())
    return lines


def arguments_of(line: str) -> list[str] | None:
    """The arguments of a line that runs cspd, or None."""
    line = LAUNCHER.sub("cspd ", line)
    words = shlex.split(re.sub(r"\$\(.*?\)", "x", line).replace("$SLURM_ARRAY_TASK_ID", "3"), comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words[1:] if words[:1] == ["cspd"] else None


def commands() -> list[tuple[str, list[str]]]:
    """Every command line of cspd in the docs and in the files of results, with the page's name."""
    found = [(block.page.name, line) for block in blocks() if block.language == "sh" for line in lines_of(block)]
    return [(page, arguments) for page, line in found if (arguments := arguments_of(line)) is not None]


@pytest.fixture
def registries():
    """Methods and sizes of plug-ins are registered for one test only."""
    kept = [(registry, dict(registry)) for registry in (DENOISERS, SAMPLERS, DRAFTS, MARS)]
    methods = list(METHODS)
    yield
    METHODS[:] = methods
    for registry, before in kept:
        registry.clear()
        registry.update(before)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    return anchors_of(BLOCK.sub("", site_hooks.included(page.read_text())))


def anchors_of(text: str) -> set[str]:
    """The anchors of the headings in a text."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)) for heading in headings]
    return {re.sub(r"\s+", "-", heading.strip().lower()) for heading in plain}


@pytest.mark.parametrize("page", [*PAGES, *CARDS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page):
    text = BLOCK.sub("", page.read_text())
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_on_the_site():
    listed = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in sorted((ROOT / "docs").glob("*.md"))]


def section(page: Path, anchor: str) -> str:
    """The text of the section of a page with this anchor, "" if there is none."""
    parts = re.split(r"^(?=#+ )", BLOCK.sub(r"\3", page.read_text()), flags=re.MULTILINE)
    found = [part for part in parts if anchors_of(part.partition("\n")[0]) == {anchor}]
    return "".join(found)


def test_differences_from_the_papers_are_the_codes():
    """The numbers of the page are the defaults and limits of the code."""
    text = " ".join((ROOT / "docs" / "differences.md").read_text().split())
    defaults = {}
    for method in METHODS:
        if method.family in ("MAR", "VQ"):
            defaults[method.name] = {option.name: option.default for option in method.options}
    assert f"z-scores by {defaults['mar-draft']['ratio_temperature']:g};" in text
    assert f"After {cspd_method.MAX_TRIES} candidates" in text and defaults["mar-draft"]["verify"] == "parallel"
    assert f"The default of `lantern` is {defaults['lantern']['k']}," in text
    assert (
        defaults["lantern"]["optimal"] is defaults["lantern++"]["optimal"] is False and defaults["cool-sd"]["optimal"]
    )
    assert (
        f"depths are counted to {rules.WINDOW_CAP}," in text
        and f"schedule (l = {rules.ELL}) has {rules.ELL - 1}" in text
    )
    assert rules.exponential(1, 1.0, 64, 0.7) == pytest.approx(32, abs=0.5)
    assert defaults["sjd"]["coupling"] == defaults["eagle2"]["coupling"] == "same-image"


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.stem)
def test_what_a_study_points_to_exists(study):
    """Sections of docs, which name the study too; scripts, and other studies."""
    text = study.read_text().replace("\n#", "")
    for name in re.findall(r"[\w/-]+\.(?:md|py|yaml)\b", text):
        assert (ROOT / name).is_file() or (study.parent / name).is_file(), name
    for page, anchor in re.findall(r"(docs/\w+\.md)(?:#([\w-]+))?", text):
        assert study.name in section(ROOT / page, anchor), f"{study.name}: {page}#{anchor}"


def test_tables_of_results_are_those_of_their_files():
    """Made by `python scripts/results.py`."""
    for page in results.pages():
        text = page.read_text()
        assert results.renewed(text) == text, f"run scripts/results.py: {page.name}"
    shown = {name for page in results.pages() for name in results.TABLE.findall(page.read_text())}
    assert shown == {file.stem for file in results.FOLDER.glob("*.json")}


def test_a_table_without_its_origin_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    (tmp_path / "speed.json").write_text('{"title": "t", "commands": [], "commit": "c", "machine": "m"}')
    with pytest.raises(ValueError, match="commands"):
        results.table_of("speed")


def test_the_site_has_docstrings_and_pages_of_the_root():
    class Config:
        repo_url = None

    shown = site_hooks.on_page_markdown((ROOT / "docs" / "reference.md").read_text(), None, Config, None)
    assert "\n::: cspd.checkpoints.load\n" in shown and "<!-- api" not in shown
    shown = site_hooks.on_page_markdown((ROOT / "docs" / "contributing.md").read_text(), None, Config, None)
    assert "# Contributing" in shown and "](docs/" not in shown and "](../cspd" not in shown


def test_blocks_have_a_language_and_known_titles():
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)
        assert all(fences[::2]) and not any(fences[1::2]), f"{page.name}: a block without a language"
    for block in blocks():
        assert block.language in LANGUAGES, f"{block.page.name}: {block.language}"
        assert not block.title or block.title in TITLES, f"{block.page.name}: {block.title}"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder as a reader has it: the repository's files, and the plugin that a guide says to write."""
    folder = tmp_path_factory.mktemp("clone")
    for entry in ROOT.iterdir():
        (folder / entry.name).symlink_to(entry)
    (plugin,) = (block for block in blocks() if block.page.name == "finetuned.md" and block.language == "python")
    (folder / "flowers.py").write_text(plugin.text)
    return folder


@pytest.mark.parametrize("page, arguments", commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_commands_parse(page, arguments, registries, clone, monkeypatch):
    monkeypatch.chdir(clone)
    assert isinstance(_parse(arguments), argparse.Namespace)


def test_targets_of_make_exist():
    rules = (ROOT / "Makefile").read_text()
    asked = {line.split()[1] for block in blocks() for line in lines_of(block) if line.startswith("make ")}
    assert asked and all(f"\n{target}:" in rules for target in asked)


@pytest.mark.slow  # runs them
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_programs_run(page, registries, monkeypatch, tmp_path):
    for name in ("examples", "scripts", "checkpoints"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in blocks():
        if block.page == page and not block.title and block.language == "python":
            exec(compile(block.text, page.name, "exec"), namespace)
        if block.page == page and not block.title and block.language == "sh":
            for line in lines_of(block):
                run(line)


def run(line: str) -> None:
    """Runs a command of the docs, with few images."""
    arguments = arguments_of(line)
    if arguments is None:
        command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", line)
        subprocess.run(command, shell=True, check=True, env=os.environ)
        return
    if "--num" in arguments and int(arguments[arguments.index("--num") + 1]) > FEW:
        arguments = [*arguments, "--num", str(FEW)]
    assert main(arguments) == 0, line
