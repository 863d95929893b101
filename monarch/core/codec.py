"""Objects to parts and back: the one place that pickles.

It decides what travels by value (lambdas, local classes, functions and classes of `__main__`: cloudpickle's rules) and
what by reference (everything that can be imported), which buffers leave the pickle, and who owns them:

- An encoded message is `[pickle, *buffers]`. Buffers of `OUT_OF_BAND_BYTES` and more leave the pickle: arrays and
  tensors wherever they are (`monarch.core.tensors`), and `bytes`, `bytearray` and `memoryview` where they are seen in
  the arguments or in a few levels of plain tuples, lists and dicts. Elsewhere these stay in the pickle, which costs a
  copy on either side. A `memoryview` arrives as `bytes`, as with cloudpickle.
- The encoder hands out *private snapshots*: memory that the sender could still change is copied, once, into memory from
  `allocate`; only `bytes`, which nobody can change, are passed on uncopied. So the sender may go on writing at once.
  Of what the sender gives up with the message (`encode_last`), memory that was lent to it is passed on, too.
- `decode` takes ownership of the parts: arrays and tensors are built over them, writable and uncopied. `bytes` and
  `bytearray` own their memory, so they are a copy, unless the part is of their own kind. A part that is `bytes` is
  copied where the result must be writable. Who decodes parts more than once gives each a copy (`private_parts`).

It leaves to others what the buffers travel in, and how objects of the library (references, ports) reduce themselves.
"""

from __future__ import annotations

import copyreg
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from types import CodeType, CoroutineType, FunctionType
from typing import Any, Final

import cloudpickle
from cloudpickle import cloudpickle as _cloudpickle

from monarch.core import settings, tensors
from monarch.core.tensors import HOLE, OUT_OF_BAND_BYTES, Outbox, Reducer
from monarch.transports import memory
from monarch.transports.base import Buffer, Missing
from monarch.transports.memory import Claim, claim

Allocate = Callable[[int], memoryview]
"""Gives `n` writable bytes that nobody else uses; `encode` fills them. May be memory that a transport shares."""

_ATOMS: Final = frozenset((type(None), bool, int, float, str))
_BULK: Final = frozenset((bytes, bytearray, memoryview))
_MAX_DEPTH: Final = 4
_MAX_ITEMS: Final = 64
_SIMPLE, _OTHER, _LARGE = range(3)
_LIMIT: Final = "codec_max_frame_length"


MemoryFor = Callable[[Sequence[int]], Allocate | None]
"""Where the large buffers of a message to these processes are best put; None: anywhere. Asked only where there may be
some."""


def _anywhere(*_: object) -> None:
    pass


def encode(
    obj: object, memory_for: MemoryFor = _anywhere, keys: Sequence[int] = (), explain: bool = True
) -> list[Buffer]:
    """`obj` as `[pickle, *buffers]`. The parts are private to the caller, and stay right when `obj` changes later.

    Raises:
        Exception: what pickling raised, of unchanged type, with a note that names the place inside `obj` (`explain`).
    """
    return _within_limit(_encoded(obj, memory_for, keys, explain))


def encode_last(box: list[Any], memory_for: MemoryFor = _anywhere, keys: Sequence[int] = ()) -> list[Buffer]:
    """As `encode`, of the only item of `box`, which is taken out: what nobody here needs any more. Memory that was lent
    to this process, and that nothing else shows, is passed on as it is, which costs no copy and no memory."""
    if type(box[0]) in _ATOMS:
        parts: list[Buffer] = [pickle.dumps(box.pop(), 5)]
        return _within_limit(parts) if settings.get(_LIMIT) else parts
    claims: list[tuple[int, Claim]] = []
    parts = _encoded(box.pop(), memory_for, keys, True, claims)  # in no variable: from here on nothing of ours holds it
    for at, claimed in claims:
        parts[at] = claimed.settle() or memory.copied(claimed.memory, memory_for(keys) or memory.allocate)
    return _within_limit(parts)


def _encoded(
    obj: object,
    memory_for: MemoryFor,
    keys: Sequence[int],
    explain: bool,
    claims: list[tuple[int, Claim]] | None = None,
) -> list[Buffer]:
    """`claims`: see `_dump`."""
    verdict = _SIMPLE if type(obj) in _ATOMS else _survey(obj, _MAX_DEPTH)
    if verdict == _SIMPLE:
        return [pickle.dumps(obj, 5)]
    try:
        return _dump(obj, memory_for(keys), verdict, claims)
    except Exception as error:
        if explain:
            _blame(error, [("the value", obj)])
        raise


