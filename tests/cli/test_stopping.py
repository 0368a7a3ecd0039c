"""Commands that are stopped: by signals, by a closed pipe, by a launcher that is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from launching import alive, environment, start, two_processes, wait_until, workers_of
from stores import small_checkpoint

from cspd.cli import main
from cspd.terminal import GRACE, POLL, SIGNALS, stoppable

SETTINGS = ["--num-sampling-steps", "3", "--cfg", "1", "--max-batch", "1"]
WHAT = {
    "sample": ["--method", "ar", "--num-iter", "4", "--num", "40"],
    "compare": ["--methods", "ar", "--num-iter", "24", "--num", "6"],
    "evaluate": ["--method", "ar", "--num-iter", "4", "--num-images", "64", "--space", "digits"],
}
ITEMS = {"sample": "0*.png", "compare": "chunks/*.npz", "evaluate": "0*.npz"}
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


def arguments(command, out):
    return [command, "--checkpoint", small_checkpoint(), *WHAT[command], *SETTINGS, "--out", str(out)]


def stamps(command, out):
    return {path.name: path.stat().st_mtime_ns for path in out.glob(ITEMS[command])}


def stopping(met, number):
    """A thread that sends a signal to this process once a condition is met."""
    thread = threading.Thread(target=lambda: (wait_until(met), os.kill(os.getpid(), number)))
    thread.start()
    return thread


@pytest.mark.parametrize(
    "command, number, more",
    [
        ("sample", signal.SIGINT, ["--overwrite"]),
        ("compare", signal.SIGTERM, []),
        ("evaluate", signal.SIGHUP, []),
    ],
)
def test_a_signal_ends_a_command_which_reports_its_progress(command, number, more, tmp_path, capsys):
    before = [signal.getsignal(each) for each in SIGNALS]
    thread = stopping(lambda: stamps(command, tmp_path), number)
    assert main([*arguments(command, tmp_path), *more]) == 128 + number
    thread.join()
    line = capsys.readouterr().err.splitlines()[-1]
    progress = re.match(r"cspd: stopped: (\d+) of (\d+) (chunks of )?images are in ", line)
    without = " without --overwrite" if more else ""
    assert progress and line.endswith(f"; run the same command{without} again to resume")
    done, total = map(int, progress.groups()[:2])
    existing = stamps(command, tmp_path)
    assert done == len(existing) * (16 if command == "evaluate" else 1) and 0 < done < total
    assert not list(tmp_path.rglob("*.tmp"))
    assert [signal.getsignal(each) for each in SIGNALS] == before

    assert main(arguments(command, tmp_path)) == 0
    after = stamps(command, tmp_path)
    assert after.items() >= existing.items() and len(after) > len(existing)


@pytest.mark.slow
def test_calibrate_caches_what_was_finished(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("cspd.tuner.STEADY", float("inf"))  # this machine may be busy

    def cached():
        return [*(tmp_path / "cspd").glob("*.safetensors")]

    thread = stopping(cached, signal.SIGTERM)
    assert main(["calibrate", "--checkpoint", small_checkpoint(), "--cfg", "1.7"]) == 128 + signal.SIGTERM
    thread.join()
    assert capsys.readouterr().err.splitlines()[-1].endswith("cspd: stopped")
    (times,) = cached()  # what was timed first; nothing of the fit that was stopped
    assert times.name.startswith("times-")
    assert [path for path in (tmp_path / "cspd").rglob("*") if path.is_file()] == [times]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc tells when torch is being loaded")
def test_a_signal_ends_a_command_during_its_imports():
    command = [sys.executable, "-m", "cspd", "methods"]
    run = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: "libtorch" in Path(f"/proc/{run.pid}/maps").read_text())
    run.send_signal(signal.SIGINT)
    assert run.communicate()[1] == "cspd: stopped\n"
    assert run.returncode == 128 + signal.SIGINT


STUBBORN = """
import signal
from cspd.terminal import Stopped, stoppable
with stoppable():
    try:
        signal.raise_signal(signal.SIGTERM)
    except Stopped:
        signal.raise_signal(signal.SIGINT)  # while files are written, or the program hangs
print("not reached")
"""


def test_a_second_signal_ends_the_process_at_once():
    run = subprocess.run([sys.executable, "-c", STUBBORN], env=environment(), capture_output=True, text=True)
    assert run.returncode == -signal.SIGINT and not run.stdout + run.stderr


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_pipe_ends_a_command_quietly(monkeypatch, capsys):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["methods"]) == 128 + signal.SIGPIPE
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "changes, wrong",
    [
        ({"RANK": "x"}, "RANK"),
        ({"RANK": "2"}, "RANK"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK"),
        ({"LOCAL_RANK": None}, "WORLD_SIZE"),
        ({"WORLD_SIZE": None, "RANK": "1"}, "RANK"),
    ],
)
def test_the_variables_of_the_launcher_are_checked(changes, wrong, monkeypatch, tmp_path, capsys):
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    assert main(arguments("evaluate", tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert wrong in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_their_launcher(number, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    command = [*arguments("evaluate", out), "--num-images", "128", "--num-iter", "32"]
    run = start(command, log, two_processes())
    wait_until(lambda: stamps("evaluate", out) or run.poll() is not None)
    workers = workers_of(run)
    assert len(workers) == 2
    run.send_signal(number)
    wait_until(lambda: not any(map(alive, workers)), POLL + GRACE + 5)
    run.wait()
    told = log.read_text()
    own = [line for line in told.splitlines() if line.startswith("cspd: ") and not line.endswith(" ...")]
    assert len(own) == 1 and own[0].startswith("cspd: stopped: ") and " of 128 images are in " in own[0]
    assert not re.search(r'File ".*/cspd/', told)  # no traceback of ours
    assert 0 < len(stamps("evaluate", out)) < 8


HANGING = """
import os, sys, time
from cspd.terminal import follow_launcher, stoppable
if os.fork():
    sys.stdin.read()  # until it is killed
with stoppable():
    follow_launcher()
    print(os.getpid(), flush=True)
    while True:
        try:
            time.sleep(600)
        except KeyboardInterrupt:  # as in a collective, where Python handles no signals
            pass
"""


@pytest.mark.slow
def test_a_process_that_hangs_ends_with_its_launcher_too():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    run = subprocess.Popen([sys.executable, "-c", HANGING], env=environment(TORCHELASTIC_RUN_ID="1"), **pipes)
    worker = int(run.stdout.readline())
    run.kill()
    start = time.monotonic()
    wait_until(lambda: not alive(worker), POLL + GRACE + 5)
    assert time.monotonic() - start > GRACE
