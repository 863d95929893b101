"""What both bindings spell alike: the objects of a device and of a queue pair, and their end, in the order that
libibverbs wants."""

from __future__ import annotations

import os
from typing import Any


class Device:
    """Half of an `adapter.OpenDevice`."""

    def __init__(self, context: Any, pd: Any, port: int) -> None:
        self.context, self.pd, self.port = context, pd, port

    def mtu(self) -> int:
        return int(self.context.query_port(self.port).active_mtu)

    def close(self) -> None:
        self.pd.close()
        self.context.close()


class Pair:
    """Half of an `adapter.QueuePair`: with its completion channel, whose descriptor never blocks, and one queue."""

    def __init__(self, channel: Any, fd: int, cq: Any, qp: Any) -> None:
        self.channel, self.cq, self.qp = channel, cq, qp
        self.number = int(qp.qp_num)
        self._fd = fd
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._fd

    def post_recv(self, receive: Any) -> None:
        self.qp.post_recv(receive)

    def arm(self) -> None:
        self.cq.req_notify()

    def close(self) -> None:
        for part in (self.qp, self.cq, self.channel):
            part.close()
