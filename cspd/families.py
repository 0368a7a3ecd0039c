"""What is known of each family of models before any is loaded.

These are the settings that all its methods have, its default method and its bundled checkpoint. Nothing here imports
torch, so that `--help` appears at once.
"""

from __future__ import annotations

from cspd.option import Option

GUIDANCE = ("linear", "constant")  # schedules of MAR's guidance scale
NUM_ITER = Option(
    "num_iter",
    int,
    "autoregressive iterations, at most one per generated token",
    low=1,
    metavar="K",
)
MAR_OPTIONS = (
    NUM_ITER,
    Option("cfg", float, "guidance scale; 1 is no guidance, 2 to 5 is usual", metavar="S"),
    Option("cfg_schedule", GUIDANCE, "guidance grows over the iterations, or is constant"),
    Option("temperature", float, "scales the denoising noise; 1 is unchanged", metavar="TAU"),
    Option(
        "num_sampling_steps",
        int,
        "denoising steps per token; MAR's default is 100",
        low=2,
        high=1000,  # the steps of training, mar.diffusion.TRAIN_STEPS
        metavar="T",
    ),
)
VQ_OPTIONS = (
    Option("cfg", float, "guidance scale; 1 is no guidance, 2 to 5 is usual", metavar="S"),
    Option("temperature", float, "divides the logits; 1 is unchanged, 0 is greedy", metavar="TAU"),
    Option("top_k", int, "sample from the K likeliest tokens; 0: from all", metavar="K"),
    Option(
        "top_p",
        float,
        "sample from the likeliest tokens of total probability P; 1: from all",
        above=0,
        high=1,
        metavar="P",
    ),
)
COMMON: dict[str, tuple[Option, ...]] = {"MAR": MAR_OPTIONS, "VQ": VQ_OPTIONS}
EMBEDDED = {"MAR": "digits32", "VQ": "digits32_vq"}  # the checkpoint that is taken by default
DEFAULTS = {"MAR": "speculative", "VQ": "speculative"}  # methods
