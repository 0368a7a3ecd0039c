"""The settings that every method of VQ codes has."""

from __future__ import annotations

from cspd.option import Option

VQ_OPTIONS = (
    Option("cfg", float, "guidance scale; 1 is no guidance, 2 to 5 is usual", metavar="S"),
    Option("temperature", float, "divides the logits; 1 is the model's own, 0 takes the likeliest code", metavar="TAU"),
    Option("top_k", int, "likeliest codes that are kept; 0 keeps all", metavar="K"),
    Option("top_p", float, "mass of the likeliest codes that are kept; 1 keeps all", above=0, high=1, metavar="P"),
)
MIXED = tuple(option.name for option in VQ_OPTIONS)  # may differ between the sequences of a round
