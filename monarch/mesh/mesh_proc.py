"""A process that hosts members of meshes: a `Proc`, with the parts that this layer adds to one.

Each part registers the requests that it answers, and keeps what it knows to itself; here is what they share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch.core import settings
from monarch.core.ids import ProcId
from monarch.core.instance import Instance
from monarch.core.limits import Limits
from monarch.core.monitor import Down
from monarch.core.proc import Proc
from monarch.mesh.agent import ProcAgent
from monarch.mesh.breakpoints import Breakpoints
from monarch.mesh.child_line import ChildBook
from monarch.mesh.inspector import Respondent
from monarch.mesh.ownership import Books
from monarch.mesh.trust import show_certificates
from monarch.mesh.undeliverable import Returned
from monarch.transports.base import Transport
from monarch.verbs.node import prefer as prefer_device

if TYPE_CHECKING:
    from monarch.onesided.transfers import Transfers
    from monarch.supervision.failure import MeshFailure


class MeshProc(Proc):
    """See the module.

    Attributes:
        root: the process of the client that all this belongs to.
        books: the meshes owned by actors of this process.
        breakpoints: where its actors wait for a debugger.
        returned: messages that came back, to be told of.
        children: supervisors of this process, and the supervised children that it calls.
        respondent: says what this process does.
        agent: makes and stops its actors.
        transfers: what carries out one-sided transfers; made at first use.
        on_actors_changed: called when there is one actor more or less.
        last_failure: how the last of its actors ended that failed.
    """

    def __init__(self, proc_id: ProcId, transport: Transport, secret: bytes, *, root: ProcId | None = None) -> None:
        super().__init__(proc_id, transport, secret, driver=settings.get("link_driver"), limits=_limits())
        if transport.memory is not None:
            transport.memory.limit = lambda: settings.get("shared_memory_bytes")
        show_certificates()
        prefer_device(
            settings.get("rdma_ibverbs_target"),
            settings.get("rdma_binding"),
            disabled=settings.get("rdma_disable_ibverbs"),
        )
        self.cleanup_timeout_s = settings.get("cleanup_timeout")
        self.release_timeout_s = settings.get("process_exit_timeout")
        self.unborn_limit_s = settings.get("actor_spawn_max_idle")
        self.message_ttl = settings.get("message_ttl_default")
        self._root = root
        self.books = Books(self)
        self.breakpoints = Breakpoints(self)
        self.returned = Returned(self.gateway.call_later)
        self.children = ChildBook(self)
        self.respondent = Respondent(self)
        self.agent = ProcAgent(self)
        self.transfers: Transfers | None = None
        self.on_actors_changed: Callable[[], None] = lambda: None
        self.last_failure: Down | None = None

    @property
    def root(self) -> ProcId:
        return self._root if self._root is not None else self.proc_id

    @property
    def host(self) -> ProcId:
        """The process in which the agent of this process's host lives."""
        keeper = self.proc_id.keeper
        return keeper if keeper is not None else self.proc_id

    def expects(self, number: int) -> bool:
        return self.agent.expects(number)

    def unowned(self, failure: MeshFailure) -> None:
        """Something has failed whose owner cannot be asked, because it has ended, or is no actor: the client is."""
        self.tell(self.root, "unowned", failure)

    def close(self, timeout_s: float = 2.0) -> None:
        super().close(timeout_s)
        self.returned.flush()

    def actor_ended(self, instance: Instance, down: Down) -> None:
        self.books.owners.pop(instance.actor_id.number, None)
        if not down.stopped:
            self.last_failure = down
        super().actor_ended(instance, down)
        self.breakpoints.forget(instance.actor_id.number)
        self.on_actors_changed()
        self.agent.end_if_idle()


def _limits() -> Limits:
    return Limits(
        settings.get("message_delivery_timeout"),
        settings.get("message_ack_time_interval"),
        settings.get("message_ack_every_n_messages"),
        settings.get("send_buffer_bytes"),
        settings.get("mailbox_bytes"),
        host_timeout_s=settings.get("host_timeout"),
    )
