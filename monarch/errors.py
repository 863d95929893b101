"""Every error this library raises, and who is to blame for it.

```
MonarchError
├── TransportError            a connection or the machine
│   ├── LinkClosed              the peer said goodbye: on purpose, between frames
│   ├── LinkSevered             the connection broke
│   ├── NotViable               this transport cannot work here; says why
│   └── AuthenticationError     the peer does not know the job's secret
├── ProtocolError             the rules of the wire were broken
│   └── RemoteProtocolError     by the peer: drop the link
├── TransferError             a one-sided transfer failed
│   └── BufferDropped           its buffer has been dropped, or its actor has ended
├── ActorError                the code of an endpoint raised; the actor lives on
├── SupervisionError          the actor that was asked has failed or was stopped
├── DeadlockError             a call would wait for itself, through others: it was refused
├── CallCancelled             the caller gave the call up, with `Future.cancel`
├── MeshError                 a mesh has been stopped, is a mere reference, or has not what it was asked for
└── JobError                  a job cannot do what it was asked for, as it stands
```

Mistakes in arguments are Python's own errors: `UnknownDimension` is three of them.

Errors travel between processes: they hold plain fields only, and pickle.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import CancelledError
from typing import Any


class MonarchError(Exception):
    """Base of all errors of this library."""


class TransportError(MonarchError):
    """A connection, or the machine it runs over, is at fault."""


class LinkClosed(TransportError):
    """The peer ended the link on purpose; every frame sent before has been delivered."""


class LinkSevered(TransportError):
    """The link broke; frames in flight may or may not have arrived."""


class NotViable(TransportError):
    """A transport was asked for that cannot work on this machine."""


class AuthenticationError(TransportError):
    """The other side of a connection did not prove knowledge of the job's secret."""


class ProtocolError(MonarchError):
    """The rules of the wire were broken."""


class RemoteProtocolError(ProtocolError):
    """The peer broke the rules of the wire; its link is dropped."""


class TransferError(MonarchError, RuntimeError):
    """A one-sided transfer failed. The bytes that it was to write are undefined."""


class BufferDropped(TransferError):
    """The buffer of a transfer has been dropped, or its actor has ended."""


class ActorError(MonarchError):
    """An endpoint raised, and its actor lives on.

    Attributes:
        exception: what the endpoint raised. Where the object itself could not travel, a `RemoteException` that has its
            type name and text.
        exception_formatted: the traceback as rendered in the remote process, with causes and contexts.
        message: one line that says which call failed.
    """

    def __init__(
        self, exception: BaseException, message: str = "A remote actor call failed.", formatted: str | None = None
    ) -> None:
        if formatted is None:
            import traceback

            formatted = "".join(traceback.format_exception(exception))
        super().__init__(exception, message, formatted)
        self.exception = exception
        self.message = message
        self.exception_formatted = formatted

    # The remote traceback is part of the text, causes included. So `exception` is never set as `__cause__` too: a
    # printed ActorError would show it twice. How it pickles is in `core.exceptions`.

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.exception).__name__}, {self.message!r})"

    def __str__(self) -> str:
        return f"{self.message}\n Traceback of where the remote call failed (most recent call last):\n" + (
            self.exception_formatted
        )


class RemoteException(Exception):
    """Stands for a remote exception that could not be sent or rebuilt: its type name and text survive.

    Attributes:
        type_name: qualified name of the original class.
        text: `str()` of the original, or a note where that raised.
        note: why the object itself is not here.
    """

    def __init__(self, type_name: str, text: str, note: str = "") -> None:
        super().__init__(type_name, text, note)
        self.type_name, self.text, self.note = type_name, text, note

    def __str__(self) -> str:
        return f"{self.type_name}: {self.text}" + (f" ({self.note})" if self.note else "")


class SupervisionError(MonarchError, RuntimeError):
    """The actor that was asked has failed, has been stopped, or its process is gone.

    Attributes:
        message: what happened to which actor, rank and process.
        endpoint: the call that met it, as `actor.method`, or None.
        failure: the `MeshFailure` behind it, or None after a stop.
    """

    def __init__(self, message: str, endpoint: str | None = None, failure: Any = None) -> None:
        super().__init__(message, endpoint, failure)
        self.message = message
        self.endpoint = endpoint
        self.failure = failure

    def __str__(self) -> str:
        if self.endpoint is None:
            return self.message
        return f"Endpoint call {self.endpoint}() failed, {self.message}"


class DeadlockError(MonarchError, RuntimeError):
    """A call could never have been answered: it waits, through others, for the call that it comes from. It did not run.

    Attributes:
        cycle: the calls that wait for each other, `module.Class name{'gpus': 0/2}.endpoint`, from the busy actor on.
    """

    def __init__(self, message: str, cycle: tuple[str, ...] = ()) -> None:
        super().__init__(message, cycle)
        self.message = message
        self.cycle = cycle

    def __str__(self) -> str:
        return self.message


class CallCancelled(MonarchError, CancelledError):
    """Whoever looks at the future of a call that was cancelled gets this; a `concurrent.futures.CancelledError`, and
    not asyncio's, which would cancel the task that looks."""


class MeshError(MonarchError, RuntimeError):
    """A mesh was asked for what it cannot do, as it stands: it has been stopped or shut down, is a reference where the
    owner is meant, its hosts could not be attached to, or it is a supervisor without a child of that name."""


class JobError(MonarchError, RuntimeError):
    """A job was asked for what it cannot do, as it stands, or the scheduler behind it has refused."""


class UnknownDimension(KeyError, TypeError, ValueError):
    """A mesh was asked for a dimension that it does not have. Of all three kinds, as each is what some method of the
    public interface raises.

    Attributes:
        what: the mesh, for people.
        label: what was asked for.
        labels: the dimensions there are.
    """

    def __init__(self, what: str, label: object, labels: Collection[str]) -> None:
        self.what, self.label, self.labels = what, label, tuple(labels)
        super().__init__(what, label, self.labels)

    def __str__(self) -> str:
        return f"{self.what} has no dimension {self.label!r}; {it_has(self.labels, self.label)}"


def it_has(names: Collection[str], wanted: object) -> str:
    """For the error about a name that is not among `names`: those that are, and which may have been meant."""
    import difflib  # 1 ms

    close = difflib.get_close_matches(str(wanted), names, n=1)
    return f"it has {', '.join(names) or 'none'}" + "".join(f". Did you mean {name!r}?" for name in close)
