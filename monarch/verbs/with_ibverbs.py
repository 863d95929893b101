"""The adapter over the wheel `ibverbs`, which loads libibverbs at its import and releases the interpreter lock."""

from __future__ import annotations

from typing import Any

from monarch.verbs.adapter import Binding, Completion, Opcode, Peer, QueuePair, Region, Timing


def load() -> Binding:
    """Raises: ImportError, also where libibverbs is missing."""
    import ibverbs

    return Binding("ibverbs", lambda device, port: _Device(ibverbs, device, port))


class _Device:
    def __init__(self, ib: Any, device: str, port: int) -> None:
        self._ib, self._port = ib, port
        flags = ib.AccessFlags
        self.access = flags.LOCAL_WRITE | flags.REMOTE_WRITE | flags.REMOTE_READ | flags.REMOTE_ATOMIC
        found = [each for each in ib.get_device_list() if each.name == device]
        if not found:
            raise OSError(f"libibverbs does not know the device {device}")
        self.context = found[0].open()
        self.pd = self.context.alloc_pd()

    def mtu(self) -> int:
        return int(self.context.query_port(self._port).active_mtu)

    def register(self, address: int, size_bytes: int) -> Region:
        region: Region = self.pd.reg_mr(address, size_bytes, self.access)
        return region

    def queue_pair(self, depth: int) -> QueuePair:
        return _QueuePair(self._ib, self, self._port, depth)

    def close(self) -> None:
        self.pd.close()
        self.context.close()


class _QueuePair:
    def __init__(self, ib: Any, device: _Device, port: int, depth: int) -> None:
        self._ib, self._port, self._access = ib, port, device.access
        self._channel = device.context.create_comp_channel()
        self._cq = device.context.create_cq(2 * depth, channel=self._channel)
        attributes = ib.QPInitAttr(
            send_cq=self._cq, recv_cq=self._cq, qp_type=ib.QPType.RC, max_send_wr=depth, max_recv_wr=depth
        )
        self._qp = device.pd.create_qp(attributes)
        self.number = int(self._qp.qp_num)
        self._fd = int(self._channel.fd)
        kinds = ib.WROpcode
        self._opcodes = {
            Opcode.SEND: kinds.SEND,
            Opcode.WRITE: kinds.RDMA_WRITE,
            Opcode.READ: kinds.RDMA_READ,
            Opcode.FETCH_ADD: kinds.ATOMIC_FETCH_AND_ADD,
            Opcode.COMPARE_AND_SWAP: kinds.ATOMIC_CMP_AND_SWP,
        }
        self._flags = ib.SendFlags.SIGNALED

    def fileno(self) -> int:
        return self._fd

    def connect(self, peer: Peer, gid_index: int, hop_limit: int, psn: int, mtu: int, timing: Timing) -> None:
        gid = bytes.fromhex(peer.gid.replace(":", "")) if peer.gid else bytes(16)
        remote = self._ib.QPInfo(qp_num=peer.number, psn=peer.psn, lid=peer.lid, gid=gid, port=self._port, mtu=mtu)
        self._qp.to_init(self._port, self._access)
        self._qp.to_rtr(remote, sgid_index=gid_index, mtu=mtu, hop_limit=hop_limit, max_dest_rd_atomic=16)
        self._qp.to_rts(
            psn, timeout=timing.timeout, retry_cnt=timing.retries, rnr_retry=timing.rnr_retries, max_rd_atomic=16
        )

    def post_recv(self, wr_id: int, address: int, size_bytes: int, lkey: int) -> None:
        self._qp.post_recv(self._ib.RecvWR(wr_id=wr_id, sg_list=[self._ib.SGE(address, size_bytes, lkey)]))

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
    ) -> None:
        request = self._ib.SendWR(
            wr_id=wr_id,
            sg_list=[self._ib.SGE(address, size_bytes, lkey)],
            opcode=self._opcodes[opcode],
            send_flags=self._flags,
            remote_addr=remote,
            rkey=rkey,
            compare_add=compare_add,
            swap=swap,
        )
        self._qp.post_send(request)

    def poll(self) -> list[Completion]:
        return [Completion(done.wr_id, int(done.status), done.byte_len) for done in self._cq.poll(16)]

    def arm(self) -> None:
        self._cq.req_notify()

    def take_event(self) -> None:
        self._channel.get_cq_event()
        self._cq.ack_events(1)

    def to_error(self) -> None:
        self._qp.modify(self._ib.QPAttrMask.STATE, qp_state=self._ib.QPState.ERR)

    def close(self) -> None:
        for part in (self._qp, self._cq, self._channel):
            part.close()
