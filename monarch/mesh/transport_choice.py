"""`enable_transport`: the client's transport, chosen by the program."""

from __future__ import annotations

from monarch.core import settings
from monarch.core.settings import ChannelTransport
from monarch.mesh.context import client_context


def enable_transport(transport: ChannelTransport | str) -> None:
    """Choose the transport of this client, before the first use of a context.

    Args:
        transport: a member of ChannelTransport, "tcp", "ipc", "inproc", or the address to listen at.

    Raises:
        RuntimeError: the client exists already, with another transport.
        NotViable, ValueError: there is no such transport, or it cannot work here.
    """
    setting = settings.setting_of("default_transport")
    wanted = setting.kind.use(settings.checked({"default_transport": transport})["default_transport"])
    if client_context() is not None:
        used = settings.get("default_transport")
        if wanted != used:
            raise RuntimeError(f"cannot enable transport {wanted!r}: the client exists already and uses {used!r}")
        return
    settings.configure({"default_transport": transport})
