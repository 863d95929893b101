"""Every setting: its name, type, default, environment variable and meaning; and the variables that are none.

Which of several values of a setting counts is decided in `settings`.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Final, Literal

from attrs import define, field

from monarch.core.setting_kinds import (
    Bool,
    Choice,
    Duration,
    Int,
    Kind,
    Modules,
    Text,
    TransportChoice,
)


@define(frozen=True)
class Setting:
    name: str
    kind: Kind
    default: Any  # in the form that users see
    doc: str
    prefix: str = "HYPERACTOR_"
    variable: str = field()
    second_variable: str = ""  # counts where the first one is not set

    @variable.default
    def _variable(self) -> str:
        return self.prefix + self.name.removeprefix("mesh_").upper()

    @property
    def variables(self) -> tuple[str, ...]:
        """The strongest first."""
        return (self.variable, self.second_variable) if self.second_variable else (self.variable,)


_MESH: Final = "HYPERACTOR_MESH_"
_OURS: Final = "MONARCH_"

SETTINGS: Final[Mapping[str, Setting]] = {
    setting.name: setting
    for setting in (
        Setting(
            "message_delivery_timeout",
            Duration(),
            "30s",
            "A process that cannot be reached for so long is given up, and the messages for it go back.",
        ),
        Setting(
            "message_ack_time_interval", Duration(), "500ms", "A received message is acknowledged after at most this."
        ),
        Setting(
            "message_ack_every_n_messages", Int(1), 1000, "So many received messages are acknowledged without waiting."
        ),
        Setting("message_ttl_default", Int(1), 64, "How many gateways a message may pass."),
        Setting(
            "codec_max_frame_length", Int(), 0, "Larger messages, in bytes, are refused at the sender; 0: no limit."
        ),
        Setting(
            "process_exit_timeout", Duration(), "10s", "How long a process that is stopped may take before SIGTERM."
        ),
        Setting("stop_actor_timeout", Duration(), "10s", "How long an actor may take to stop; then `stop()` fails."),
        Setting("cleanup_timeout", Duration(), "3s", "How long `__cleanup__` of an actor may take."),
        Setting(
            "default_transport",
            TransportChoice(),
            "auto",
            "What this process listens on and dials with: a name, a ChannelTransport, or an address.",
            variable="MONARCH_TRANSPORT",
            second_variable=_MESH + "DEFAULT_TRANSPORT",
        ),
        Setting(
            "mesh_attach_config_timeout",
            Duration(),
            "1m",
            "How long a worker may take to answer a client that attaches; then attaching has failed.",
            _MESH,
        ),
        Setting(
            "host_timeout",
            Duration(),
            "7s",
            "A host is lost, with all its processes, when nothing came from it for so long, or up to a fifth longer.",
            _OURS,
        ),
        Setting(
            "advertise_host",
            Text(),
            "",
            "The name or address of this host that others are told; empty: the one that the kernel sends from.",
            _OURS,
        ),
        Setting(
            "hyperactor_tls_cert",
            Text(),
            "",
            "For tls+tcp: the file (PEM) of this host's certificate. Like the next two, never handed to other hosts.",
            "",
        ),
        Setting("hyperactor_tls_key", Text(), "", "The file of that certificate's private key.", ""),
        Setting("hyperactor_tls_ca", Text(), "", "The file of the authority that signs the certificates of all.", ""),
        Setting(
            "mesh_proc_spawn_max_idle",
            Duration(),
            "30s",
            "A process that has not come up for so long is killed, and its start has failed.",
            _MESH,
        ),
        Setting(
            "actor_spawn_max_idle",
            Duration(),
            "30s",
            "How long a message waits for an actor that is not spawned yet, or a process that is not launched yet.",
            _MESH,
        ),
        Setting(
            "mesh_terminate_timeout",
            Duration(),
            "10s",
            "How long a process may take after SIGTERM before SIGKILL.",
            _MESH,
        ),
        Setting(
            "enable_log_forwarding",
            Bool(),
            False,
            "What processes print is shown by the driver, with actor and rank; counts when they are spawned.",
            _MESH,
        ),
        Setting("prefix_with_rank", Bool(), True, "Forwarded lines start with the actor's name and rank."),
        Setting(
            "tail_log_lines",
            Int(),
            0,
            "So many of the last lines of a process are in the report of its death; with log forwarding.",
            _MESH,
        ),
        Setting(
            "enable_file_capture",
            Bool(),
            False,
            "Forwarded lines are also kept, in `monarch_logs/PID OF THE DRIVER/`, a file for each process.",
            _MESH,
        ),
        Setting(
            "link_driver",
            Choice(("thread", "caller")),
            "caller",
            "Who moves frames: always a thread of its own, or also the thread that waits for an answer.",
            _OURS,
        ),
        Setting(
            "stack_signal",
            Choice(("SIGURG", "SIGUSR1", "SIGUSR2", "none")),
            "SIGURG",
            "Reserved to ask a process for its stacks when native code holds its interpreter; `none`: it is not asked.",
            _OURS,
        ),
        Setting(
            "mixed_endpoints",
            Bool(),
            True,
            "A class of actors may have both sync and async endpoints; False refuses it, as Monarch does.",
            _OURS,
        ),
        Setting(
            "breakpoints",
            Bool(),
            True,
            "`breakpoint()` in an actor waits for `monarch debug`; False: it raises at once.",
            _OURS,
        ),
        Setting(
            "poison_failed_procs", Bool(), False, "A process whose actor failed takes no others, as in Monarch.", _OURS
        ),
        Setting(
            "undeliverable_fails_sender",
            Bool(),
            True,
            "An actor fails whose message came back and who neither handles that nor owns the receiver; "
            "False: a warning.",
            _OURS,
        ),
        Setting(
            "send_buffer_bytes",
            Int(1),
            256 << 20,
            "How much may be on its way to one peer before its senders wait.",
            _OURS,
        ),
        Setting(
            "mailbox_bytes",
            Int(1),
            256 << 20,
            "How much may queue for one actor before those who call it wait for it; a message counts 1 KiB more.",
            _OURS,
        ),
        Setting(
            "preload",
            Modules(),
            "auto",
            "What processes find imported already; `auto`: numpy and torch, if the driver had them at its first spawn.",
            _OURS,
        ),
        Setting(
            "rdma_path",
            Choice(("auto", "ibverbs", "shm", "tcp")),
            "auto",
            "How one-sided transfers go; one that is asked for and cannot work is an error.",
            _OURS,
        ),
        Setting(
            "rdma_allow_tcp_fallback",
            Bool(),
            True,
            "Whether transfers may go in chunks over the link, where nothing faster works.",
            _OURS,
        ),
        Setting(
            "shared_memory_bytes",
            Int(),
            8 << 30,
            "How much shared memory a process may have for what it sends; the rest goes through sockets.",
            _OURS,
        ),
        Setting("rdma_disable_ibverbs", Bool(), False, "RDMA devices are not used, as if there were none.", _OURS),
        Setting(
            "rdma_ibverbs_target",
            Text(),
            "",
            "The RDMA device to use: `nic:DEVICE`, `nic:DEVICE/PORT` or `nic:DEVICE/PORT/GID`; empty: the best one.",
            _OURS,
        ),
        Setting(
            "rdma_binding",
            Choice(("auto", "pyverbs", "ibverbs")),
            "auto",
            "The binding to libibverbs; `auto`: ibverbs where it can be imported, else pyverbs.",
            _OURS,
        ),
        Setting(
            "rdma_cq_busy_poll_window",
            Duration(),
            "0s",
            "How long a transfer polls the RDMA device before it sleeps until the device wakes it.",
            _OURS,
        ),
    )
}

DurationName = Literal[
    "message_delivery_timeout",
    "message_ack_time_interval",
    "mesh_attach_config_timeout",
    "host_timeout",
    "process_exit_timeout",
    "stop_actor_timeout",
    "cleanup_timeout",
    "mesh_proc_spawn_max_idle",
    "actor_spawn_max_idle",
    "mesh_terminate_timeout",
    "rdma_cq_busy_poll_window",
]
IntName = Literal[
    "message_ack_every_n_messages",
    "message_ttl_default",
    "codec_max_frame_length",
    "mailbox_bytes",
    "send_buffer_bytes",
    "tail_log_lines",
    "shared_memory_bytes",
]
BoolName = Literal[
    "breakpoints",
    "enable_file_capture",
    "enable_log_forwarding",
    "mixed_endpoints",
    "poison_failed_procs",
    "prefix_with_rank",
    "rdma_allow_tcp_fallback",
    "undeliverable_fails_sender",
    "rdma_disable_ibverbs",
]
StrName = Literal[
    "advertise_host",
    "default_transport",
    "hyperactor_tls_ca",
    "hyperactor_tls_cert",
    "hyperactor_tls_key",
    "link_driver",
    "preload",
    "rdma_binding",
    "rdma_ibverbs_target",
    "rdma_path",
    "stack_signal",
]


_METAS: Final = frozenset(
    """
    channel_net_rx_buffer_full_check_interval channel_reconnect_timeout channel_tcp_congestion
    channel_tcp_keepalive_idle default_encoding enable_dest_actor_reordering_buffer enable_otel_metrics
    enable_otel_tracing enable_recorder_tracing enable_sqlite_tracing enable_unawaited_python_task_traceback
    file_log_level force_file_log forwarder_flush_timeout get_actor_state_max_idle get_proc_state_max_idle
    host_spawn_ready_timeout max_cast_dimension_size max_cast_fanout mesh_admin_addr
    mesh_admin_config_dump_bridge_timeout mesh_admin_max_concurrent_resolves mesh_admin_pyspy_bridge_timeout
    mesh_admin_pyspy_client_timeout mesh_admin_pyspy_max_profile_duration mesh_admin_pyspy_timeout
    mesh_admin_query_child_timeout mesh_admin_resolve_actor_timeout mesh_admin_single_host_timeout
    mesh_admin_tree_timeout mesh_bootstrap_enable_pdeathsig mesh_orphan_timeout mesh_terminate_concurrency
    message_latency_sampling_rate monarch_log_suffix otel_metric_export_interval perfetto_trace_mode
    proc_launcher_kind proc_stop_max_idle process_memory_metric_interval pyspy_bin rdma_max_chunk_size_mb
    rdma_peer_device_affinity rdma_qp_init_timeout rdma_qps_per_cq rdma_runtime_worker_threads
    rdma_tcp_fallback_parallelism read_log_buffer sequencer_max_locked_keys server_heartbeat_interval
    small_write_threshold split_max_buffer_age split_max_buffer_size stop_grace_period supervision_watchdog_timeout
    terminated_snapshot_retention tokio_worker_threads
    """.split()
)
"""Settings of Meta's Monarch that have no meaning here."""


