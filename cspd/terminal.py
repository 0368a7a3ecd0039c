"""What a person types and reads: parsing, words of errors, progress, Ctrl-C, the version. It imports no torch."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import json
import os
import re
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import FrameType

from tqdm import tqdm

# The text that users type, on the command line and in study files: numbers, words, paths, and what was meant.

MOST = 10_000_000  # of what is counted, such as images
MOST_LISTED = 100_000  # numbers in a list
MOST_NAMED = 60  # words that an error lists
LARGEST_SEED = 2**63 - 1
API_KEY = "CSPD_API_KEY"  # the environment variable that has the key of `cspd serve`
MEASURES = {"fid": "fid", "is": "inception_score", "accuracy": "accuracy"}  # that `cspd tune` limits, by their names
NO_CHARACTER = re.compile(r"[\0\ud800-\udfff]")  # arrays drop the first at an end; JSON may have halves of characters
SPAN = re.compile(r"\s*(\d{1,8})\s*(?:-\s*(\d{1,8})\s*)?", re.ASCII)  # "5" or "0-3"
_SHORT = reprlib.Repr()  # never the whole of what may be endless
_SHORT.maxstring = _SHORT.maxother = 60


def closest(word: object, known: Collection[str]) -> str | None:
    """The one of the words that are known which was perhaps meant."""
    text = str(word)
    if len(text) > 3 * max(map(len, known), default=0):  # like none of them, and difflib is slow at long words
        return None
    return next(iter(difflib.get_close_matches(text, known, n=1)), None)


def choice(word: object, known: Collection[str]) -> str:
    """What an error over an unknown word ends with: what was perhaps meant, or else all that there is."""
    meant = closest(word, known)
    more = f" ... ({len(known):,} in all)" if len(known) > MOST_NAMED else ""
    return f"did you mean {meant}?" if meant else f"choose one of {', '.join([*known][:MOST_NAMED])}{more}"


def number_list(text: str) -> list[int]:
    """ "0-3,7" to [0, 1, 2, 3, 7]; at most `MOST_LISTED` numbers, of at most 8 digits."""
    spans = [SPAN.fullmatch(part) for part in text.split(",")]
    ends = [(int(span[1]), int(span[2] or span[1])) for span in spans if span]
    is_list = len(ends) == len(spans) and all(low <= high for low, high in ends)
    if not is_list or sum(high - low + 1 for low, high in ends) > MOST_LISTED:
        limits = f"at most {MOST_LISTED:,} numbers, of at most 8 digits"
        raise argparse.ArgumentTypeError(
            f"{shortened(text)} is no list of numbers: write it like 0-9 or 1,5,7-9 ({limits})"
        )
    return [number for low, high in ends for number in range(low, high + 1)]


def label_list(text: str) -> list[int | str | None]:
    """ "0-2,golden retriever,none" to [0, 1, 2, "golden retriever", None]: classes by number or name, or no class.

    Raises:
        ArgumentTypeError: a part is neither a name nor a list of numbers, or there are more than `MOST_LISTED` classes.
    """
    labels: list[int | str | None] = []
    for part in text.split(","):
        if re.fullmatch(r"[\s\d-]*", part):
            labels += number_list(part)
        else:
            labels.append(None if part.strip() == "none" else part.strip())
        if len(labels) > MOST_LISTED:
            raise argparse.ArgumentTypeError(f"{shortened(text)} lists too many classes: give at most {MOST_LISTED:,}")
    return labels


def label_of(text: str) -> int | str | None:
    """One class, by number or name, or None for "none". Raises ArgumentTypeError on a list, which is not expanded."""
    if "," in text or re.fullmatch(r"[\s\d]+-[\s\d-]*", text):
        raise argparse.ArgumentTypeError(f"{shortened(text)} lists several classes: give one")
    return label_list(text)[0]


def value_of(text: str) -> object:
    """A number, true, false, null or quoted word of JSON; else the text as it is."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # a word; nothing, thousands of brackets deep
        return text
    return text if isinstance(value, (dict, list)) else value


def float_list(text: str) -> list[float]:
    """ "1,3" to [1.0, 3.0]."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no list of numbers: write it like 1,3") from None


def word_list(words: Collection[str]) -> Callable[[str], list[str]]:
    """A parser of "parallel,sequential" to its parts, each one of `words`."""

    def parse(text: str) -> list[str]:
        if not set(text.split(",")) <= set(words):
            raise argparse.ArgumentTypeError(f"{text!r}: give some of {','.join(words)}")
        return text.split(",")

    return parse


def count_list(text: str) -> list[int]:
    """As `number_list`, of numbers above 0."""
    numbers = number_list(text)
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{shortened(text)}: give numbers above 0")
    return numbers


def name_list(text: str) -> list[str]:
    """ "ar,cspd:gamma=8" to ["ar", "cspd:gamma=8"]; none is empty, or there twice."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not name:
            raise argparse.ArgumentTypeError(f"{text!r} has an empty name: write it like ar,cspd:gamma=8")
        if names.count(name) > 1:
            raise argparse.ArgumentTypeError(f"{text!r} has {name!r} twice: give it once")
    return names


def share(text: str) -> float:
    """A number inside 0..1."""
    try:
        share = float(text)
    except ValueError:
        share = -1
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no share of the tokens: give a number between 0 and 1")
    return share


def box(text: str) -> tuple[int, ...]:
    """ "8,8,16,16" to (8, 8, 16, 16)."""
    if not re.fullmatch(r"\d{1,6}(,\d{1,6}){3}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no box: give left,top,width,height in pixels")
    return tuple(map(int, text.split(",")))


