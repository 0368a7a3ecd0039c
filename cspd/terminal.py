"""The terminal: parsing what is typed, words for errors, progress, signals, and the version. It imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import ipaddress
import json
import math
import os
import re
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from tqdm import tqdm

# Words for errors.

MOST_NAMED = 60  # words that an error lists
_SHORT = reprlib.Repr()  # its texts have a bounded length
_SHORT.maxstring = _SHORT.maxother = 60


OTHER_NAMES = {  # of settings in other libraries: ours
    "guidance_scale": ("cfg",),
    "num_inference_steps": ("num_iter", "num_sampling_steps"),
    "num_steps": ("num_iter", "num_sampling_steps"),
    "steps": ("num_iter", "num_sampling_steps"),
}


def closest(word: object, valid: Collection[str]) -> str | None:
    """The valid word that was probably meant, or None. A setting of another library may be several of ours."""
    text = str(word)
    # "--num-iter" is the flag of "num_iter"
    by_name = {each.lstrip("-").replace("-", "_"): each for each in valid}
    ours = OTHER_NAMES.get(text.lstrip("-").replace("-", "_"), ())
    meant = [by_name[name] for name in ours if name in by_name]
    if meant:
        return " or ".join(meant)
    longest = max(map(len, valid), default=0)
    # a much longer text resembles none of them, and difflib would be slow
    if len(text) > 3 * longest:
        return None
    matches = difflib.get_close_matches(text, valid, n=1)
    return matches[0] if matches else None


def choice(word: object, valid: Collection[str]) -> str:
    """The end of an error about an invalid word: the word that was probably meant, or else a list of all."""
    meant = closest(word, valid)
    if meant:
        return f"did you mean {meant}?"
    more = f" ... ({len(valid):,} in all)" if len(valid) > MOST_NAMED else ""
    return f"choose one of {', '.join([*valid][:MOST_NAMED])}{more}"


def shortened(value: object) -> str:
    """A value in an error: one line of about 80 characters at most. Long texts lose their middle."""
    if type(value).__repr__ is object.__repr__:  # it would show an address
        return f"an object of type {type(value).__name__}"
    try:
        shown = _SHORT.repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        shown = "a number of thousands of digits"
    shown = re.sub(r"\s*\n\s*", " ", shown)  # tensors and arrays have several lines
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def first_line(error: BaseException) -> str:
    """The type and the first line of an error in a message, 200 characters at most."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__