def encode_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    memory_for: MemoryFor = _anywhere,
    keys: Sequence[int] = (),
    names: Sequence[str] = (),
) -> list[Buffer]:
    """As `encode((args, kwargs))`, for the arguments of a call. `names`, of positional parameters, are for the note.

    Raises:
        Exception: what pickling raised, of unchanged type, with a note such as "argument 2 ('x')['k'][0] is a
            _thread.lock, which cannot be pickled".
    """
    if not kwargs:
        for value in args:  # a look at all types at once takes 0.1 us more
            if type(value) not in _ATOMS:
                break
        else:
            plain: list[Buffer] = [pickle.dumps((args, kwargs), 5)]  # 0.6 us for three of them
            return _within_limit(plain) if settings.get(_LIMIT) else plain
    call = (args, kwargs)
    verdict = _survey(args, _MAX_DEPTH)
    if kwargs and verdict != _LARGE:
        verdict = max(verdict, _survey(kwargs, _MAX_DEPTH))
    if verdict == _SIMPLE:
        return _within_limit([pickle.dumps(call, 5)])
    try:
        parts = _dump(call, memory_for(keys), verdict)
    except Exception as error:
        named = [(f"argument {i}" + (f" ({n!r})" if n else ""), a) for i, n, a in _numbered(args, names)]
        _blame(error, [*named, *((f"argument {name!r}", value) for name, value in kwargs.items())])
        raise
    return _within_limit(parts)


def _within_limit(parts: list[Buffer]) -> list[Buffer]:
    """Raises: ValueError when the setting `codec_max_frame_length` is lower than what the parts have together."""
    limit = settings.get(_LIMIT)
    if limit and (size := sum(map(len, parts))) > limit:
        raise ValueError(
            f"rejecting oversize frame: len={size} > max={limit}; the limit is the setting codec_max_frame_length "
            "(HYPERACTOR_CODEC_MAX_FRAME_LENGTH), and 0 lifts it"
        )
    return parts


def decode(parts: Sequence[Buffer]) -> Any:
    """What `encode` was given. Takes ownership of `parts`: arrays and tensors are built over them, not copied.

    Raises:
        MemoryError: there was none, or no descriptor of any, for a part of the message when it arrived.
        Exception: whatever unpickling raises; the code of users runs here.
    """
    if len(parts) == 1 and type(parts[0]) is not Missing:
        return pickle.loads(parts[0])
    if Missing in map(type, parts):
        lacking = next(part.lacking for part in parts if isinstance(part, Missing))
        raise MemoryError(f"{lacking} for the {sum(map(_size_of, parts))} bytes of a message")
    return _Unpickler(parts).load()


def _size_of(part: Buffer) -> int:
    return part.size_bytes if isinstance(part, Missing) else len(part)


def private_parts(parts: Sequence[Buffer]) -> list[Buffer]:
    """The same message for one more receiver in this process: what `decode` would hand out writable is copied."""
    return [part if type(part) is bytes else memory.new_bytearray(part) for part in parts]


# What is simple, what is large


def _survey(value: object, depth: int) -> int:
    """Looks a few levels into plain containers: only plain values, or other things too, or large bytes among them?"""
    kind = type(value)
    if kind in _ATOMS:
        return _SIMPLE
    items: Any
    if kind is tuple or kind is list:
        items = value
    elif kind is dict:
        if not _ATOMS.issuperset(map(type, value)):  # type: ignore[call-overload]
            return _OTHER
        items = value.values()  # type: ignore[attr-defined]
    elif kind in _BULK:
        return _bulk(value)
    else:
        return _OTHER
    if len(items) > _MAX_ITEMS:
        # The pickler is as fast as a look at each item; a sample finds the lists of large bytes.
        return max([_OTHER, *(_bulk(item) for item in islice(items, _MAX_ITEMS) if type(item) in _BULK)])
    verdict = _SIMPLE
    for item in items:
        if type(item) in _ATOMS:
            continue
        found = _survey(item, depth - 1) if depth else _OTHER
        if found > verdict:
            if found == _LARGE:
                return found
            verdict = found
    return verdict


def _bulk(value: Any) -> int:
    size = value.nbytes if type(value) is memoryview else len(value)
    if size >= OUT_OF_BAND_BYTES:
        return _LARGE
    return _OTHER if type(value) is memoryview else _SIMPLE


# Encoding


def _dump(
    obj: object, allocate: Allocate | None, verdict: int, claims: list[tuple[int, Claim]] | None = None
) -> list[Buffer]:
    """`claims`: gets those on parts that are not there yet, by their places; without it, there are none."""
    tensors.install_reducers(_reducers)
    outbox = _Outbox(allocate or memory.allocate, claims)
    file = io.BytesIO()
    kind = _BulkPickler if verdict == _LARGE else _Pickler
    pickler = kind(file, outbox)
    try:
        pickler.dump(obj)
    except pickle.PicklingError:
        if not _by_reference:
            raise
        _by_reference.clear()  # a module may have been reloaded since: its old classes go by value now
        if claims:
            claims.clear()
        outbox = _Outbox(allocate or memory.allocate, claims)
        file = io.BytesIO()
        kind(file, outbox).dump(obj)
    return [file.getvalue(), *outbox.parts, *reversed(outbox.bulk)]


