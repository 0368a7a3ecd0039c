"""`cspd methods`: what can be run, and what each method guarantees."""

from __future__ import annotations

import argparse

from cspd.listing import format_table, markdown_table, options_table
from cspd.methods import METHODS


def run(args: argparse.Namespace) -> None:
    table = options_table if args.options else markdown_table if args.markdown else format_table
    print(table(METHODS))
