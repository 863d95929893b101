"""What happens when something dies, and who sees to it.

```python no-run
from monarch.supervision import Child, Supervisor
```
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

# The actor itself is part of the layer above, which imports this package.
_PUBLIC: Final = {
    "Child": "monarch.mesh.supervisor",
    "ChildStatus": "monarch.mesh.supervisor",
    "Restart": "monarch.supervision.policy",
    "Strategy": "monarch.supervision.policy",
    "Supervisor": "monarch.mesh.supervisor",
}

__all__ = ["Child", "ChildStatus", "Restart", "Strategy", "Supervisor"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        found = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
