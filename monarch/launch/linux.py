"""What only the kernel can tell or promise: parent-death signals, subreapers, pidfds, titles, why a process was killed.

Every function degrades where the system lacks the call (macOS, old kernels): it returns False or None instead of
raising, and its caller falls back to what is portable. Only Linux is tested.

`ctypes` is loaded on first use, because the processes that only watch others never need it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

LINUX: Final = sys.platform.startswith("linux")

# Source: linux/prctl.h
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

# Sources: asm-generic/unistd.h, linux/pidfd.h, asm-generic/mman-common.h, linux/uio.h
_PROCESS_MADVISE: Final = 440
_PIDFD_SELF: Final = -10000
_MADV_POPULATE_WRITE: Final = 23
_IOVEC: Final = struct.Struct("@PN")
_IOV_MAX: Final = 1024

_PF_EXITING: Final = 0x4  # linux/sched.h: a flag of a task

# Of an entry in /proc/pid/pagemap, the highest byte: present, mapped by this process alone, and not of a file.
_OWN: Final = re.compile(b"\x81+")
_PAGES_AT_ONCE: Final = 512
_MOST_LOOKED_AT_BYTES: Final = 4 << 30  # of a mapping; a GiB takes 4 ms, and who reserves more writes to little of it


@functools.cache
def _libc() -> Any:
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _prctl() -> Callable[..., int] | None:
    if not LINUX:
        return None
    import ctypes

    prctl: Any = _libc().prctl
    # prctl is variadic: without these, ints would travel as 32 bits and leave the upper half to chance on some ABIs.
    prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong]
    prctl.restype = ctypes.c_int
    return prctl  # type: ignore[no-any-return]


def clear_environment() -> None:
    """Take away all variables of this process, also those that native code has set."""
    clear = getattr(_libc(), "clearenv", None)
    if clear is not None:
        clear()


def set_parent_death_signal(signum: int) -> bool:
    """Have the kernel send `signum` to this process when the *thread* that forked it ends.

    Survives exec, unless of a set-uid program; children do not inherit it. A parent that is dead already is not
    noticed: compare `os.getppid()` afterwards.
    """
    prctl = _prctl()
    return prctl is not None and prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) == 0


def set_child_subreaper() -> bool:
    """Orphans below this process become its children, rather than those of init. Survives exec, is not inherited."""
    prctl = _prctl()
    return prctl is not None and prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def end_with_this_thread(status: int) -> bool:
    """Have this process exit with `status` when this thread is ended by `pthread_exit`, as native code may do with the
    main thread: the others would go on, and to its parent the process would not have ended."""
    if not LINUX:
        return False
    import ctypes

    libc = _libc()
    key = ctypes.c_uint()
    # The kernel is told by the destructor of a value of the thread: it runs at the end of a thread, not of a process.
    if libc.pthread_key_create(ctypes.byref(key), libc._exit) != 0:
        return False
    return bool(libc.pthread_setspecific(key, ctypes.c_void_p(status)) == 0)


def set_process_title(title: str) -> None:
    """Show `title` in `ps` and `top`, as far as the memory of the command line given at exec has room for it."""
    prctl = _prctl()
    if prctl is None:
        return
    import ctypes

    encoded = title.encode(errors="replace")
    start, end = _argument_area()
    if 0 < start < end:
        ctypes.memmove(start, encoded[: end - start - 1].ljust(end - start, b"\0"), end - start)
        prctl(_PR_SET_NAME, start, 0, 0, 0)  # which takes no more than 15 bytes


@functools.cache
def _argument_area() -> tuple[int, int]:
    """Where the memory of the command line starts and ends, in this process and its forks; (0, 0) if unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(fields[45]), int(fields[46])  # arg_start and arg_end: proc(5), /proc/pid/stat, 48 and 49
    return 0, 0


def open_pidfd(pid: int) -> int | None:
    """A descriptor that is readable once `pid` has ended, owned by the caller; None where there is no such thing."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError as e:
        import errno

        if e.errno in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None
        raise


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`, zombies included; empty where /proc is missing.

    The kernel may leave some out while others are exiting: ask again after each exit.
    """
    try:
        return _children_of_tasks(pid)
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, no /proc, or the thread has just ended
        return _children_in_proc(pid)


def _children_of_tasks(pid: int) -> list[int]:
    found: list[int] = []
    with os.scandir(f"/proc/{pid}/task") as tasks:
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                found += map(int, Path(task.path, "children").read_text().split())
    return found


