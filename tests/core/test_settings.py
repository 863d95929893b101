"""Settings: the table, the types, the layers, and handing them to another process."""

from __future__ import annotations

import pickle
import re
import threading
from pathlib import Path
from typing import get_args

import pytest

from monarch.core import setting_table, settings
from monarch.core.setting_kinds import ChannelTransport, UnsupportedTransport
from monarch.core.setting_table import SETTINGS
from monarch.core.settings import Settings
from monarch.errors import NotViable

SOURCES = Path(settings.__file__).parents[1]


@pytest.fixture
def environ():
    return {}


@pytest.fixture
def table(environ):
    return Settings(environ)


# The table


def test_the_defaults_are_those_of_the_table(table):
    assert table.merged() == {
        "message_delivery_timeout": "30s",
        "message_ack_time_interval": "500ms",
        "message_ack_every_n_messages": 1000,
        "message_ttl_default": 64,
        "codec_max_frame_length": 0,
        "process_exit_timeout": "10s",
        "stop_actor_timeout": "10s",
        "cleanup_timeout": "3s",
        "default_transport": "auto",
        "mesh_proc_spawn_max_idle": "30s",
        "actor_spawn_max_idle": "30s",
        "mesh_terminate_timeout": "10s",
        "enable_log_forwarding": False,
        "prefix_with_rank": True,
        "tail_log_lines": 0,
        "enable_file_capture": False,
        "link_driver": "caller",
        "mixed_endpoints": True,
        "breakpoints": True,
        "poison_failed_procs": False,
        "send_buffer_bytes": 268435456,
        "mailbox_bytes": 268435456,
        "rdma_path": "auto",
        "rdma_allow_tcp_fallback": True,
        "rdma_disable_ibverbs": False,
        "rdma_ibverbs_target": "",
        "rdma_binding": "auto",
        "rdma_cq_busy_poll_window": "0s",
        "stack_signal": "SIGURG",
        "preload": "auto",
        "advertise_host": "",
        "host_timeout": "7s",
        "hyperactor_tls_ca": "",
        "hyperactor_tls_cert": "",
        "hyperactor_tls_key": "",
        "mesh_attach_config_timeout": "1m",
        "shared_memory_bytes": 8 << 30,
        "undeliverable_fails_sender": True,
    }


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_every_setting_accepts_its_default_as_it_is_and_says_what_it_means(setting):
    assert setting.kind.accept(setting.default) == setting.default
    assert setting.kind.parse(str(setting.default)) == setting.default
    assert setting.doc.endswith(".") and setting.kind.name


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("cleanup_timeout", "HYPERACTOR_CLEANUP_TIMEOUT"),
        ("codec_max_frame_length", "HYPERACTOR_CODEC_MAX_FRAME_LENGTH"),
        ("mesh_proc_spawn_max_idle", "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE"),
        ("actor_spawn_max_idle", "HYPERACTOR_MESH_ACTOR_SPAWN_MAX_IDLE"),
        ("mesh_terminate_timeout", "HYPERACTOR_MESH_TERMINATE_TIMEOUT"),
        ("enable_log_forwarding", "HYPERACTOR_MESH_ENABLE_LOG_FORWARDING"),
        ("default_transport", "MONARCH_TRANSPORT"),
        ("link_driver", "MONARCH_LINK_DRIVER"),
        ("send_buffer_bytes", "MONARCH_SEND_BUFFER_BYTES"),
        ("mailbox_bytes", "MONARCH_MAILBOX_BYTES"),
        ("preload", "MONARCH_PRELOAD"),
    ],
)
def test_a_setting_is_read_from_its_environment_variable(name, variable):
    assert SETTINGS[name].variable == variable


def test_no_two_settings_share_a_variable():
    assert len({setting.variable for setting in SETTINGS.values()}) == len(SETTINGS)


