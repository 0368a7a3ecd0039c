"""The methods and their options as text: for `cspd methods`, `--help` and the tables in the docs."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cspd.option import COMMON, DEFAULTS, FAMILIES, Option

if TYPE_CHECKING:
    from cspd.method import Method

    Owner = str | Method  # a method, or the name of a family
    Declared = list[tuple[Owner, Option]]

WIDTH = 120  # of the meaning of a guarantee, in characters
METHODS_HEADER = """\
| method | models | guarantee | needs | what it does | paper |
| --- | --- | --- | --- | --- | --- |"""
OPTIONS_HEADER = """\
| setting | of | values | default | what it is |
| --- | --- | --- | --- | --- |"""
FEW = 4  # up to this many methods are named one by one; more are summed up by their families


@dataclass
class Use:
    """One meaning of an option's name. `gamma` has several: drafted tokens of `mar-draft`, or the height of a tree.

    Attributes:
        option: the first declaration with this meaning.
        declared: all declarations with this meaning, each with the method or family that has it.
    """

    option: Option
    declared: Declared = field(default_factory=list)

    @property
    def is_of_all_families(self) -> bool:
        owners = [owner for owner, _ in self.declared]
        return owners == list(COMMON)

    def owners(self) -> str:
        """Who has the option, such as "disa, with --denoiser annealed"."""
        names = _names([owner for owner, option in self.declared if option.only_with is None])
        return ", ".join(filter(None, [names, self.condition()]))

    def section(self, methods: Collection[str]) -> str:
        """What has the option, such as "disa, --denoiser annealed (MAR)". `methods`: the names of all methods."""
        names = _names([owner for owner, option in self.declared if option.only_with is None])
        parts: dict[str, str] = {}  # a part that several settings can choose is named once
        for other, values in (option.only_with for _, option in self.declared if option.only_with):
            for value in values:
                parts.setdefault(value, value if value in methods else f"--{other} {value}")
        families = ", ".join(
            dict.fromkeys(owner if isinstance(owner, str) else owner.family for owner, _ in self.declared)
        )
        title = ", ".join(dict.fromkeys([*filter(None, names.split(", ")), *parts.values()]))
        return title if title == families else f"{title} ({families})"

    def condition(self) -> str:
        """The values of other options that this one needs, such as "with --rule gsd"; empty if it needs none."""
        words: dict[str, list[str]] = {}
        for _, option in self.declared:
            if option.only_with:
                other, values = option.only_with
                words.setdefault(other, []).extend(values)
        conditions = []
        for other, values in words.items():
            distinct = ", ".join(dict.fromkeys(values))
            conditions.append(f"with --{other} {distinct}")
        return ", ".join(conditions)

    def default(self) -> str:
        """The most common default, then the others and who has them; empty if there is none."""
        by_default: dict[str, Declared] = {}
        for owner, option in self.declared:
            default = "" if option.default is None else str(option.default)
            by_default.setdefault(default, []).append((owner, option))
        if len(by_default) > FEW:
            return "the method's own"

        # sorted() is stable: among equally common defaults the first declared one counts as usual
        most_common, *others = sorted(by_default, key=lambda default: -len(by_default[default]))
        parts = [most_common]
        for default in others:
            owners = self._owners_of_default(by_default, default)
            parts.append(f"{default or 'none'} for {owners}")
        return "; ".join(filter(None, parts))

    def _owners_of_default(self, by_default: dict[str, Declared], default: str) -> str:
        """Who has a default. A method that also has another one is named by the condition of this one only."""
        with_another = []
        for other, declared in by_default.items():
            if other != default:
                with_another += [owner for owner, _ in declared]
        found = Use(self.option)
        for owner, option in by_default[default]:
            # one default is the method's default, whatever the option depends on
            if owner not in with_another:
                option = option.but(only_with=None)
            found.declared.append((owner, option))
        return found.owners()


def _names(owners: Sequence[Owner]) -> str:
    """Families and methods by name. More than `FEW` are summed up by their families."""
    names = {}
    for owner in owners:
        if isinstance(owner, str):
            names[owner] = owner
        else:
            names[owner.name] = owner.family
    if len(names) <= FEW:
        return ", ".join(names)
    return " and ".join(dict.fromkeys(names.values()))


def uses(methods: Iterable[Method] = ()) -> list[Use]:
    """Every meaning of every option: first the options of whole families, then those of `methods`."""
    declared: Declared = []
    for family, options in COMMON.items():
        declared += [(family, option) for option in options]
    for method in methods:
        declared += [(method, option) for option in method.options]

    # options of one name that differ in their help text mean different things
    found: dict[tuple[str, str], Use] = {}
    for owner, option in declared:
        use = found.setdefault((option.name, option.help), Use(option))
        use.declared.append((owner, option))
    return list(found.values())


def format_table(methods: Sequence[Method]) -> str:
    """The methods as text, with the meanings of guarantees and of models, and the titles of their papers."""
    # imported here because cspd.method imports torch, and --help needs this module
    from cspd.method import GUARANTEES

    lines = ["method       models guarantee   needs          what it does (source)"]
    titles: dict[str, str] = {}
    for method in methods:
        source = f" (arXiv {', '.join(method.papers)})" if method.papers else ""
        columns = f"{method.name:<12} {method.family:<6} {method.guarantee:<11} {method.needs:<14}"
        lines.append(f"{columns} {method.summary}{source}")
        titles |= method.papers

    lines.append("")
    shown = {method.guarantee for method in methods}
    for name, meaning in GUARANTEES.items():
        if name in shown:
            lines.append(textwrap.fill(f"{name:<11} {meaning}", WIDTH, subsequent_indent=" " * 12))

    lines.append("")
    lines += [f"{name:<10} {what}" for name, what in FAMILIES.items() if any(each.family == name for each in methods)]

    lines.append("")
    lines += [f"arXiv {number}  {title}" for number, title in titles.items()]
    return "\n".join(lines)


def markdown_table(methods: Iterable[Method]) -> str:
    """The table of methods in docs/methods.md."""
    lines = [METHODS_HEADER]
    for method in methods:
        name = f"`{method.name}`"
        if DEFAULTS[method.family] == method.name:
            name += " (default)"
        papers = [f"[{number}](https://arxiv.org/abs/{number})" for number in method.papers]
        source = ", ".join(papers) or "-"
        lines.append(_row(name, method.family, method.guarantee, method.needs, method.summary, source))
    return "\n".join(lines)


def options_table(methods: Iterable[Method]) -> str:
    """The table of options in docs/reference.md."""
    lines = [OPTIONS_HEADER]
    for use in uses(methods):
        option = use.option
        lines.append(_row(f"`{option.name}`", use.owners(), option.range, use.default(), option.help))
    return "\n".join(lines)


def _row(*cells: str) -> str:
    """A row of a Markdown table."""
    escaped = [cell.replace("|", "\\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"
