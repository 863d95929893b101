"""For people's own tests: a fresh client for each, meshes of threads, faults on demand, a clock that is moved by hand.

```python no-run
from monarch.testing import fresh_client

with fresh_client() as client:  # the processes of its meshes are groups of threads in this one
    procs = this_host().spawn_procs({"gpus": 2})
    ...
```

With pytest, `monarch.testing.plugin` has fixtures of the same. See `docs/testing.md`.
"""

from __future__ import annotations

from monarch.testing.client import TestClient, UnexpectedFaults, fresh_client
from monarch.testing.clock import ManualClock
from monarch.testing.events import Recorder, wait_until_gone
from monarch.testing.links import LinkFaults

__all__ = [
    "LinkFaults",
    "ManualClock",
    "Recorder",
    "TestClient",
    "UnexpectedFaults",
    "fresh_client",
    "wait_until_gone",
]
