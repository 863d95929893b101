"""The pages that every child writes to, which a fork copies in one go.

A fork shares the pages of its template until it writes to one: then the kernel copies the page. Reference counts lie
everywhere, so a process of a mesh writes to 1,800 pages until it is up. One fault after the other, each amid something
else, that takes 3.8 us for a page, in one go 1.9 (in a virtual machine): an eighth less of what 32 processes take.

Which pages those are, the kernel tells the first child that is up: those that it has to itself. It writes them into a
file in memory (`tell`), where the template looks before it forks. Children would have copied them a moment later, so
they take no more memory, but for some 40 pages that the template has written to while the first came up.

Where the kernel does not tell, or does not copy for the asking (an older one), all is as without. Where two children
tell at the same time, the pages of either are found, or some of them: any are worth while.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import struct
from collections.abc import Callable
from typing import Final

from monarch.launch import linux

_STRETCH: Final = struct.Struct("@QQ")  # address and size in bytes

_file: int | None = None  # where a child tells
_copies: list[Callable[[], int]] = []  # what copies the pages, once a child has told
_goes_on = False  # whether a fork that is being made copies them


def ask(file: int) -> None:
    """For the template, when it has imported what children need: have the next child tell, in a `memory_file` that
    children inherit."""
    global _file
    _file = file


def ask_again() -> None:
    """As `ask`, when it has imported more: other pages are written to."""
    _copies.clear()
    if _file is not None:
        os.ftruncate(_file, 0)


def fork() -> int:
    """As `os.fork`, for a child that goes on in Python."""
    global _goes_on
    if not _copies:
        _look()
    _goes_on = True
    try:
        return os.fork()
    finally:
        _goes_on = False


def _look() -> None:
    """For what a child has told."""
    if _file is None or not (told := os.pread(_file, os.fstat(_file).st_size, 0)):
        return
    mappings = linux.private_mappings()
    starts = [start for start, _ in mappings]
    pages: list[tuple[int, int]] = []
    for start, size in _STRETCH.iter_unpack(told[: len(told) // _STRETCH.size * _STRETCH.size]):  # a limit cuts it off
        at = bisect.bisect(starts, start) - 1
        if at >= 0 and start + size <= mappings[at][1]:  # else the child has mapped it
            pages.append((start, size))
    _copies[:] = linux.copier(pages)


def tell() -> None:
    """For a child that is up, before it runs code of the user's: say which pages it has written to, if none has. Later
    calls do nothing."""
    global _file
    file, _file = _file, None
    if file is None or _copies:
        return
    with contextlib.suppress(OSError):  # there is no memory for it, say, or a limit to the sizes of files
        if not os.fstat(file).st_size:
            told = bytearray()
            for stretch in linux.own_pages():
                told += _STRETCH.pack(*stretch)
            os.pwrite(file, told, 0)


def _in_forked_child() -> None:
    if _goes_on:
        for copy in _copies:
            copy()


os.register_at_fork(after_in_child=_in_forked_child)  # before those of the modules that are imported later
