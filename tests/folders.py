"""A small store, and a run in its folder that was cut off."""

from __future__ import annotations

from cspd.runs import LOCK, Store

SCHEMA = "tests/1"
FILES = ["0.npz", "parts/1.npz", "report.md"]
RECORD = "record.json"


def store_of(folder, **shape):
    return Store(folder, RECORD, SCHEMA, {"settings": dict, **shape}, compared=("settings",))


def record_of(**settings):
    return {"schema": SCHEMA, "settings": settings}


def begun(folder, *, overwrite=False, files=FILES, **settings):
    """A run that was cut off after it began."""
    with store_of(folder) as store:
        earlier = store.claim(record_of(**settings), files, overwrite)
        store.begin(record_of(**settings))
    return earlier


def content(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
