"""Holds many concurrent clients on `cspd serve` and reports errors, latencies and images per second.

    cspd serve --max-requests 400 --max-per-visitor 400 &
    python scripts/measure/load.py --clients 200 --minutes 5 --pid $!

Each client asks for an image, waits for it and asks again; after an answer 429 it waits as long as the server says. The
memory of the server is read from /proc twice a minute. The last line of the report compares with one client alone.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import Counter
from pathlib import Path

import openai

PAUSE = 30.0  # seconds between two looks at the memory
BASELINE = 0.2  # of the time: a single client


async def ask(client: openai.AsyncOpenAI, fields: dict, end: float, seconds: list[float], errors: Counter) -> None:
    """Asks for images, one after the other, until `end`. Notes the seconds of each, and errors by their status."""
    while time.monotonic() < end:
        began = time.monotonic()
        try:
            await client.images.generate(prompt="3", extra_body=fields)
            seconds.append(time.monotonic() - began)
        except openai.RateLimitError as error:
            errors[429] += 1
            await asyncio.sleep(float(error.response.headers["retry-after"]))
        except openai.APIStatusError as error:
            errors[error.status_code] += 1
            await asyncio.sleep(1)
        except openai.APIConnectionError as error:
            errors[type(error).__name__] += 1
            await asyncio.sleep(1)


async def watch_memory(pid: int) -> None:
    """Prints the resident memory of a process."""
    while True:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        print(f"memory: {pages * os.sysconf('SC_PAGE_SIZE') / 2**20:.0f} MiB", flush=True)
        await asyncio.sleep(PAUSE)


async def hold(client: openai.AsyncOpenAI, fields: dict, num_clients: int, minutes: float) -> tuple[float, set]:
    """Holds some clients and prints the result. Returns images per second, and the kinds of errors."""
    seconds: list[float] = []
    errors: Counter = Counter()
    began = time.monotonic()
    end = began + 60 * minutes
    await asyncio.gather(*[ask(client, fields, end, seconds, errors) for _ in range(num_clients)])
    rate = len(seconds) / (time.monotonic() - began)
    latencies = "too few images for latencies"
    if len(seconds) > 1:
        percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
        latencies = f"p50 {percentiles[49]:.2f} s, p99 {percentiles[98]:.2f} s"
    print(f"{num_clients} clients: {len(seconds)} images, {rate:.2f} images/s, {latencies}, errors {dict(errors)}")
    return rate, set(errors)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="default: %(default)s")
    parser.add_argument("--api-key", default=os.environ.get("CSPD_API_KEY", "none"))
    parser.add_argument("--model", default="digits32", help="default: %(default)s")
    parser.add_argument("--clients", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=5, help="default: %(default)s")
    parser.add_argument("--num-iter", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--method", default="ar", help="default: %(default)s")
    parser.add_argument("--pid", type=int, help="process of the server, whose memory is shown")
    args = parser.parse_args()
    fields = {"model": args.model, "method": args.method, "num_iter": args.num_iter}
    # no limit of connections, and no second try that would hide an error
    async with openai.AsyncOpenAI(base_url=args.url, api_key=args.api_key, max_retries=0, timeout=600) as client:
        watching = asyncio.create_task(watch_memory(args.pid)) if args.pid else None
        alone, _ = await hold(client, fields, 1, BASELINE * args.minutes)
        together, errors = await hold(client, fields, args.clients, args.minutes)
        if watching:
            watching.cancel()
    if alone:
        print(f"continuous batching: {together / alone:.1f} times the images/s of one at a time")
    if errors - {429}:
        raise SystemExit("there were errors other than 429")


if __name__ == "__main__":
    asyncio.run(main())
