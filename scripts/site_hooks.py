"""Hooks of mkdocs (mkdocs.yml): tables of the registry, pages of the repository's root, links out of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cspd.cli.listing import options_table
from cspd.method import METHODS

ROOT = Path(__file__).parent.parent
OPTIONS = "<!-- options -->"  # a page's place for the table of all options
INCLUDED = re.compile(r"<!-- include (\S+) -->")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")  # a link from docs/ to another file


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    import cspd.checkpoints  # noqa: F401  # every family registers its methods and options

    markdown = included(markdown)
    markdown = markdown.replace(OPTIONS, options_table(METHODS))
    return OUTSIDE.sub(lambda found: _outside(found[1], found[2], config.repo_url), markdown)


def included(markdown: str) -> str:
    """A page with the pages that it includes."""
    return INCLUDED.sub(lambda found: _included(found[1]), markdown)


def _included(name: str) -> str:
    """A page of the root, with its links as they are from docs/."""
    text = (ROOT / name).read_text()
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda found: "](" if found[1] else "](../", text)


def _outside(text: str, path: str, repository: str | None) -> str:
    """A link to the file in the repository; without a repository's address, the file's name."""
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/main/{path})"
    return text if text.strip("`") == path else f"{text} (`{path}`)"
