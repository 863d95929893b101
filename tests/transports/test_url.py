"""Addresses as text."""

from __future__ import annotations

import pytest

from monarch.errors import NotViable
from monarch.transports.url import Url, parse, stays_on_host

GOOD = [
    ("tcp://host:fd7", Url("tcp", "host", fd=7)),
    ("tcp://a:1@tcp://[::1]:fd12", Url("tcp", "a", 1, bind=Url("tcp", "::1", fd=12))),
    ("tcp://127.0.0.1:80", Url("tcp", "127.0.0.1", 80)),
    ("tcp://host.example:0", Url("tcp", "host.example", 0)),
    ("tcp://[::1]:65535", Url("tcp", "::1", 65535)),
    ("ipc:///tmp/a b", Url("ipc", name="/tmp/a b")),
    ("ipc://@name", Url("ipc", name="@name")),
    ("ipc://", Url("ipc")),
    ("inproc://a", Url("inproc", name="a")),
    ("tcp://public:1@tcp://0.0.0.0:2", Url("tcp", "public", 1, bind=Url("tcp", "0.0.0.0", 2))),
    ("ipc://@a@ipc:///b", Url("ipc", name="@a", bind=Url("ipc", name="/b"))),
]

BAD = [
    ("tcp://*:1", r"\* is no host"),
    ("tcp://host:fdx", "decimal port"),
    ("ibverbs://host:fd7", "decimal port"),
    ("host:80", "is no address"),
    ("", "is no address"),
    ("TCP://a:1", "is no address"),
    ("udp://a:1", "unknown scheme 'udp'"),
    ("tcp://a", "decimal port"),
    ("tcp://a:x", "decimal port"),
    ("tcp://a:-1", "decimal port"),
    ("tcp://a:65536", "above 65535"),
    ("tcp://:80", "is no host name"),
    ("tcp://a b:80", "is no host name"),
    ("tcp://::1:80", "in brackets"),
    ("ipc://relative", "absolute path"),
    ("ipc://@", "missing"),
    ("ipc:///a\0b", "NUL"),
    ("tcp://a:1@ipc:///b", "same scheme"),
    ("tcp://a:1@tcp://b", "decimal port"),
]


@pytest.mark.parametrize(("text", "url"), GOOD)
def test_an_address_survives_the_way_into_fields_and_back(text, url):
    assert parse(text) == url
    assert str(url) == text


@pytest.mark.parametrize(("text", "why"), BAD)
def test_what_is_no_address_is_refused_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why) as caught:
        parse(text)
    assert repr(text) in str(caught.value)


def test_a_listener_binds_the_second_half_of_an_alias():
    assert parse("tcp://public:1@tcp://0.0.0.0:2").local == Url("tcp", "0.0.0.0", 2)
    assert parse("tcp://public:1").local == Url("tcp", "public", 1)


def test_an_address_of_another_transport_is_refused():
    with pytest.raises(ValueError, match="starts with ipc://"):
        parse("tcp://a:1", "ipc")


@pytest.mark.parametrize("text", ["metatls://host:1", "metatls-hostname://host:1"])
def test_metatls_is_refused_with_the_reason_and_the_alternative(text):
    with pytest.raises(NotViable, match=r"certificates.*use tcp://"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "stays"),
    [
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://127.0.0.9:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://localhost:1", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://node7:1", False),
    ],
)
def test_which_addresses_stay_on_the_host(text: str, stays: bool) -> None:
    assert stays_on_host(text) is stays
