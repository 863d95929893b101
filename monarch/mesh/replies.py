"""The replies of a call: the sinks that collect what its members answer, one for each adverb.

The reply of a call is a value sent to a port that takes as many replies as the call has members. A sink completes the
futures of its call: with the values, which whoever looks decodes, or with what went wrong, and with whom.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from monarch.core import codec, exceptions, inquiries
from monarch.core.deadlock import Wait
from monarch.core.driver import Signal
from monarch.core.envelope import Envelope, Flag
from monarch.core.future import Future, Outcome, tell_unseen
from monarch.core.monitor import Down
from monarch.core.spin import cpus
from monarch.errors import ActorError, CallCancelled
from monarch.mesh import pending
from monarch.mesh.casting import tell_all
from monarch.mesh.context import Context
from monarch.mesh.members import Members
from monarch.mesh.value_mesh import ValueMesh
from monarch.supervision.failure import Fate

if TYPE_CHECKING:
    from monarch.core.proc import Proc

R = TypeVar("R")


def decode_value(envelope: Envelope, members: Members | None = None) -> Any:
    """The value of a PORT message, or raises the error that it carries. `members`: those that were called, if it is a
    reply. What unpickling raises is an error of the user's code: it keeps its type, and says where it comes from."""
    if envelope.flags & Flag.ERROR:
        error, formatted = exceptions.decode_exception(envelope.parts)
        if envelope.flags & Flag.RAW_ERROR:
            raise Outcome(error)
        text = "A remote actor call failed." if members is None else members.call_text(envelope.rank)
        raise ActorError(error, text, formatted)
    try:
        return codec.decode(envelope.parts)
    except Exception as error:
        what = "a value on a port" if members is None else f"the result of {members.endpoint_text(envelope.rank)}"
        with contextlib.suppress(Exception):
            error.add_note(f"{what} could not be rebuilt here")
        raise


def fate_of(bounce: Envelope) -> Fate:
    """What became of a message that came back."""
    if bounce.flags & Flag.BEGUN:
        return Fate.BEGUN
    return Fate.UNKNOWN if bounce.flags & Flag.UNSURE else Fate.UNSERVED


class Unattended:
    """The reply port of a call whose caller's program ends. Nobody waits any more; the first error is told."""

    def __init__(self, members: Members, told: bool = False) -> None:
        self._members = members
        self._told = told

    def deliver(self, envelope: Envelope) -> None:
        if envelope.flags & Flag.ERROR and not self._told:
            self._told = True
            tell_unseen(self._members.trouble(envelope))

    def bounced(self, envelope: Envelope, down: Down) -> None:
        pass

    def proc_gone(self, key: int, down: Down) -> None:
        pass


_SLOTS: Final = ("_members", "_runtime", "caller_wait", "chain", "number")


class CallSink:
    """What the reply port of a call stands for; the `Call` of its futures (see `core.future`). Where there is one for
    all its replies, it is that future itself."""

    __slots__ = tuple[str, ...]()  # a class may have one base with slots, which is `Future`: its own are in `_SLOTS`

    _members: Members
    _runtime: Proc
    caller_wait: Wait | None
    chain: bytes  # for the message
    number: int

    def _open(self, here: Context, members: Members) -> None:
        """To be called once it is ready for replies."""
        self._runtime = runtime = here.actor_instance.proc_runtime
        self._members = members
        caller = here._caller if here.endpoint else None
        self.chain = b"" if caller is None else caller.chain()
        self.caller_wait = None if caller is None else Wait(caller)
        self.number = number = runtime.new_port()
        runtime.ports[number] = self

    def _close(self) -> None:
        self._runtime.ports.pop(self.number, None)

    def unattended(self) -> Unattended | None:
        """What takes its place when the program ends; None where errors are results."""
        return Unattended(self._members)

    def _left(self) -> list[int]:
        """The ranks that have not answered."""
        raise NotImplementedError

    def _fail_all(self, error: Exception) -> bool:
        """Fail all futures that are pending; False when there was none left."""
        raise NotImplementedError

    def deliver(self, envelope: Envelope) -> None:
        raise NotImplementedError

    def bounced(self, envelope: Envelope, down: Down) -> None:
        raise NotImplementedError

    def proc_gone(self, key: int, down: Down) -> None:
        raise NotImplementedError

    def wait_of(self, future: Future[Any]) -> Wait | None:
        return self.caller_wait

    def new_signal(self) -> Signal:
        keys = self._members.keys
        return Signal(len(keys) <= cpus(), keys.count(self._runtime.key) == len(keys))

    def unanswered(self) -> list[tuple[int, int]]:
        """(process, number) of the actors that have not answered."""
        return [(self._members.keys[rank], self._members.number) for rank in self._left()]

    def wanted(self) -> str:
        """The endpoint that was called, for people."""
        left = self._left()
        members = self._members
        return members.endpoint_text(left[0]) if len(left) == 1 else f"{members.mesh_name}.{members.method}"

    def refuse(self, error: Exception) -> None:
        """Take the call back from those who have not answered, and fail with `error`."""
        left = self._left()
        self._close()
        self._fail_all(error)
        self._withdraw(left)

    def _trouble_of(self, reply: Envelope) -> Callable[[], str]:
        """For an error: what it says."""
        return partial(self._members.trouble, reply)

    def explain(self, limit_s: float) -> str:
        return pending.explain(self._runtime, self._members, self.number, self._left(), limit_s)

    def give_up(self) -> bool:
        members, left = self._members, self._left()
        self._close()
        what = f"the call {members.mesh_name}.{members.method}() was cancelled by its caller"
        if not self._fail_all(CallCancelled(what)):
            return False
        self._withdraw(left)
        return True

    def _withdraw(self, ranks: Sequence[int]) -> None:
        members = self._members
        procs = [proc for rank in ranks if (proc := members.procs[rank]) is not None]
        tell_all(self._runtime, procs, *inquiries.withdrawal(members.number, self.number))


