"""Fits the calibrations of the bundled models at their usual settings: python scripts/train/bundle_calibrations.py

Models with a diffusion head get the calibrations of `speculative` and `calibrated`, VQ models the tokens per round of
every draft configuration. Nothing here depends on the device. The files in checkpoints/*/calibration/ are replaced.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import cspd
from cspd import Engine, Request
from cspd.discrete.tuning import JACOBI, TREES
from cspd.files import CALIBRATION, user_cache
from cspd.models import bundled

PROMPT = "a red heart"


def fit_head(engine: Engine) -> None:
    """Fits the drafts of `speculative` and the segments of `calibrated`."""
    calibrations = engine.runner.tuning.calibrations["target"]
    calibrations.get(engine.check(Request(0, method="speculative")))
    engine.resolve(Request(0, method="calibrated"))


def count_vq(engine: Engine) -> None:
    """Counts the tokens per round of every draft configuration."""
    tuning = engine.runner.tuning
    asked = Request(0) if engine.runner.num_classes else Request(prompt=PROMPT)
    request = engine.resolve(asked.but(window=0)).but(window=None)  # resolving encodes the prompt
    tuning.tokens_per_round(request, [*JACOBI, *(TREES if tuning.models.eagle else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=sorted(bundled()), help="bundled models (default: all)")
    for name in parser.parse_args().names:
        folder = bundled()[name] / CALIBRATION
        shutil.rmtree(folder, ignore_errors=True)  # otherwise its values would be read
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            engine = cspd.load(name, max_batch=1, device="cpu")
            {"MAR": fit_head, "causal": fit_head, "VQ": count_vq}[engine.runner.family](engine)
            folder.mkdir()
            files = [
                Path(shutil.copy(file, folder)) for file in sorted(user_cache().glob("*.*"))
            ]  # not text/, the features
        print(f"{folder}: {len(files)} files, {sum(file.stat().st_size for file in files):,} bytes")


if __name__ == "__main__":
    main()
