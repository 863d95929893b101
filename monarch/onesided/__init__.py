"""One-sided transfers: bytes of one process into another's memory, without the other's Python taking part.

`local` says where memory of this process is, `ranges` which use of it is refused. `exports` is what this process lets
others use, and `neighbour` how another process of this host uses that directly. `transfers` decides which way one
goes, and each way is a module: `here` and `shared` (one host), `ibverbs`, `chunks` (over the link).
"""