def test_the_types_that_get_promises_are_those_it_returns(table):
    promised = {
        settings.DurationName: float,
        settings.IntName: int,
        settings.BoolName: bool,
        settings.StrName: str,
    }
    names = {name: kind for literal, kind in promised.items() for name in get_args(literal)}

    assert names.keys() == SETTINGS.keys()
    for name, kind in names.items():
        assert type(table.get(name)) is kind


# Types


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("cleanup_timeout", 3, TypeError, "cleanup_timeout.*'30s'"),
        ("cleanup_timeout", 3.0, TypeError, "cleanup_timeout"),
        ("cleanup_timeout", "soon", TypeError, "Invalid duration format"),
        ("cleanup_timeout", "3", TypeError, "Invalid duration format"),
        ("message_ttl_default", "64", TypeError, "message_ttl_default.*int"),
        ("message_ttl_default", 64.0, TypeError, "int"),
        ("message_ttl_default", True, TypeError, "int"),
        ("message_ttl_default", 0, ValueError, "at least 1"),
        ("codec_max_frame_length", -1, ValueError, "at least 0"),
        ("mixed_endpoints", 1, TypeError, "True or False"),
        ("mixed_endpoints", "true", TypeError, "True or False"),
        ("link_driver", "threads", ValueError, "thread, caller"),
        ("link_driver", None, TypeError, "thread, caller"),
        (
            "default_transport",
            "carrier-pigeon",
            ValueError,
            r"carrier-pigeon.*auto, inproc, ipc, tcp, tls\+tcp, shm",
        ),
        ("default_transport", "tcp://", ValueError, "unknown transport"),
        ("default_transport", "auto://x", ValueError, "unknown transport"),
        ("default_transport", "metatls", ValueError, "use tcp"),
        ("default_transport", 42, TypeError, "ChannelTransport"),
        ("default_transport", ChannelTransport.MetaTlsWithIpV6, ValueError, "use tcp"),
        ("preload", 1, TypeError, "names of modules"),
        ("preload", ["numpy", 2], TypeError, "names of modules"),
        ("preload", "numpy, my-module", ValueError, "'my-module' is no name of a module"),
        ("preload", "", ValueError, "'auto', 'none'"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_name(table, name, value, error, text):
    with pytest.raises(error, match=text) as caught:
        table.configure({name: value})
    assert str(caught.value).startswith(f"{name}: ")


def test_an_unknown_setting_is_refused_with_the_closest_known_ones(table):
    with pytest.raises(ValueError, match="unknown setting 'clean_timeout': the closest are cleanup_timeout"):
        table.configure({"clean_timeout": "3s"})
    with pytest.raises(
        ValueError, match=r"unknown setting 'mesh_orphan_timeout': .* has no meaning here: leave it out"
    ):
        table.configure({"mesh_orphan_timeout": "5s"})
    with pytest.raises(ValueError, match="unknown setting 'zzz': settings are message_delivery_timeout, "):
        table.get("zzz")


def test_a_refused_configure_changes_nothing(table):
    for bad in ({"nonsense": 1}, {"cleanup_timeout": 1}):
        with pytest.raises((ValueError, TypeError)):
            table.configure({"message_ttl_default": 3, **bad})
    assert table.runtime() == {}
    assert table.get("message_ttl_default") == 64


@pytest.mark.parametrize(
    ("value", "used"),
    [
        ("tcp", "tcp"),
        ("ipc", "ipc"),
        ("inproc", "inproc"),
        ("auto", "auto"),
        ("shm", "shm"),
        ("tcp://127.0.0.1:26600", "tcp://127.0.0.1:26600"),
        ("ipc:///tmp/socket", "ipc:///tmp/socket"),
        (ChannelTransport.Unix, "ipc"),
        (ChannelTransport.Local, "inproc"),
        (ChannelTransport.TcpWithHostname, "tcp"),
        (ChannelTransport.TcpWithLocalhost, "tcp"),
    ],
)
def test_a_transport_shows_as_given_and_is_used_by_our_name(table, value, used):
    table.configure({"default_transport": value})

    assert table.merged()["default_transport"] == value
    assert table.get("default_transport") == used


def test_channel_transports_are_values():
    assert [member.name for member in ChannelTransport] == [
        "TcpWithLocalhost",
        "TcpWithHostname",
        "MetaTlsWithHostname",
        "MetaTlsWithIpV6",
        "Tls",
        "Local",
        "Unix",
    ]
    for member in ChannelTransport:
        assert pickle.loads(pickle.dumps(member)) is member
        assert {member: 1}[member] == 1


@pytest.mark.parametrize("name", ["MetaTlsWithHostname", "MetaTlsWithIpV6"])
def test_transports_that_we_lack_say_why(name):
    with pytest.raises(UnsupportedTransport, match=f"{name}.*use tcp") as caught:
        ChannelTransport[name].transport()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, NotViable)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(["numpy", "a.b"], "numpy, a.b"), ("numpy,a.b", "numpy, a.b"), ([], "none"), ("none", "none"), ("auto", "auto")],
)
def test_modules_to_preload_are_names(table, value, shown):
    table.configure({"preload": value})

    assert table.merged()["preload"] == table.get("preload") == shown


