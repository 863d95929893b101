"""What every transport promises, and each is held to."""

from __future__ import annotations

import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from monarch.errors import AuthenticationError, LinkClosed, LinkSevered, TransportError
from monarch.transports import certificates, registry, ring, shm
from monarch.transports.base import BIG_BYTES, Inherit, Link, Listener, Missing, Transport
from monarch.transports.certificates import Certificates
from monarch.transports.framing import FrameDecoder
from monarch.transports.url import parse
from tests.certificates import Authority
from tests.transports.drive import (
    ADDRESSES,
    SECRET,
    WAIT_S,
    Receiver,
    Sender,
    accept_from,
    connected,
    dial_and_accept,
    exchange,
    plain,
    wait_until,
)
from tests.until import until

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Authority(tmp_path_factory.mktemp("certificates")).sign("process")


@pytest.fixture(
    params=[
        "inproc",
        "ipc",
        "shm",
        "shm without rings",
        "tcp",
        "tls+tcp",
        pytest.param("ibverbs", marks=pytest.mark.rdma),
    ]
)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    scheme, _, without = request.param.partition(" ")
    if without:
        monkeypatch.setattr(ring, "why_not", "the test does without")
    if scheme == "tls+tcp":
        certificates.use(request.getfixturevalue("identity"))
    yield usable(scheme)
    certificates.use(Certificates())


def usable(scheme: str) -> Transport:
    transport = registry.get(scheme)
    viability = transport.viability()
    assert viability.ok or scheme != "ibverbs", viability.reason  # there is a device, so it has to work
    if not viability.ok:
        pytest.skip(viability.reason)
    return transport


@pytest.fixture
def over_processes(transport: Transport) -> Transport:
    if transport.scheme == "inproc":
        pytest.skip("inproc links stay inside one process")
    return transport


@pytest.fixture
def listener(transport: Transport) -> Iterator[Listener]:
    listener = transport.listen(ADDRESSES[transport.scheme], SECRET)
    yield listener
    listener.close()


@pytest.fixture
def links(transport: Transport) -> Iterator[tuple[Link, Link]]:
    with connected(transport) as pair:
        yield pair


def connect_raw(url_text: str) -> socket.socket:
    """A stranger's connection."""
    url = parse(url_text)
    if url.host:
        return socket.create_connection((url.host, url.port), 5)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(5)
    sock.connect("\0" + url.name[1:] if url.is_abstract else url.name)
    return sock


FRAMES = [
    [],
    [b""],
    [b"", b"", b"x"],
    [b"x"],
    [bytes(range(256)) * 16],
    [b"head", os.urandom(3 * MIB), b"", b"tail"],
    [bytes([i % 256]) * i for i in range(1000)],
    [bytes([i]) * 40_000 for i in range(40)],
    [b"a" * BIG_BYTES, b"b" * (BIG_BYTES - 1), b"c" * (BIG_BYTES + 1)],
    [b"last"],
]


def test_frames_arrive_whole_and_in_order_with_their_edges(links):
    left, right = links
    assert plain(exchange(left, right, FRAMES)) == FRAMES
    assert plain(exchange(right, left, FRAMES)) == FRAMES


def test_a_frame_of_70_mib_arrives(links):
    left, right = links
    frame = [b"head", os.urandom(MIB) * 70]
    (got,) = exchange(left, right, [frame])
    assert got[0] == frame[0] and got[1] == frame[1]


def test_any_buffer_can_be_sent(links):
    left, right = links
    frame = [bytearray(b"abc"), memoryview(b"def"), memoryview(bytearray(2 * MIB))[5:]]
    assert plain(exchange(left, right, [frame])) == plain([frame])


def test_ten_thousand_small_frames_pass_both_ways_at_once(links):
    left, right = links
    frames = {link: [[name, b"%d" % i] for i in range(10_000)] for link, name in ((left, b"left"), (right, b"right"))}
    senders = [Sender(left, frames[left]), Sender(right, frames[right])]
    receivers = [Receiver(left), Receiver(right)]

    def done() -> bool:
        for sender in senders:
            sender.step()
        return sum(receiver.step() for receiver in receivers) == 20_000

    wait_until(done, left, right)
    assert receivers[0].frames == frames[right]
    assert receivers[1].frames == frames[left]


