"""The `monarch` command. It parses, and leaves the work to the module behind each subcommand.

The imports of a subcommand happen when it runs: `monarch --version` answers without loading the actor system.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: that of this process) and return the exit status."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        return 130  # as a shell reports a process that SIGINT ended


def _parser() -> argparse.ArgumentParser:
    from monarch import __version__

    parser = argparse.ArgumentParser(
        prog="monarch",
        description="Actors in meshes of processes.",
        epilog="apply, exec, shell, kill, context and debug are planned.",
    )
    parser.add_argument("--version", action="version", version=f"monarch {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="search the files of this Python installation with a mesh of processes",
        description="Build a search engine over the source and documentation files of this Python installation, on a "
        "mesh of processes, and ask it a few things. The code is examples/search.py, installed as "
        "monarch.examples.search.",
    )
    demo.add_argument("--procs", type=_positive, metavar="N", help="processes in the mesh (default: by CPU count)")
    demo.add_argument("--query", nargs="+", action="extend", metavar="TEXT", help="what to search for")
    demo.add_argument("--limit-files", type=_positive, metavar="N", help="index at most N files")
    demo.set_defaults(run=_demo)
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return number


def _demo(args: argparse.Namespace) -> int:
    search = import_module("monarch.examples.search")
    search.main(procs=args.procs, queries=args.query, limit_files=args.limit_files)
    return 0
