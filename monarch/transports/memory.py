"""Memory of this process for large buffers, wherever it is needed: at the encoder, at a receiver.

The kernel fills each page of fresh memory with zeros when it is first touched, which takes longer than to copy: 256 MiB
in huge pages 40 ms at the least, in small ones 110 ms. So what large buffers leave behind is kept for the next ones, up
to `KEPT_BYTES`; the kernel may take it back whenever it has no other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any, Final

from monarch.transports.base import Buffer

LARGE_BYTES: Final = 4 << 20
"""From here on memory is mapped on its own, in huge pages where there are any, and used again."""

KEPT_BYTES: Final = 256 << 20
"""So much that nobody uses is kept at most."""

_STEP_BYTES: Final = 2 << 20
_FREELY_BYTES: Final = 1 << 20
"""A copy of so much lets other threads run meanwhile."""

_TOGETHER_BYTES: Final = 32 << 20
"""From here on a second thread helps to copy: one alone does not get all that memory gives. 256 MiB: 30 ms, and 17."""

_ENDLESS: Final = 1 << 46  # more than an address space has; views of it are cut to size

Memory: Final = ctypes.c_ubyte * _ENDLESS
"""Memory at an address, as an object that exports it."""


# ---- the end of objects


class _End(weakref.ref[CodeType]):
    """Calls `action(*arguments)` when the object that holds `token` is gone.

    A finalizer of that object itself, or a weak reference to it, would be called too early where the object is part of
    a cycle: others in the cycle have finalizers that may still use it, or bring it back to life. The token must
    therefore be something that the collector does not know, so that it goes when it is really let go. Code objects are
    the only ones of the kind that can be referenced weakly. 0.5 us.
    """

    __slots__ = ("action", "arguments")
    action: Callable[..., None]
    arguments: tuple[Any, ...]


_ends: Final[dict[int, _End]] = {}
_CODE: Final = (lambda: None).__code__


def at_end(action: Callable[..., None], *arguments: Any) -> CodeType:
    """A token. `action` takes no lock: a collection may run it anywhere."""
    token = _CODE.replace()
    end = _End(token, _ended)
    end.action, end.arguments = action, arguments
    _ends[id(end)] = end
    return token


def _ended(end: Any, ends: dict[int, _End] = _ends) -> None:
    del ends[id(end)]
    end.action(*end.arguments)


# ---- memory of others


class Lent(Memory):  # type: ignore[misc, valid-type]
    """What this process has of memory that another has lent to it. Whatever shows the memory, in any library, has a
    reference to this in the end."""

    size_bytes: int


_lent: Final[dict[int, weakref.ref[Lent]]] = {}  # by address


def note_loan(address: int, loan: Lent) -> None:
    _lent[address] = weakref.ref(loan)


def forget_loan(address: int) -> None:
    _lent.pop(address, None)


class Returned(Memory):  # type: ignore[misc, valid-type]
    """Memory that was lent, and belongs to a message from now on: its owner can have it back as it is."""

    loan: Lent


class Claim:
    """Of one who wants to pass on lent memory instead of a copy, once it has let go of all that shows the memory."""

    def __init__(self, loan: Lent) -> None:
        self._held = [loan]
        self._address = ctypes.addressof(loan)
        self.memory = memoryview(Memory.from_address(self._address)).cast("B")[: loan.size_bytes]
        """Lives as long as this."""

    def settle(self) -> memoryview | None:
        """The memory, as a part to send; None where somebody else still has something that shows it."""
        if _references(self._held) > _ALONE:
            return None
        returned = Returned.from_address(self._address)
        returned.loan = self._held[0]
        return memoryview(returned).cast("B")[: len(self.memory)]


def _references(held: list[Any]) -> int:
    """To the only item of `held`."""
    return sys.getrefcount(held[0])


_ALONE: Final = _references([object()])


def claim(address: int, size_bytes: int) -> Claim | None:
    """On exactly that memory, where it was lent."""
    known = _lent.get(address)
    loan = known() if known is not None else None
    return Claim(loan) if loan is not None and loan.size_bytes == size_bytes else None


# ---- buffers


class _Hold(Memory):  # type: ignore[misc, valid-type]
    """Of a buffer on its memory, until the last view of it is gone."""

    end: CodeType


_unused: Final[list[mmap.mmap]] = []  # oldest first


def allocate(size_bytes: int) -> memoryview:
    """Writable memory, with anything in it. What is large is neither touched nor taken before it is filled.

    Raises: MemoryError.
    """
    if size_bytes >= LARGE_BYTES and hasattr(mmap, "MAP_ANONYMOUS"):
        mapped = _take(-(-size_bytes // _STEP_BYTES) * _STEP_BYTES)
        hold = _Hold.from_address(_address(mapped))
        hold.end = at_end(_give_back, mapped)
        return memoryview(hold).cast("B")[:size_bytes]
    numpy = sys.modules.get("numpy")
    if hasattr(numpy, "empty"):
        return memoryview(numpy.empty(size_bytes, numpy.uint8))  # type: ignore[union-attr]
    return memoryview(bytearray(size_bytes))


def _take(size_bytes: int) -> mmap.mmap:
    for mapped in reversed(list(_unused)):
        if len(mapped) == size_bytes:
            with contextlib.suppress(ValueError):  # another thread was quicker
                _unused.remove(mapped)
                return mapped
    try:
        mapped = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"cannot map {size_bytes} bytes: {error.strerror}") from error
    _advise(mapped, "MADV_HUGEPAGE")
    return mapped


def _give_back(mapped: mmap.mmap) -> None:
    """Anywhere, and without a lock: see `at_end`."""
    _advise(mapped, "MADV_FREE")
    _unused.append(mapped)
    with contextlib.suppress(IndexError):
        while sum(map(len, list(_unused))) > KEPT_BYTES:
            _unused.pop(0)


def _advise(mapped: mmap.mmap, advice: str) -> None:
    if hasattr(mmap, advice):
        with contextlib.suppress(OSError):  # a kernel that knows no such thing
            mapped.madvise(getattr(mmap, advice))


class _Inside(Memory):  # type: ignore[misc, valid-type]
    """The memory of an object of type `bytes` that nobody has seen yet."""

    made: bytes


def allocate_for_bytes(size_bytes: int) -> memoryview:
    """As `allocate`, of which `new_bytes` makes `bytes` without a copy; nobody is to write to it then."""
    made: bytes = _new_bytes(None, size_bytes)
    address = ctypes.cast(ctypes.c_char_p(made), ctypes.c_void_p).value or 0
    if size_bytes >= LARGE_BYTES:
        _prefer_huge_pages(address, size_bytes)
    inside = _Inside.from_address(address)
    inside.made = made
    return memoryview(inside).cast("B")[:size_bytes]


def new_bytes(part: Buffer) -> bytes:
    """As `bytes(part)`."""
    inside = part.obj if type(part) is memoryview else None
    if type(inside) is _Inside and len(part) == len(inside.made):
        return inside.made
    if len(part) < LARGE_BYTES or type(part) is bytes:
        return bytes(part)
    fixed = memoryview(part)
    view = allocate_for_bytes(len(fixed))
    copy(view, fixed)
    return new_bytes(view)


def new_bytearray(part: Buffer) -> bytearray:
    """As `bytearray(part)`."""
    if len(part) < LARGE_BYTES:
        return bytearray(part)
    fixed = memoryview(part)  # another thread may use it: what has a view keeps its size
    made: bytearray = _new_bytearray(None, len(fixed))
    _prefer_huge_pages(_address(made), len(made))
    copy(memoryview(made), fixed)
    return made


_python: Final = ctypes.PyDLL(None)  # our own, whose types of arguments nobody else sees
_new_bytes = _python.PyBytes_FromStringAndSize
_new_bytearray = _python.PyByteArray_FromStringAndSize
for _new in (_new_bytes, _new_bytearray):
    _new.argtypes, _new.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object

_libc: Final = ctypes.CDLL(None)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def _prefer_huge_pages(address: int, size_bytes: int) -> None:
    if hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        whole_bytes = (address + size_bytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc.madvise(start, whole_bytes, mmap.MADV_HUGEPAGE)


def copy(to: memoryview, part: Buffer) -> None:
    """Fill `to`, of the size of `part`, with its bytes."""
    size = len(part)
    if size < _FREELY_BYTES:
        to[:] = part
    elif type(part) is bytes:
        address = ctypes.cast(ctypes.c_char_p(part), ctypes.c_void_p).value or 0
        move(_address(to), address, size, to, part)
    elif not (fixed := memoryview(part)).readonly:
        move(_address(to), _address(fixed), size, to, fixed)
    else:
        to[:] = part


def copied(part: Buffer, allocate: Callable[[int], memoryview] = allocate) -> memoryview:
    """Memory from `allocate` with the bytes of `part` in it."""
    own = allocate(len(part))
    copy(own, part)
    return own


def move(to: int, start: int, size_bytes: int, *owners: object) -> None:
    """Copy from the address `start` to the address `to`, in memory that lives as long as `owners`."""
    in_halves(lambda at, count: ctypes.memmove(to + at, start + at, count), size_bytes, *owners)


def in_halves(work: Callable[[int, int], object], size_bytes: int, *owners: object) -> None:
    """Call `work(start, count)` for all bytes of some memory, in two threads where that pays. It lets go of the
    interpreter, raises nothing, and needs `owners`."""
    near_bytes = size_bytes
    helper = None
    if size_bytes >= _TOGETHER_BYTES and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1:
        near_bytes = size_bytes // (2 * mmap.PAGESIZE) * mmap.PAGESIZE
        # It has the owners, too: who waits for it may be interrupted.
        far = work, near_bytes, size_bytes - near_bytes, owners
        helper = threading.Thread(target=_call, args=far, name="monarch-copy", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads
            helper, near_bytes = None, size_bytes
    work(0, near_bytes)
    if helper is not None:
        helper.join()


def _call(work: Callable[[int, int], object], start: int, count: int, owners: tuple[object, ...]) -> None:
    work(start, count)


def _address(memory: Buffer | mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
