"""Many at once, by named dimensions: hosts, processes, actors, and the endpoints that are called on them."""

from monarch.mesh import client as client  # without it, `context()` could not make one
