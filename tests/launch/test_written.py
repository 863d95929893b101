"""The pages that a fork copies in one go."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys

import pytest

from monarch.launch import linux

PAGE = os.sysconf("SC_PAGE_SIZE")

MEMORY = """
import json, mmap, os
from monarch.launch import linux, written
from monarch.launch.wire import memory_file
PAGE = os.sysconf("SC_PAGE_SIZE")
memory = mmap.mmap(-1, 100 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
import ctypes
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
def write(pages):
    for page in pages:
        memory[page * PAGE] = 1
def own():
    return [page for at, size in linux.own_pages() for page in range((at - start) // PAGE, (at - start + size) // PAGE)
            if 0 <= page < 100]
def in_child(do, fork):
    there, here = os.pipe()
    pid = fork()
    if not pid:
        os.write(here, json.dumps(do()).encode())
        os._exit(0)
    os.close(here)
    with open(there) as f:
        found = json.load(f)
    os.waitpid(pid, 0)
    return found
def up():
    write([3, 4, 50])
    written.tell()
    return own()
write(range(100))
written.ask(memory_file())
"""


def told(program: str) -> list[list[int]]:
    run = subprocess.run([sys.executable, "-c", MEMORY + program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    found: list[list[int]] = json.loads(run.stdout)
    return found


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    """One that tells, and that copies."""
    memory = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = ctypes.addressof(ctypes.c_char.from_buffer(memory)), PAGE
    results = [call() for call in linux.copier([page])]
    if results != [PAGE] or not any(at <= page[0] < at + size for at, size in linux.own_pages()):
        pytest.skip("the kernel does not tell whose a page is, or does not copy it for the asking")


def test_a_child_begins_with_the_pages_that_the_first_one_wrote_to() -> None:
    assert told("print(json.dumps([in_child(up, written.fork), in_child(own, written.fork)]))") == [[3, 4, 50]] * 2


def test_a_child_that_goes_on_in_another_program_copies_nothing() -> None:
    assert told("print(json.dumps([in_child(up, written.fork), in_child(own, os.fork)]))")[1] == []


def test_nor_does_a_fork_of_a_child() -> None:
    program = "print(json.dumps([in_child(up, written.fork), in_child(lambda: in_child(own, os.fork), written.fork)]))"
    assert told(program)[1] == []


def test_a_template_that_has_imported_more_asks_again() -> None:
    program = """
first = in_child(up, written.fork)
written.ask_again()
def other():
    write([7])
    written.tell()
in_child(other, written.fork)
print(json.dumps([first, in_child(own, written.fork)]))
"""
    assert told(program)[1] == [7]


def test_what_the_first_one_has_mapped_itself_is_let_be() -> None:
    program = """
def maps_more():
    more = mmap.mmap(-1, 1000 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(1000):
        more[page * PAGE] = 1
    return up()
in_child(maps_more, written.fork)
calls = in_child(lambda: [call() > 0 for call in written._copies], written.fork)
print(json.dumps([calls, in_child(own, written.fork)]))
"""
    calls, found = told(program)
    assert all(calls)
    assert found == [3, 4, 50]


@pytest.mark.parametrize("limit_bytes", [0, 24])
def test_a_child_that_may_not_write_so_much_goes_on_and_so_does_its_template(limit_bytes: int) -> None:
    program = f"""
import resource
def limited():
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))
    return up()
first = in_child(limited, written.fork)
print(json.dumps([first, in_child(lambda: [1], written.fork)]))
"""
    assert told(program) == [[3, 4, 50], [1]]


def test_a_huge_mapping_is_not_looked_at() -> None:
    """One of a TiB would take seconds."""
    program = """
import time
reserved = mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
reserved[0] = 1
at = ctypes.addressof(ctypes.c_char.from_buffer(reserved))
began_s = time.monotonic()
found = [start for start, _ in linux.own_pages() if at <= start < at + len(reserved)]
print(json.dumps([found, own() == list(range(100)), time.monotonic() - began_s < 2]))
"""
    assert told(program) == [[], True, True]
