"""How fast Inception's features are extracted, and in how much memory: python scripts/feature_rates.py

Random images of 256x256 pixels, in an .npz in ADM's layout, and Inception-v3 with random weights: neither changes the
work. Prints images per second and the growth of memory, which is that of the features alone: 20 kB per image.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

from cspd.device import describe, pick_device
from cspd.evaluation import metrics
from cspd.evaluation.metrics import INCEPTION, extract

SIDE = 256


def random_inception(path: Path) -> None:
    """Writes a file like torch-fidelity's, with random weights."""
    torch.manual_seed(0)
    # its constructor would download the published ones
    extractor = FeatureExtractorInceptionV3.__new__(FeatureExtractorInceptionV3)
    torch.nn.Module.load_state_dict, own = lambda *_, **__: None, torch.nn.Module.load_state_dict
    try:
        with tempfile.TemporaryDirectory() as folder:
            empty = Path(folder) / "empty.pth"
            torch.save({}, empty)
            extractor.__init__("inception-v3-compat", ["2048"], str(empty))
    finally:
        torch.nn.Module.load_state_dict = own
    torch.save(extractor.state_dict(), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=256, help="images (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="timed runs (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="(default: %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        weights, file = Path(folder) / "weights.pth", Path(folder) / "images.npz"
        random_inception(weights)
        pixels = np.random.default_rng(0).integers(0, 256, (args.num, SIDE, SIDE, 3), np.uint8)
        np.savez(file, pixels)
        del pixels
        how = {"space": INCEPTION, "weights": weights, "device": args.device}
        extract(metrics.ImageList([torch.zeros(3, SIDE, SIDE)] * metrics.CHUNK), **how)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        rates = []
        for _ in range(args.runs):
            start = time.perf_counter()
            extract(file, **how)
            rates.append(args.num / (time.perf_counter() - start))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    machine = describe(pick_device(args.device))
    print(f"{machine['device']}, threads: {machine['threads']}: {args.num} images of {SIDE}x{SIDE} pixels")
    print(f"images/s: median {np.median(rates):.2f} (range {min(rates):.2f} to {max(rates):.2f}, {args.runs} runs)")
    print(f"memory grew by {grown / 1024:.0f} MiB; the images have {args.num * SIDE * SIDE * 3 / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
