"""Exceptions that always arrive: as text for certain, as objects where that can be had.

An encoded exception is one pickle of plain values: its qualified type name, its message, the traceback as rendered
where it was raised, and for the exception and all those it refers to (causes, contexts, members of groups) a *node*.
A node tries, in this order:

1. **the object**, pickled and unpickled again at the sender: it must come back with the same type and text;
2. **its pieces**: class, `args` and attributes, each by itself, put together without calling the constructor of the
   class (which may want other arguments than `args`, or open a connection). Pieces that cannot travel are left out; in
   `args` an `Absent` with the same repr takes their place. A note at the end of the exception and of its text says so;
3. **a stand-in**, `RemoteException`, where not even the class can be had, here or at the receiver.

So `except MyError` works wherever the class exists, and neither a `__reduce__` nor a `__str__` that raises, nor an
exception that refers to itself, can keep an error from its caller. Everything that users can override is called here
with BaseException caught, for that reason. Attributes that two exceptions of a chain share arrive as two copies.
"""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, Final

from monarch.core import codec
from monarch.errors import ActorError, RemoteException
from monarch.transports.base import Buffer

_PACKAGE: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OUR_FRAMES: Final = (os.path.join(_PACKAGE, "core", ""), os.path.join(_PACKAGE, "mesh", ""))
_LOOP_FRAMES: Final = os.path.join(os.path.dirname(os.__file__), "asyncio", "")
_MAX_NODES: Final = 1000
"""Longer chains (an exception in a loop that keeps its context) go on as text only, and say so."""

_OBJECT, _PIECES, _STAND_IN = range(3)


class Absent:
    """Takes the place of a part of an exception that could not be sent, and looks like it."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def encode_exception(exc: BaseException) -> list[Buffer]:
    """`exc` as parts. Never raises."""
    name, text, formatted = type_name(exc), text_of(exc), format_remote(exc)
    try:
        nodes = _nodes(exc)
        notes = list(dict.fromkeys(node["note"] for node in nodes if node["note"]))
        part = pickle.dumps((name, text, _with_notes(formatted, notes), nodes), 5)
    except BaseException as failure:
        note = f"the original object could not be sent: {type(failure).__name__}"
        part = pickle.dumps((name, text, _with_notes(formatted, [note]), [_stand_in(name, text, note)]), 5)
    return [part]


def summary_of_sent(parts: Sequence[Buffer]) -> str:
    """`summary` of an exception that was sent. Never raises, and runs nothing of the user's."""
    try:
        name, text, _, _ = pickle.loads(parts[0])
        return f"{name}: {text}" if text else str(name)
    except BaseException as failure:
        return f"an exception that cannot be read: {type(failure).__name__}"


def decode_exception(parts: Sequence[Buffer]) -> tuple[BaseException, str]:
    """The exception, or a `RemoteException` in its place, and the traceback as rendered where it was raised. Never
    raises. Takes ownership of `parts`."""
    try:
        name, text, formatted, nodes = pickle.loads(parts[0])
        if not all(isinstance(plain, str) for plain in (name, text, formatted)):
            raise TypeError("not an exception")
    except BaseException as failure:
        text = f"an exception arrived that cannot be read: {type(failure).__name__}: {text_of(failure)}"
        return RemoteException("unknown", text), text + "\n"
    try:
        return _assemble(nodes), formatted
    except BaseException as failure:
        return RemoteException(name, text, f"rebuilding it failed: {type(failure).__name__}"), formatted


def format_remote(exc: BaseException) -> str:
    """The traceback of `exc` with causes, contexts, groups and notes. Never raises.

    The frames of this library that lie below the user's endpoint are left out, unless there are no others.
    """
    try:
        rendered = traceback.TracebackException(
            type(exc), exc, exc.__traceback__, max_group_width=1000, max_group_depth=100
        )
        todo, seen = [rendered], set()
        while todo:
            one = todo.pop()
            if id(one) not in seen:
                seen.add(id(one))
                _strip(one.stack)
                todo += [e for e in (one.__cause__, one.__context__, *(one.exceptions or ())) if e is not None]
        return "".join(rendered.format())
    except BaseException:
        return _format_plain(exc)


def type_name(value: object) -> str:
    """Of an exception or another object, qualified, as tracebacks show it: without the module for builtins and
    `__main__`. Never raises."""
    return name_of_type(type(value))


def name_of_type(kind: type) -> str:
    """As `type_name` of one of that type."""
    try:
        module = kind.__module__
        return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"
    except BaseException:
        return "BaseException" if issubclass(kind, BaseException) else "object"


def text_of(exc: BaseException) -> str:
    """`str(exc)`, or a note in its place where that raises. Never raises, and cuts nothing off."""
    try:
        return str.__str__(str(exc))
    except BaseException as failure:
        return f"<the text cannot be had: __str__ raised {type(failure).__name__}>"


