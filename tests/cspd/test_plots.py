"""Grids: how large images are shown in them, and colours of costs that all eyes tell apart."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from cspd.plots import MARGIN, UNKNOWN, coloured, grid


def noise(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("num, columns, side, factor", [(4, 4, 32, 7), (40, 10, 32, 3), (1, 1, 32, 8), (3, 3, 256, 1)])
def test_small_images_are_enlarged_by_whole_factors(num, columns, side, factor):
    images = [noise(side, side, seed) for seed in range(num)]
    made = np.asarray(grid(images, ["0"] * num, columns))
    assert made.shape[1] == columns * (factor * side + MARGIN) + MARGIN
    below = (made.shape[0] - MARGIN) // -(-num // columns)  # from row to row
    for i in (0, num - 1):
        row, column = divmod(i, columns)
        y, x = MARGIN + row * below, MARGIN + column * (factor * side + MARGIN)
        cell = made[y : y + factor * side, x : x + factor * side]
        assert (cell == np.asarray(images[i]).repeat(factor, 0).repeat(factor, 1)).all()


def test_colours_of_costs_differ_in_lightness():
    """Which all see who see no hues: least, unknown and most, and everything in between in order."""
    shares = np.array([[0.0, 0.25, 0.5, 0.75, 1.0, np.nan]])
    picture = coloured(shares)
    *known, unknown = np.asarray(picture.convert("L"))[0].astype(int)
    assert np.diff(known).min() > 20 and known[0] + 60 < unknown < known[-1] - 60
    assert tuple(np.asarray(picture)[0, -1]) == UNKNOWN
