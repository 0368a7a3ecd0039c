"""Commands as processes: started, watched, and killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import cspd
from cspd.terminal import GRACE, POLL


def environment(**more: str) -> dict[str, str]:
    own = {"PYTHONPATH": str(Path(cspd.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return os.environ | own | more


def start(arguments: Sequence[str], log: Path, launch: Sequence[str] = (), **more: str) -> subprocess.Popen:
    """The command in a process of its own; with `launch`, the options of torchrun, in the processes that it starts."""
    torchrun = ["-m", "torch.distributed.run", *launch] if launch else []
    command = [sys.executable, *torchrun, "-m", "cspd", *map(str, arguments)]
    with open(log, "a") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment(**more))


def two_processes() -> list[str]:
    return ["--nproc_per_node=2", f"--master_port={free_port()}"]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(met: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.02)


def workers_of(run: subprocess.Popen) -> list[int]:
    """The worker processes of torchrun, which are in sessions of their own."""
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if run.poll() is None else []


def alive(pid: int) -> bool:
    try:
        return bool(
            Path(f"/proc/{pid}/cmdline").read_bytes()
        )  # empty: it has ended, and its parent has not waited for it
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def kill_all(run: subprocess.Popen) -> None:
    """kill -9 of a command, or of torchrun and its workers, all at once."""
    if run.poll() is None:
        run.send_signal(signal.SIGSTOP)  # so that it cannot start another worker
        kill([*workers_of(run), run.pid])
    run.wait()


def kill_launcher(run: subprocess.Popen) -> None:
    """kill -9 of torchrun alone; waits until its workers have ended by themselves."""
    workers = workers_of(run)
    for pid in workers:  # a worker that is still starting does not know its launcher
        wait_until(lambda pid=pid: not alive(pid) or b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes())
    kill([run.pid])
    run.wait()
    wait_until(lambda: not any(map(alive, workers)), POLL + GRACE + 5)