class OneReply(Future[R], CallSink):
    """The reply of a single member, which has `rank` in the view."""

    __slots__ = (*_SLOTS, "_rank")

    def __init__(self, here: Context, members: Members, rank: int = 0) -> None:
        self._rank = rank
        self._begin(here.actor_instance.proc_runtime.driver, None, self)
        self._open(here, members)

    def _left(self) -> list[int]:
        return [self._rank]

    def _fail_all(self, error: Exception) -> bool:
        return self._fail(error)

    def deliver(self, envelope: Envelope) -> None:
        self._runtime.ports.pop(self.number, None)
        self._complete(envelope, self._trouble_of(envelope) if envelope.flags & Flag.ERROR else None)

    def _read(self, outcome: Envelope) -> R:
        value: R = decode_value(outcome, self._members)
        return value

    def bounced(self, envelope: Envelope, down: Down) -> None:
        self._close()
        self._fail(self._members.error(self._rank, down, fate_of(envelope)))

    def proc_gone(self, key: int, down: Down) -> None:
        if key == self._members.keys[self._rank]:
            self._close()
            self._fail(self._members.error(self._rank, down))


class MeshReply(Future[ValueMesh[R]], CallSink, Generic[R]):
    """The replies of all members. It is complete when all have answered, or one is gone; then it raises the error of
    the lowest rank."""

    __slots__ = (*_SLOTS, "_outcomes", "_size")

    def __init__(self, here: Context, members: Members) -> None:
        self._outcomes: dict[int, Any] = {}  # by rank: messages; of a `SettledReply` exceptions, too
        self._size = len(members.keys)
        self._begin(here.actor_instance.proc_runtime.driver, None, self)
        self._open(here, members)
        if not self._size:
            self._finish()

    def _left(self) -> list[int]:
        return [rank for rank in range(self._size) if rank not in self._outcomes]

    def _fail_all(self, error: Exception) -> bool:
        return self._fail(error)

    def deliver(self, envelope: Envelope) -> None:
        outcomes, rank = self._outcomes, envelope.rank
        # It is there before they are counted: of two threads the last sees all. Both may.
        if rank < self._size and outcomes.setdefault(rank, envelope) is envelope and len(outcomes) == self._size:
            self._finish()

    def bounced(self, envelope: Envelope, down: Down) -> None:
        self._gone(envelope.rank, self._members.error(envelope.rank, down, fate_of(envelope)))

    def proc_gone(self, key: int, down: Down) -> None:
        for rank, each in enumerate(self._members.keys):
            if each == key:
                self._gone(rank, self._members.error(rank, down))

    def _gone(self, rank: int, error: Exception) -> None:
        """A member has failed, whether it has answered or not."""
        self._close()
        self._fail(error)

    def _finish(self) -> None:
        self._close()
        self._complete(self._outcomes, self._trouble())

    def _complete(
        self, outcome: Any, trouble: Callable[[], str] | None = None, error: BaseException | None = None
    ) -> bool:
        is_first = super()._complete(outcome, trouble, error)
        self._outcomes = {}  # messages go once their values are read
        return is_first

    def _read(self, outcome: Mapping[int, Any]) -> ValueMesh[Any]:
        members, replies = self._members, [outcome[rank] for rank in sorted(outcome)]
        for reply in replies:
            if reply.flags & Flag.ERROR:
                decode_value(reply, members)
        return ValueMesh._lazy(members.region.extent, decode_value, replies, members)

    def _trouble(self) -> Callable[[], str] | None:
        for _, reply in sorted(self._outcomes.items()):
            if reply.flags & Flag.ERROR:
                return self._trouble_of(reply)
        return None

    def unattended(self) -> Unattended | None:
        trouble = self._trouble()
        if trouble is not None:
            tell_unseen(trouble())
        return Unattended(self._members, told=trouble is not None)


