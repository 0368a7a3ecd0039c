"""Writes docs/results/memory.json: memory by model and batch, as the engine estimates it before it loads anything.

python scripts/measure/memory.py && python scripts/results.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import nn

from cspd.causal import runner as causal
from cspd.causal.registry import create_causal
from cspd.device import precision_of
from cspd.discrete.kv_cache import bytes_per_slot
from cspd.discrete.registry import create_gpt
from cspd.masked import runner as masked
from cspd.origin import commit_of
from mar.checkpoint import create_mar

FILE = Path(__file__).parents[2] / "docs" / "results" / "memory.json"
BATCHES = (1, 8, 64)
MODELS = (
    *("mar_base", "mar_large", "mar_huge"),
    *("sphere_ar_b", "sphere_ar_l", "sphere_ar_h", "bitdance_b_1x", "bitdance_b_4x", "bitdance_b_16x"),
    "bitdance_h_1x",
    *("llamagen_b", "llamagen_l", "llamagen_xl", "llamagen_3b"),
)


def of_model(name: str) -> tuple[nn.Module, int]:
    """A model of this size without memory for its weights, and the bytes of a slot in float32."""
    precision = precision_of("fp32", torch.device("cpu"))
    with torch.device("meta"):
        if name.startswith("mar"):
            mar = create_mar(name)
            return mar, masked.bytes_per_slot(mar, masked.usual_tokens(mar))
        if name.startswith("llamagen"):
            gpt = create_gpt(name)
            return gpt, bytes_per_slot(gpt, (), precision)
        model = create_causal(name)
        return model, causal.bytes_per_slot(model, precision)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = []
    for name in MODELS:
        model, per_slot = of_model(name)
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        batches = [f"{(weights + batch * per_slot) / 2**30:.1f}" for batch in BATCHES]
        rows.append([f"`{name}`", f"{weights / 2**30:.1f}", f"{per_slot / 2**20:.0f} MiB", *batches])
    content = {
        "title": "GiB in float32, on a CPU or GPU, without the autoencoder: **estimates**, by which an engine refuses a"
        " batch that is too large. MAR has K = 64; LlamaGen B and L make 256 pixels, XL and 3B 384.",
        "commands": ["python scripts/measure/memory.py"],
        "commit": (commit_of(Path(__file__)) or "unknown")[:7],
        "machine": "any machine, since they are computed from the models' shapes",
        "header": ["model", "weights", "per image", *(f"batch {batch}" for batch in BATCHES)],
        "rows": rows,
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
