"""Settings of actors that are plain module attributes; known to users as `monarch.actor.config`."""

prefix_python_logs_with_actor = True
"""Whether a log record emitted inside an actor starts with `[actor=...] `."""
