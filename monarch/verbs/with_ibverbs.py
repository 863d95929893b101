"""The adapter over the wheel `ibverbs`, which loads libibverbs at its import and releases the interpreter lock."""

from __future__ import annotations

import errno
from typing import Any

from monarch.verbs import alike
from monarch.verbs.adapter import POLLED, Binding, Completion, Opcode, Peer, QueuePair, Region, Timing


def load() -> Binding:
    """Raises: ImportError, also where libibverbs is missing."""
    import ibverbs

    return Binding("ibverbs", lambda device, port: _Device(ibverbs, device, port))


class _Device(alike.Device):
    def __init__(self, ib: Any, device: str, port: int) -> None:
        self._ib = ib
        flags = ib.AccessFlags
        self.access = flags.LOCAL_WRITE | flags.REMOTE_WRITE | flags.REMOTE_READ | flags.REMOTE_ATOMIC
        found = [each for each in ib.get_device_list() if each.name == device]
        if not found:
            raise OSError(f"libibverbs does not know the device {device}")
        context = found[0].open()
        super().__init__(context, context.alloc_pd(), port)

    def register(self, address: int, size_bytes: int) -> Region:
        region: Region = self.pd.reg_mr(address, size_bytes, self.access)
        return region

    def register_dmabuf(self, fd: int, offset: int, size_bytes: int, address: int) -> Region:
        region: Region = self.pd.reg_dmabuf_mr(offset, size_bytes, address, fd, int(self.access))
        return region

    def queue_pair(self, depth: int) -> QueuePair:
        return _QueuePair(self._ib, self, depth)


class _QueuePair(alike.Pair):
    def __init__(self, ib: Any, device: _Device, depth: int) -> None:
        self._ib, self._port, self._access = ib, device.port, device.access
        channel = device.context.create_comp_channel()
        cq = device.context.create_cq(2 * depth, channel=channel)
        attributes = ib.QPInitAttr(send_cq=cq, recv_cq=cq, qp_type=ib.QPType.RC, max_send_wr=depth, max_recv_wr=depth)
        super().__init__(channel, int(channel.fd), cq, device.pd.create_qp(attributes))
        kinds = ib.WROpcode
        self._opcodes = {
            Opcode.SEND: int(kinds.SEND),
            Opcode.WRITE: int(kinds.RDMA_WRITE),
            Opcode.READ: int(kinds.RDMA_READ),
            Opcode.FETCH_ADD: int(kinds.ATOMIC_FETCH_AND_ADD),
            Opcode.COMPARE_AND_SWAP: int(kinds.ATOMIC_CMP_AND_SWP),
        }
        self._request = ib.SendWR()
        self._signalled = int(ib.SendFlags.SIGNALED)

    def connect(self, peer: Peer, gid_index: int, hop_limit: int, psn: int, mtu: int, timing: Timing) -> None:
        gid = bytes.fromhex(peer.gid.replace(":", "")) if peer.gid else bytes(16)
        remote = self._ib.QPInfo(qp_num=peer.number, psn=peer.psn, lid=peer.lid, gid=gid, port=self._port, mtu=mtu)
        self.qp.to_init(self._port, self._access)
        self.qp.to_rtr(remote, sgid_index=gid_index, mtu=mtu, hop_limit=hop_limit, max_dest_rd_atomic=16)
        self.qp.to_rts(
            psn, timeout=timing.timeout, retry_cnt=timing.retries, rnr_retry=timing.rnr_retries, max_rd_atomic=16
        )

    def receive(self, wr_id: int, address: int, size_bytes: int, lkey: int) -> Any:
        return self._ib.RecvWR(wr_id=wr_id, sg_list=[self._ib.SGE(address, size_bytes, lkey)])

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
        request = self._request
        request.wr_id, request.opcode = wr_id, self._opcodes[opcode]
        request.sg_list = [self._ib.SGE(address, size_bytes, lkey)]
        request.send_flags = self._signalled if signalled else 0
        if opcode is not Opcode.SEND:
            request.remote_addr, request.rkey = remote, rkey
            request.compare_add, request.swap = compare_add, swap
        self.qp.post_send(request)

    def poll(self) -> list[Completion]:
        return [Completion(done.wr_id, int(done.status), done.byte_len) for done in self.cq.poll(POLLED)]

    def take_event(self) -> bool:
        try:
            self.channel.get_cq_event()
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
            return False
        self.cq.ack_events(1)
        return True

    def to_error(self) -> None:
        self.qp.modify(self._ib.QPAttrMask.STATE, qp_state=self._ib.QPState.ERR)
