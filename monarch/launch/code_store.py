"""Source modules are compiled once for all children of a template, where Python keeps no bytecode.

Where bytecode is not written (PYTHONDONTWRITEBYTECODE, a read-only installation: the rule in containers), each process
of a mesh would compile what it imports by itself, which takes longer than all the rest of its start. So they share a
file in memory that they inherit from the template: whoever compiles a module first adds it there, and those who come
meanwhile wait for it. Modules that have valid bytecode never come here.

Code is found by the path and the content of its source, so that a file which was edited is compiled anew. The file
grows with what is compiled, and goes with the last of the processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import marshal
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, Final

from attrs import define, field

_DIGEST_BYTES: Final = 16
_RECORD: Final = struct.Struct(f"!{_DIGEST_BYTES}sI")  # digest of path and source, bytes of marshalled code that follow
_WAIT_S: Final = 1.0  # for one that compiles, and may be a stopped process; then everybody compiles by himself
_LOOK_S: Final = 0.002


@define(eq=False)
class CodeStore:
    """Records of compiled code in the file `fd`, which forks of this process share. Thread-safe."""

    fd: int
    _known: dict[bytes, tuple[int, int]] = field(factory=dict)  # digest: where its code is, and its size
    _end: int = 0  # of the records that are known
    _lock: threading.RLock = field(factory=threading.RLock)  # among threads; that on the file is one among processes
    _file: tuple[int, int] = field(init=False)  # which one it is

    def __attrs_post_init__(self) -> None:
        self._file = _identity(self.fd)

    def code_of(self, path: str, source: bytes, compiled: Callable[[], CodeType]) -> CodeType:
        """The code of `source`: from the store, else by calling `compiled`, whose errors are passed on."""
        digest = hashlib.blake2b(os.fsencode(path) + b"\0" + source, digest_size=_DIGEST_BYTES).digest()
        with self._alone() as alone:
            if alone:
                self._take_in()
                if digest in self._known:
                    at, size = self._known[digest]
                    found: CodeType = marshal.loads(os.pread(self.fd, size, at))
                    return found
            code = compiled()
            if alone:
                self._add(digest, marshal.dumps(code))
            return code

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Whether nobody else is in here, as it is unless somebody stays longer than `_WAIT_S`, or the user's code has
        closed our descriptor. The lock on the file ends with its process."""
        deadline_s = time.monotonic() + _WAIT_S
        if not self._lock.acquire(timeout=_WAIT_S):  # a fork may have copied it while it was held
            yield False
            return
        try:
            alone = False
            while _identity(self.fd) == self._file and not (alone := self._lock_file()):
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(_LOOK_S)
            try:
                yield alone
            finally:
                if alone:
                    fcntl.lockf(self.fd, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def _lock_file(self) -> bool:
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _take_in(self) -> None:
        """Learn of the records that others have added, and cut off one whose writer died."""
        size = os.fstat(self.fd).st_size
        while self._end < size:
            head = os.pread(self.fd, _RECORD.size, self._end)
            digest, length = _RECORD.unpack(head) if len(head) == _RECORD.size else (b"", size)
            at = self._end + _RECORD.size
            if at + length > size:
                os.ftruncate(self.fd, self._end)
                return
            self._known[digest] = at, length
            self._end = at + length

    def _add(self, digest: bytes, code: bytes) -> None:
        with contextlib.suppress(OSError):  # no memory for it: the next one compiles as well
            os.pwrite(self.fd, _RECORD.pack(digest, len(code)) + code, self._end)


def _identity(fd: int) -> tuple[int, int]:
    """Of the file that `fd` is now."""
    try:
        found = os.fstat(fd)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


class _SharingLoader(SourceFileLoader):
    """A `SourceFileLoader` that asks the store before it compiles."""

    def __init__(self, store: CodeStore, name: str, path: str) -> None:
        super().__init__(name, path)
        self._store = store

    def source_to_code(self, data: Any, path: Any, **options: Any) -> CodeType:  # type: ignore[override]  # no staticmethod
        def compiled() -> CodeType:
            return super(_SharingLoader, self).source_to_code(data, path, **options)

        return self._store.code_of(path, data, compiled) if isinstance(data, bytes) and not options else compiled()


@define(eq=False)
class SharingFinder:
    """First on `sys.meta_path`: finds what those behind it find, and has source files loaded by way of the store."""

    _store: CodeStore

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else ()
        for finder in behind:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                if type(spec.loader) is SourceFileLoader:
                    spec.loader = _SharingLoader(self._store, spec.loader.name, spec.loader.path)
                return spec
        return None


def share_compiled_code(store: CodeStore) -> None:
    """From now on, source modules that this process and its forks import are compiled once for all of them."""
    sys.meta_path.insert(0, SharingFinder(store))
