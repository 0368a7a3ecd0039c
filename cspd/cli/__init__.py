"""The command line: `cspd sample`, `cspd compare` and the others, see `cspd --help`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import shlex
import sys

from cspd.cli.flags import COMMANDS, help_wanted, parser_of
from cspd.terminal import Stopped, first_line, follow_launcher, is_out_of_memory, open_streams, stoppable, telling

MODULES = {  # the module with a command's function `run_COMMAND`; only this one is imported
    "sample": "cspd.cli.sample",
    "edit": "cspd.cli.sample",
    "serve": "cspd.cli.sample",
    "compare": "cspd.cli.evaluate",
    "tune": "cspd.cli.evaluate",
    "evaluate": "cspd.cli.evaluate",
    "merge": "cspd.cli.merge",
    "verify": "cspd.cli.merge",
    "bench": "cspd.cli.bench",
    "gpu_check": "cspd.cli.bench",
    "calibrate": "cspd.cli.bench",
    "methods": "cspd.cli.options",
    "env": "cspd.cli.env",
}
BROKEN_PIPE = 141  # what shells report of a process that SIGPIPE ended: 128 + 13


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    0: success. 1: a check failed. 2: an error of the user or the machine, printed in one line. 128 + n: stopped by
    signal n, after printing the progress and how to resume.
    """
    open_streams()
    # characters that the terminal cannot show must not end a run
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        # before the slow imports, so that Ctrl-C works at once
        with stoppable():
            follow_launcher()
            return _run(argv)
    except Stopped as stop:
        # of several processes under torchrun, only one prints
        if os.environ.get("RANK", "0") == "0":
            progress = f": {stop.done}" if stop.done else ""
            print(f"cspd: stopped{progress}", file=sys.stderr)
        return 128 + stop.number
    except BrokenPipeError:
        # `cspd methods | head -1`: the output goes nowhere, so that Python reports no error when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(argv: list[str] | None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = _parse(argv)
        args.line = shlex.join(["cspd", *argv])  # for reports
        command = args.command.replace("-", "_")
        module = importlib.import_module(MODULES[command])
        status = getattr(module, f"run_{command}")(args)
        # an error of the last write can be reported here, but not at exit
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except _expected_errors() as error:
        from mar.tensors import printable  # torch, which has been imported where errors are raised

        print(f"cspd: {printable(' '.join(str(error).splitlines()))}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"cspd: memory is exhausted ({first_line(error)}): use a smaller --max-batch or model", file=sys.stderr)
        return 2
    except Stopped as stop:
        if stop.done:
            again = " without --overwrite" if args.overwrite else ""
            stop.done += f"; run the same command{again} again to resume"
        raise
    return status or 0


def _parse(argv: list[str]) -> argparse.Namespace:
    """Parses the arguments. Methods and plugins, which import torch, are loaded only if their flags may be needed."""
    wanted = help_wanted(argv)
    if wanted == "" or not argv or argv[0] not in COMMANDS or argv[0] == "env":
        argv = argv or ["--help"]
        return parser_of(argv).parse_args(argv)
    with telling("loading PyTorch") if sys.stderr.isatty() else contextlib.nullcontext():
        from cspd.cli.options import defaults_like, load_plugins
        from cspd.method import METHODS, method_names
        from cspd.option import method_now
        from cspd.terminal import choice
    load_plugins(argv)
    methods = METHODS
    if wanted is not None and wanted != "all":
        methods = [method for method in METHODS if method.name == method_now(wanted)]
        if not methods:
            raise ValueError(f"--help {wanted}: there is no such method: {choice(wanted, method_names())}")
    defaults = defaults_like(argv) if argv[0] == "sample" else {}
    return parser_of(argv, methods, defaults).parse_args(argv)


def _expected_errors() -> tuple[type[BaseException], ...]:
    """Errors that the user or the machine causes. torch's own exists only if torch was imported."""
    expected: list[type[BaseException]] = [ValueError, OSError, FloatingPointError]
    torch = sys.modules.get("torch")
    if torch:
        expected.append(torch.OutOfMemoryError)
    return tuple(expected)
