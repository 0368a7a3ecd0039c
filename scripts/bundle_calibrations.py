"""Fits what the bundled models need at their usual settings, beside them: python scripts/bundle_calibrations.py

Of MAR models, what `speculative` and `calibrated` need. Of VQ models, how many codes a round commits by each way to
draft. None of it depends on the device. It goes to checkpoints/*/calibration/, whose files are replaced.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path

import cspd
from cspd import Engine, Request
from cspd.discrete.family import JACOBI, TREES
from cspd.files import CALIBRATION, user_cache
from cspd.models import bundled

PROMPT = "a red heart"


def fit_mar(engine: Engine) -> None:
    """Fits the drafts of `speculative` and the windows of `calibrated`."""
    calibrations = engine.runner.tuning.calibrations["target"]
    calibrations.get(engine.check(Request(0, method="speculative")))
    engine.resolve(Request(0, method="calibrated"))


def count_vq(engine: Engine) -> None:
    """Counts the codes of rounds by every way."""
    tuning = engine.runner.tuning
    asked = Request(0) if engine.runner.num_classes else Request(prompt=PROMPT)
    request = engine.resolve(asked.but(window=0)).but(window=None)  # which encodes its text
    tuning.tokens_per_round(request, [*JACOBI, *(TREES if tuning.eagle else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=sorted(bundled()), help="of bundled models (default: all)")
    for name in parser.parse_args().names:
        place = bundled()[name] / CALIBRATION
        shutil.rmtree(place, ignore_errors=True)  # or it would be found
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            engine = cspd.load(name, max_batch=1, device="cpu")
            {"MAR": fit_mar, "VQ": count_vq}[engine.runner.family](engine)
            place.mkdir()
            files = [Path(shutil.copy(file, place)) for file in sorted(user_cache().glob("*.*"))]  # a folder has texts
        print(f"{place}: {len(files)} files, {sum(file.stat().st_size for file in files):,} bytes")


if __name__ == "__main__":
    main()
