"""Measure one subject, in this process, and print each figure as a line of JSON. The runner starts it:

    python -m benchmarks.measure SUBJECT [--quick] [--only GROUP ...]

A subject is `floor`, or a transport. A group that fails is a line with its error; the others go on.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator

from benchmarks import floor
from benchmarks.figures import FULL, QUICK, Figure, Scale

FLOOR = "floor"
Group = Callable[[Scale], Iterator[Figure]]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.measure", description="Measure one subject.")
    parser.add_argument("subject")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="*", default=None)
    options = parser.parse_args()
    for name, group in _groups(options.subject).items():
        if options.only is None or options.subject == FLOOR or name in options.only:
            _report(name, group, QUICK if options.quick else FULL)


def _groups(subject: str) -> dict[str, Group]:
    if subject == FLOOR:
        return {FLOOR: floor.measure}
    os.environ["MONARCH_TRANSPORT"] = subject
    from benchmarks import workloads  # the floor does without monarch

    return workloads.GROUPS


def _report(name: str, group: Group, scale: Scale) -> None:
    try:
        for figure in group(scale):
            print(json.dumps({"name": figure.name, "value": figure.value}), flush=True)
    except Exception as error:
        print(json.dumps({"name": name, "error": f"{type(error).__name__}: {error}"}), flush=True)


if __name__ == "__main__":
    main()
