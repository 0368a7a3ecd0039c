"""Hooks of mkdocs (mkdocs.yml): docstrings, pages of the repository's root, links out of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
API = re.compile(r"<!-- api (.*?) -->", re.DOTALL)  # a page's place for docstrings, which GitHub does not show
INCLUDED = re.compile(r"<!-- include (\S+) -->")
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)(?:#[^)]*)?\)")  # a link from docs/ to another file


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    markdown = API.sub(lambda found: f"::: {found[1]}", included(markdown))
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
