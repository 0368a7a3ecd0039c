"""A stream of outputs: requests are read as slots become free, and outputs handed out as they finish."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sized
from typing import Any

from PIL import Image
from tqdm import tqdm

from cspd.flight import Flight
from cspd.option import LARGEST_INTEGER, check_integer, plain
from cspd.sequence import Output, Request, Sequence

DECODING = 0.1  # of an image, in the bar: its tokens are the rest
NAMED = 3  # requests of one fault that are named one by one
Item = tuple[int, Output]  # the index of a request, and what became of it
# told of a request of one's own, the share of its tokens that are known, and how to see them
OnProgress = Callable[[Request, float, Callable[[], "Image.Image | None"]], object]


def stream(
    flight: Flight,
    queue: Callable[[Request, deque], Sequence],
    requests: Iterable[Request],
    progress: bool = False,
    on_progress: OnProgress | None = None,
    every: int = 1,
    stop: threading.Event | None = None,
) -> Iterator[Item]:
    """See `Engine.stream`. It ends soon after `stop` is set, by any thread.

    Args:
        queue: checks a request and puts its sequence, of an inbox, in flight; raises ValueError on a bad one.

    Raises ValueError at once if `every` is not an integer above 0.
    """
    every = plain(every)
    check_integer("every", every, 1, LARGEST_INTEGER, "rounds from one call of on_progress to the next")
    return _stream(flight, queue, requests, progress, on_progress, every, stop)


def _stream(
    flight: Flight,
    queue: Callable[[Request, deque], Sequence],
    requests: Iterable[Request],
    progress: bool,
    on_progress: OnProgress | None,
    every: int,
    stop: threading.Event | None,
) -> Iterator[Item]:
    source, bar = _Source(requests), _Bar(progress, len(requests) if isinstance(requests, Sized) else None)
    own: dict[Sequence, int] = {}
    inbox: deque = deque()
    lost: dict[int, str] = {}
    finished = rounds = 0
    try:
        while own or not source.is_over:
            # one more than there are slots: a round that ends all of them then does not wait for their images
            fresh = source.read(1 + flight.scheduler.num_slots - len(flight.scheduler))
            with flight.turns.take():
                try:
                    for index, request in fresh:
                        own[queue(request, inbox)] = index
                except ValueError as bad:
                    source.end(bad)
                if not rounds:
                    bar.show(0, own, flight)
                if not inbox:
                    flight.run_round(bar.add_decoded)
            rounds += 1
            decoded = {sequence for sequence, _ in inbox}
            bar.show(finished + len(decoded), own.keys() - decoded, flight)
            while inbox:
                sequence, output = checked(*inbox.popleft())
                index = own.pop(sequence)
                if output is None:
                    continue
                finished += 1
                if output.error:
                    lost[index] = output.error
                    continue
                if on_progress:
                    on_progress(sequence.asked, 1.0, output.pil)
                yield index, output
            if stop is not None and stop.is_set():
                return
            for sequence in list(own) if on_progress and rounds % every == 0 else ():
                on_progress(sequence.asked, flight.share(sequence), functools.partial(flight.preview, sequence))
    finally:
        bar.close()
        with flight.turns.take():
            flight.cancel(own)
    if source.error:
        raise source.error
    _raise_lost(lost)


def _raise_lost(lost: dict[int, str]) -> None:
    """Raises FloatingPointError where requests, by index, gave no image, for the reasons there."""
    if lost:
        first = f"{named([min(lost)])}: " if len(lost) > 1 else ""
        raise FloatingPointError(f"{named(sorted(lost))} gave no image: {first}{lost[min(lost)]}")


def forget_failures(inbox: deque) -> None:
    """Leaves in an inbox what is no failure."""
    kept = [message for message in inbox if not isinstance(message[1], BaseException)]
    inbox.clear()
    inbox.extend(kept)


def checked(sequence: Sequence, result: Output | BaseException | None) -> tuple[Sequence, Output | None]:
    """A message of an inbox. Raises RuntimeError where a round failed that another thread ran."""
    if isinstance(result, BaseException):
        raise RuntimeError(f"everything in flight was dropped: {result!r}") from result
    return sequence, result


class _Source:
    """Requests that are read one after the other, and what ended them."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self._requests: Iterator[tuple[int, Request]] = enumerate(requests)
        self.is_over = False
        self.error: ValueError | None = None

    def read(self, most: int) -> list[tuple[int, Request]]:
        """Up to so many of the next requests, with their indices."""
        read: list[tuple[int, Request]] = []
        while not self.is_over and len(read) < most:
            try:
                read.append(next(self._requests))
            except StopIteration:
                self.end()
            except ValueError as bad:
                self.end(bad)
        return read

    def end(self, error: ValueError | None = None) -> None:
        """No more are read."""
        self.is_over, self.error = True, error


