"""Every exception arrives: as itself where it can, by its pieces where it must, as text for certain."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import threading
import traceback
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.core import exceptions
from monarch.core.exceptions import Absent, decode_exception, encode_exception, format_remote
from monarch.errors import ActorError, RemoteException, SupervisionError


class TwoArgs(Exception):
    def __init__(self, a: object, b: object) -> None:
        super().__init__(f"{a}-{b}")


class NoArgs(Exception):
    def __init__(self) -> None:
        super().__init__("fixed text")


class Prefixed(Exception):
    """Comes back from pickle without an error, and with another text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"prefix {text}")


class WithFile(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.file = io.BufferedRandom(io.BytesIO())  # type: ignore[arg-type]
        self.code = 7


class Slotted(Exception):
    __slots__ = ("code", "empty")

    def __init__(self, a: int, b: int) -> None:
        super().__init__(a + b)
        self.code = a


class BadStr(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class NotStr(Exception):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value]


class BadRepr(Exception):
    def __repr__(self) -> str:
        raise ValueError("no repr")


class BadReduce(Exception):
    def __reduce__(self) -> Any:
        raise ValueError("no reduce")


class LeavingReduce(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class BadState(Exception):
    def __getstate__(self) -> Any:
        raise ValueError("no state")


class BadNew(Exception):
    def __new__(cls, *args: Any) -> BadNew:
        if len(args) != 3:
            raise TypeError("three, please")
        return super().__new__(cls, *args)

    def __init__(self, *args: Any) -> None:
        super().__init__("three")


class BadAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise ValueError("nothing to see")


class Status(OSError):
    def __init__(self, code: int) -> None:
        super().__init__(code, "status", "file")


class Group(ExceptionGroup):
    def __new__(cls, code: int) -> Group:
        return super().__new__(cls, f"code {code}", [ValueError(code)])

    def __init__(self, code: int) -> None:
        self.code = code


def recursive() -> Exception:
    error = RuntimeError("first")
    error.args = (error,)
    return error


def holding_itself() -> Exception:
    error = RuntimeError("first")
    error.me = error  # type: ignore[attr-defined]
    return error


def arrived(exc: BaseException) -> tuple[BaseException, str]:
    return decode_exception([bytes(part) for part in encode_exception(exc)])


def raised(exc: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise exc from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("exc", "text"),
    [
        (ValueError("plain"), "plain"),
        (TwoArgs(1, 2), "1-2"),
        (NoArgs(), "fixed text"),
        (Prefixed("x"), "prefix x"),
        (WithFile("carries a file"), "carries a file"),
        (Slotted(1, 2), "3"),
        (BadRepr("a"), "a"),
        (BadReduce("b"), "b"),
        (LeavingReduce("c"), "c"),
        (BadState("d"), "d"),
        (BadNew(1, 2, 3), "three"),
        (Status(5), "[Errno 5] status: 'file'"),
        (KeyError("k"), "'k'"),
        (FileNotFoundError(2, "none", "/x"), "[Errno 2] none: '/x'"),
        (UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"), "'utf8' codec can't decode byte 0xff in position 0: bad"),
        (KeyboardInterrupt(), ""),
        (SystemExit(3), "3"),
        (GeneratorExit(), ""),
        (StopIteration(4), "4"),
        (RuntimeError(), ""),
        (RuntimeError("surrogate \udcff"), "surrogate \udcff"),
        (holding_itself(), "first"),
        (RuntimeError("x" * (5 << 20)), "x" * (5 << 20)),
        (SupervisionError("gone", "a.b"), "Endpoint call a.b() failed, gone"),
        (RemoteException("a.B", "text", "why"), "a.B: text (why)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_the_same_type_and_text_arrive(exc: BaseException, text: str) -> None:
    got, formatted = arrived(raised(exc))
    assert type(got) is type(exc)
    assert str(got) == text
    assert type(exc).__name__ in formatted and text in formatted
    assert "in raised" in formatted


@pytest.mark.parametrize("make", [lambda: BadStr("x"), lambda: NotStr("x"), recursive, lambda: BadAttributes("y")])
def test_exceptions_that_cannot_even_be_printed_arrive(make: Any) -> None:
    exc = make()
    got, formatted = arrived(raised(exc))
    assert isinstance(got, (type(exc), RemoteException))
    assert type(exc).__name__ in formatted
    assert "in raised" in formatted


@given(st.text(), st.integers() | st.none() | st.binary() | st.lists(st.text()))
def test_any_arguments_arrive(text: str, value: Any) -> None:
    got, formatted = arrived(LookupError(text, value))
    assert got.args == (text, value)
    assert str(got) in formatted


def test_a_lock_in_the_arguments_is_replaced_and_noted() -> None:
    exc = RuntimeError("carries a lock", threading.Lock(), [1])
    got, formatted = arrived(exc)
    assert type(got) is RuntimeError
    assert str(got) == str(exc)
    assert got.args[0] == "carries a lock" and isinstance(got.args[1], Absent) and got.args[2] == [1]
    note = "the original RuntimeError could not be sent whole; missing: args[1] (_thread.lock)"
    assert note in formatted and note in got.__notes__


def test_attributes_are_kept_as_far_as_they_pickle() -> None:
    got, formatted = arrived(WithFile("m"))
    assert isinstance(got, WithFile)
    assert got.code == 7 and not hasattr(got, "file")
    assert "missing: file (_io.BufferedRandom)" in formatted
    slotted, _ = arrived(Slotted(3, 4))
    assert isinstance(slotted, Slotted)
    assert slotted.code == 3 and not hasattr(slotted, "empty")


def test_fields_of_builtin_exceptions_are_kept() -> None:
    got, _ = arrived(Status(5))
    assert isinstance(got, Status)
    assert (got.errno, got.strerror, got.filename) == (5, "status", "file")
    exit_, _ = arrived(SystemExit(3))
    assert isinstance(exit_, SystemExit) and exit_.code == 3
    missing, _ = arrived(ImportError("m", name="n", path="p"))
    assert isinstance(missing, ImportError) and (missing.name, missing.path) == ("n", "p")
    stop, _ = arrived(StopIteration(4))
    assert isinstance(stop, StopIteration) and stop.value == 4


def test_causes_contexts_and_notes_arrive() -> None:
    try:
        try:
            try:
                _ = 1 / 0
            except ZeroDivisionError:
                raise TwoArgs("in", "between")  # noqa: B904
        except TwoArgs as error:
            error.add_note("a note on the cause")
            raise ValueError("outer") from error
    except ValueError as error:
        error.add_note("a note")
        got, formatted = arrived(error)

    assert type(got) is ValueError and got.__notes__ == ["a note"]
    assert type(got.__cause__) is TwoArgs and got.__cause__.__notes__ == ["a note on the cause"]
    assert got.__context__ is got.__cause__ and got.__suppress_context__
    assert type(got.__cause__.__context__) is ZeroDivisionError and not got.__cause__.__suppress_context__
    for text in ("outer", "in-between", "division by zero", "a note on the cause", "direct cause", "During handling"):
        assert formatted.count(text) >= 1


def test_from_none_stays_from_none() -> None:
    try:
        try:
            raise KeyError("hidden")
        except KeyError:
            raise ValueError("shown") from None
    except ValueError as error:
        got, formatted = arrived(error)
    assert got.__suppress_context__ and got.__cause__ is None and type(got.__context__) is KeyError
    assert "hidden" not in formatted


def test_a_cause_that_cannot_travel_does_not_keep_the_others() -> None:
    class Unsendable(Exception):
        lock = threading.Lock()  # a local class goes by value, with what it holds

    got, formatted = arrived(raised(ValueError("outer"), raised(Unsendable("inner"), TwoArgs(1, 2))))
    assert type(got) is ValueError
    stand_in = got.__cause__
    assert isinstance(stand_in, RemoteException)
    assert "Unsendable" in stand_in.type_name and stand_in.text == "inner" and stand_in.note
    assert type(stand_in.__cause__) is TwoArgs
    assert "inner" in formatted and stand_in.note in formatted


def test_chains_may_be_circular_and_long() -> None:
    first, second = ValueError("a"), KeyError("b")
    first.__cause__, second.__cause__ = second, first
    got, _ = arrived(first)
    assert got.__cause__ is not None and got.__cause__.__cause__ is got

    error: Exception = ValueError("0")
    for n in range(1, 1500):
        following = ValueError(str(n))
        following.__context__ = error
        error = following
    got, formatted = arrived(error)
    assert str(got) == "1499" and "only 1000 linked exceptions" in formatted
    assert "ValueError: 7\n" in formatted


def test_groups_arrive_with_all_their_members() -> None:
    inner = ExceptionGroup("inner", [TwoArgs(1, 2), RuntimeError("lock", threading.Lock())])
    group = ExceptionGroup("outer", [raised(ValueError("v"), KeyError("k")), inner])  # type: ignore[list-item]
    group.add_note("noted")
    got, formatted = arrived(group)
    assert type(got) is ExceptionGroup and got.message == "outer" and got.__notes__ == ["noted"]
    value, members = got.exceptions
    assert type(value) is ValueError and type(value.__cause__) is KeyError
    assert isinstance(members, ExceptionGroup) and [type(m) for m in members.exceptions] == [TwoArgs, RuntimeError]
    assert "1-2" in formatted and "noted" in formatted
    own, _ = arrived(Group(5))
    assert isinstance(own, Group) and own.code == 5 and str(own.exceptions[0]) == "5"
    leaving, _ = arrived(BaseExceptionGroup("b", [KeyboardInterrupt()]))
    assert type(leaving) is BaseExceptionGroup and type(leaving.exceptions[0]) is KeyboardInterrupt


def test_local_classes_are_the_same_class_when_they_come_home() -> None:
    class Local(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(a)

    got, _ = arrived(Local(1, 2))
    assert isinstance(got, Local)


def test_a_class_that_the_receiver_does_not_have_becomes_a_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("only_at_sender")
    exec("class Rare(Exception): pass", module.__dict__)
    module.__dict__["__file__"] = __file__
    monkeypatch.setitem(sys.modules, "only_at_sender", module)
    parts = encode_exception(raised(module.Rare("x"), ValueError("cause")))
    monkeypatch.delitem(sys.modules, "only_at_sender")
    got, formatted = decode_exception(parts)
    assert isinstance(got, RemoteException)
    assert got.type_name == "only_at_sender.Rare" and got.text == "x" and "ModuleNotFoundError" in got.note
    assert type(got.__cause__) is ValueError
    assert "only_at_sender.Rare: x" in formatted


def test_another_process_reads_it() -> None:
    code = """
import sys
from monarch.core.exceptions import decode_exception
got, text = decode_exception([sys.stdin.buffer.read()])
print(type(got).__name__, got, got.args, type(got.__cause__).__name__, "in raised" in text)
"""
    (part,) = encode_exception(raised(Prefixed("x"), OSError(2, "none")))
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], input=part, capture_output=True, timeout=50)
    # Whether this module can be imported there under its name depends on how pytest was started: both are right.
    assert not done.returncode, done.stderr
    assert b"prefix x" in done.stdout and done.stdout.strip().endswith(b"FileNotFoundError True")


@given(st.binary())
def test_rubbish_decodes_to_a_stand_in(data: bytes) -> None:
    good = encode_exception(ValueError(data))[0]
    for part in (
        good[: len(data)],
        pickle.dumps(data),
        pickle.dumps((1, 2, "x", [])),
        pickle.dumps(("", "", "", [data])),
    ):
        got, text = decode_exception([part])
        assert isinstance(got, BaseException) and isinstance(text, str)
    assert isinstance(decode_exception([])[0], RemoteException)


def test_encoding_never_raises_even_when_its_own_parts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise MemoryError

    for name in ("_nodes", "_made_node", "_packed", "_strip"):
        with monkeypatch.context() as patch:
            patch.setattr(exceptions, name, broken)
            got, formatted = arrived(ValueError("x"))
            assert isinstance(got, (ValueError, RemoteException)) and "ValueError: x" in formatted


# Text


def user() -> None:
    raise ValueError("boom")


def as_ours(inner: Any, path: str) -> Any:
    """A function whose frame lies in this file of the library, and which calls `inner`."""
    filename = os.path.join(os.path.dirname(exceptions.__file__), os.pardir, path)
    scope: dict[str, Any] = {"inner": inner}
    exec(compile("def library(): inner()", os.path.normpath(filename), "exec"), scope)
    return scope["library"]


def test_frames_below_the_endpoint_are_left_out_and_those_above_stay() -> None:
    def endpoint() -> None:
        as_ours(user, "mesh/helper.py")()

    def text(function: Any) -> str:
        try:
            function()
        except ValueError as error:
            error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
            return format_remote(error)
        raise AssertionError

    shown = text(as_ours(as_ours(endpoint, "mesh/actors.py"), "core/instance.py"))
    assert "instance.py" not in shown and "actors.py" not in shown
    assert "in endpoint" in shown and "helper.py" in shown and "in user" in shown
    assert "rdma.py" in text(as_ours(user, "rdma.py"))


def test_a_failure_wholly_inside_the_library_shows_its_frames() -> None:
    try:
        as_ours(lambda: None, "core/instance.py")(1)
    except TypeError as error:
        assert "TypeError" in format_remote(error)
    try:
        exceptions.codec.decode([b"\x80\x05."])
    except Exception as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        assert "codec.py" in format_remote(error)


# ActorError


def remote() -> ActorError:
    exc = raised(TwoArgs(1, 2), raised(ZeroDivisionError("cause of it")))
    got, formatted = arrived(exc)
    return ActorError(got, "Actor call a.b failed.", formatted)


def test_a_printed_actor_error_shows_the_remote_traceback_and_its_causes_once() -> None:
    text = "".join(traceback.format_exception(raised(remote())))
    assert "ActorError: Actor call a.b failed.\n Traceback of where the remote call failed" in text
    for once in ("TwoArgs: 1-2", "ZeroDivisionError: cause of it", "The above exception was the direct cause"):
        assert text.count(once) == 1


@pytest.mark.parametrize("again", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy, lambda e: arrived(e)[0]])
def test_actor_errors_travel_whatever_they_hold(again: Any) -> None:
    for inner in (TwoArgs(1, 2), WithFile("f"), RuntimeError(threading.Lock()), BadReduce("x")):
        error = ActorError(inner, "Actor call a.b failed.", "the remote traceback")
        error.add_note("noted")
        got = again(error)
        assert type(got) is ActorError
        assert type(got.exception) is type(inner)
        assert (got.message, got.exception_formatted) == ("Actor call a.b failed.", "the remote traceback")
        assert str(got) == str(error) and got.__notes__ == ["noted"]


def test_an_actor_error_without_a_remote_text_renders_its_exception() -> None:
    error = ActorError(raised(ValueError("v")))
    assert "in raised" in str(error) and "ValueError: v" in error.exception_formatted
    assert repr(ActorError(BadRepr())) == "ActorError(BadRepr, 'A remote actor call failed.')"
