"""The files of unix sockets: whose they are, and when they go."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from monarch.transports import registry
from tests.transports.drive import SECRET, dial_and_accept, exchange


def test_a_socket_file_is_for_its_owner_only_and_gone_after_close(tmp_path):
    path = tmp_path / "s"
    old = os.umask(0)
    try:
        listener = registry.get("ipc").listen(f"ipc://{path}", SECRET)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    left, right = dial_and_accept(registry.get("ipc"), listener)
    assert exchange(left, right, [[b"x"]])
    left.abort()
    right.abort()
    listener.close()
    assert not path.exists()
    with pytest.raises(ConnectionRefusedError, match=str(path)):
        registry.get("ipc").dial(f"ipc://{path}", SECRET, 5)


def test_the_file_of_a_dead_listener_is_replaced(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = registry.get("ipc").listen(f"ipc://{path}", SECRET)
    with pytest.raises(OSError, match=str(path)):
        registry.get("ipc").listen(f"ipc://{path}", SECRET)
    listener.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path):
    path: Path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(OSError, match=str(path)):
        registry.get("ipc").listen(f"ipc://{path}", SECRET)
    assert path.read_text() == "precious"


def test_a_file_that_somebody_else_put_there_is_left_alone(tmp_path):
    path = tmp_path / "s"
    listener = registry.get("ipc").listen(f"ipc://{path}", SECRET)
    path.unlink()
    path.write_text("theirs")
    listener.close()
    assert path.read_text() == "theirs"


def test_a_path_that_is_too_long_is_explained(tmp_path):
    with pytest.raises(OSError, match="at most 107 bytes"):
        registry.get("ipc").listen(f"ipc://{tmp_path}/{'x' * 200}", SECRET)