def tolerance(text: str) -> dict[str, float]:
    """ "fid=2%,accuracy=1%" to {"fid": 0.02, "accuracy": 0.01}."""
    limits = {}
    for part in text.split(","):
        name, _, amount = part.strip().partition("=")
        if name not in MEASURES:
            raise argparse.ArgumentTypeError(f"{shortened(part)} limits nothing: {choice(name, MEASURES)}, like fid=2%")
        if not re.fullmatch(r"\d{1,3}(\.\d{1,6})?%", amount, re.ASCII):
            raise argparse.ArgumentTypeError(f"{shortened(part)} is no percentage: write it like fid=2%")
        if MEASURES[name] in limits:
            raise argparse.ArgumentTypeError(f"{shortened(text)} has {name} twice: give it once")
        limits[MEASURES[name]] = float(amount[:-1]) / 100
    return limits


def nats(text: str) -> float:
    """A divergence."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:  # a NaN neither
        raise argparse.ArgumentTypeError(f"{shortened(text)} is no divergence: give nats per token above 0, like 0.5")
    return value


def api_key(text: str) -> str:
    """A key that HTTP headers can have. Raises ArgumentTypeError on another one, whose text it does not repeat."""
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise argparse.ArgumentTypeError(
            f"the key (also of {API_KEY}) needs ASCII letters, digits or marks, and no spaces"
        )
    return text


def host_names(text: str) -> list[str]:
    """ "demo.example.org,gpu1" to its names."""
    names = name_list(text)
    for name in names:
        if not re.fullmatch(r"[\w.-]+|[\da-f:]+", name, re.ASCII | re.IGNORECASE):
            raise argparse.ArgumentTypeError(
                f"{shortened(name)} is not a host's name: give it without http:// and port"
            )
    return names


def whole(low: int, high: int) -> Callable[[str], int]:
    """A parser of whole numbers in low..high."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{shortened(text)} is no whole number, {low}..{high}")
        return int(text)

    return parse


count = whole(1, MOST)
seed = whole(0, LARGEST_SEED)


def word(text: str) -> str:
    """Text that is not empty: an empty one is mostly a variable of the shell that was never set."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} names nothing: give a name, or . for the current folder")
    return text


def place(text: str) -> Path:
    """A file or folder, of a name that the file system can have."""
    path = Path(word(text))
    if is_too_long(path):
        raise argparse.ArgumentTypeError(f"{shortened(text)} is too long for the file system: give a shorter name")
    return path


def is_too_long(path: Path) -> bool:
    """Whether the file system can have no such name."""
    try:
        path.lstat()
    except OSError as error:
        return error.errno == errno.ENAMETOOLONG
    except ValueError:  # a null character, which no file's name has
        pass
    return False


def shortened(value: object) -> str:
    """A value as an error shows it, in one line of about 60 characters at most; long texts lose their middle."""
    if type(value).__repr__ is object.__repr__:  # which shows an address
        return f"an object of type {type(value).__name__}"
    try:
        shown = _SHORT.repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        shown = "a number of thousands of digits"
    shown = re.sub(r"\s*\n\s*", " ", shown)  # of tensors and arrays
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


# Ending early: on a signal, with what was done, and when the launcher is gone.
#
# It imports nothing that takes time, so that a command can be stopped from its first moment.

# Ctrl-C; the machine or a scheduler; the terminal was closed (Windows knows no SIGHUP)
SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
POLL = 1.0  # seconds between looks at the launcher
GRACE = 5.0  # seconds that a process without its launcher has to end by itself


class Stopped(KeyboardInterrupt):
    """A signal ends the command. `number` is the signal's; `done` says what was done, "" if nothing is known."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.strsignal(number))
        self.number = number
        self.done = ""


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within it, the first of `SIGNALS` raises `Stopped`; the next one ends the process at once.

    What is ignored, as SIGHUP under nohup, stays ignored. Python handles signals in its main thread only, so that in
    another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    heeded = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def stop(number: int, frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    for number in heeded:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def if_stopped(say: Callable[[], str]) -> Iterator[None]:
    """If the command is stopped within it, `say` tells what was done."""
    try:
        yield
    except Stopped as stop:
        stop.done = say()
        raise


def follow_launcher() -> None:
    """Ends this process soon after torchrun, if that started it, is gone: killed, it cannot stop its processes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a shell that started this process may well end before it
        threading.Thread(target=_follow, args=[os.getppid()], daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(128 + signal.SIGTERM)  # the main thread is waiting for the other processes, outside Python


# Saying what takes its time.

PATIENCE = 0.7  # seconds
Advance = Callable[[float], None]  # is told how much more is done
BAR = "{l_bar}{bar}| [{elapsed}<{remaining}]"


def no_advance(amount: float) -> None:
    """For work that nobody waits for."""


@contextlib.contextmanager
def telling(what: str) -> Iterator[None]:
    """Says on the error stream what is being done, if it is not done in a moment."""
    timer = threading.Timer(PATIENCE, lambda: print(f"cspd: {what} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def counting(what: str, total: float) -> Iterator[Advance]:
    """Says on the error stream what is being done, and about how long it takes, if it is not done in a moment.

    On a terminal a bar follows.

    Yields:
        A function that is told how much more of `total` is done.
    """
    start = time.perf_counter()
    done = 0.0
    bar = None

    def advance(amount: float) -> None:
        nonlocal done, bar
        done += amount
        spent = time.perf_counter() - start
        if bar is None and spent > PATIENCE:
            print(f"cspd: {what}: about {spent * total / done:.0f} s", file=sys.stderr, flush=True)
            bar = tqdm(total=total, initial=done, leave=False, bar_format=BAR, disable=None)
        elif bar is not None:
            bar.update(amount)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()


# The version, in a file that everything may import.

__version__ = "0.1.0"
