"""Loads SphereAR's and BitDance's official sizes with random weights, and predicts how long an image takes here.

python scripts/measure/causal_sizes.py --sizes sphere_ar_b,sphere_ar_l,sphere_ar_h       prints a table in Markdown

A file as the authors' is written, loaded by the ordinary code, and sampled. Rounds of `ar`, at the beginning, middle
and end of an image, are timed in CPU seconds of one thread, so that other processes matter little.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tabulate import tabulate

import cspd
from cspd.causal.registry import CAUSALS, create_autoencoder, create_causal
from cspd.causal.runner import bytes_per_slot
from cspd.request import Request
from cspd.speed import batch_at

COLUMNS = ["size", "parameters", "GiB of weights", "MiB per image at once", "seconds per token", "seconds per image"]


def official_file(name: str, folder: Path) -> Path:
    """A file of random weights with the authors' names, its autoencoder inside."""
    model, vae = create_causal(name), create_autoencoder("ae_d16c32" if "bitdance" in name else "s_vae")
    weights = model.state_dict() | {f"vae.{key}": value for key, value in vae.state_dict().items()}
    family, *size = name.removeprefix("sphere_ar_").split("_")
    path = folder / (f"BitDance_{'_'.join(size)}.pt" if family == "bitdance" else f"SphereAR_{family.upper()}.pt")
    torch.save({"ema": weights}, path)
    return path


def row_of(name: str, batch: int) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        engine = cspd.load(official_file(name, Path(folder)), max_batch=batch, device="cpu")
    target, length = engine.runner.target, engine.runner.seq_len
    request = engine.prepare(Request(207, method="ar")).request
    times = []
    for known in (0, length // 2, length - 1):
        own = batch_at(engine, request, known)
        start = time.process_time()
        own.round()
        times.append(time.process_time() - start)
    parameters = sum(parameter.numel() for parameter in target.parameters())
    slot = bytes_per_slot(target, engine.runner.precision)
    seconds = statistics.mean(times[1:])  # the first round draws the unconditional branch's own token too
    numbers = parameters * 4 / 2**30, slot / 2**20, seconds / batch, seconds * length / batch
    return [name, f"{parameters / 1e6:.0f}M", *(f"{number:.3g}" for number in numbers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ",".join(name for name in CAUSALS if "emoji" not in name)
    parser.add_argument("--sizes", default=sizes, help="names of --arch (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="images at once (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row_of(name, args.batch) for name in args.sizes.split(",")]
    print(f"batch {args.batch}, one thread, CPU time, guidance on, T = 100, torch {torch.__version__}")
    print(tabulate(rows, COLUMNS, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
