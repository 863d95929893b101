"""Programs to read and run, from small to large: ping_pong, getting_started, dining_philosophers, search.

Each is a script of its own (`python examples/ping_pong.py`). They are installed as `monarch.examples`, so that
`monarch demo` finds the last one.
"""
