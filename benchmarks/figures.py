"""What is measured: names, units, and what of the machine's own each is compared with. The lower the better, always."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from attrs import define

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

Unit = Literal["s", "B"]


@define(frozen=True)
class Figure:
    """One measured value, in seconds or bytes."""

    name: str
    value: float


@define(frozen=True)
class Row:
    """A figure of a transport, and the one of the floor beside it.

    Attributes:
        title: for people.
        floor: name of the figure of the floor; "" where the machine has nothing like it.
        rate: what it is one of, where people think in how many there are in a second: "call".
    """

    name: str
    title: str
    floor: str
    rate: str = ""
    unit: Unit = "s"


@define(frozen=True)
class Scale:
    """How much of everything.

    Attributes:
        calls: how often a latency is measured.
        outstanding: calls that are sent before the first answer is read.
        casts: messages that nobody answers.
        sizes: of payloads, in bytes.
        crowds: of how many processes a mesh is spawned.
    """

    calls: int
    outstanding: int
    casts: int
    sizes: tuple[int, ...]
    crowds: tuple[int, ...]


CROWDS: Final = (1, 8, 32)
SIZES: Final = (KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB)
KINDS: Final = ("bytes", "numpy", "torch")
FULL: Final = Scale(calls=2000, outstanding=1000, casts=5000, sizes=SIZES, crowds=CROWDS)
QUICK: Final = Scale(calls=20, outstanding=50, casts=50, sizes=SIZES[:3], crowds=CROWDS[:2])


def in_words(size_bytes: float) -> str:
    """`64 KiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:.3g} B"


def _rows() -> Iterator[Row]:
    yield Row("call", "call, sync endpoint", "round_trip")
    yield Row("call_p99", "the same, 99th percentile", "round_trip_p99")
    yield Row("call_async", "call, async endpoint", "round_trip")
    yield Row("call_peer", "call, actor to actor", "round_trip")
    yield Row("call_local", "call in the same process", "thread_round_trip")
    yield Row("outstanding", "calls, 1000 outstanding", "round_trip", rate="call")
    for n in CROWDS[:2]:
        yield Row(f"cast_{n}", f"casts to {n} process{'es' if n > 1 else ''}", "message", rate="cast")
    for n in CROWDS[1:]:
        yield Row(f"gather_{n}", f"call {n} processes, gather", f"gather_{n}")
    for kind in KINDS:
        for size in SIZES:
            yield Row(f"echo_{kind}_{size}", f"echo of {in_words(size)}, {kind}", f"exchange_{size}")
    yield Row("spawn_first", "the first process of a program", "interpreter_start")
    for n in CROWDS:
        yield Row(f"spawn_{n}", f"spawn {n}, hear from all", f"fork_exit_{n}")
    for n in CROWDS:
        yield Row(f"stop_{n}", f"stop {n}", f"fork_exit_{n}")
    yield Row("idle_memory", "private memory of an idle process", "interpreter_memory", unit="B")


ROWS: Final = tuple(_rows())
