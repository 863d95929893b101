"""The times and sizes that a process keeps to with others."""

from __future__ import annotations

from attrs import define


@define(frozen=True)
class Limits:
    """See the settings of the same names."""

    message_delivery_timeout_s: float = 30.0
    ack_interval_s: float = 0.5
    ack_every_n: int = 1000
    send_buffer_bytes: int = 256 << 20
    mailbox_bytes: int = 256 << 20
    hello_timeout_s: float = 10.0
    host_timeout_s: float = 7.0
