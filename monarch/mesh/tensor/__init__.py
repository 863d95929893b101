"""Sharded tensors: ordinary torch code, run on every process of a mesh. The only package that needs torch.

The *controller* (the thread that activated a mesh) runs torch under a dispatch mode. A distributed tensor is a handle
there: shape, dtype and a number. Each operator is turned into a small *command*, and commands go in batches, in order,
to a *worker* actor on each process, which holds the shards by their numbers. Nothing waits until a value is fetched.

| module | decides |
|---|---|
| `metadata`, `propagation` | what shape and dtype the results of an operator have; cached by operator and metadata |
| `handle` | what a distributed tensor is on the controller, and when its shards are freed |
| `dispatch`, `usage` | which operators go to the mesh; which uses of tensors are wrong |
| `lane` | batching, and how far the controller may run ahead |
| `engine` | numbering, what workers must know, and what becomes of failures |
| `commands` | the words that controller and workers have in common |
| `worker`, `slots` | running commands; values that threads and processes hand over |
| `groups`, `direct` | collectives: over torch.distributed; within a host |
| `rendezvous`, `buffers` | how the members of a group find each other; memory for what they reduce |
| `remote`, `fetch`, `collectives`, `streams`, `graphs`, `gradients`, `opaque`, `builtins` | what users call |
| `interop` | tensors as arguments and results of actors' endpoints |
| `entry` | what meshes call |
"""

try:
    import torch as torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "distributed tensors need torch, which is not installed: pip install 'monarch-actors[torch]'", name="torch"
    ) from None
