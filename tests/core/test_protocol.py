"""Two sessions back to back, over links that break at any moment: each frame arrives once, and in order."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from monarch import compiled
from monarch.core.protocol import SESSION, FrameType, Hello, Session, frame_type, refusal, refused_because
from monarch.errors import RemoteProtocolError

_HELLO = Hello("p-2", "inproc://p", 3, 42, "here")


class _Side:
    def __init__(self) -> None:
        self.session = Session(ack_every_n=4, ack_interval_s=1.0)
        self.wire: deque[list[bytes]] = deque()  # what this side has sent and the other has not yet taken
        self.got: list[bytes] = []
        self.greeted = False

    def send(self, frame: list[bytes]) -> None:
        if self.greeted:
            self.wire.append([bytes(part) for part in frame])


class Sessions(RuleBasedStateMachine):
    """A link is up once a side has the other's hello; each side attaches at a moment of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = (_Side(), _Side())
        self.wrapped = (0, 0)
        self.sent: tuple[list[bytes], list[bytes]] = ([], [])
        self.hellos: list[int | None] = [None, None]  # of each side, on its way to the other
        self.now_s = 0.0

    @rule(at=st.sampled_from([0, 1]), parts=st.integers(1, 3), size=st.sampled_from([0, 5, 1 << 20]))
    def wrap(self, at: int, parts: int, size: int) -> None:
        side, text = self.sides[at], b"%d" % len(self.sent[at])
        self.sent[at].append(text)
        frame = [text, *[bytes(2)] * (parts - 1)]
        side.send(side.session.wrap(frame, size))

    @rule(at=st.sampled_from([0, 1]), kind=st.sampled_from([FrameType.ACK, FrameType.HEARTBEAT, FrameType.GOODBYE]))
    def control(self, at: int, kind: FrameType) -> None:
        self.sides[at].send(self.sides[at].session.control(kind))

    @rule(at=st.sampled_from([0, 1]), count=st.integers(1, 9))
    def deliver(self, at: int, count: int) -> None:
        other = self.sides[1 - at]
        if not other.greeted:
            return  # it reads the hello first
        for _ in range(min(count, len(self.sides[at].wire))):
            inner = other.session.accept(self.sides[at].wire.popleft())
            if inner is not None:
                other.session.took(sum(map(len, inner)), self.now_s)
                other.got.append(bytes(inner[0]))
        if other.session.ack_due(self.now_s):
            other.send(other.session.control(FrameType.ACK))
            assert not other.session.ack_due(self.now_s) and not other.session.owes_ack

    @rule()
    def break_and_dial(self) -> None:
        """Everything on its way is lost; both say hello, as of now, on the next link."""
        for at, side in enumerate(self.sides):
            side.wire.clear()
            side.greeted = False
            self.hellos[at] = side.session.received

    @precondition(lambda self: any(hello is not None for hello in self.hellos))
    @rule(at=st.sampled_from([0, 1]))
    def hello_arrives(self, at: int) -> None:
        hello, self.hellos[1 - at] = self.hellos[1 - at], None
        if hello is None:
            return
        side = self.sides[at]
        side.greeted = True
        for frame in side.session.resume(hello):
            side.send(frame)

    @rule(step_s=st.sampled_from([0.1, 1.0]))
    def wait(self, step_s: float) -> None:
        self.now_s += step_s

    @invariant()
    def in_order_and_once(self) -> None:
        for at, side in enumerate(self.sides):
            side.session.check_invariants()
            sent = self.sent[1 - at]
            assert side.got == sent[: len(side.got)]
            assert side.session.received == len(side.got)

    def teardown(self) -> None:
        self.break_and_dial()
        for at in (0, 1):
            self.hello_arrives(at)
        for at in (0, 1):
            self.deliver(at, len(self.sides[at].wire))
        for at in (0, 1):
            self.sides[at].send(self.sides[at].session.control(FrameType.ACK))
        for at in (0, 1):
            self.deliver(at, len(self.sides[at].wire))
        self.in_order_and_once()
        for at, side in enumerate(self.sides):
            assert side.got == self.sent[1 - at]
            assert not side.session.unacked and side.session.unacked_bytes == 0


TestSessions = Sessions.TestCase


def _exchange(frames: int, size: int = 1, **options: float) -> tuple[Session, Session]:
    left, right = Session(), Session(**options)  # type: ignore[arg-type]
    for _ in range(frames):
        assert right.accept(left.wrap([bytes(8), bytes(size)], size)) is not None
        right.took(8 + size, 100.0)
    return left, right


def test_an_acknowledgement_is_due_by_number() -> None:
    _, right = _exchange(9, ack_every_n=10)
    assert not right.ack_due(100.0)
    _, right = _exchange(10, ack_every_n=10)
    assert right.ack_due(100.0)


def test_an_acknowledgement_is_due_by_size() -> None:
    assert not _exchange(3, 1 << 20)[1].ack_due(100.0)
    assert _exchange(4, 1 << 20)[1].ack_due(100.0)


def test_an_acknowledgement_is_due_by_time_and_says_when() -> None:
    _, right = _exchange(1, ack_interval_s=0.5)

    assert right.owes_ack
    assert not right.ack_due(100.4) and right.ack_due(100.5)
    right.control(FrameType.ACK)
    assert not right.owes_ack and not right.ack_due(1000.0)


def test_every_frame_acknowledges_so_none_travels_alone_when_there_is_an_answer() -> None:
    left, right = _exchange(3)
    assert len(left.unacked) == 3
    left.accept(right.wrap([bytes(8)], 8))

    assert not left.unacked and left.unacked_bytes == 0 and not right.ack_due(1e9)


