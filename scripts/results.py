"""Writes the tables of numbers in the docs from docs/results/*.json.

    python scripts/results.py                     # renews the tables of all pages
    python scripts/results.py --add speed runs/comparison/comparison.json --title "..." --columns speed_up,fid

A page has a table NAME between `<!-- table NAME -->` and `<!-- /table -->`. Each file says what was run, at which
commit and on which machine. `--add` makes such a file from the JSON of `cspd compare` or `cspd tune`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "results"
TABLE = re.compile(r"<!-- table (\w+) -->\n.*?<!-- /table -->", re.DOTALL)
FIELDS = {"title": str, "commands": list, "commit": str, "machine": str, "header": list, "rows": list}
MARK = '"minutes to hours"'  # of commands that no test runs: tests/test_docs.py
SHORT = 7  # characters of a commit
DIGITS = 3


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def table_of(name: str) -> str:
    """A table in Markdown, under its title and above the commands, the commit and the machine that gave it.

    Raises ValueError if a field is missing or of another type, or a row has another number of cells than the header.
    """
    content = json.loads((FOLDER / f"{name}.json").read_text())
    for field, kind in FIELDS.items():
        if not isinstance(content.get(field), kind) or not content[field]:
            raise ValueError(f"{name}.json: {field} is missing, empty or not a {kind.__name__}")
    rows = [content["header"], ["---"] * len(content["header"]), *content["rows"]]
    if len({len(row) for row in rows}) > 1:
        raise ValueError(f"{name}.json: a row has another number of cells than the header")
    lines = [f"| {' | '.join(row)} |" for row in rows]
    # folded, on GitHub and on the site
    origin = f"<details markdown><summary>commit {content['commit']}; {content['machine']}</summary>"
    run = ["", f"```sh title={MARK}", *content["commands"], "```", "", "</details>"]
    return "\n".join([content["title"], "", *lines, "", origin, *run])


def renewed(text: str) -> str:
    """A page with its tables as their files say."""
    return TABLE.sub(lambda found: f"<!-- table {found[1]} -->\n{table_of(found[1])}\n<!-- /table -->", text)


def add(name: str, report: Path, title: str, columns: list[str]) -> None:
    """Writes a table's file from a report of `cspd compare`, with one row for each configuration."""
    found = json.loads(report.read_text())
    ran = found["ran"]
    machine = ran["machine"]
    rows = [[f"`{row['name']}`", *(_cell(row, column) for column in columns)] for row in found["rows"]]
    content = {
        "title": title,
        "commands": [ran["command"]],
        "commit": (ran["commit"] or "unknown")[:SHORT],
        "machine": f"{machine['device']}, {machine['threads']} threads, torch {ran['versions']['torch']}",
        "header": ["method", *(column.replace("_", " ") for column in columns)],
        "rows": rows,
    }
    (FOLDER / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _cell(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if value is None:
        return ""
    if isinstance(value, dict):  # the spread over the turns
        return f"{value['median']:.{DIGITS}g} ({value['min']:.{DIGITS}g}-{value['max']:.{DIGITS}g})"
    if not isinstance(value, float):
        return str(value)
    interval = row.get(f"{column}_ci95")
    spread = f" ± {(interval[1] - interval[0]) / 2:.2g}" if interval else ""
    return f"{value:.{DIGITS}g}{spread}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs=2, metavar=("NAME", "FILE"), help="make the file of a table from a report")
    parser.add_argument("--title", default="", help="what the table shows")
    parser.add_argument(
        "--columns", default="speed_up", help="fields of a row (docs/reference.md), separated by commas"
    )
    args = parser.parse_args()
    if args.add:
        add(args.add[0], Path(args.add[1]), args.title, args.columns.split(","))
    for page in pages():
        page.write_text(renewed(page.read_text()))


if __name__ == "__main__":
    main()
