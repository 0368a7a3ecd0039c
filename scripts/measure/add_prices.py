"""Do prices add up? Random combinations of MAR's approximations: the sum of their prices against that of the whole.

    python scripts/measure/add_prices.py [CHECKPOINT] [--num 20] [--num-iter 64] [--cfg 3]

Prints one line for each combination of rounds, refreshes and head calls, and the extreme ratios (docs/exactness.md).
"""

from __future__ import annotations

import argparse
import json

import numpy as np

import cspd
from cspd import Request
from cspd.heads.calibration import Price
from cspd.masked.plan import LAZY, BudgetPlan, between, listed, steps_of


def random_stops(rng: np.random.Generator, end: int, mean: float) -> list[int]:
    """0, and other numbers below `end`, about `mean` apart."""
    chosen = np.flatnonzero(rng.random(end) < 1 / mean)
    return [0, *chosen[chosen > 0].tolist()]


def combination(rng: np.random.Generator, prices, counts: np.ndarray) -> tuple[BudgetPlan, float, float, float]:
    """A random plan, and the prices of its rounds, refreshes and head calls."""
    starts = random_stops(rng, len(counts), rng.choice([1.2, 2, 4]))
    starts = sorted({*starts, *range(0, len(counts), 12)})  # no distance was priced beyond 16
    refreshes = random_stops(rng, len(starts), rng.choice([1.5, 3, 8]))
    which, head = rng.integers(len(LAZY)), rng.integers(len(prices.head_calls))
    joining = between(prices.between(prices.joined_anchor, prices.joined_lag) * counts / counts.sum())[
        steps_of(starts, len(counts))
    ].sum()
    of_rounds = prices.between(prices.lazy_anchor[which], prices.lazy_lag[which])[np.ix_(starts, starts)]
    tokens = np.add.reduceat(counts, starts)
    lazy = between(of_rounds * tokens / tokens.sum())[steps_of(refreshes, len(starts))].sum()
    settings = {"rounds": listed(starts), "backbone": "cached", "refreshes": listed(refreshes), **LAZY[which]}
    settings |= {"denoiser": "calibrated", "corrected": False}
    settings |= {"head_calls": int(prices.head_calls[head]), "null_every": int(prices.null_every[head])}
    of_head = float(prices.of_calls[head, 0])
    return BudgetPlan(settings, Price(joining + lazy + of_head, 0.0), None), joining, lazy, of_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", default="digits32")
    parser.add_argument("--num", type=int, default=20)
    parser.add_argument("--num-iter", type=int, default=64)
    parser.add_argument("--cfg", type=float, default=3.0)
    args = parser.parse_args()
    engine = cspd.load(args.checkpoint, max_batch=1)
    request = engine.check(Request(0, budget=1.0, num_iter=args.num_iter, cfg=args.cfg))
    planner = engine.runners["MAR"].tuning
    prices = planner.prices(request)
    masked = engine.runners["MAR"].num_masked(request)
    counts = -np.diff(masked, prepend=engine.runners["MAR"].seq_len)
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(args.num):
        plan, *parts = combination(rng, prices, counts)
        whole = planner.priced(request, plan).price
        ratios.append(plan.price.divergence / whole.divergence)
        told = " + ".join(f"{part:.3f}" for part in parts)
        print(f"{told} = {plan.price.divergence:.3f}, whole {whole.divergence:.3f} +- {whole.error:.3f}", flush=True)
        print(f"  ratio {ratios[-1]:.3f}: {json.dumps(plan.settings)}", flush=True)
    print(f"predicted / measured: {min(ratios):.3f} to {max(ratios):.3f}, median {np.median(ratios):.3f}")


if __name__ == "__main__":
    main()
