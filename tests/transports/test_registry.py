"""Which transport is taken, and what is said about it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from monarch.errors import NotViable
from monarch.transports import registry
from monarch.transports.base import Viability


@pytest.mark.parametrize("scheme", ["inproc", "ipc", "shm", "tcp"])
def test_a_scheme_has_one_transport(scheme):
    transport = registry.get(scheme)
    assert transport.scheme == scheme
    assert registry.get(scheme) is transport


def test_an_address_finds_its_transport():
    assert registry.for_url("tcp://a:1").scheme == "tcp"
    assert registry.for_url("ipc://@x").scheme == "ipc"


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"expected one of auto, inproc, ipc, shm, tcp, tls\+tcp, ibverbs"):
        registry.choose("udp")


def test_a_transport_that_was_asked_for_is_taken():
    choice = registry.choose("tcp")
    assert (choice.transport.scheme, choice.reason) == ("tcp", "tcp was asked for")


def test_auto_prefers_shared_memory():
    choice = registry.choose()
    assert choice.transport.scheme == "shm"
    assert "fastest" in choice.reason


def test_auto_takes_the_next_one_and_says_why(monkeypatch):
    monkeypatch.setattr(type(registry.get("shm")), "viability", lambda self: Viability(False, "no memfd here"))
    choice = registry.choose("auto")
    assert choice.transport.scheme == "ipc"
    assert "shm does not work here: no memfd here" in choice.reason


def test_a_forced_transport_that_cannot_work_is_an_error(monkeypatch):
    monkeypatch.setattr(type(registry.get("ipc")), "viability", lambda self: Viability(False, "no sockets here"))
    with pytest.raises(NotViable, match="no sockets here"):
        registry.choose("ipc")


def test_nng_is_not_started_before_the_first_link():
    """A process that has used nng must not fork; one that listens has loaded it, and may."""
    code = (
        "import os, sys; from monarch.transports import registry, tcp; registry.choose('tcp'); "
        "assert 'pynng' not in sys.modules; "
        "registry.get('tcp').listen('tcp://127.0.0.1:0', b's').close(); "
        "assert len(os.listdir('/proc/self/task')) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
