"""A lock on a folder: one run at a time holds it, and a run that is killed holds it no longer."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import stat
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from cspd.records import make_folder

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".cspd.lock"
SIGN = "cspd: "  # what the file begins with, unless it is empty
SHOWN = 500  # characters of what the holder says of itself, at most


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds a folder, which is made if there is none. The lock is the kernel's, on an open file: it ends with us.

    The file stays, since another run may have opened it already. It says who holds the lock, for others to tell.

    Raises:
        ValueError: another run holds it (the message says which), or the file is not ours. OSError: no file can be
            written there.
    """
    make_folder(folder)
    path = folder / LOCK
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror}): give another --out") from error
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):  # a pipe would be waited for
            raise ValueError(f"{path} is not a file: give another --out")
        said = os.read(file, SHOWN).decode(errors="replace")
        if said and not said.startswith(SIGN):
            raise ValueError(f"{path} is not a file of cspd: give another --out")
        _lock(file, folder, said)
        with contextlib.suppress(OSError):  # of a full disk: who we are is only information
            os.truncate(file, 0)
            os.lseek(file, 0, os.SEEK_SET)
            os.write(file, f"{SIGN}{_who()}\n".encode(errors="backslashreplace"))  # an argument may be no UTF-8
        yield
    finally:
        os.close(file)


def _who() -> str:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}, {command}"


def _lock(file: int, folder: Path, said: str) -> None:
    """Locks an open file. Raises ValueError if another run holds it, which `said` who it is."""
    try:
        if fcntl is None:
            raise OSError("not on this system")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        line = said.removeprefix(SIGN).partition("\n")[0]
        holder = "".join(filter(str.isprintable, line)) or "another process"
        raise ValueError(f"{folder} is in use by {holder}: wait for its end, or give another --out") from None
    except OSError as error:  # of a file system without locks
        reason = error.strerror or error
        warnings.warn(f"{folder} cannot be locked ({reason}): start no second run there", stacklevel=3)
