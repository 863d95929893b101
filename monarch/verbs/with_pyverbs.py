"""The adapter over rdma-core's own binding, pyverbs, in the versions that distributions have.

What it takes care of: importing pyverbs gives the root logger a handler and a level, which are taken back. Work
requests leak when they are dropped, so each queue pair has one for sending, and receives are made once. Older
versions do not tell the descriptor of a completion channel, so it is looked for. Every call holds the interpreter lock.
An object that is collected in a forked child prints that it could not be destroyed, so there they never are.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from monarch.verbs import alike
from monarch.verbs.adapter import POLLED, Binding, Completion, Opcode, Peer, QueuePair, Region, Timing


def load() -> Binding:
    """Raises: ImportError, also where pyverbs is of another version than libibverbs."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        parts = _Pyverbs()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    return Binding("pyverbs", lambda device, port: _Device(parts, device, port))


class _Pyverbs:
    """The names that are used of pyverbs."""

    def __init__(self) -> None:
        try:
            self.e: Any = import_module("pyverbs.libibverbs_enums")
        except ImportError:
            self.e = import_module("pyverbs.enums")  # before rdma-core 50
        addr, cq, qp, wr = (import_module(f"pyverbs.{name}") for name in ("addr", "cq", "qp", "wr"))
        self.GID, self.AHAttr, self.GlobalRoute = addr.GID, addr.AHAttr, addr.GlobalRoute
        self.CQ, self.CompChannel = cq.CQ, cq.CompChannel
        self.QP, self.QPAttr, self.QPCap, self.QPInitAttr = qp.QP, qp.QPAttr, qp.QPCap, qp.QPInitAttr
        self.SGE, self.RecvWR, self.SendWR = wr.SGE, wr.RecvWR, wr.SendWR
        self.Context = import_module("pyverbs.device").Context
        self.MR, self.PD = import_module("pyverbs.mr").MR, import_module("pyverbs.pd").PD
        self.Error: type[Exception] = import_module("pyverbs.pyverbs_error").PyverbsRDMAError

    def os_error(self, error: Any) -> OSError:
        return OSError(getattr(error, "error_code", 0), str(error))

    @contextmanager
    def os_errors(self) -> Iterator[None]:
        try:
            yield
        except self.Error as error:
            raise self.os_error(error) from error


class _Device(alike.Device):
    def __init__(self, parts: _Pyverbs, device: str, port: int) -> None:
        self._parts = parts
        e = parts.e
        self.access = (
            e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
        )
        with parts.os_errors():
            context = parts.Context(name=device)
            super().__init__(context, parts.PD(context), port)
        _made.update((self.context, self.pd))

    def register(self, address: int, size_bytes: int) -> Region:
        with self._parts.os_errors():
            region: Region = self._parts.MR(self.pd, size_bytes, self.access, address=address)
        _made.add(region)
        return region

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int, address: int) -> Region:
        raise OSError(errno.ENOTSUP, "pyverbs cannot say at which address others find it; the wheel ibverbs can")

    def queue_pair(self, depth: int) -> QueuePair:
        with self._parts.os_errors():
            return _QueuePair(self._parts, self, depth)