def test_a_small_frame_never_overtakes_a_large_one(links):
    left, right = links
    rng = random.Random(1)
    frames = [[b"%d" % i, bytes(rng.choice([0, 10, 5000, 70_000, 300_000]))] for i in range(300)]
    assert plain(exchange(left, right, frames)) == frames


def test_received_large_parts_are_writable_and_private(links):
    left, right = links
    source = bytearray(b"s" * BIG_BYTES)
    (first,), (second,) = exchange(left, right, [[source], [source]])
    view = memoryview(first)
    assert not view.readonly
    view[0] = 0
    assert second[0] == source[0] == ord("s")


@pytest.mark.parametrize("transport", ["ipc", "shm", "tcp"], indirect=True)
def test_where_there_is_no_memory_for_a_part_the_frame_arrives_without_it(links, monkeypatch):
    def no_memory(*_: object) -> memoryview:
        raise MemoryError

    monkeypatch.setattr(FrameDecoder, "reserve", staticmethod(lambda size_bytes, **_: Missing.of(size_bytes)))
    monkeypatch.setattr(shm, "borrow", no_memory)
    sender, receiver = links
    large = bytes(3 << 20)
    first, second = exchange(sender, receiver, [[b"x", large, b"y"], [b"next"]])
    assert first == [b"x", b"", b"y"] and second == [b"next"]
    assert isinstance(first[1], Missing) and first[1].size_bytes == len(large)


def test_a_16_mib_frame_sent_just_before_close_arrives(links):
    left, right = links
    frame = [b"head", os.urandom(MIB) * 16]
    closed: list[bool] = []
    receiver = Receiver(right)
    assert left.send_nowait([frame]) == 1
    closer = threading.Thread(target=lambda: closed.append(left.close(WAIT_S)))
    closer.start()
    end = receiver.until_end()
    right.close()
    closer.join(WAIT_S)

    assert type(end) is LinkClosed
    assert plain(receiver.frames) == [frame]
    assert closed == [True]


