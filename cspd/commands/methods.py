"""`cspd methods`: what can be run, and what each method guarantees."""

from __future__ import annotations

import argparse

from cspd.commands.options import add_plugin_option
from cspd.listing import format_table, markdown_table, options_table


def add(commands: argparse._SubParsersAction) -> None:
    """Declares the command."""
    text = "Lists the methods: which models they decode, what they guarantee, what they need, and their papers."
    methods = commands.add_parser("methods", help="list the methods and their guarantees", description=text)
    methods.set_defaults(run=run)
    add_plugin_option(methods)
    methods.add_argument("--markdown", action="store_true", help="as the table in README.md")
    methods.add_argument("--options", action="store_true", help="the options of a request, as the table in docs/api.md")


def run(args: argparse.Namespace) -> None:
    table = options_table if args.options else markdown_table if args.markdown else format_table
    print(table())
