"""Code that is compiled once for many processes: whose it is, when it is stale, and what a death leaves."""

from __future__ import annotations

import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType

import pytest

from monarch.launch import code_store
from monarch.launch.code_store import CodeStore, share_compiled_code
from monarch.launch.wire import memory_file
from tests.forks import fork

PATH = "/somewhere/module.py"


@pytest.fixture
def store() -> Iterator[CodeStore]:
    made = CodeStore(memory_file())
    yield made
    os.close(made.fd)


def compiler(source: bytes, path: str = PATH) -> Callable[[], CodeType]:
    return lambda: compile(source, path, "exec")


def never() -> CodeType:
    raise AssertionError("compiled again")


def value_of(code: CodeType) -> object:
    names: dict[str, object] = {}
    exec(code, names)
    return names["x"]


def in_a_fork(action: Callable[[], object]) -> int:
    """How a fork ended that ran `action`: 0 when nothing was raised."""
    pid = fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_source_is_compiled_once_for_all_forks(store: CodeStore) -> None:
    source = b"x = 41 + 1"
    assert in_a_fork(lambda: store.code_of(PATH, source, compiler(source))) == 0
    assert value_of(store.code_of(PATH, source, never)) == 42
    assert in_a_fork(lambda: store.code_of(PATH, source, never)) == 0


@pytest.mark.parametrize(("path", "source"), [(PATH, b"x = 2"), ("/elsewhere/module.py", b"x = 1")])
def test_another_content_or_another_path_is_compiled_anew(store: CodeStore, path: str, source: bytes) -> None:
    store.code_of(PATH, b"x = 1", compiler(b"x = 1"))
    code = store.code_of(path, source, compiler(source, path))
    assert (value_of(code), code.co_filename) == (int(source[-1:]), path)
    assert value_of(store.code_of(PATH, b"x = 1", never)) == 1


def test_an_error_is_passed_on_and_kept_nowhere(store: CodeStore) -> None:
    for _ in range(2):
        with pytest.raises(SyntaxError):
            store.code_of(PATH, b"x =", compiler(b"x ="))
    assert os.fstat(store.fd).st_size == 0


@pytest.mark.parametrize("kept_bytes", [1, 19, 21, 40])
def test_what_a_writer_left_unfinished_is_cut_off(store: CodeStore, kept_bytes: int) -> None:
    in_a_fork(lambda: store.code_of(PATH, b"x = 1", compiler(b"x = 1")))
    os.ftruncate(store.fd, kept_bytes)
    assert value_of(store.code_of(PATH, b"x = 1", compiler(b"x = 1"))) == 1
    assert value_of(CodeStore(store.fd).code_of(PATH, b"x = 1", never)) == 1


def test_the_lock_of_a_dead_process_is_free(store: CodeStore) -> None:
    def die() -> CodeType:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    assert in_a_fork(lambda: store.code_of(PATH, b"x = 1", die)) == -signal.SIGKILL
    assert value_of(store.code_of(PATH, b"x = 1", compiler(b"x = 1"))) == 1


def test_nobody_waits_for_ever_for_one_who_compiles(store: CodeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_store, "_WAIT_S", 0.01)

    def meanwhile() -> CodeType:
        assert in_a_fork(lambda: CodeStore(store.fd).code_of(PATH, b"x = 2", compiler(b"x = 2"))) == 0
        return compiler(b"x = 1")()

    assert value_of(store.code_of(PATH, b"x = 1", meanwhile)) == 1


def test_a_file_that_took_the_place_of_a_closed_one_is_left_alone(tmp_path: Path) -> None:
    store = CodeStore(memory_file())
    mine = tmp_path / "mine"
    mine.write_bytes(b"precious")
    with open(mine, "r+b") as f:
        os.dup2(f.fileno(), store.fd)
    assert value_of(store.code_of(PATH, b"x = 1", compiler(b"x = 1"))) == 1
    os.close(store.fd)
    assert value_of(store.code_of(PATH, b"x = 1", compiler(b"x = 1"))) == 1
    assert mine.read_bytes() == b"precious"


@pytest.fixture
def module(tmp_path: Path, store: CodeStore, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source file that can be imported, by way of the store, as `shared_module`."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shared_module", raising=False)
    share_compiled_code(store)
    return tmp_path / "shared_module.py"


def test_a_module_looks_as_always(module: Path, store: CodeStore) -> None:
    module.write_text("def f():\n    raise ValueError('here')\n")
    found = importlib.import_module("shared_module")
    assert os.fstat(store.fd).st_size > 0
    assert found.__file__ == str(module)
    assert inspect.getsource(found.f) == module.read_text()
    try:
        found.f()
    except ValueError as error:
        (frame,) = traceback.extract_tb(error.__traceback__)[1:]
    assert (frame.filename, frame.lineno, frame.line) == (str(module), 2, "raise ValueError('here')")


def test_a_file_that_was_edited_is_seen_anew(module: Path) -> None:
    for value in (1, 2):
        module.write_text(f"x = {value}\n")
        importlib.invalidate_caches()
        sys.modules.pop("shared_module", None)
        assert importlib.import_module("shared_module").x == value


def test_a_module_with_bytecode_does_not_come_here(
    module: Path, store: CodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    module.write_text("x = 1\n")
    importlib.import_module("shared_module")
    size = os.fstat(store.fd).st_size
    del sys.modules["shared_module"]
    monkeypatch.setattr(CodeStore, "code_of", never)
    assert importlib.import_module("shared_module").x == 1
    assert os.fstat(store.fd).st_size == size


def test_what_is_no_source_file_and_what_is_not_there_is_left_to_the_others(module: Path) -> None:
    assert importlib.util.find_spec("_json") is not None
    assert type(importlib.util.find_spec("_json").loader).__name__ == "ExtensionFileLoader"  # type: ignore[union-attr]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_module_anywhere")