def test_both_may_close_at_once(links):
    links[0].send_nowait([[b"x"]])
    results: list[bool] = []
    threads = [threading.Thread(target=lambda link=link: results.append(link.close(WAIT_S))) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert results == [True, True]  # False would say that one waited out its time


def test_close_gives_up_on_a_peer_that_does_not_read(transport, links):
    left, _ = links
    if transport.scheme == "inproc":
        pytest.skip("what was sent in a process has arrived")
    Sender(left, [[bytes(60_000)]] * 700).step()
    assert left.close(0.2) is False


def test_after_the_peer_closed_sending_fails(links):
    left, right = links
    closer = threading.Thread(target=left.close)
    closer.start()
    assert type(Receiver(right).until_end()) is LinkClosed
    with pytest.raises(LinkClosed):
        right.send_nowait([[b"x"]])
    assert right.close() is True
    closer.join(WAIT_S)


def test_what_arrived_before_the_goodbye_is_read_before_it_is_told(links):
    left, right = links
    left.send_nowait([[b"%d" % i] for i in range(100)])
    closer = threading.Thread(target=left.close)
    closer.start()
    receiver = Receiver(right)
    receiver.until_end()
    closer.join(WAIT_S)
    assert receiver.frames == [[b"%d" % i] for i in range(100)]
    with pytest.raises(LinkClosed):
        right.recv_nowait()


def test_a_slow_reader_pushes_back_and_loses_nothing(links):
    left, right = links
    frames = [[b"%d" % i, bytes(20_000)] for i in range(2_000)]
    sender, receiver = Sender(left, frames), Receiver(right)
    sender.step()
    assert left.blocked
    assert sender.sent < len(frames)

    def done() -> bool:
        sender.step()
        return receiver.step() == len(frames)

    wait_until(done, left, right)
    assert receiver.frames == frames
    assert not left.blocked


def test_abort_is_seen_as_severed(links):
    left, right = links
    exchange(left, right, [[b"x"]])
    left.abort()
    assert type(Receiver(right).until_end()) is LinkSevered
    with pytest.raises(TransportError):
        right.send_nowait([[b"x"]])


def test_abort_inside_a_large_frame_is_seen_as_severed(transport, links):
    left, right = links
    if transport.scheme == "inproc":
        pytest.skip("frames in a process arrive whole")
    left.send_nowait([[b"first"]])
    left.send_nowait([[bytes(60_000)] * 1000])
    receiver = Receiver(right)
    wait_until(receiver.step, right)
    left.abort()
    assert type(receiver.until_end()) is LinkSevered
    assert receiver.frames == [[b"first"]]


PEER = """
import os, select, sys
from monarch.transports import certificates, registry
certificates.use(certificates.Certificates(*sys.argv[4:]))
url, frames, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
link = registry.for_url(url).dial(url, sys.stdin.buffer.read(), 20)
taken = link.send_nowait([[b"%d" % i, bytes(size)] for i in range(frames)])
while link.blocked:
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN | select.POLLOUT)
    poll.poll(20000)
    link.flush_nowait()
sys.stdout.write(str(taken))
sys.stdout.flush()
select.poll().poll(60000)
"""


def start_peer(url: str, frames: int = 0, size_bytes: int = 0) -> subprocess.Popen[bytes]:
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, url, str(frames), str(size_bytes), *attrs.astuple(certificates.used())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert peer.stdin is not None
    peer.stdin.write(SECRET)
    peer.stdin.close()
    return peer


def accept_one(listener: Listener) -> Link:
    return wait_until(listener.accept_nowait, listener)[0]


handing_down = pytest.mark.parametrize("transport", ["ipc", "shm", "shm without rings", "tcp"], indirect=True)


@pytest.fixture
def inherit(transport: Transport) -> Inherit:
    assert transport.inherit is not None
    return transport.inherit


@handing_down
def test_a_link_that_is_handed_down_is_as_any_other(inherit, listener):
    fds = [listener.hand_down() for _ in range(3)]
    ends = [accept_from(lambda each=each: inherit(each, "keeper", WAIT_S), listener) for each in reversed(fds)]
    for heir, keeper in ends:
        assert plain(exchange(heir, keeper, FRAMES)) == FRAMES
        assert plain(exchange(keeper, heir, FRAMES)) == FRAMES
    (one, other), (heir, keeper), _ = ends
    one.abort()
    assert isinstance(Receiver(other).until_end(), LinkSevered)
    assert plain(exchange(heir, keeper, [[b"still here"]])) == [[b"still here"]]
    for end in (other, *(end for pair in ends[1:] for end in pair)):
        end.abort()


@handing_down
def test_an_heir_that_never_comes_disturbs_nobody(transport, inherit, listener):
    before = len(os.listdir("/proc/self/fd"))
    for fd in [fd for _ in range(200) for fd in listener.hand_down()]:
        os.close(fd)
    listener.accept_nowait()
    for link in listener.accept_nowait():
        with pytest.raises(LinkSevered):
            link.recv_nowait()
        link.abort()
    assert len(os.listdir("/proc/self/fd")) <= before
    left, right = dial_and_accept(transport, listener)
    assert plain(exchange(left, right, FRAMES)) == FRAMES
    left.abort()
    right.abort()


@handing_down
def test_an_heir_of_a_listener_that_closed_is_told(inherit, listener):
    fds = listener.hand_down()
    listener.close()
    with pytest.raises(TransportError):
        link = inherit(fds, "keeper", WAIT_S)
        Receiver(link).until_end()
        link.recv_nowait()


def test_a_killed_process_is_seen_as_severed(over_processes, transport, listener):
    with start_peer(listener.url, 3, 100_000) as peer:
        link = accept_one(listener)
        try:
            assert peer.stdout is not None and peer.stdout.read(1) == b"3"
            receiver = Receiver(link)
            peer.send_signal(signal.SIGKILL)
            peer.wait(WAIT_S)
            assert type(receiver.until_end()) is LinkSevered
            arrived = [int(frame[0]) for frame in receiver.frames]
            if "tcp" in transport.scheme:
                assert arrived == list(range(len(arrived)))  # nng may have had some of them yet, and died, too
            else:
                assert arrived == [0, 1, 2]  # the kernel had them, so they are delivered
        finally:
            peer.kill()
            link.abort()


def test_a_killed_process_is_seen_by_one_who_only_sends(over_processes, listener):
    with start_peer(listener.url) as peer:
        link = accept_one(listener)
        try:
            sender = Sender(link, [[bytes(50_000)]] * 2000)
            assert not sender.step()
            peer.send_signal(signal.SIGKILL)
            peer.wait(WAIT_S)

            def step() -> bool:
                sender.step()
                link.recv_nowait()
                return False

            with pytest.raises(LinkSevered):
                wait_until(step, link)
        finally:
            peer.kill()
            link.abort()


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return os._exit, (86,)


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), pickle.dumps(Bomb()), b"MONARCH\n\x00\x07" + bytes(32)],
    ids=["nothing", "newline", "http", "random", "pickle", "version"],
)
def test_a_stranger_gets_nothing_and_disturbs_nobody(over_processes, listener, data):
    with connect_raw(listener.url) as stranger:
        stranger.sendall(data)
        left, right = dial_and_accept(over_processes, listener)
        try:
            assert exchange(left, right, [[b"hello"]]) == [[b"hello"]]
            assert listener.accept_nowait() == []
            if len(data) >= 34:
                greeting = b""
                with_end = False
                while not with_end:
                    try:
                        got = stranger.recv(4096)
                    except ConnectionResetError:
                        got = b""
                    greeting += got
                    with_end = not got
                is_alert = greeting.startswith(b"\x15\x03") and len(greeting) == 7  # of TLS, which has met nonsense
                assert is_alert or len(greeting) in (0, 42)  # no proof
        finally:
            left.abort()
            right.abort()


