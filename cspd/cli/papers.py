"""`cspd evaluate --like paper:NAME`: the rows of a published table, with the published settings and numbers."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tabulate import tabulate

from cspd.evaluation.metrics import INCEPTION, load_reference
from cspd.evaluation.run import RECORD
from cspd.files import checked_json
from cspd.terminal import choice

PAPERS = Path(__file__).parents[1] / "evaluation" / "papers"
PREFIX = "paper:"
SHAPE = {"paper": str, "table": str, "family": str, "common": dict, "rows": [dict]}
FILES = ("checkpoint", "vae", "draft_checkpoint", "ref", "weights")  # settings that are files
TITLES = {"fid": "FID", "inception_score": "IS"}
OF_ALL = ("--like", "--out")  # flags of the table, not of its rows


def read_paper(name: str) -> dict:
    """The table of a paper, by "paper:NAME": its settings, rows and published numbers. Raises ValueError if unknown."""
    known = {f"{PREFIX}{path.stem}": path for path in sorted(PAPERS.glob("*.yaml"))}
    if name not in known:
        raise ValueError(f"--like {name} is unknown: {choice(name, list(known))}")
    return yaml.safe_load(known[name].read_bytes())


def arguments_of(settings: Mapping[str, Any], typed: Sequence[str], out: str) -> list[str]:
    """The arguments of a row's own `cspd evaluate`: the published settings, then those that the user typed."""
    words = ["evaluate"]
    for key, value in settings.items():
        if key not in ("name", "published"):
            words += [f"--{key.replace('_', '-')}", str(value)]
    return [*words, *typed, "--out", out]


def typed_in(line: str) -> list[str]:
    """The arguments in a command's line that its rows share: all but those of the table itself."""
    words = shlex.split(line)[2:]
    shared = []
    while words:
        word = words.pop(0)
        if word in OF_ALL:
            words.pop(0)
        elif word != "--dry-run" and word.partition("=")[0] not in OF_ALL:
            shared.append(word)
    return shared


def run_paper(
    args: argparse.Namespace,
    parse: Callable[[list[str]], argparse.Namespace],
    check: Callable[[argparse.Namespace, str], None],
    evaluate: Callable[[argparse.Namespace], Any],
) -> None:
    """Runs every row whose weights are there, and prints its numbers beside the published ones.

    With `args.dry_run` nothing is sampled: everything but the weights is checked.

    Args:
        parse: reads a command's arguments. check: raises ValueError for settings that a family of models refuses.
        evaluate: runs the command.
    """
    table = read_paper(args.like)
    typed = typed_in(args.line)
    rows = []
    for row in table["rows"]:
        folder = row["name"].lower().replace(", ", "_").replace(" ", "_")
        words = arguments_of(table["common"] | row, typed, f"{args.out}/{folder}")
        own = parse(words)
        own.line = shlex.join(["cspd", *words])
        lacking = [str(getattr(own, name)) for name in FILES if getattr(own, name) and not _exists(own, name)]
        rows.append((row, own, lacking))
    # every row is checked before the first one, whose images may take days
    for row, own, _ in rows:
        try:
            if own.ref and _exists(own, "ref"):
                load_reference(own.ref)
            check(own, table["family"])
        except ValueError as error:
            raise ValueError(f"{row['name']}: {error}") from error
    is_first = os.environ.get("RANK", "0") == "0"  # of several processes under torchrun
    if args.dry_run and is_first:
        print(f"{args.like} (arXiv {table['paper']}): the settings of {len(rows)} rows are valid")
    if not args.dry_run:
        for _, own, lacking in rows:
            if not lacking:
                evaluate(own)
    if is_first:
        print(side_by_side(rows))


def _exists(args: argparse.Namespace, name: str) -> bool:
    return Path(getattr(args, name)).exists()


def side_by_side(rows: Sequence[tuple[dict, argparse.Namespace, list[str]]]) -> str:
    """The published and our own numbers of each row, ours with their interval; or the files that it lacks."""
    names = list(dict.fromkeys(name for row, _, _ in rows for name in row["published"]))
    titles = ["row"]
    for name in names:
        titles += [f"{TITLES[name]}, published", f"{TITLES[name]}, ours"]
    lines = []
    for row, own, lacking in rows:
        report = {} if lacking else _report(Path(own.out))
        line = [row["name"]]
        for name in names:
            published = row["published"].get(name)
            line += ["" if published is None else str(published), _own(report, name)]
        note = f"no {', '.join(lacking)}" if lacking else f"by {report.get('space') or INCEPTION}"
        lines.append([*line, note])
    return tabulate(lines, [*titles, ""], tablefmt="plain", disable_numparse=True)


def _report(out: Path) -> dict:
    """The report of a row's run, {} if it has none yet."""
    try:
        return checked_json(out / RECORD, {"space": (str, type(None))}, "")
    except (ValueError, OSError):
        return {}


def _own(report: Mapping[str, Any], name: str) -> str:
    value = report.get(name)
    if value is None:
        return "-"
    interval = report.get(f"{name}_ci95")
    return f"{value:.2f}" if interval is None else f"{value:.2f} [{interval[0]:.2f}, {interval[1]:.2f}]"