def test_a_frame_that_comes_again_is_dropped_and_a_gap_is_an_error() -> None:
    left, right = Session(), Session()
    frames = [left.wrap([b"%d" % n], 1) for n in range(3)]
    for _ in range(2):  # nobody has delivered it
        assert right.accept([bytes(frames[0][0])]) == [b"0"] and right.told() == 0
    right.took(1, 0.0)
    assert right.accept([bytes(frames[0][0])]) is None
    with pytest.raises(RemoteProtocolError, match="frame 3 arrived after frame 1"):
        right.accept(frames[2])
    assert right.received == 1
    right.check_invariants()


@pytest.mark.parametrize("frame", [[], [b""], [bytes(23)], [b"x", bytes(100)]])
def test_what_has_no_head_is_refused(frame: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError):
        Session().accept(list(frame))
    with pytest.raises(RemoteProtocolError):
        frame_type(list(frame))


@pytest.mark.parametrize("kind", [0, 6, 255])
def test_a_frame_of_unknown_type_is_refused(kind: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"unknown type {kind}"):
        Session().accept([SESSION.pack(kind, 0, 0)])


def test_an_acknowledgement_of_what_was_never_sent_is_refused() -> None:
    session = Session()
    session.wrap([b"a"], 1)
    with pytest.raises(RemoteProtocolError, match="acknowledges frame 2 of 1"):
        session.accept([SESSION.pack(FrameType.ACK, 0, 2)])
    with pytest.raises(RemoteProtocolError, match="has received 2 frames of 1"):
        session.resume(2)
    assert len(session.unacked) == 1
    session.check_invariants()


@given(st.lists(st.binary(max_size=60), max_size=3))
def test_no_nonsense_makes_a_session_crash_or_lose_its_books(frame: list[bytes]) -> None:
    session = Session()
    session.wrap([b"a"], 1)
    try:
        session.accept(frame)
    except RemoteProtocolError:
        pass
    session.check_invariants()


def test_a_hello_round_trips() -> None:
    assert Hello.decode(_HELLO.encode()) == _HELLO
    assert frame_type(_HELLO.encode()) == FrameType.HELLO


@pytest.mark.parametrize(
    ("hello", "words"),
    [
        (evolve(_HELLO, wire=99), r"the peer runs monarch \S+ \(wire version 99\), this process monarch"),
        (evolve(_HELLO, monarch="0.0.1"), r"the peer runs monarch 0\.0\.1, this process monarch .* both sides"),
        (evolve(_HELLO, python="2.7"), r"the peer runs Python 2\.7, this process Python 3\.\d+"),
    ],
)
def test_a_peer_of_another_version_is_told_apart_in_words(hello: Hello, words: str) -> None:
    with pytest.raises(RemoteProtocolError, match=words):
        Hello.decode(hello.encode())


def test_a_refusal_says_why() -> None:
    assert refused_because(refusal("who are you?")) == "who are you?"
    assert refused_because(_HELLO.encode()) == ""


def _hello_with(body: object) -> list[bytes]:
    return [SESSION.pack(FrameType.HELLO, 0, 0), json.dumps(body).encode()]


@pytest.mark.parametrize(
    "frame",
    [
        [],
        [b""],
        [bytes(24)],
        [SESSION.pack(FrameType.HELLO, 0, 0)],
        [SESSION.pack(FrameType.HELLO, 0, 0), b"\xff"],
        [SESSION.pack(FrameType.DATA, 1, 0), b"{}"],
        _hello_with([]),
        _hello_with({"proc": "a"}),
        _hello_with(None),
    ],
)
def test_what_is_no_hello_is_refused(frame: list[bytes]) -> None:
    with pytest.raises(RemoteProtocolError, match="is no hello"):
        Hello.decode(frame)


def test_a_hello_of_a_later_version_with_more_to_say_is_understood_as_that() -> None:
    body = json.loads(bytes(evolve(_HELLO, wire=3).encode()[1])) | {"compression": "zstd"}
    with pytest.raises(RemoteProtocolError, match="wire version 3"):
        Hello.decode(_hello_with(body))


@pytest.mark.parametrize("field", ["proc", "address", "received", "pid", "host"])
def test_a_hello_whose_fields_are_of_other_types_is_refused(field: str) -> None:
    body = json.loads(bytes(_HELLO.encode()[1])) | {field: [1]}
    with pytest.raises(RemoteProtocolError, match="is no hello"):
        Hello.decode(_hello_with(body))


@pytest.mark.skipif(bool(compiled.why_not), reason=compiled.why_not or "there is a compiled part")
def test_the_compiled_part_and_python_agree_on_what_is_not_said() -> None:
    """One of the two is tested in a run; the other has the same defaults."""
    pure = "import os; os.environ['MONARCH_RING'] = '0'\n"
    code = (
        "from monarch.core.protocol import Session; from monarch.core.envelope import Envelope\n"
        "def arrive(s, size): s.accept(s.wrap([b'', bytes(size)], 1)); s.took(size, 7.0)\n"
        "s = Session(); due = [arrive(s, 1 << 18) or s.ack_due(7.0 + after) for after in (0.0, 0.4, 0.5)]\n"
        "e = Envelope(1, 2, 3, 4, 5, 6, [])\n"
        "print(due, [arrive(s, 1 << 19) or s.ack_due(7.0) for n in range(2)], e.size_bytes,"
        " e.flags, e.rank, e.seq, e.reply_port, e.ttl, e.chain, e.via, type(s).__mro__[1].__name__)"
    )
    run = [
        subprocess.run([sys.executable, "-c", each + code], capture_output=True, text=True, check=True, timeout=60)
        for each in ("", pure)
    ]
    said = [done.stdout.rpartition(" ") for done in run]
    assert said[0][0] == said[1][0] != "" and said[0][2] != said[1][2]
