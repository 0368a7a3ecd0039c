"""The methods and their options as text: for `cspd methods`, `--help`, README and docs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cspd.option import COMMON, DEFAULTS, Option

if TYPE_CHECKING:
    from cspd.method import Method


# The methods and their options as text: for `cspd methods`, `--help`, README and docs.

OURS = "ours"  # in the place of a paper
WIDTH = 120  # of what a guarantee means
FEW = 4  # methods that are named one by one; of more it is said whose models they decode


@dataclass
class Owners:
    """Whose an option is.

    Attributes:
        owners: families (by name) or methods. selected: words of other options that it goes with.
    """

    owners: list[str | Method] = field(default_factory=list)
    selected: dict[str, list[str]] = field(default_factory=dict)

    def add(self, owner: str | Method, option: Option) -> None:
        """Adds a family or a method that has the option."""
        if option.only_with:
            selector, words = option.only_with
            self.selected.setdefault(selector, []).extend(words)
        else:
            self.owners.append(owner)

    def __str__(self) -> str:
        with_others = [f"with --{name} {', '.join(dict.fromkeys(words))}" for name, words in self.selected.items()]
        return ", ".join(filter(None, [_few(self.owners), *with_others]))


@dataclass
class Use:
    """What an option means to some methods: one of those that mean it, whose it is, and who has each default."""

    option: Option
    whose: Owners = field(default_factory=Owners)
    defaults: dict[str, list[tuple[str | Method, Option]]] = field(default_factory=dict)

    def add(self, owner: str | Method, option: Option) -> None:
        """Adds a family or a method that has the option."""
        self.whose.add(owner, option)
        default = "" if option.default is None else f"{option.default}"
        self.defaults.setdefault(default, []).append((owner, option))

    def default(self) -> str:
        """The most common default, and whose are others; empty where there is none."""
        values = sorted(self.defaults, key=lambda value: -len(self.defaults[value]))
        if len(values) > FEW:
            return "the method's own"
        usual, *others = values
        exceptions = [f"{value or 'none'} of {self._whose_default(value)}" for value in others]
        return "; ".join(filter(None, [usual, *exceptions]))

    def _whose_default(self, value: str) -> Owners:
        """Those that have this default; of those with several, by what they go with."""
        others = [owner for other, pairs in self.defaults.items() if other != value for owner, _ in pairs]
        found = Owners()
        for owner, option in self.defaults[value]:
            found.add(owner, option if owner in others else option.but(only_with=None))
        return found


def _few(owners: list[str | Method]) -> str:
    names = dict.fromkeys(owner if isinstance(owner, str) else owner.name for owner in owners)
    if len(names) <= FEW:
        return ", ".join(names)
    return " and ".join(dict.fromkeys(owner if isinstance(owner, str) else owner.family for owner in owners))


def uses(methods: Iterable[Method] = ()) -> list[Use]:
    """What every option means, to whom: first those of whole families, then those of `methods`."""
    found: dict[tuple[str, str], Use] = {}
    declared: list[tuple[str | Method, Option]] = []
    declared += [(family, option) for family, options in COMMON.items() for option in options]
    declared += [(method, option) for method in methods for option in method.options]
    for owner, option in declared:
        found.setdefault((option.name, option.help), Use(option)).add(owner, option)
    return list(found.values())


def format_table(methods: Sequence[Method]) -> str:
    """The methods as text, what their guarantees mean, and the papers they are from."""
    from cspd.method import GUARANTEES

    lines = [f"{'method':<12} {'models':<6} {'guarantee':<10} {'needs':<14} what it does (source)"]
    for method in methods:
        columns = f"{method.name:<12} {method.family:<6} {method.guarantee:<10} {method.needs:<14}"
        source = f"arXiv {', '.join(method.papers)}" if method.papers else OURS
        lines.append(f"{columns} {method.summary} ({source})")
    titles = {number: title for method in methods for number, title in method.papers.items()}
    given = {method.guarantee for method in methods}
    meanings = [_indented(f"{name:<10} {meaning}") for name, meaning in GUARANTEES.items() if name in given]
    return "\n".join([*lines, "", *meanings, "", *(f"arXiv {number}  {title}" for number, title in titles.items())])


def _indented(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * 11)


def markdown_table(methods: Iterable[Method]) -> str:
    """The methods as docs/methods.md has them."""
    rows = [("method", "models", "guarantee", "needs", "what it does", "paper"), ("---",) * 6]
    for method in methods:
        name = f"`{method.name}`" + (" (default)" if DEFAULTS[method.family] == method.name else "")
        papers = ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in method.papers)
        rows.append((name, method.family, method.guarantee, method.needs, method.summary, papers or OURS))
    return _markdown(rows)


def options_table(methods: Iterable[Method]) -> str:
    """The options as docs/api.md has them."""
    rows = [("setting", "of", "values", "default", "what it is"), ("---",) * 5]
    for use in uses(methods):
        option = use.option
        rows.append((f"`{option.name}`", f"{use.whose}", option.range, use.default(), option.help))
    return _markdown(rows)


def _markdown(rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
