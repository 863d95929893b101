"""The debugger's desk in the client's process: actors reach it by messages, people by `monarch debug`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from monarch.core import settings
from monarch.core.proc import Proc
from monarch.mesh.actor import Actor
from monarch.mesh.console import Conversation
from monarch.mesh.context import client_context
from monarch.mesh.controllers import get_or_spawn_controller
from monarch.mesh.debugger import Desk
from monarch.mesh.endpoint import endpoint

if TYPE_CHECKING:
    from monarch.mesh.client import RootClient


def serve(runtime: Proc) -> Desk:
    """The desk of the client's process."""
    desk = Desk(
        lambda proc, id, line: runtime.tell(proc, "debug_input", id, line),
        _say,
        f"monarch debug --pid {os.getpid()}",
    )
    handlers: dict[str, Callable[..., None]] = {
        "debug_open": lambda envelope: runtime.answer(envelope, _refusal()),
        "debug_stopped": lambda _, waiter, place, text: desk.stopped(waiter, place, text),
        "debug_said": lambda _, id, text: desk.said(id, text),
        "debug_resumed": lambda _, id, over: desk.resumed(id, over),
    }
    runtime.handlers.update(handlers)
    runtime.on_proc_gone.append(lambda key, down: desk.proc_gone(key))
    return desk


def _refusal() -> str:
    """Why nobody could attach, or ""."""
    if not settings.get("breakpoints"):
        return "breakpoints are off, by the setting `breakpoints`"
    if not _client().console.is_open:
        return "the driver cannot be reached by `monarch debug`: it could not listen at a unix socket (see the log)"
    return ""


def attend(desk: Desk, conversation: Conversation) -> None:
    """Serve a terminal until it leaves."""
    terminal = desk.open(lambda text: conversation.say({"text": text}))

    def hear(facts: dict[str, Any]) -> None:
        if not terminal.line(facts["line"]):
            conversation.end()

    try:
        conversation.run(hear)
    finally:
        desk.close(terminal)


def _say(text: str) -> None:
    """On a thread of its own: whoever hears of breakpoints must not wait for a terminal."""

    def write() -> None:
        sys.stderr.write(f"monarch: {text}\n")
        sys.stderr.flush()

    threading.Thread(target=write, daemon=True).start()


class DebugController(Actor):
    """The desk, for programs."""

    @endpoint
    def list(self) -> list[dict[str, Any]]:
        """The actors that wait at a breakpoint: name, rank, function, file and line of each."""
        return [
            {"name": who.name, "rank": who.rank, "function": at.function, "file": at.file, "line": at.line}
            for who, at in _client().desk.waiting()
        ]

    @endpoint
    def cast(self, name: str, spec: str, command: str) -> int:
        """Send a command of pdb to those of a mesh whose ranks are meant; returns to how many."""
        return _client().desk.cast(None, name, spec, command)

    @endpoint
    def release(self) -> int:
        """Clear all breakpoints, and let all go on; returns how many waited."""
        return _client().desk.release()


def _client() -> RootClient:
    found: Any = client_context()
    client: RootClient = found.actor_instance
    return client


def debug_controller() -> DebugController:
    """The controller of the debugger. It lives in the client's process."""
    return get_or_spawn_controller("debug_controller", DebugController).get()