# Layers


def test_the_stronger_layer_wins(table, environ):
    environ["HYPERACTOR_MESSAGE_TTL_DEFAULT"] = "5"

    table.configure({"message_ttl_default": 2, "message_ack_every_n_messages": 2, "send_buffer_bytes": 2})
    table.install({"message_ttl_default": 3, "message_ack_every_n_messages": 3})
    assert table.get("send_buffer_bytes") == 2
    assert table.get("message_ack_every_n_messages") == 3
    assert table.get("message_ttl_default") == 5
    with table.overridden(message_ttl_default=7) as config:
        assert config["message_ttl_default"] == table.get("message_ttl_default") == 7
        with table.overridden(message_ttl_default=8):
            assert table.get("message_ttl_default") == 8
        assert table.get("message_ttl_default") == 7
    assert table.get("message_ttl_default") == 5


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("HYPERACTOR_CLEANUP_TIMEOUT", "90s", "cleanup_timeout", 90.0),
        ("HYPERACTOR_CODEC_MAX_FRAME_LENGTH", " 1024 ", "codec_max_frame_length", 1024),
        ("MONARCH_MIXED_ENDPOINTS", "off", "mixed_endpoints", False),
        ("MONARCH_POISON_FAILED_PROCS", "True", "poison_failed_procs", True),
        ("MONARCH_LINK_DRIVER", "thread", "link_driver", "thread"),
        ("MONARCH_TRANSPORT", "tcp", "default_transport", "tcp"),
        ("MONARCH_TRANSPORT", "", "default_transport", "auto"),
        ("HYPERACTOR_MESH_DEFAULT_TRANSPORT", "tcp", "default_transport", "tcp"),
    ],
)
def test_the_environment_is_read_in_each_type(table, environ, variable, text, name, value):
    environ[variable] = text

    assert table.get(name) == value


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HYPERACTOR_CLEANUP_TIMEOUT", "soon"),
        ("HYPERACTOR_MESSAGE_TTL_DEFAULT", "many"),
        ("HYPERACTOR_MESSAGE_TTL_DEFAULT", "1.5"),
        ("MONARCH_MIXED_ENDPOINTS", "perhaps"),
        ("MONARCH_TRANSPORT", "pigeon"),
    ],
)
def test_a_bad_variable_is_named_at_first_use(environ, variable, text):
    environ[variable] = text

    table = Settings(environ)
    for act in (lambda: table.get("cleanup_timeout"), table.merged, lambda: table.install({})):
        with pytest.raises((TypeError, ValueError), match=f"environment variable {variable}: "):
            act()