class _Outbox(Outbox):
    """Collects the buffers of one message: `parts` in the order in which the pickle asks for them, and `bulk` (bytes
    and bytearrays) which it names by number, so that they come last, backwards."""

    __slots__ = ("allocate", "bulk", "claims", "parts", "places")

    def __init__(self, allocate: Allocate, claims: list[tuple[int, Claim]] | None) -> None:
        self.allocate, self.claims = allocate, claims
        self.parts: list[Buffer] = []
        self.bulk: list[Buffer] = []
        self.places: dict[int, tuple[int, bool, object]] = {}

    def room(self, size: int) -> memoryview:
        room = self.allocate(size)
        self.parts.append(room)
        return room

    def claim(self, address: int, size: int) -> bool:
        claimed = claim(address, size) if self.claims is not None else None
        if claimed is None:
            return False
        self.parts.append(b"")  # it goes there
        self.claims.append((len(self.parts), claimed))  # type: ignore[union-attr]
        return True

    def take(self, buffer: pickle.PickleBuffer) -> bool:
        """The callback of the pickler. Our own reducers have left their snapshot in `parts` already; the buffers of
        others (subclasses of arrays, for instance) are still the sender's memory."""
        if buffer is not HOLE:
            view = buffer.raw()
            if view.nbytes < OUT_OF_BAND_BYTES:
                return True
            if type(view.obj) is bytes and view.nbytes == len(view.obj):
                self.parts.append(view.obj)
            else:
                memory.copy(self.room(view.nbytes), view)
        return False


_reducers: dict[type, Reducer] = {}
_by_reference: dict[int, object] = {}
"""Classes and functions that were found importable, by id. They are kept alive; their modules do that anyway. Saves
cloudpickle's look-up of 1 us for each class or function in each message."""
_SPAWNED_MAIN: Final = "__mp_main__"
"""What `multiprocessing` calls the main script in a process that it has spawned: nobody else can import that either."""
_by_value_modules: Any = getattr(_cloudpickle, "_PICKLE_BY_VALUE_MODULES", (None,))


def register(kind: type, reducer: Reducer) -> None:
    """Reduce objects of exactly this class by `reducer(obj, outbox)`; `NotImplemented` means pickle's own way."""
    _reducers[kind] = reducer


def _reduce_code(code: CodeType, outbox: Outbox) -> Any:
    """Code that travels by value keeps the name of its file, which cloudpickle drops for the sake of equal pickles: a
    traceback without it helps nobody. Where that is no file but a cell of a notebook, say, its lines come along."""
    make, arguments, *rest = _cloudpickle._code_reduce(code)
    named = tuple(
        code.co_filename if type(argument) is str and argument == _NO_FILE else argument for argument in arguments
    )
    if not os.path.exists(code.co_filename) and (lines := linecache.getlines(code.co_filename)):
        return (_code_with_lines, (code.co_filename, lines, make, *named), *rest)
    return (make, named, *rest)


def _code_with_lines(file: str, lines: list[str], make: Callable[..., CodeType], *arguments: Any) -> CodeType:
    if linecache.getlines(file) != lines:
        linecache.cache[file] = sum(map(len, lines)), None, lines, file
    return make(*arguments)


_NO_FILE: Final = "<dynamic-code>"
_reducers[CodeType] = _reduce_code


class _DispatchTable(dict[type, Any]):
    """A plain dict is looked up in C; cloudpickle's ChainMap costs 1 us for each object of a class."""

    def __missing__(self, kind: type) -> Any:
        return copyreg.dispatch_table[kind]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined, unused-ignore]
    dispatch_table = _DispatchTable(cloudpickle.Pickler._dispatch_table)

    def __init__(self, file: io.BytesIO, outbox: _Outbox) -> None:
        super().__init__(file, 5, buffer_callback=outbox.take)
        self.outbox = outbox

    dump = pickle.Pickler.dump  # cloudpickle's turns RecursionError into another error

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        reducer = _reducers.get(kind)
        if reducer is not None:
            return reducer(obj, self.outbox)
        if kind is not FunctionType and not issubclass(kind, type):
            is_tensor = tensors.subclassed and issubclass(kind, tensors.subclassed[0])
            return tensors.reduce_subclass(obj, self.outbox) if is_tensor else NotImplemented
        is_unseen = _SPAWNED_MAIN in sys.modules and _SPAWNED_MAIN not in _by_value_modules
        if is_unseen and getattr(obj, "__module__", None) == _SPAWNED_MAIN:
            cloudpickle.register_pickle_by_value(sys.modules[_SPAWNED_MAIN])
        if _by_reference.get(id(obj)) is obj and not _by_value_modules:
            return NotImplemented
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and not _by_value_modules:
            _by_reference[id(obj)] = obj
        return reduced


