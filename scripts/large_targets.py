"""Predicts the speed-up of draft configurations for LlamaGen's larger models.

python scripts/large_targets.py --sizes B,L,XL        prints a table in Markdown

Rounds are timed with random weights. Tokens per round are those of the bundled model, since they depend on trained
weights. Times are CPU seconds of one thread, so that other processes matter little.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from tabulate import tabulate

import cspd
from cspd.device import Precision
from cspd.discrete.gpt import GPT, Eagle
from cspd.discrete.registry import gpt_spec
from cspd.discrete.runner import VQRunner
from cspd.discrete.tuning import JACOBI, TREES, DraftTuner, name_of, round_seconds
from cspd.gpu_check.models import random_model
from cspd.request import Request
from cspd.tuner import PLAIN

CPU = torch.device("cpu")
REPEATS = 5


def asked(**config: object) -> Request:
    """A request as `speculative` resolves it, with the official settings and guidance 2."""
    common = {"cfg": 2.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "coupling": "same-image"}
    return Request(0, method="speculative", family="VQ", settings=common | config)


def milliseconds(size: str, batch: int, requests: dict[str, Request]) -> dict[str, float]:
    """Milliseconds per round of each configuration, for an official size with random weights."""
    config = gpt_spec(f"llamagen_{size.lower()}").config
    target, eagle = random_model(GPT, config, CPU), random_model(Eagle, config, CPU)
    runner = VQRunner(target, batch, CPU, Precision("fp32", CPU), eagle=eagle)
    times = round_seconds(runner, requests, REPEATS, time.process_time)
    return {name: 1000 * statistics.median(own) for name, own in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="B,L,XL", help="sizes of LlamaGen (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="images at once (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)

    drafting = [*JACOBI, *TREES]
    requests = {name_of(config): asked(**config) for config in (PLAIN, *drafting)}
    tuning: DraftTuner = cspd.load("digits32_vq", device="cpu").runner.tuning
    tokens = {name_of(PLAIN): 1.0} | tuning.tokens_per_round(asked(), drafting)
    rows = [[name, f"{tokens[name]:.2f}"] for name in requests]
    for size in args.sizes.split(","):
        spent = milliseconds(size, args.batch, requests)
        plain = spent[name_of(PLAIN)]
        for row in rows:
            gain = tokens[row[0]] * plain / spent[row[0]]
            row += [f"{spent[row[0]]:.0f}", f"{spent[row[0]] / plain:.2f}", f"{gain:.2f}x"]
    columns = [f"{size}: {what}" for size in args.sizes.split(",") for what in ("ms/round", "of ar's", "speed-up")]
    print(f"batch {args.batch}, one thread, CPU time, torch {torch.__version__}")
    print(tabulate(rows, ["configuration", "tokens per round", *columns], tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