class FailFastReply(MeshReply[R]):
    """As MeshReply, and an error is not kept waiting for the answers of others."""

    __slots__ = ()

    def deliver(self, envelope: Envelope) -> None:
        if envelope.flags & Flag.ERROR:
            self._close()
            self._complete({envelope.rank: envelope}, self._trouble_of(envelope))
        else:
            super().deliver(envelope)


class SettledReply(MeshReply[R | BaseException]):
    """As MeshReply, with the failures of members, and the ends of those that are gone, as values."""

    __slots__ = ()

    def _gone(self, rank: int, error: Exception) -> None:
        if self._outcomes.setdefault(rank, error) is error and len(self._outcomes) == self._size:
            self._finish()

    def _trouble(self) -> None:
        return None

    def unattended(self) -> None:
        return None

    def _read(self, outcome: Mapping[int, Any]) -> ValueMesh[Any]:
        members, outcomes = self._members, [outcome[rank] for rank in sorted(outcome)]
        return ValueMesh._lazy(members.region.extent, _settled, outcomes, members)


def _settled(outcome: Envelope | Exception, members: Members) -> Any:
    if isinstance(outcome, Exception):
        return outcome
    try:
        return decode_value(outcome, members)
    except Outcome as raw:
        return raw.error
    except Exception as error:
        return error


class StreamReply(CallSink, Generic[R]):
    """The replies of a stream: the i-th future is the i-th reply to arrive; a member that is gone counts as one."""

    __slots__ = (*_SLOTS, "_answered", "_arrived", "_lock", "futures")

    def __init__(self, here: Context, members: Members) -> None:
        self._lock = threading.Lock()
        self._answered = [False] * len(members.keys)
        self._arrived = 0
        driver = here.actor_instance.proc_runtime.driver
        self.futures: list[Future[R]] = [Future._pending(driver, call=self) for _ in members.keys]
        self._open(here, members)

    def wait_of(self, future: Future[Any]) -> Wait | None:
        # The last one alone needs all members; which are those of an earlier one is not known.
        if self.caller_wait is None or any(future is each for each in self.futures[:-1]):
            return None
        return self.caller_wait

    def _left(self) -> list[int]:
        return [rank for rank, answered in enumerate(self._answered) if not answered]

    def _fail_all(self, error: Exception) -> bool:
        failed = [future._fail(error) for future in self.futures]
        return any(failed)

    def _next(self, rank: int) -> Future[R] | None:
        with self._lock:
            if rank >= len(self._answered) or self._answered[rank]:
                return None
            self._answered[rank] = True
            future = self.futures[self._arrived]
            self._arrived += 1
            if self._arrived == len(self.futures):
                self._close()
        return future

    def deliver(self, envelope: Envelope) -> None:
        future = self._next(envelope.rank)
        if future is not None:
            trouble = self._trouble_of(envelope) if envelope.flags & Flag.ERROR else None
            future._complete(partial(decode_value, envelope, self._members), trouble)

    def bounced(self, envelope: Envelope, down: Down) -> None:
        future = self._next(envelope.rank)
        if future is not None:
            future._fail(self._members.error(envelope.rank, down, fate_of(envelope)))

    def proc_gone(self, key: int, down: Down) -> None:
        for rank, each in enumerate(self._members.keys):
            if each == key:
                future = self._next(rank)
                if future is not None:
                    future._fail(self._members.error(rank, down))
