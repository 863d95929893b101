"""Faults on demand on in-process links, for tests of everything above the transports.

```
faults = Faults(link, seed=7)
faults.hold()          # what `link` sends stays on its way ...
faults.reorder()       # ... is shuffled there, the same way for the same seed ...
faults.release()       # ... and arrives
faults.slow(1)         # one frame on its way at a time: the sender is pushed back
faults.cut()           # both ends severed, what is on its way is lost
```

All but `cut` act on one direction: on what the given end sends.
"""

from __future__ import annotations

from collections import deque
from random import Random

from monarch.errors import LinkSevered
from monarch.transports.inproc import QUEUE_FRAMES, InprocLink


class Faults:
    """Disturbs one in-process link. Deterministic: nothing here depends on time."""

    def __init__(self, link: InprocLink, seed: int = 0) -> None:
        self._link = link
        self._way = link.outgoing
        self._random = Random(seed)

    @property
    def held_count(self) -> int:
        """Frames on their way."""
        with self._way.lock:
            return len(self._way.frames)

    def hold(self) -> None:
        """Nothing arrives until `release`, not even the end of the link."""
        with self._way.lock:
            self._way.is_held = True

    def release(self, frames: int | None = None) -> None:
        """Let everything arrive. With `frames`, only the oldest so many: the rest is lost, and the link with it."""
        with self._way.lock:
            way = self._way
            way.is_held = False
            if frames is not None:
                way.frames = deque(list(way.frames)[:frames])
                self._sever()
            way.wake()

    def slow(self, max_frames: int | None) -> None:
        """At most so many frames on their way; the sender is pushed back. None: as before."""
        with self._way.lock:
            self._way.max_frames = QUEUE_FRAMES if max_frames is None else max_frames
            self._way.wake()

    def reorder(self) -> None:
        """Shuffle the frames on their way."""
        with self._way.lock:
            frames = list(self._way.frames)
            self._random.shuffle(frames)
            self._way.frames = deque(frames)

    def cut(self) -> None:
        """Break the link: both ends see it severed, and frames on their way are lost."""
        with self._way.lock:
            for way in (self._link.outgoing, self._link.incoming):
                way.frames.clear()
                way.is_held = False
            self._sever()

    def _sever(self) -> None:
        for way in (self._link.outgoing, self._link.incoming):
            way.end = LinkSevered
            way.wake()