class _QueuePair(alike.Pair):
    def __init__(self, parts: _Pyverbs, device: _Device, depth: int) -> None:
        self._parts, self._port, self._access = parts, device.port, device.access
        e = parts.e
        before = _event_descriptors()
        channel = parts.CompChannel(device.context)
        known = getattr(channel, "fd", None)
        fd: int = known if known is not None else (_event_descriptors() - before).pop()
        cq = parts.CQ(device.context, 2 * depth, channel=channel)
        cap = parts.QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=1, max_recv_sge=1, max_inline_data=0)
        attributes = parts.QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=cap)
        super().__init__(channel, fd, cq, parts.QP(device.pd, attributes))
        _made.update((self.channel, self.cq, self.qp))
        self._opcodes = {
            Opcode.SEND: e.IBV_WR_SEND,
            Opcode.WRITE: e.IBV_WR_RDMA_WRITE,
            Opcode.READ: e.IBV_WR_RDMA_READ,
            Opcode.FETCH_ADD: e.IBV_WR_ATOMIC_FETCH_AND_ADD,
            Opcode.COMPARE_AND_SWAP: e.IBV_WR_ATOMIC_CMP_AND_SWP,
        }
        # Given `sg_list`, a SendWR reads the memory of this SGE, which may then be set anew; neither may be closed.
        self._signalled = e.IBV_SEND_SIGNALED
        self._sge = parts.SGE(0, 0, 0)
        self._request = parts.SendWR(num_sge=1, sg=[self._sge], send_flags=self._signalled)
        self._request.sg_list = self._sge

    def connect(self, peer: Peer, gid_index: int, hop_limit: int, psn: int, mtu: int, timing: Timing) -> None:
        parts = self._parts
        attributes = parts.QPAttr(port_num=self._port)
        attributes.qp_access_flags = self._access
        self.qp.to_init(attributes)
        attributes = parts.QPAttr(port_num=self._port)
        if peer.gid:
            route = parts.GlobalRoute(dgid=parts.GID(peer.gid), sgid_index=gid_index, hop_limit=hop_limit)
            attributes.ah_attr = parts.AHAttr(gr=route, is_global=1, port_num=self._port, dlid=peer.lid)
        else:
            attributes.ah_attr = parts.AHAttr(port_num=self._port, dlid=peer.lid)
        attributes.dest_qp_num, attributes.path_mtu, attributes.rq_psn = peer.number, mtu, peer.psn
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 16, 12
        attributes.sq_psn, attributes.max_rd_atomic = psn, 16
        attributes.timeout, attributes.retry_cnt = timing.timeout, timing.retries
        attributes.rnr_retry = timing.rnr_retries
        with parts.os_errors():
            self.qp.to_rtr(attributes)
            self.qp.to_rts(attributes)

    def receive(self, wr_id: int, address: int, size_bytes: int, lkey: int) -> Any:
        sge = self._parts.SGE(address, size_bytes, lkey)
        return self._parts.RecvWR(wr_id=wr_id, num_sge=1, sg=[sge])

    def post_send(
        self,
        opcode: Opcode,
        wr_id: int,
        address: int,
        size_bytes: int,
        lkey: int,
        remote: int = 0,
        rkey: int = 0,
        compare_add: int = 0,
        swap: int = 0,
        signalled: bool = True,
    ) -> None:
        sge, request = self._sge, self._request
        sge.addr, sge.length, sge.lkey = address, size_bytes, lkey
        request.wr_id, request.opcode = wr_id, self._opcodes[opcode]
        request.send_flags = self._signalled if signalled else 0
        if opcode in (Opcode.READ, Opcode.WRITE):
            request.set_wr_rdma(rkey, remote)
        elif opcode is not Opcode.SEND:
            request.set_wr_atomic(rkey, remote, compare_add, swap)
        try:
            self.qp.post_send(request)
        except self._parts.Error as error:
            raise self._parts.os_error(error) from error

    def poll(self) -> list[Completion]:
        count, found = self.cq.poll(POLLED)
        return [Completion(done.wr_id, int(done.status), done.byte_len) for done in found[:count]]

    def take_event(self) -> bool:
        try:
            self.channel.get_cq_event(self.cq)
        except self._parts.Error as error:
            if getattr(error, "error_code", 0) != errno.EAGAIN:
                raise
            return False
        self.cq.ack_events(1)
        return True

    def to_error(self) -> None:
        attributes = self._parts.QPAttr()
        attributes.qp_state = self._parts.e.IBV_QPS_ERR
        self.qp.modify(attributes, self._parts.e.IBV_QP_STATE)


_made: weakref.WeakSet[Any] = weakref.WeakSet()


def _in_forked_child() -> None:
    for each in _made:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


os.register_at_fork(after_in_child=_in_forked_child)


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[infinibandevent]":
                found.add(int(name))
        except OSError:
            continue
    return found
