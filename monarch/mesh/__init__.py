"""Many at once, by named dimensions: hosts, processes, actors, and the endpoints that are called on them."""