def setting_of(name: str) -> Setting:
    if (setting := SETTINGS.get(name)) is not None:
        return setting
    if name in _METAS:
        raise ValueError(f"unknown setting {name!r}: Meta's Monarch has it, and it has no meaning here: leave it out")
    close = difflib.get_close_matches(name, SETTINGS, n=3)
    hint = f"the closest are {', '.join(close)}" if close else f"settings are {', '.join(SETTINGS)}"
    raise ValueError(f"unknown setting {name!r}: {hint}")


_OTHERS: Final = "BOOTSTRAP_FD", "HOST_ID", "INSECURE", "LOG", "OUTLIVE", "RDMA_RUNNER", "RING", "SECRET", "SECRET_FILE"
OTHER_VARIABLES: Final = frozenset(_OURS + name for name in _OTHERS)
"""Variables of this library that are no settings; beside them, `monarch exec` sets some for each dimension."""


def unknown_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that look like settings of an actor runtime and have no meaning here, sorted, each with the one that is
    meant, perhaps, or "". Of those that begin with `MONARCH_`, which others use too, only what is near to another."""
    known = {name for setting in SETTINGS.values() for name in setting.variables} | OTHER_VARIABLES
    keys = {_key(variable): variable for variable in known}
    found = {}
    for name in sorted(set(environ) - known):
        if name.startswith(("HYPERACTOR_", _OURS)):
            near = difflib.get_close_matches(_key(name), keys, n=1, cutoff=0.8)
            if near or not name.startswith(_OURS):
                found[name] = keys[near[0]] if near else ""
    return found


def _key(variable: str) -> str:
    for prefix in (_MESH, "HYPERACTOR_", _OURS):
        variable = variable.removeprefix(prefix)
    return variable
