"""Checkpoints on the Hugging Face hub by their names there, through its own client: what it keeps is not fetched again.

Nothing of theirs is run: files are read as any others are (`mar.tensors`). With HF_HUB_OFFLINE=1, and where the hub
cannot be reached, only what is kept is looked at.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from mar.tensors import CheckpointError

NAME = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+)?", re.ASCII)


def is_name(text: str) -> bool:
    """Whether a text is a name on the hub, "org/name" or "org/name/file", and no place here."""
    return NAME.fullmatch(text) is not None and not Path(text.partition("/")[0]).exists()


@functools.cache
def fetched(name: str, targets: Collection[str], companions: Collection[str]) -> Path:
    """The file of a target on the hub, in the hub's cache on this machine, beside it what lies beside it there.

    Args:
        name: "org/name", or with a file or folder in it. targets, companions: patterns of files' names.

    Raises:
        CheckpointError: there is no such target, or several are there.
    """
    owner, repository, *rest = name.split("/", 2)
    repo, inside = f"{owner}/{repository}", PurePosixPath(*rest)
    files = [PurePosixPath(file) for file in _listed(repo)]
    found = [file for file in files if file == inside]
    if not found:
        found = [file for file in files if file.parent == inside and _matches(file, targets)]
    if len(found) != 1:
        several = f"several checkpoints are there: give one: {', '.join(f'{repo}/{file}' for file in found)}"
        fetch = f"a model of transformers is fetched first: hf download {repo} --local-dir {repository}"
        none = f"no such place here, and on the hub it has none of {', '.join(targets)}; {fetch}"
        raise CheckpointError(f"{name}: {several if found else none}")
    beside = [file for file in files if file.parent == found[0].parent and _matches(file, companions)]
    return _folder(repo, [str(file) for file in (*found, *beside)]) / found[0]


def _matches(file: PurePosixPath, patterns: Collection[str]) -> bool:
    return any(fnmatch(file.name, pattern) for pattern in patterns)


def _listed(repo: str) -> list[str]:
    """The files of a repository; where the hub cannot be asked, those that are kept here."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        with _unlogged():
            return HfApi().list_repo_files(repo)
    except RepositoryNotFoundError:
        raise CheckpointError(f"{repo}: no such place here, and no such repository on the hub") from None
    except Exception as error:  # no network, or told to do without it: its client has an error for each
        folder = _folder(repo, None, error)
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Within it the hub's client does not log each of its attempts: what comes of them is told in one line."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _folder(repo: str, files: list[str] | None, why: Exception | None = None) -> Path:
    """The folder of a repository in the hub's cache, with these files; None: with those that are there.

    Raises CheckpointError, which says `why` it is these, or else what went wrong.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=files, local_files_only=files is None))
    except Exception as error:
        why = why or error
        reason = (str(why) or type(why).__name__).splitlines()[0]
        raise CheckpointError(f"{repo}: no such place here, and it cannot be had from the hub: {reason}") from why