def summary(exc: BaseException) -> str:
    """`Type: text`, as the last line of a traceback has it. Never raises."""
    text = text_of(exc)
    return f"{type_name(exc)}: {text}" if text else type_name(exc)


# Text


def _with_notes(formatted: str, notes: list[str]) -> str:
    return formatted.rstrip() + "\n" + "".join(f"[{note}]\n" for note in notes) if notes else formatted


def _strip(stack: traceback.StackSummary) -> None:
    ours = 0
    for at, frame in enumerate(stack):
        if frame.filename.startswith(_OUR_FRAMES):
            ours = at + 1
        elif not frame.filename.startswith(_LOOP_FRAMES):  # asyncio counts only where our frames come after it
            break
    if ours < len(stack):
        del stack[:ours]


def _format_plain(exc: BaseException) -> str:
    """What can be said without touching anything of the exception that can be overridden."""
    lines = []
    try:
        frames = traceback.extract_tb(_plain(exc, "__traceback__"))
        lines = ["Traceback (most recent call last):\n", *frames.format()]
    except BaseException:
        pass
    return "".join(lines) + f"{summary(exc)}\n"


# Encoding


def _nodes(root: BaseException) -> list[dict[str, Any]]:
    """One node for each exception that can be reached, the root first. Links are numbers of nodes, or None."""
    order: list[BaseException] = [root]
    numbers: dict[int, int] = {id(root): 0}
    cut = False

    def number(exc: Any) -> int | None:
        nonlocal cut
        if exc is None:
            return None
        if id(exc) not in numbers:
            if len(order) >= _MAX_NODES:
                cut = True
                return None
            numbers[id(exc)] = len(order)
            order.append(exc)
        return numbers[id(exc)]

    nodes = []
    for exc in order:  # grows while we go
        links: dict[str, Any] = {
            "cause": number(_plain(exc, "__cause__")),
            "context": number(_plain(exc, "__context__")),
            "suppress": bool(_plain(exc, "__suppress_context__")),
            "members": None,
        }
        if issubclass(type(exc), BaseExceptionGroup):
            members = vars(BaseExceptionGroup)["exceptions"].__get__(exc)
            links["members"] = [number(member) for member in members]
        nodes.append(_node(exc) | links)
    if cut:
        nodes[0]["note"] = "; ".join(filter(None, (nodes[0]["note"], f"only {_MAX_NODES} linked exceptions were sent")))
    return nodes


def _plain(exc: BaseException, name: str) -> Any:
    """The field of BaseException itself, whatever the class overrides."""
    return vars(BaseException)[name].__get__(exc)


def _node(exc: BaseException) -> dict[str, Any]:
    name, text = type_name(exc), text_of(exc)
    try:
        return _made_node(exc, name, text)
    except BaseException as failure:
        return _stand_in(name, text, f"the original object could not be sent: {type(failure).__name__}")


def _made_node(exc: BaseException, name: str, text: str) -> dict[str, Any]:
    whole = None if issubclass(type(exc), BaseExceptionGroup) else _whole(exc, text)
    if whole is not None:
        return {"how": _OBJECT, "name": name, "text": text, "data": whole, "note": ""}
    kind = _packed(type(exc))
    if kind is None:
        return _stand_in(name, text, "the original object could not be sent: its class cannot be pickled")
    missing: list[str] = []
    data: dict[str, Any] = {
        "kind": kind,
        "args": [_piece(f"args[{at}]", value, missing) for at, value in enumerate(_args(exc))],
        "state": {},
        "message": str(vars(BaseExceptionGroup)["message"].__get__(exc))
        if issubclass(type(exc), BaseExceptionGroup)
        else "",
    }
    for attribute, value in _attributes(exc).items():
        piece, _ = _piece(attribute, value, missing)
        if piece is not None:
            data["state"][attribute] = piece
    note = ""
    if missing:
        note = f"the original {name} could not be sent whole; missing: {', '.join(missing)}"
    return {"how": _PIECES, "name": name, "text": text, "data": data, "note": note}


def _stand_in(name: str, text: str, note: str) -> dict[str, Any]:
    links = {"cause": None, "context": None, "suppress": False, "members": None}
    return {"how": _STAND_IN, "name": name, "text": text, "data": None, "note": note} | links


def _whole(exc: BaseException, text: str) -> list[Buffer] | None:
    """The object as parts, if it comes back from them with the same type and text."""
    parts = _packed(exc)
    if parts is None:
        return None
    try:
        copy = codec.decode(parts)
    except BaseException:
        return None
    return parts if type(copy) is type(exc) and text_of(copy) == text else None


def _packed(value: object) -> list[Buffer] | None:
    """Parts that unpickle, as bytes (they go into another pickle); None when `value` cannot be pickled."""
    try:
        return [bytes(part) for part in codec.encode(value, explain=False)]
    except BaseException:
        return None


