"""Files that are not there, cut off or of another kind get one error that names them and the way out; no code runs."""

import argparse
import os
import pickle

import pytest
from weights import draft_weights, file_writer, refusal  # noqa: F401 - fixtures

from mar.checkpoint import load_mar, load_vae


def test_missing_file(tmp_path):
    assert "no such file; checkpoints/README.md" in refusal(load_mar, tmp_path / "absent.pth")


@pytest.mark.parametrize("name, problem", [(".", "not a file"), ("pipe", "not a file"), ("loop", "no such file")])
def test_what_is_no_file_is_not_opened(name, problem, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # to open it would be to wait for a writer
    (tmp_path / "loop").symlink_to("loop")
    assert f"{problem}; checkpoints/README.md" in refusal(load_vae, tmp_path / name)


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
def test_truncated_file(name, save, weights):
    content = weights if name.endswith("safetensors") else {"model": weights}
    whole = save(name, content, _use_new_zipfile_serialization=name != "legacy.pth").read_bytes()
    for size in [*range(0, 2000, 97), *(int(f * len(whole)) for f in (0.01, 0.3, 0.9)), len(whole) - 1]:
        message = refusal(load_mar, save(name, whole[:size]))
        assert f"{size:,}" in message


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.parametrize("content", [b"<!DOCTYPE html>\n<html>", b"access denied", b"\0" * 99, b"\x80\x02", b"PK\3\4"])
def test_file_of_another_kind(name, content, save):
    message = refusal(load_mar, save(name, content))
    assert ("<!DOCTYPE html>" in message) == content.startswith(b"<")
    assert ("access denied" in message) == content.startswith(b"access")


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_git_lfs_pointer(name, save):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
    assert "is a Git LFS pointer, not the file itself: fetch that with `git lfs pull`" in refusal(
        load_mar, save(name, pointer)
    )


class WritesFile:
    """Pickles to a call that creates a file when it is read without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("name", ["weights.pth", "legacy.pth", "weights.safetensors"])
@pytest.mark.parametrize("wrap", [dict, argparse.Namespace])
def test_code_in_a_pickle_does_not_run(wrap, name, save, weights, tmp_path):
    trap = tmp_path / "trap"
    pickle.loads(pickle.dumps(WritesFile(trap))).close()
    trap.unlink()  # so it would have worked
    content = {"model": weights, "args": wrap(output=WritesFile(trap))}
    refusal(load_mar, save(name, content if name == "weights.pth" else pickle.dumps(content, 2)))
    assert not trap.exists()
