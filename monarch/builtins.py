"""Remote functions that every training script needs: logging, and the state of random numbers of the workers.

```python no-run
with procs.activate():
    set_manual_seed_remote(7)
```
"""

from __future__ import annotations

from monarch.mesh.tensor.builtins import (
    get_rng_state_remote,
    log_remote,
    same_random_numbers,
    set_logging_level_remote,
    set_manual_seed_remote,
    set_rng_state_remote,
)

__all__ = [
    "get_rng_state_remote",
    "log_remote",
    "same_random_numbers",
    "set_logging_level_remote",
    "set_manual_seed_remote",
    "set_rng_state_remote",
]