def install(extra: str) -> str:
    """The command that installs the libraries of an extra. The package is not published: a clone has them."""
    return f"pip install '.[{extra}]' in a clone of the repository"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of Python, numpy, or torch on a CPU says that memory is exhausted; torch has no type for it."""
    return isinstance(error, MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)


def switched_on(name: str, usually: bool) -> bool:
    """Whether a switch in the environment is 1; `usually` if it is not set. Raises ValueError unless it is 0 or 1."""
    value = os.environ.get(name, str(int(usually)))
    if value not in ("0", "1"):
        raise ValueError(f"{name}={value!r} in the environment: set it to 0 or 1")
    return value == "1"


# Parsers of what is typed, on the command line and in study files. As argparse wants it, they raise ArgumentTypeError.

MOST = 10_000_000  # of countable things, such as images
MOST_LISTED = 100_000  # numbers or classes in a list
LARGEST_SEED = 2**63 - 1
API_KEY = "CSPD_API_KEY"  # the environment variable for the key of `cspd serve`
MEASURES = {"fid": "fid", "is": "inception_score", "accuracy": "accuracy"}  # name in --tolerance -> key in records
NO_CHARACTER = re.compile(r"[\0\ud800-\udfff]")  # numpy drops a null at the end; JSON may hold halves of a character
SPAN = re.compile(r"\s*(\d{1,8})\s*(?:-\s*(\d{1,8})\s*)?", re.ASCII)  # "5" or "0-3"


def unexpected(text: str, expected: str) -> argparse.ArgumentTypeError:
    """The error about a text of another form than expected."""
    return argparse.ArgumentTypeError(f"expected {expected}, got {shortened(text)}")


def number_list(text: str) -> list[int]:
    """ "0-3,7" -> [0, 1, 2, 3, 7]; at most `MOST_LISTED` numbers."""
    expected = f"a list of at most {MOST_LISTED:,} integers such as 0-9 or 1,5,7-9"
    spans = []
    total = 0
    for part in text.split(","):
        span = SPAN.fullmatch(part)
        if span is None:
            raise unexpected(text, expected)
        low = int(span[1])
        high = int(span[2] or low)
        total += high - low + 1
        if low > high or total > MOST_LISTED:
            raise unexpected(text, expected)
        spans.append(range(low, high + 1))
    return [number for span in spans for number in span]


def count_list(text: str) -> list[int]:
    """`number_list` of numbers above 0."""
    numbers = number_list(text)
    if min(numbers) < 1:
        raise unexpected(text, "a list of integers above 0")
    return numbers


def label_list(text: str) -> list[int | str | None]:
    """ "0-2,golden retriever,none" -> [0, 1, 2, "golden retriever", None]; at most `MOST_LISTED` classes.

    None is the unconditional branch. Names are not looked up here.
    """
    labels: list[int | str | None] = []
    for part in utf8(text).split(","):
        if re.fullmatch(r"[\s\d-]*", part):
            labels += number_list(part)
        else:
            name = part.strip()
            labels.append(None if name == "none" else name)
        if len(labels) > MOST_LISTED:
            raise unexpected(text, f"at most {MOST_LISTED:,} classes")
    return labels


def label_of(text: str) -> int | str | None:
    """One class, by number or name, or None for "none"."""
    # reject a list without expanding it: requests over HTTP may have any
    if "," in text or re.fullmatch(r"[\s\d]+-[\s\d-]*", text):
        raise unexpected(text, "a single class, by number or name")
    return label_list(text)[0]


def value_of(text: str) -> object:
    """A number, true, false, null or quoted word of JSON; any other text unchanged."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested thousands of brackets deep
        return text
    return text if isinstance(value, (dict, list)) else value


def float_list(text: str) -> list[float]:
    """ "1,3.5" -> [1.0, 3.5]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise unexpected(text, "a list of numbers such as 1,3.5") from None


def word_list(words: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of lists such as "parallel,sequential", whose parts are some of `words`."""

    def parse(text: str) -> list[str]:
        parts = text.split(",")
        if not set(parts) <= set(words):
            raise unexpected(text, f"one or several of {','.join(words)}")
        return parts

    return parse


def name_list(text: str) -> list[str]:
    """ "ar,mar-draft:gamma=8" -> ["ar", "mar-draft:gamma=8"]. No name may be empty or occur twice."""
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise unexpected(text, "a list of different names such as ar,mar-draft:gamma=8")
    return names


def number_between(low: float, high: float, expected: str) -> Callable[[str], float]:
    """A parser of numbers between two limits, which are not allowed themselves."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = low
        # a NaN fails both comparisons
        if not low < value < high:
            raise unexpected(text, expected)
        return value

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    """A parser of integers in low..high."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not low <= int(text) <= high:
            raise unexpected(text, f"an integer in {low}..{high}")
        return int(text)

    return parse


count = whole(1, MOST)
seed = whole(0, LARGEST_SEED)
fraction = number_between(0, 1, "a number between 0 and 1")
nats = number_between(0, 1e6, "a divergence in nats per token, above 0, such as 0.5")


def part(text: str) -> tuple[int, int]:
    """ "3/64" -> (3, 64): the fourth of 64 parts, which are 0/64 to 63/64."""
    match = re.fullmatch(r"(\d{1,7})/(\d{1,7})", text, re.ASCII)
    if not match or not int(match[1]) < int(match[2]):
        raise unexpected(text, "a part I/N with I from 0 to N - 1, such as 3/64")
    return int(match[1]), int(match[2])


