"""Links over queue pairs: what the conformance suite does not know of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch.core import settings
from monarch.errors import LinkSevered
from monarch.transports import registry
from monarch.verbs import node
from tests.transports.drive import ADDRESSES, SECRET, Receiver, plain, wait_until
from tests.verbs import cable

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(200)]

ROOT = Path(__file__).parents[2]
ECHO = """
import sys
from monarch.errors import LinkSevered
from monarch.transports import registry
from monarch.verbs import node
from tests.transports.drive import wait_until
url, target, binding = sys.argv[1:]
node.prefer(target, binding)
link = registry.for_url(url).dial(url, sys.stdin.buffer.read(), 60)
try:
    while True:
        frames = wait_until(lambda: link.flush_nowait() and link.recv_nowait(), link, wait_s=60)
        link.send_nowait(frames)
except LinkSevered:
    link.abort()
"""


def start_echo(url: str, target: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", ECHO, url, target, settings.get("rdma_binding")]
    echo = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT)
    assert echo.stdin is not None
    echo.stdin.write(SECRET)
    echo.stdin.close()
    return echo


def echoed(link: Any, frame: list[bytes]) -> Any:
    """What comes back. Raises: LinkSevered."""
    assert link.send_nowait([frame]) == 1
    return plain(wait_until(lambda: link.flush_nowait() and link.recv_nowait(), link))


def test_a_peer_that_was_killed_is_followed_by_another():
    listener = registry.get("ibverbs").listen(ADDRESSES["ibverbs"], SECRET)
    for _ in range(2):
        with start_echo(listener.url, "") as echo:
            (link,) = wait_until(listener.accept_nowait, listener, wait_s=60)
            frame = [b"head", bytes(1 << 20)]
            assert echoed(link, frame) == [frame]
            echo.kill()
            assert type(Receiver(link).until_end()) is LinkSevered
            link.abort()
    listener.close()


@pytest.mark.cable
def test_a_cable_that_is_pulled_severs_the_link_and_the_next_one_works():
    node.prefer("nic:rxe0", settings.get("rdma_binding"))
    listener = registry.get("ibverbs").listen(ADDRESSES["ibverbs"], SECRET)
    with start_echo(listener.url, "nic:rxe1") as echo:
        (link,) = wait_until(listener.accept_nowait, listener, wait_s=60)
        assert echoed(link, [b"before"]) == [[b"before"]]
        with cable.pulled():
            try:
                with pytest.raises(LinkSevered, match="does not answer: it is gone, or the cable is out"):
                    echoed(link, [b"into the void"])
            finally:
                link.abort()
                echo.wait(60)

    with start_echo(listener.url, "nic:rxe1") as echo:
        (link,) = wait_until(listener.accept_nowait, listener, wait_s=60)
        assert echoed(link, [b"after"]) == [[b"after"]]
        link.abort()
        echo.wait(60)
    listener.close()
    node.prefer("", settings.get("rdma_binding"))