class _Bar:
    """Counts images, or the tokens of a single one; of none there is no bar."""

    def __init__(self, shown: bool, total: int | None) -> None:
        self._shown, self._total = shown and total != 0, total
        self._bar: tqdm | None = None

    def show(self, finished: int, own: Collection[Sequence], flight: Flight) -> None:
        """So many images are finished, and some are under way."""
        if not self._shown or not (own or self._bar is not None):
            return
        done = finished + sum(map(flight.share, own)) * (1 if self._total == 1 else 1 - DECODING)
        if self._total == 1:
            length = next(map(flight.seq_len, own)) if self._bar is None else self._bar.total
            self._count(done * length, length, "token", "{n:.0f}/{total}")
        else:
            self._count(done, self._total, "image", "{n:.1f}/{total}" if self._total else "{n:.1f}")

    def _count(self, done: float, total: int | None, unit: str, counted: str) -> None:
        if self._bar is None:
            bar, left = ("{l_bar}{bar}| ", "<{remaining}") if total else ("", "")
            form = f"{bar}{counted} {unit}s [{{elapsed}}{left}, {{rate_fmt}}]"
            self._bar = tqdm(total=total, unit=f" {unit}", bar_format=form)
        self._bar.n = done
        self._bar.update(0)

    def add_decoded(self, count: int) -> None:
        """So many images more are decoded, in the middle of a round."""
        if self._bar is not None and self._total != 1:
            self._bar.update(DECODING * count)

    def close(self) -> None:
        """The last that was shown stays."""
        if self._bar is not None:
            self._bar.close()


async def from_threads(make: Callable[..., Iterator[Item]], *args: Any) -> AsyncIterator[Item]:
    """What `make(*args, stop=...)` yields, which another thread waits for; if it is left early, that one stops soon."""
    stop = threading.Event()
    items = make(*args, stop=stop)
    pending: asyncio.Future | None = None
    try:
        while True:
            pending = asyncio.ensure_future(asyncio.to_thread(next, items, None))
            item = await asyncio.shield(pending)
            if item is None:
                return
            yield item
    finally:
        stop.set()
        if pending is not None:
            await asyncio.wait([pending])
        await asyncio.to_thread(items.close)  # type: ignore[attr-defined]


def check_all(check: Callable[[Request], object], requests: Iterable[Request]) -> None:
    """Raises ValueError where some requests are bad, naming each fault once."""
    bad: dict[str, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        try:
            check(request)
        except ValueError as error:
            bad[str(error)].append(index)
    if bad:
        raise ValueError("; ".join(f"{named(alike)}: {error}" for error, alike in bad.items()))


def named(indices: list[int]) -> str:
    """Requests by their indices, of many the first and how many there are."""
    if len(indices) == 1:
        return f"request {indices[0]}"
    numbers = ", ".join(map(str, indices[:NAMED]))
    return f"requests {numbers}" + (f" ... ({len(indices)} of them)" if len(indices) > NAMED else "")