def box(text: str) -> tuple[int, ...]:
    """ "8,8,16,16" -> (8, 8, 16, 16)."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6}){3}", text, re.ASCII):
        raise unexpected(text, "a box LEFT,TOP,WIDTH,HEIGHT in pixels")
    return tuple(map(int, text.split(",")))


def tolerance(text: str) -> dict[str, float]:
    """ "fid=2%,accuracy=1%" -> {"fid": 0.02, "accuracy": 0.01}."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        measure = MEASURES.get(name)
        is_percentage = re.fullmatch(r"\d{1,3}(\.\d{1,6})?%", amount, re.ASCII)
        if measure is None or measure in limits or not is_percentage:
            raise unexpected(text, f"percentages of some of {', '.join(MEASURES)}, such as fid=2%,accuracy=1%")
        limits[measure] = float(amount[:-1]) / 100
    return limits


def api_key(text: str) -> str:
    """A key that fits into an HTTP header. The error does not repeat a key that does not."""
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise argparse.ArgumentTypeError(
            f"the key (also of {API_KEY}) needs ASCII letters, digits or punctuation, and no spaces"
        )
    return text


def host_names(text: str) -> list[str]:
    """ "demo.example.org,gpu1" -> ["demo.example.org", "gpu1"]."""
    names = name_list(text)
    for name in names:
        if not re.fullmatch(r"[\w.-]+|[\da-f:]+", name, re.ASCII | re.IGNORECASE):
            raise unexpected(name, "the name of a host, without http:// and port")
    return names


def networks(text: str) -> list[str]:
    """ "127.0.0.1,10.0.0.0/8" -> ["127.0.0.1", "10.0.0.0/8"]."""
    parts = text.split(",")
    for part in parts:
        try:
            ipaddress.ip_network(part)
        except ValueError:
            raise unexpected(part, "an IP address, or a network such as 10.0.0.0/8") from None
    return parts


def word(text: str) -> str:
    """Text that is not empty. An empty argument often comes from a shell variable that was never set."""
    if not text.strip():
        raise unexpected(text, "a name, or . for the current directory")
    return text


def utf8(text: str) -> str:
    """An argument as UTF-8, whatever the locale. Paths stay as Python decodes them: it encodes them the same way."""
    with contextlib.suppress(UnicodeError):
        return os.fsencode(text).decode()
    return text


def prompt(text: str) -> str:
    """A prompt that is not empty."""
    return word(utf8(text))


def path_argument(text: str) -> Path:
    """The path of a file or a directory on this machine. A URL would become a folder named "s3:"."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", text, re.IGNORECASE):
        raise unexpected(text, "a path on this machine, not a URL")
    return Path(word(text))


# Ending early: on a signal, with a report of the progress, and when the launcher is gone. A command can be stopped
# from its first moment, so this must not need any slow import.

# Ctrl-C; termination by the machine or a scheduler; a closed terminal (Windows has no SIGHUP)
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
POLL = 1.0  # seconds between looks at the launcher
GRACE = 5.0  # seconds that a process without its launcher has to end by itself


class Stopped(KeyboardInterrupt):
    """A signal ends the command.

    Attributes:
        number: of the signal.
        done: the progress so far, for the user; "" if unknown.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number
        self.done = ""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Inside the block, the first of `SIGNALS` raises `Stopped`; the next one ends the process at once.

    Ignored signals, such as SIGHUP under nohup, stay ignored. Python handles signals only in its main thread: in
    another thread the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {}
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler not in (signal.SIG_IGN, None):
            handlers[number] = handler

    def stop(number: int, frame: FrameType | None) -> None:
        # from now on, signals have their default effect: the clean-up may hang
        for each in handlers:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def if_stopped(say: Callable[[], str]) -> Iterator[None]:
    """If the command is stopped inside the block, `say` returns the progress to report."""
    try:
        yield
    except Stopped as stop:
        stop.done = say()
        raise


