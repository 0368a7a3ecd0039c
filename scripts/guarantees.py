"""Draws docs/exactness.png: what the four guarantees say of a method's distribution.

python scripts/guarantees.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from PIL import Image

OUT = Path(__file__).parent.parent / "docs" / "exactness.png"
BLUE, ORANGE, GREY = "#1f6feb", "#d9730d", "#9aa0a6"


def density(x: np.ndarray, shift: float = 0.0, width: float = 1.0) -> np.ndarray:
    """A density with two modes, moved by `shift` and scaled by `width`."""
    first, second = (np.exp(-(((x - mean - shift) / (width * deviation)) ** 2) / 2) for mean, deviation in MODES)
    return (first + 0.6 * second) / width


MODES = ((-1.0, 0.6), (1.2, 0.5))


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    x = np.linspace(-3.2, 3.2, 400)
    target = density(x)
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.4), dpi=90, sharey=True)
    for axis, (name, text) in zip(
        axes,
        (
            ("exact", "the same distribution"),
            ("approximate", "a token's distance is reported"),
            ("bounded", "somewhere within a band"),
            ("heuristic", "nothing is known"),
        ),
    ):
        axis.plot(x, target, color=BLUE, lw=2.5)
        axis.set_title(name, fontsize=12, fontweight="bold")
        axis.set_xlabel(text, fontsize=10)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[0].plot(x, target, color=ORANGE, lw=2.5, ls=(0, (3, 3)))
    axes[1].plot(x, density(x, 0.35), color=ORANGE, lw=2.5, ls=(0, (3, 3)))
    top = int(np.argmax(target))
    axes[1].annotate("", (x[top] + 0.35, 1.1), (x[top], 1.1), arrowprops={"arrowstyle": "|-|", "mutation_scale": 3})
    axes[2].fill_between(x, np.maximum(target - 0.22, 0), target + 0.22, color=ORANGE, alpha=0.3, lw=0)
    axes[3].text(2.3, 0.9, "?", color=GREY, fontsize=40, ha="center", va="center")
    axes[0].legend(["ar", "the method"], frameon=False, fontsize=9, loc="upper right", bbox_to_anchor=(1.12, 1.05))
    axes[0].set_ylim(0, 1.3)
    figure.tight_layout()
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    Image.fromarray(pixels).quantize(32).save(OUT, optimize=True)


if __name__ == "__main__":
    main()
