"""One-sided transfers: one actor hands out a reference to memory, others read and write it, and it computes on.

```python
from monarch.rdma import RDMABuffer

buffer = RDMABuffer(weights)           # in the actor that has them; send `buffer` to others
buffer.read_into(my_weights).get()     # anywhere
```
"""

from __future__ import annotations

from monarch.errors import BufferDropped, TransferError
from monarch.mesh.rdma import (
    RDMAAction,
    RDMABuffer,
    RDMAReadTransferWarning,
    RDMATcpFallbackWarning,
    RDMAWriteTransferWarning,
    empty,
    get_rdma_backend,
    is_ibverbs_available,
    is_rdma_available,
)

__all__ = [
    "BufferDropped",
    "RDMAAction",
    "RDMABuffer",
    "RDMAReadTransferWarning",
    "RDMATcpFallbackWarning",
    "RDMAWriteTransferWarning",
    "TransferError",
    "empty",
    "get_rdma_backend",
    "is_ibverbs_available",
    "is_rdma_available",
]