def _piece(name: str, value: object, missing: list[str]) -> tuple[list[Buffer] | None, str]:
    """`value` as parts that have been tried, or None and its repr."""
    parts = _packed(value)
    if parts is not None:
        try:
            codec.decode(parts)
            return parts, ""
        except BaseException:
            pass
    missing.append(f"{name} ({type(value).__module__}.{type(value).__qualname__})")
    try:
        return None, str.__str__(repr(value))
    except BaseException:
        return None, f"<{type(value).__qualname__}>"


def _args(exc: BaseException) -> tuple[Any, ...]:
    if issubclass(type(exc), BaseExceptionGroup):
        return ()  # message and members; they travel by themselves
    try:
        args: tuple[Any, ...] = _plain(exc, "args")
        return args
    except BaseException:
        return ()


def _attributes(exc: BaseException) -> dict[str, Any]:
    """What the exception holds beside `args`: its `__dict__`, its slots, and the fields of builtin classes."""
    found: dict[str, Any] = {}
    for kind in type(exc).__mro__:
        if kind in (BaseException, BaseExceptionGroup, object):
            continue
        for name, slot in vars(kind).items():
            if isinstance(slot, (MemberDescriptorType, GetSetDescriptorType)) and not name.startswith("__"):
                try:
                    value = slot.__get__(exc)
                except BaseException:  # an empty slot
                    continue
                if value is not None:
                    found[name] = value
    with contextlib.suppress(BaseException):
        found.update(BaseException.__getattribute__(exc, "__dict__"))
    return {name: value for name, value in found.items() if isinstance(name, str)}


# Decoding


def _assemble(nodes: list[dict[str, Any]]) -> BaseException:
    built: list[BaseException | None] = [None] * len(nodes)

    def build(at: int) -> BaseException:
        done = built[at]
        if done is None:
            node = nodes[at]
            members = [build(m) for m in node["members"] if m is not None] if node["members"] is not None else None
            done = built[at] = _build(node, members)
        return done

    for at in reversed(range(len(nodes))):
        build(at)
    for exc, node in zip(built, nodes, strict=True):
        assert exc is not None
        if node["cause"] is not None:
            exc.__cause__ = built[node["cause"]]
        if node["context"] is not None:
            exc.__context__ = built[node["context"]]
        exc.__suppress_context__ = node["suppress"]
    assert built[0] is not None
    return built[0]


def _build(node: dict[str, Any], members: list[BaseException] | None) -> BaseException:
    try:
        if node["how"] == _OBJECT:
            exc = codec.decode(node["data"])
            if isinstance(exc, BaseException):
                return exc
        elif node["how"] == _PIECES:
            return _from_pieces(node["data"], members, node["note"])
        note = node["note"]
    except BaseException as failure:
        note = f"the original object could not be rebuilt: {type(failure).__name__}: {text_of(failure)}"
    return RemoteException(node["name"], node["text"], note)


def _from_pieces(data: dict[str, Any], members: list[BaseException] | None, note: str) -> BaseException:
    kind = codec.decode(data["kind"])
    args = tuple(Absent(text) if parts is None else _decoded(parts, "a part") for parts, text in data["args"])
    exc: BaseException
    if members is not None:
        exc = BaseExceptionGroup.__new__(kind, data["message"], members)
    else:
        # The constructor of the builtin base sets its fields from `args` (errno, code); the user's is not called.
        base: Any = next(c for c in kind.__mro__ if c.__module__ == "builtins")
        try:
            exc = base.__new__(kind, *args)
            base.__init__(exc, *args)
        except Exception:
            exc = BaseException.__new__(kind)
        BaseException.args.__set__(exc, args)  # type: ignore[attr-defined]
    for name, parts in data["state"].items():
        value = _decoded(parts, f"attribute {name}")
        if isinstance(value, Absent):
            continue
        slot = next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), None)
        try:
            if isinstance(slot, (MemberDescriptorType, GetSetDescriptorType)):
                slot.__set__(exc, value)
            else:
                BaseException.__getattribute__(exc, "__dict__")[name] = value
        except Exception:  # a read-only field of a builtin class; `args` has set it
            pass
    if note:
        exc.add_note(note)
    return exc


def _decoded(parts: list[Buffer], what: str) -> Any:
    try:
        return codec.decode(parts)
    except Exception as failure:
        return Absent(f"<{what} that cannot be unpickled here: {type(failure).__name__}>")


# Errors of ours that hold exceptions of users


def _reduce_actor_error(error: ActorError) -> tuple[Callable[..., ActorError], tuple[Any, ...]]:
    """`pickle`, `copy` and the codec all look into copyreg: an ActorError pickles whatever its exception is made of."""
    parts = [bytes(part) for part in encode_exception(error.exception)]
    return _actor_error, (parts, error.message, error.exception_formatted, getattr(error, "__notes__", None))


def _actor_error(parts: list[Buffer], message: str, formatted: str, notes: list[str] | None) -> ActorError:
    exception, _ = decode_exception(parts)
    error = ActorError(exception, message, formatted)
    for note in notes or ():
        error.add_note(note)
    return error


copyreg.pickle(ActorError, _reduce_actor_error)
