"""Inception-v3 with random weights, for tests of several files."""

from __future__ import annotations

import pytest
from feature_rates import random_inception


@pytest.fixture(scope="session")
def inception(tmp_path_factory):
    """A file like torch-fidelity's, with random weights."""
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    random_inception(path)
    return path
