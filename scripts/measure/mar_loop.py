"""Times our samplers of a bundled model against MAR's own code: python scripts/measure/mar_loop.py FOLDER

FOLDER is a clone of https://github.com/LTH14/mar. Its model loads the same weights and samples with the same settings.
The runs are interleaved and generate whole images; ours are decoded too. With --products, beside each time is that of
the bare matrix products of the same images: the same calls in the same order, with nothing between them.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llamagen_loop import in_turns
from torch.utils._python_dispatch import TorchDispatchMode

import cspd
from cspd import Request
from cspd.engine import Engine
from cspd.gpu_check.times import their_model

THEIRS = "MAR's code"
SETTINGS = {
    "ar": {"method": "ar"},
    "speculative": {"method": "speculative"},
    "calibrated": {"method": "calibrated"},
    "lazymar": {"method": "lazymar"},
    "lazymar + calibrated": {"method": "lazymar", "denoiser": "calibrated"},
    "budget 0.3": {"budget": 0.3},
    "budget 0.5": {"budget": 0.5},
    "budget 1": {"budget": 1.0},
    "budget 3": {"budget": 3.0},
    "ddim, 6 calls, K = 6": {"method": "ddim", "head_calls": 6, "num_iter": 6},
}


class Products(TorchDispatchMode):
    """Records linear layers' calls. Those of one layer and shape share their input, since all would fill the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[tuple, tuple] = {}
        self.calls: list[tuple[Callable, tuple]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.name() == "aten::linear":
            x, weight, *_ = args
            own = self.inputs.setdefault((x.shape, weight.data_ptr()), args)
            self.calls.append((function, own))
        return function(*args, **(kwargs or {}))

    def replay(self) -> None:
        for function, args in self.calls:
            function(*args)


def stand_in(*names: str, **attributes: Any) -> None:
    """Modules of these names, in place of packages that sampling does not need."""
    for name in names:
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)


def products_of(engine: Engine, requests: list[Request]) -> Callable[[], None]:
    """A function that repeats the matrix products of these images."""
    with Products() as products:
        engine.generate(requests)
    return torch.inference_mode()(products.replay)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="clone of MAR's repository")
    parser.add_argument("--checkpoint", default="digits32", choices=("digits32", "emoji64"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--num-iter", type=int, default=64)
    parser.add_argument("--cfg", type=float, default=3.0)
    parser.add_argument("--runs", type=int, default=5, help="runs of each, interleaved")
    parser.add_argument("--products", action="store_true", help="also time the bare matrix products")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    engine = cspd.load(args.checkpoint, max_batch=args.batch, device="cpu")
    theirs = their_model(args.folder, engine.runner.target)
    labels = torch.arange(args.batch) % 10

    @torch.inference_mode()
    def sample_theirs() -> None:
        theirs.sample_tokens(args.batch, num_iter=args.num_iter, cfg=args.cfg, labels=labels)

    runs: dict[str, Callable] = {THEIRS: sample_theirs}
    for name, settings in SETTINGS.items():
        requests = [
            Request(i % 10, seed=i, cfg=args.cfg, **{"num_iter": args.num_iter, **settings}) for i in range(args.batch)
        ]
        engine.generate(requests)  # calibrates and measures costs
        runs[name] = partial(engine.generate, requests)
        if args.products:
            runs[f"{name}, products"] = products_of(engine, requests)

    print(f"{args.checkpoint}, batch {args.batch}, {args.threads} threads, K = {args.num_iter}, guidance {args.cfg:g}")
    in_turns(runs, args.runs, THEIRS)


if __name__ == "__main__":
    main()
