"""The names of a model's classes: a request may name its class, and what is shown names it too."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Sequence

from cspd.parsing import choice, shortened


class ClassNames:
    """Names of the classes 0, 1, ... of a model.

    Args:
        texts: of each class its names with commas between them, the one to show first; perhaps a colon and what it is
            ("crane: large long-necked wading bird").
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self._names = [[name.strip() for name in text.partition(": ")[0].split(",")] for text in self.texts]
        self._shown: dict[str, list[int]] = defaultdict(list)  # classes, by the names that are shown
        self._known: dict[str, list[int]] = defaultdict(list)  # classes, by all their names
        for label, (shown, *others) in enumerate(self._names):
            self._shown[_plain(shown)].append(label)
            for name in {_plain(each) for each in (shown, *others)}:
                self._known[name].append(label)

    def name_of(self, label: int | str | None) -> str:
        """The name to show of a class, its number where it has none; None is no class."""
        if not isinstance(label, int):
            return label or "no class"
        return self._names[label][0] if label < len(self._names) else str(label)

    def number_of(self, name: str) -> int:
        """The class of a name, whose case does not matter, nor whether it has spaces, hyphens or underscores.

        A name that is shown of one class alone is that class's, whoever else has it too.

        Raises:
            ValueError: no class has the name, or several have.
        """
        found = self._shown.get(_plain(name), []) or self._known.get(_plain(name), [])
        if len(found) == 1:
            return found[0]
        given = f"label={shortened(name)}"
        if found:
            several = "; ".join(f"{label} ({self.texts[label]})" for label in found)
            raise ValueError(f"{given} is the name of several classes: give the number of one: {several}")
        if not self.texts:
            raise ValueError(f"{given}: the classes of these models have no names: give a number")
        known = [name for names in self._names for name in names]
        raise ValueError(f"{given} is the name of no class: {choice(name, known)}")


def _plain(name: str) -> str:
    return " ".join(name.casefold().replace("_", " ").replace("-", " ").split())


@functools.cache
def imagenet() -> ClassNames:
    """Of ImageNet's 1,000 classes in their usual order: WordNet's names and definitions, as timm has them."""
    from timm.data import ImageNetInfo  # takes a quarter of a second to read

    return ClassNames(ImageNetInfo().label_descriptions(detailed=True))


NO_NAMES = ClassNames(())