class _BulkPickler(_Pickler):
    """Takes large bytes out of the pickle, at any depth. Pickle offers no other hook for exact `bytes`; this one is
    called for every object (0.1 us), so it is used only where `_survey` saw that it pays (64 KiB cost 4 us to copy)."""

    def persistent_id(self, obj: Any) -> tuple[int, bool] | None:
        kind = type(obj)
        if kind not in _BULK or _bulk(obj) != _LARGE:
            return None
        outbox = self.outbox
        place = outbox.places.get(id(obj))
        if place is None:
            part: Buffer
            if kind is bytes and outbox.allocate is memory.allocate:
                part = obj
            elif kind is memoryview and type(obj.obj) is bytes and obj.c_contiguous:
                part = obj.cast("B")
            elif kind is bytearray and outbox.allocate is memory.allocate:
                part = memory.new_bytearray(obj)  # arrives as itself where no transport is in between
            else:
                view = memoryview(obj)
                part = outbox.allocate(view.nbytes)
                # Of `bytes` the object itself, and not a view: such a copy lets other threads run.
                memory.copy(part, obj if kind is bytes else view.cast("B") if view.c_contiguous else view.tobytes())
            place = outbox.places[id(obj)] = len(outbox.bulk), kind is bytearray, obj
            outbox.bulk.append(part)
        return place[:2]


# Decoding


class _Unpickler(pickle.Unpickler):
    def __init__(self, parts: Sequence[Buffer]) -> None:
        super().__init__(io.BytesIO(parts[0]), buffers=_writable(parts[1:]))
        self._parts = parts
        self._loaded: dict[int, bytes | bytearray] = {}

    def persistent_load(self, pid: tuple[int, bool]) -> bytes | bytearray:
        at, mutable = pid
        loaded = self._loaded.get(at)
        if loaded is None:
            part = self._parts[-1 - at]
            kind = bytearray if mutable else bytes
            make = memory.new_bytearray if mutable else memory.new_bytes
            loaded = self._loaded[at] = part if type(part) is kind else make(part)
        return loaded


def _writable(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    for part in parts:
        is_fixed = type(part) is bytes or (type(part) is memoryview and part.readonly)
        yield memory.new_bytearray(part) if is_fixed else part


# Who is to blame


def _numbered(args: Iterable[Any], names: Sequence[str]) -> Iterator[tuple[int, str, Any]]:
    for at, value in enumerate(args):
        yield at + 1, names[at] if at < len(names) else "", value


def _blame(error: Exception, named: list[tuple[str, Any]]) -> None:
    """Add a note to `error` that names the innermost value that cannot be pickled. Pickles the values a few times."""
    try:
        path = _culprit(named, 16)
        if path is not None:
            hint = "; is an `await` missing?" if isinstance(path[1], CoroutineType) else ""
            error.add_note(f"{path[0]} is a {_type_name(type(path[1]))}, which cannot be pickled{hint}")
    except Exception:  # the note is a courtesy: the error itself matters more
        pass


def _culprit(named: Iterable[tuple[str, Any]], depth: int) -> tuple[str, Any] | None:
    for path, value in named:
        if type(value) in _ATOMS or type(value) in _BULK:
            continue
        if type(value) in _reducers and not getattr(value.dtype, "hasobject", False):
            continue  # would copy all its memory
        try:
            _dump(value, None, _OTHER)
        except Exception:
            return (_culprit(_children(path, value), depth - 1) if depth else None) or (path, value)
    return None


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (tuple, list)):
        yield from ((f"{path}[{at}]", item) for at, item in enumerate(value))
    elif isinstance(value, dict):
        yield from ((f"{path}[{_short(key)}]", item) for key, item in value.items())
        yield from ((f"key {_short(key)} of {path}", key) for key in value)
    elif isinstance(value, (set, frozenset)):
        yield from ((f"an item of {path}", item) for item in value)
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
            yield f"variable {name!r} of {path}", cell.cell_contents
        for name in value.__code__.co_names:
            if name in value.__globals__:
                yield f"global {name!r} of {path}", value.__globals__[name]
    elif not isinstance(value, type) and "__getstate__" not in vars(type(value)) and hasattr(value, "__dict__"):
        yield from ((f"{path}.{name}", item) for name, item in vars(value).items())


def _short(key: object) -> str:
    text = repr(key)
    return text if len(text) <= 80 else text[:77] + "..."


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