def follow_launcher() -> None:
    """Ends this process soon after its launcher, torchrun, is gone: a killed torchrun cannot stop its processes."""
    # a process that a shell has started may outlive the shell
    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=_follow, args=[os.getppid()], daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    # the main thread still waits for the other processes, in code that handles no signals
    os._exit(128 + signal.SIGTERM)


# The standard streams: one that is closed, and progress of slow work on the error stream.


def open_streams() -> None:
    """Sends to nowhere what would be written to a closed standard stream (`>&-`).

    Otherwise the next file that is opened would have the stream's number, and get what C libraries print.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


PATIENCE = 0.7  # seconds; faster work is not mentioned
SELDOM = 30.0  # seconds from line to line of a bar without a terminal
Advance = Callable[[float], None]  # reports how much more is done
BAR = "{l_bar}{bar}| [{elapsed}<{remaining}]"


class _Lines(io.TextIOBase):
    """Writes states of a bar as lines of their own: in a file they cannot replace the ones before.

    The first state is written, one each `SELDOM` seconds, and the last. tqdm asks for more: each `refresh` is one.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._written = -math.inf  # when the last line was, in seconds
        self._held_back = ""

    @property
    def encoding(self) -> str:  # type: ignore[override] # by which tqdm chooses the bar's characters
        return self._stream.encoding

    def write(self, text: str) -> int:
        self._held_back = text.strip() or self._held_back
        ends = text == "\n"  # tqdm's last, after the state at its end
        if self._held_back and (ends or time.monotonic() - self._written >= SELDOM):
            self._stream.write(f"{self._held_back}\n")
            self._stream.flush()
            self._written, self._held_back = time.monotonic(), ""
        return len(text)


def progress_bar(*args: Any, **settings: Any) -> tqdm:
    """tqdm's bar; without a terminal or a notebook, a line now and then."""
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        settings |= {"file": _Lines(sys.stderr), "mininterval": SELDOM, "maxinterval": SELDOM}
    return tqdm(*args, **settings)


def say(message: str) -> None:
    """Prints a message on the error stream. If nobody can read it any more, the work goes on."""
    with contextlib.suppress(OSError, ValueError):
        print(f"cspd: {message}", file=sys.stderr, flush=True)


def no_advance(amount: float) -> None:
    """For work whose progress is not shown."""
    ask(begins=False)


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Prints what is being done, if it takes longer than `PATIENCE`."""
    timer = threading.Timer(PATIENCE, lambda: say(f"{what} ..."))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def counting(what: str, total: float) -> Iterator[Advance]:
    """Prints what is being done and an estimate of its seconds, if it takes longer than `PATIENCE`.

    On a terminal a progress bar follows.

    Yields:
        A function to call with each further amount of `total` that is done.
    """
    start = time.perf_counter()
    done = 0.0
    bar = None

    def advance(amount: float) -> None:
        nonlocal done, bar
        ask(begins=False)
        done += amount
        spent = time.perf_counter() - start
        # the first report after `PATIENCE` gives the estimate and starts the bar
        if bar is not None:
            bar.update(amount)
        elif spent > PATIENCE:
            say(f"{what}: about {spent * total / done:.0f} s")
            bar = tqdm(total=total, initial=done, leave=False, bar_format=BAR, disable=None)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()


# Slow measurements for new settings. A server may refuse them, and stops those that nobody waits for.

_WATCH: ContextVar[Callable[[bool], object]] = ContextVar("watch", default=bool)


@contextlib.contextmanager
def watching(watch: Callable[[bool], object]) -> Iterator[None]:
    """Inside the block, measurements call `watch(True)` before they begin and `watch(False)` on their way.

    What it raises ends them.
    """
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def ask(begins: bool) -> None:
    """Raises an error if a slow measurement may not begin, or go on, see `watching`."""
    _WATCH.get()(begins)


# The version, in a file that everything may import.

__version__ = "0.3.0"