def test_of_two_variables_of_a_setting_the_first_counts(table, environ):
    environ |= {"HYPERACTOR_MESH_DEFAULT_TRANSPORT": "tcp", "MONARCH_TRANSPORT": "ipc"}

    assert table.get("default_transport") == "ipc"
    assert setting_table.unknown_variables(environ) == {}


def test_a_configure_under_a_bad_variable_changes_nothing(table, environ):
    environ["MONARCH_TRANSPORT"] = "pigeon"
    with pytest.raises(ValueError):
        table.configure({"message_ttl_default": 3})
    assert table.runtime() == {}


def test_the_environment_counts_for_who_forgets_the_runtime_layer_first(environ):
    environ["HYPERACTOR_PROCESS_EXIT_TIMEOUT"] = "9s"
    table = Settings(environ)
    table.replace_runtime({})
    assert table.get("process_exit_timeout") == 9.0


def test_the_environment_is_read_again_by_install(table, environ):
    assert table.get("message_ttl_default") == 64
    environ["HYPERACTOR_MESSAGE_TTL_DEFAULT"] = "5"
    assert table.get("message_ttl_default") == 64
    table.install({})
    assert table.get("message_ttl_default") == 5


def test_a_child_gets_what_was_configured_here_and_hands_it_on():
    parent, child, grandchild = (Settings({}) for _ in range(3))
    parent.configure({"cleanup_timeout": "90s", "default_transport": ChannelTransport.Unix})
    child.install(parent.export())
    child.configure({"cleanup_timeout": "1s", "message_ttl_default": 9})
    grandchild.install(pickle.loads(pickle.dumps(child.export())))

    assert parent.export() == {"cleanup_timeout": "1m 30s", "default_transport": "ipc"}
    assert child.get("cleanup_timeout") == grandchild.get("cleanup_timeout") == 90.0
    assert grandchild.get("message_ttl_default") == 9
    assert grandchild.get("default_transport") == "ipc"
    assert grandchild.runtime() == {}


def test_what_merged_and_runtime_give_away_is_a_copy(table):
    table.configure({"message_ttl_default": 3})
    table.merged()["message_ttl_default"] = 1
    table.runtime().clear()

    assert table.get("message_ttl_default") == table.merged()["message_ttl_default"] == 3


def test_threads_that_configure_at_once_lose_nothing(table):
    names = ["message_ttl_default", "message_ack_every_n_messages", "codec_max_frame_length", "send_buffer_bytes"]
    barrier = threading.Barrier(len(names))

    def work(name):
        barrier.wait()
        for value in range(1, 101):
            table.configure({name: value})
            assert table.get(name) == value

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert table.runtime() == dict.fromkeys(names, 100)


def test_variables_without_a_meaning_can_be_listed():
    environ = {
        "HYPERACTOR_CLEANUP_TIMEOUT": "1s",
        "HYPERACTOR_SPLIT_MAX_BUFFER_AGE": "1s",
        "HOME": "/",
        "MONARCH_X": "1",
        "MONARCH_LOG": "debug",
        "MONARCH_RANK_gpus": "0",
        "MONARCH_CLEANUP_TIMEOUT": "1s",
        "MONARCH_SECRETS_FILE": "/secret",
    }

    assert setting_table.unknown_variables(environ) == {
        "HYPERACTOR_SPLIT_MAX_BUFFER_AGE": "",
        "MONARCH_CLEANUP_TIMEOUT": "HYPERACTOR_CLEANUP_TIMEOUT",
        "MONARCH_SECRETS_FILE": "MONARCH_SECRET_FILE",
    }


def test_no_variable_of_this_library_is_unknown():
    sources = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    read = set(re.findall(r"\bMONARCH_[A-Z_]*[A-Z]\b", sources))
    assert "MONARCH_HOST_ID" in read

    assert setting_table.unknown_variables(dict.fromkeys(read, "1")) == {}