def test_a_wrong_secret_is_refused_on_both_sides(transport, listener):
    errors: list[BaseException] = []
    ended, over = socket.socketpair()

    def dial() -> None:
        try:
            transport.dial(listener.url, b"another secret", 5)
        except BaseException as error:
            errors.append(error)
        over.close()

    thread = threading.Thread(target=dial)
    thread.start()
    accepted: list[Link] = []
    with ended:
        wait_until(lambda: accepted.extend(listener.accept_nowait()) or accepted or errors, listener, ended)
    thread.join(WAIT_S)
    assert accepted == listener.accept_nowait() == []
    assert type(errors[0]) is AuthenticationError
    assert listener.url in str(errors[0])


def test_silent_strangers_do_not_block_the_others(over_processes, listener):
    strangers = [connect_raw(listener.url) for _ in range(200)]
    try:
        left, right = dial_and_accept(over_processes, listener)
        assert exchange(left, right, [[b"hello"]]) == [[b"hello"]]
        left.abort()
        right.abort()
        assert listener.newcomer_count <= 128
    finally:
        for stranger in strangers:
            stranger.close()


def test_dialing_where_nobody_listens_is_refused_at_once_with_the_address(transport):
    listener = transport.listen(ADDRESSES[transport.scheme], SECRET)
    listener.close()
    with pytest.raises(ConnectionRefusedError, match=re.escape(listener.url)):
        transport.dial(listener.url, SECRET, WAIT_S)  # out of time, it would be a TimeoutError


def test_an_address_is_free_again_after_close(transport):
    listener = transport.listen(ADDRESSES[transport.scheme], SECRET)
    left, right = dial_and_accept(transport, listener)
    listener.close()
    again = transport.listen(listener.url, SECRET)
    again.close()
    assert exchange(left, right, [[b"links outlive their listener"]])
    left.abort()
    right.abort()


def test_a_second_listener_at_an_address_is_refused_with_the_address(transport, listener):
    with pytest.raises(OSError, match=re.escape(listener.url)):
        transport.listen(listener.url, SECRET)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_descriptors_do_not_leak(transport):
    def once(orderly: bool) -> None:
        with connected(transport) as (left, right):
            left.send_nowait([[b"x"]])
            if orderly:
                closer = threading.Thread(target=left.close)
                closer.start()
                Receiver(right).until_end()
                right.close()
                closer.join(WAIT_S)

    once(True)
    before = open_descriptors()
    for i in range(60):
        once(i % 2 == 0)
    until(lambda: open_descriptors() <= before + 8)  # nng closes some behind our back


def test_closing_twice_and_aborting_after_it_is_harmless(links):
    left, right = links
    threads = [threading.Thread(target=link.close) for link in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    left.close()
    left.abort()
    right.abort()
    right.close()
    with pytest.raises(TransportError):
        left.send_nowait([[b"x"]])
    with pytest.raises(TransportError):
        left.recv_nowait()
