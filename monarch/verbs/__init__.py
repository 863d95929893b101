"""RDMA devices: which one to use, and queue pairs and registered memory on it, over libibverbs.

`devices` chooses device, port and GID. `adapter` says what is needed of a binding to libibverbs, and finds one;
there are two, `with_pyverbs` and `with_ibverbs`. `node` is this process on its device, with its `registrations`, whose
memory has `pins`.
`moves` has bytes moved over a queue pair, in pieces. Frames over queue pairs are `monarch.transports.ibverbs`.
"""
