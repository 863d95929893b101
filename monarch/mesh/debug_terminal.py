"""`monarch debug`: a terminal of a running driver's debugger (`debugger`, which knows the commands)."""

from __future__ import annotations

import os
import sys
from collections import deque
from typing import Any

from monarch.launch import linux
from monarch.mesh.breakpoints import PDB_PROMPT
from monarch.mesh.console import Conversation, converse, found
from monarch.mesh.debugger import PROMPT


def run(pid: int | None) -> int:
    """Talk to the driver with that pid, or to the only one there is. Returns the exit status."""
    drivers = [driver for driver in found() if pid in (None, driver.pid) and _is_mine(driver.pid)]
    if pid is None and len(drivers) > 1:
        names = "".join(f"\n  --pid {driver.pid}  {linux.title(driver.pid)}" for driver in drivers)
        print(f"several programs run; choose one:{names}", file=sys.stderr)
        return 1
    conversation = converse(drivers[0]) if drivers else None
    if conversation is None:
        which = "" if pid is None else f" with a driver of pid {pid}"
        print(f"no monarch program of yours{which} runs on this machine", file=sys.stderr)
        return 1
    _talk(conversation)
    return 0


def _is_mine(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


def _talk(conversation: Conversation) -> None:
    keyboard = _Keyboard(conversation)

    def hear(facts: dict[str, Any]) -> None:
        sys.stdout.write(facts["text"])
        sys.stdout.flush()
        if facts["text"].endswith((PROMPT, PDB_PROMPT)):
            keyboard.prompted()

    conversation.run(hear, keyboard)


class _Keyboard:
    """Standard input. Somebody who types is heard at once; what comes from a file or a pipe waits for a prompt, line by
    line, so that each is for what has asked for it."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self._typed = os.isatty(0)
        self._prompts = 0
        self._unfinished = b""
        self._lines: deque[str | None] = deque()  # None: the end of input
        self._ended = False

    def fileno(self) -> int:
        """To be polled while there is nothing to say; -1 when not."""
        return -1 if self._lines or self._ended else 0

    def read(self) -> None:
        """Take in what has been typed."""
        data = os.read(0, 1 << 16)
        *whole, self._unfinished = (self._unfinished + data).split(b"\n")
        if not data and self._unfinished:
            whole, self._unfinished = [self._unfinished], b""
        self._lines.extend(line.decode(errors="replace") for line in whole)
        if not data:
            self._lines.append(None)
            self._ended = not self._typed
        self._pass_on()

    def prompted(self) -> None:
        """Somebody waits for a line."""
        self._prompts += 1
        self._pass_on()

    def _pass_on(self) -> None:
        while self._lines and (self._typed or self._prompts):
            self._prompts = max(self._prompts - 1, 0)
            line = self._lines[0]
            if line is not None or not self._ended:  # after the end of a file comes its end, for ever
                self._lines.popleft()
            self._conversation.say({"line": line})