def _children_in_proc(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError), os.scandir("/proc") as processes:
        for process in processes:
            if process.name.isdigit():
                with contextlib.suppress(OSError):
                    if int(Path(process.path, "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                        found.append(int(process.name))
    return found


def signal_thread(pid: int, tid: int, signum: int) -> bool:
    """Send a signal to one thread of a process; False if there is no such thread.

    Raises:
        OSError: it may not be sent.
    """
    import ctypes
    import errno

    tgkill: Any = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None)
    if tgkill is None:  # a C library without it: the kernel chooses the thread
        os.kill(pid, signum)
    elif tgkill(pid, tid, signum) != 0:
        number = ctypes.get_errno()
        if number == errno.ESRCH:
            return False
        raise OSError(number, os.strerror(number))
    return True


def handles_signal(pid: int, tid: int, signum: int) -> bool:
    """Whether a signal is on its way to a thread, or its handler runs there, which keeps it blocked meanwhile."""
    bit = 1 << (signum - 1)
    for line in Path(f"/proc/{pid}/task/{tid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in ("SigPnd", "ShdPnd", "SigBlk") and int(value, 16) & bit:
            return True
    return False


def run_times_s(pid: int) -> dict[int, float]:
    """How long each thread of a process has had a processor, by its kernel's number, in seconds."""
    found: dict[int, float] = {}
    with os.scandir(f"/proc/{pid}/task") as tasks:
        for task in tasks:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found[int(task.name)] = int(Path(task.path, "schedstat").read_text().split()[0]) / 1e9
    return found


def is_dying(pid: int) -> bool:
    """Whether a process has begun to end, or is gone: then it gives up its descriptors."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _stat(pid)
        return fields[0] in "ZX" or bool(int(fields[6]) & _PF_EXITING)  # proc(5): /proc/pid/stat, 3 and 9
    return True


def is_below(pid: int, ancestor: int) -> bool:
    """Whether `pid` is `ancestor`, or descends from it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1 and pid != ancestor:
            pid = int(_stat(pid)[1])
    return pid == ancestor


def _stat(pid: int) -> list[str]:
    """What /proc/pid/stat says, from its third field on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def title(pid: int) -> str:
    """The command line of a process as `ps` shows it; empty where there is none."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0 ").split(b"\0")
        return b" ".join(words).decode(errors="replace")
    return ""


def kernel_state(pid: int) -> str:
    """What `ps` shows as the state of a process: R, S, D, T, Z...; empty where there is none."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0]
    return ""


def memory_bytes(pid: int) -> int | None:
    """The resident memory of a process. What it shares with others, as a fork with its parent, counts in each."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def private_mappings() -> list[tuple[int, int]]:
    """Start and end of the writable mappings that forks of this process get copies of, in order; empty where /proc is
    missing."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            where, kind, _ = line.split(maxsplit=2)
            if kind == "rw-p":
                start, end = where.split("-")
                found.append((int(start, 16), int(end, 16)))
    return found


def own_pages() -> Iterator[tuple[int, int]]:
    """Which pages of its `private_mappings` this process shares with no other, as address and size of each stretch;
    none where the kernel does not tell, and none of huge mappings. To look takes few pages itself."""
    page = os.sysconf("SC_PAGE_SIZE")
    high = 7 if sys.byteorder == "little" else 0
    with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for start, end in private_mappings():
            if end - start > _MOST_LOOKED_AT_BYTES:
                continue
            for at in range(start, end, _PAGES_AT_ONCE * page):
                some = min(_PAGES_AT_ONCE, (end - at) // page)
                entries = os.pread(pagemap.fileno(), some * 8, at // page * 8)
                for stretch in _OWN.finditer(entries[high::8]):
                    first, last = stretch.span()
                    yield at + first * page, (last - first) * page


def copier(stretches: Sequence[tuple[int, int]]) -> list[Callable[[], int]]:
    """What to call to have these pages of the calling process copied that a first write to them would copy; in a fork,
    too. Nothing, where the system cannot."""
    if not LINUX:
        return []
    import ctypes

    syscall: Any = ctypes.PyDLL(None)["syscall"]  # it is quick: nobody else gets the interpreter meanwhile
    syscall.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_long, ctypes.c_long]
    calls: list[Callable[[], int]] = []
    for at in range(0, len(stretches), _IOV_MAX):
        some = stretches[at : at + _IOV_MAX]
        vector = b"".join(_IOVEC.pack(*stretch) for stretch in some)
        given = (_PROCESS_MADVISE, _PIDFD_SELF, vector, len(some), _MADV_POPULATE_WRITE, 0)
        calls.append(functools.partial(syscall, *given))
    return calls


def thread_count() -> int | None:
    """Threads of this process as the kernel counts them, those of native libraries included."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return None


def current_umask() -> int:
    """The umask of this process, read without the moment of 0 that `os.umask` needs where /proc tells it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def oom_kills() -> int | None:
    """How often the out-of-memory killer has struck in this process's control group; None where nobody counts."""
    # The controller list is empty for cgroup v2. Source: cgroups(7), /proc/pid/cgroup
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controller, group = line.split(":", 2)
            place = {"": f".{group}/memory.events", "memory": f"memory{group}/memory.oom_control"}.get(controller)
            if place is not None:
                with contextlib.suppress(OSError, ValueError):
                    words = Path("/sys/fs/cgroup", place).read_text().split()
                    return int(words[words.index("oom_kill") + 1])
    return None


class Readiness:
    """A set of descriptors that is itself a descriptor: readable when one of them is ready (epoll, kqueue)."""

    def __init__(self) -> None:
        self._watched: dict[int, bool] = {}
        system: Any = select
        self._set: Any = system.epoll() if LINUX else system.kqueue()

    def fileno(self) -> int:
        """The descriptor to wait on."""
        return int(self._set.fileno())

    def watch(self, fd: int, *, writable: bool = False) -> None:
        """Watch `fd` for reading and, if asked, for room to write. Costs nothing where nothing changes."""
        before = self._watched.get(fd)
        if before == writable:
            return
        self._watched[fd] = writable
        if LINUX:
            mask = select.EPOLLIN | (select.EPOLLOUT if writable else 0)
            self._set.register(fd, mask) if before is None else self._set.modify(fd, mask)
            return
        kq: Any = select
        changes = [kq.kevent(fd, kq.KQ_FILTER_READ, kq.KQ_EV_ADD)]
        if writable or before:
            changes.append(kq.kevent(fd, kq.KQ_FILTER_WRITE, kq.KQ_EV_ADD if writable else kq.KQ_EV_DELETE))
        self._set.control(changes, 0, 0)

    def forget(self, fd: int) -> None:
        """Stop watching `fd`. Call it before closing `fd`: a duplicate elsewhere would keep a closed one alive."""
        if self._watched.pop(fd, None) is not None and LINUX:
            with contextlib.suppress(OSError):
                self._set.unregister(fd)

    def close(self) -> None:
        """Release the descriptor."""
        self._set.close()
