"""`enable_transport`: the client's transport, chosen by the program."""

from __future__ import annotations

from monarch.core import setting_table, settings
from monarch.core.setting_kinds import ChannelTransport
from monarch.mesh.context import client_context


def enable_transport(transport: ChannelTransport | str) -> None:
    """Choose the transport of this client, before the first use of a context.

    Args:
        transport: a member of ChannelTransport, "tcp", "ipc", "shm", "inproc", or the address to listen at.

    Raises:
        RuntimeError: the client exists already, with another transport.
        NotViable, ValueError: there is no such transport, or it cannot work here.
    """
    setting = setting_table.setting_of("default_transport")
    wanted = setting.kind.use(settings.checked({"default_transport": transport})["default_transport"])
    client = client_context()
    if client is not None:
        used = client.actor_instance.proc_runtime.gateway.transport.scheme
        if wanted not in ("auto", used) and not wanted.startswith(f"{used}://"):
            raise RuntimeError(f"cannot enable transport {wanted!r}: the client exists already and uses {used!r}")
        return
    settings.configure({"default_transport": transport})
    if settings.get("default_transport") != wanted:
        raise RuntimeError(
            f"cannot enable transport {wanted!r}: the environment ({' or '.join(setting.variables)}) says "
            f"{settings.get('default_transport')!r}, and it has the last word"
        )
