"""The command line: `cspd sample`, `cspd compare` and the others, as `cspd --help` has them."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import shlex
import sys

from cspd.cli.flags import COMMANDS, help_wanted, parser_of
from cspd.terminal import Stopped, follow_launcher, stoppable, telling

# The command line: `cspd sample`, `cspd compare` and the others, as `cspd --help` has them.

HOMES = {  # each command's module has a function `run_COMMAND`
    "sample": "cspd.cli.sample",
    "edit": "cspd.cli.sample",
    "serve": "cspd.cli.sample",
    "compare": "cspd.cli.evaluate",
    "tune": "cspd.cli.evaluate",
    "evaluate": "cspd.cli.evaluate",
    "bench": "cspd.cli.bench",
    "gpu_check": "cspd.cli.bench",
    "calibrate": "cspd.cli.bench",
    "methods": "cspd.cli.options",
}
BROKEN_PIPE = 141  # as a shell has it of a process that SIGPIPE ended


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit status.

    That is 0, or 1 where a check failed, or 2 after an error of the user's, which is printed in one line, or 128 + n
    after signal n, with what was done and how to go on.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it: `cspd methods >&-`
            setattr(sys, name, open(os.devnull, "w"))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a name that the terminal cannot show does not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with stoppable():  # before anything is imported that takes time
            follow_launcher()
            return _run(argv)
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":  # one of several processes speaks for all
            print(f"cspd: stopped{stop.done and ': '}{stop.done}", file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:  # `cspd methods | head -1`: nobody reads on, and nobody is to be told when Python flushes
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parse(argv)
        args.line = shlex.join(["cspd", *argv])  # as reports name it
        command = args.command.replace("-", "_")
        status = getattr(importlib.import_module(HOMES[command]), f"run_{command}")(args)
        sys.stdout.flush()  # while an error can still be told
    except BrokenPipeError:
        raise
    except _expected_errors() as error:
        print(f"cspd: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return 2
    except Stopped as stop:
        if stop.done:
            again = " without --overwrite" if args.overwrite else ""
            stop.done += f"; the same command{again} goes on from here"
        raise
    return status or 0


def _parse(argv: list[str]) -> argparse.Namespace:
    """The arguments of a command. The methods' flags, and the methods of plugins, are read if they may be needed."""
    wanted = help_wanted(argv)
    if wanted == "" or not argv or argv[0] not in COMMANDS:
        return parser_of(argv or ["--help"]).parse_args(argv or ["--help"])
    with telling("loading PyTorch") if sys.stderr.isatty() else contextlib.nullcontext():
        from cspd.cli.options import load_plugins
        from cspd.method import METHODS, method_names
        from cspd.terminal import choice
    load_plugins(argv)
    methods = METHODS
    if wanted is not None and wanted != "all":
        methods = [method for method in METHODS if method.name == wanted]
        if not methods:
            raise ValueError(f"--help {wanted}: no such method: {choice(wanted, method_names())}")
    return parser_of(argv, methods).parse_args(argv)


def _expected_errors() -> tuple[type[BaseException], ...]:
    """Errors that a user or the machine causes, which are printed in one line; torch's own if it was imported."""
    torch = sys.modules.get("torch")
    return (ValueError, OSError, FloatingPointError, *([torch.OutOfMemoryError] if torch else []))
