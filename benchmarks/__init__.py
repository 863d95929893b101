"""How fast monarch is on this machine, next to what the machine itself can do. `python -m benchmarks` runs all of it.

```
    runner ──a fresh process each──► measure ──► floor         the machine alone
       │                                └──────► workloads     monarch, over one transport
       ▼
    results ──► report (table, JSON), plot (PNG)
```

`figures` says what is measured, and with which figure of the floor it is compared; `steps` takes one call apart.
Nothing here asserts a time.
"""
