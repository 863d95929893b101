"""What meshes call. With it all of the package is loaded: the verbs of tensors, and endpoints that take some.

It is no part of the package's `__init__`: the actors of a process load modules of the package at the same time, each in
its thread, and one that waits for `__init__` must not have what that waits for.
"""

from monarch.mesh.tensor.collectives import rank_tensor as rank_tensor
from monarch.mesh.tensor.dispatch import activate as activate
from monarch.mesh.tensor.engine import engine_of as engine_of
from monarch.mesh.tensor.interop import rref as rref
