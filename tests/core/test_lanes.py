"""Lanes: a message leaves for all its receivers in one step, or for none; the other way and back keeps the order. A
call to an actor of the same process comes into its mailbox in one step, too, or not at all.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from monarch import compiled
from monarch.core import chain
from monarch.core.driver import Signal
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.ids import ProcId, Uid
from monarch.core.mailbox import Mailbox, size_of
from monarch.core.monitor import Down
from monarch.core.peer import Peer
from monarch.core.poller import Poller
from monarch.core.protocol import FrameType, Session
from monarch.errors import LinkSevered, RemoteProtocolError
from monarch.transports import ring
from monarch.wake import Wake
from tests.core.net import take

pytestmark = pytest.mark.skipif(bool(compiled.why_not), reason=compiled.why_not or "there are lanes")


class Way:
    """From a session over a lane to another session; `lane` is what `post` looks for at a peer."""

    def __init__(self, most_bytes: int = 1 << 20) -> None:
        self.session, self.there = Session(), Session()
        self.counter = itertools.count()
        fds, self.reader = ring.offer()
        self.writer = ring.accept(fds)
        self.reader.attended = True
        self.reader.carry(self.there)
        self.there.ack_is_timed = True
        self.bells, self._bell = socket.socketpair()
        self.bells.setblocking(False)
        self.lane: Any = compiled.part.Lane(self.writer, self.session, self._bell.fileno(), most_bytes)
        self.lane.open = True

    def close(self) -> None:
        self.bells.close()
        self._bell.close()

    def target(self, proc: int = 7, rank: int = 0) -> Any:
        return self, self.counter, proc, rank

    def take(self) -> list[Any]:
        """What has arrived, all of it messages, which are delivered."""
        got = self.reader.pop(0)
        for each in got:
            self.there.took(each.size_bytes, 0.0)
        return got

    def deliver(self, take: Callable[[Any], object], proc: int = 7) -> bool:
        return self.reader.deliver(take, proc, 0.0)

    @property
    def bell_rang(self) -> bool:
        try:
            return self.bells.recv(100) == bytes(4)
        except BlockingIOError:
            return False

    @property
    def state(self) -> tuple[int, int, int]:
        return self.session.sent, self.session.unacked_bytes, self.writer.position


Make = Callable[..., Way]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Way] = []

    def way(**options: int) -> Way:
        made.append(Way(**options))
        return made[-1]

    yield way
    for each in made:
        each.close()


def post(*targets: Any, parts: list[Any] | None = None, chain: bytes = b"", kind: int = Kind.CALL) -> int:
    parts = [b"what", b"arguments"] if parts is None else parts
    return compiled.post(targets, parts, chain, kind, Flag.SEQUENCED, 60, 3, 4, 5, 6, 8)


def fields(envelope: Envelope) -> dict[str, Any]:
    names = "kind flags ttl rank dst_proc dst_actor dst_port src_proc src_actor seq reply_port parts chain via".split()
    return {name: getattr(envelope, name) for name in names}


def test_what_is_posted_arrives_as_if_it_had_been_framed_and_parsed(make: Make) -> None:
    way = make()
    parts = [b"a", bytearray(b"bc"), memoryview(b"def"), b""]

    assert post(way.target(proc=2**64 - 1, rank=9), parts=parts, chain=b"who called") == compiled.SENT
    (got,) = way.take()

    sent = Envelope(
        Kind.CALL, 2**64 - 1, 3, 4, 5, 6, [b"a", b"bc", b"def", b""], Flag.SEQUENCED, 9, 0, 8, 60, b"who called"
    )
    assert type(got) is Envelope and fields(got) == fields(sent)
    ((number, kept, size_bytes),) = way.session.unacked
    assert (number, size_bytes) == (1, way.session.unacked_bytes) and size_bytes == sum(map(len, kept))
    assert fields(Envelope.parse(list(kept))) | {"parts": None} == fields(sent) | {"parts": None}
    assert way.there.received == 1 and way.there.owes_ack


def test_each_receiver_has_its_own_rank_and_numbers(make: Make) -> None:
    ways = [make(), make()]
    for _ in range(3):
        assert post(*(way.target(rank=rank) for rank, way in enumerate(ways))) == compiled.SENT

    for rank, way in enumerate(ways):
        assert [(each.rank, each.seq) for each in way.reader.pop(0)] == [(rank, seq) for seq in range(3)]
    assert post((ways[0], None, 7, 0)) == compiled.SENT  # without numbers
    assert [each.seq for each in ways[0].reader.pop(0)] == [0] and next(ways[0].counter) == 3


def test_two_receivers_behind_one_lane(make: Make) -> None:
    way = make()
    other = itertools.count(50)

    assert post(way.target(rank=0), (way, other, 7, 1)) == compiled.SENT

    assert [(each.rank, each.seq) for each in way.reader.pop(0)] == [(0, 0), (1, 50)]
    way.session.check_invariants()


def _closed(way: Way) -> None:
    way.lane.close()
    way.lane.open = True  # it stays closed
    assert not way.lane.open


def _not_open(way: Way) -> None:
    way.lane.open = False


def _without(way: Way) -> None:
    way.lane = None


def _full(way: Way) -> None:
    while way.writer.push([[bytes(1000)]]):
        pass


@pytest.mark.parametrize("hinder", [_closed, _not_open, _without, _full])
def test_where_one_receiver_has_to_be_reached_otherwise_nothing_is_sent_to_any(
    hinder: Callable[[Way], None], make: Make
) -> None:
    well, ill = make(), make()
    hinder(ill)
    before = well.state, ill.state

    assert post(well.target(), ill.target()) == post(ill.target(), well.target()) == 0

    assert (well.state, ill.state) == before and next(well.counter) == next(ill.counter) == 0


@pytest.mark.parametrize("parts", [[bytes(96 << 10)], [bytes(1 << 20)], [b""] * 32])
def test_what_is_too_large_for_a_ring_goes_another_way(parts: list[bytes], make: Make) -> None:
    way = make()
    assert post(way.target(), parts=parts) == 0 and way.state == (0, 0, 0)


@pytest.mark.parametrize("targets", [(), [object()], (object(),), ((object(), None, 1, 0),), ((None, None, 1),)])
def test_nonsense_is_refused(targets: Any) -> None:
    try:
        sent = compiled.post(targets, [b""], b"", 1, 0, 1, 1, 1, 1, 1, 1)
    except (TypeError, AttributeError):
        return
    assert targets == () and sent == 0


def test_numbers_come_from_an_iterator_or_from_nowhere(make: Make) -> None:
    way = make()
    with pytest.raises(TypeError):
        post((way, 5, 7, 0))
    assert way.state == (0, 0, 0)


def test_nothing_overtakes_what_a_broken_link_refused(make: Make) -> None:
    way = make()

    class Link:
        """Whose stream is broken, and not its ring."""

        lane, blocked = way.lane, False

        def send_nowait(self, frames: object) -> int:
            raise LinkSevered("it broke")

    sender: Any = Peer(ProcId(Uid.instance("p")), way.session, Poller(), 1 << 20, lambda peer: None)
    sender.link, sender.lane = Link(), way.lane

    assert sender.send([b"large"]) is None

    assert not post((sender, way.counter, 7, 0)) and way.session.sent == 1 and way.writer.position == 0


def test_only_a_sleeper_is_woken(make: Make) -> None:
    way = make()
    ring.look((way.reader,), -1, 0.0, bytearray(1))
    post(way.target())
    assert not way.bell_rang
    way.reader.attended = False  # so that it sleeps when nothing is left
    way.reader.pop(0)
    post(way.target())
    assert way.bell_rang
    post(way.target())
    assert not way.bell_rang, "it knows already"


def test_who_sends_too_much_is_told(make: Make) -> None:
    way = make(most_bytes=1000)
    said = [post(way.target(), parts=[bytes(400)]) for _ in range(3)]
    assert said == [compiled.SENT, compiled.SENT, compiled.FULL]


def test_answers_acknowledge_what_has_come(make: Make) -> None:
    way = make()
    for _ in range(3):
        post(way.target())
    way.take()

    way.session.accept(way.there.control(FrameType.ACK))

    assert not way.session.unacked and way.session.unacked_bytes == 0 and not way.there.owes_ack


def test_messages_are_delivered_one_by_one_and_count_when_they_are(make: Make) -> None:
    way = make()
    for _ in range(3):
        post(way.target())
    seen: list[tuple[int, int]] = []

    assert way.deliver(lambda message: seen.append((message.seq, way.there.received)))

    assert seen == [(0, 0), (1, 1), (2, 2)] and way.there.received == 3 and way.there.owes_ack
    assert not way.deliver(seen.append), "what wakes without a message is something else"
    assert len(seen) == 3 and way.take() == []


def test_a_message_whose_delivery_fails_counts_and_one_that_is_interrupted_does_not(make: Make) -> None:
    way = make()
    for _ in range(3):
        post(way.target())
    seen: list[int] = []

    def fail(error: BaseException) -> Callable[[Any], None]:
        def take(message: Any) -> None:
            seen.append(message.seq)
            raise error

        return take

    with pytest.raises(ValueError, match="a bug"):
        way.deliver(fail(ValueError("a bug")))
    assert (seen, way.there.received) == ([0], 1)
    with pytest.raises(KeyboardInterrupt):
        way.deliver(fail(KeyboardInterrupt()))
    assert (seen, way.there.received) == ([0, 1], 1)


def test_what_comes_during_the_delivery_waits_for_the_next(make: Make) -> None:
    way = make()
    post(way.target())
    seen: list[int] = []

    def take(message: Any) -> None:
        seen.append(message.seq)
        post(way.target())

    assert way.deliver(take) and seen == [0]
    assert way.deliver(take) and seen == [0, 1]


def test_what_is_no_message_for_this_process_is_left_where_it_is(make: Make) -> None:
    way = make()
    post(way.target())
    post(way.target(proc=8))
    way.writer.push([way.session.control(FrameType.HEARTBEAT)])
    seen: list[int] = []

    assert not way.deliver(lambda message: seen.append(message.seq))
    assert not way.deliver(lambda message: seen.append(message.seq))

    assert seen == [0]
    message, frame = way.reader.pop(0)
    assert (message.dst_proc, message.seq) == (8, 1) and frame[0][0] == FrameType.HEARTBEAT


def push_elsewhere(way: Way, description: bytes, proc: int = 7) -> None:
    """A call whose only part lies elsewhere, as a link sends it."""
    message = Envelope(Kind.CALL, proc, 3, 4, 5, 6, [], Flag.SEQUENCED, 0, next(way.counter), 8)
    (head,) = way.session.wrap(message.frame(), message.size_bytes)
    assert way.writer.push([[head, (description,)]]) == 1


def test_what_lies_elsewhere_is_found_once_where_its_message_is_delivered(make: Make) -> None:
    way = make()
    found: list[bytes] = []
    way.reader.find = lambda description: (found.append(description), bytearray(description))[1]
    push_elsewhere(way, b"here")
    push_elsewhere(way, b"to be passed on", proc=8)
    seen: list[Any] = []

    assert not way.deliver(seen.append)
    assert [message.parts for message in seen] == [[bytearray(b"here")]] and found == [b"here"]
    (message,) = way.reader.pop(0)
    assert message.dst_proc == 8 and found == [b"here", b"to be passed on"]


def test_what_cannot_be_found_is_left_to_who_tells_the_link(make: Make) -> None:
    way = make()

    def refuse(description: bytes) -> memoryview:
        raise RemoteProtocolError("no such place")

    way.reader.find = refuse
    push_elsewhere(way, b"")
    assert not way.deliver(pytest.fail)
    with pytest.raises(RemoteProtocolError, match="no such place"):
        way.reader.pop(0)


def test_much_that_lies_elsewhere_is_delivered_in_turns(make: Make) -> None:
    way = make()
    way.reader.find = lambda description: memoryview(bytearray(3 << 20))
    for _ in range(3):
        push_elsewhere(way, b"")
    seen: list[int] = []
    for turn in ([0, 1], [2]):
        way.deliver(lambda message: seen.append(message.seq))
        assert seen == turn
        seen.clear()


@pytest.mark.parametrize("error", [None, ValueError])
def test_messages_acknowledge_what_they_have_met_however_their_delivery_ends(error: Any, make: Make) -> None:
    here, there = make(), make()  # the two directions of a conversation
    there.session, here.there = here.there, there.session
    there.lane = compiled.part.Lane(there.writer, there.session, there._bell.fileno(), 1 << 20)
    there.lane.open = True
    there.reader.carry(here.session)
    post(here.target())
    assert here.deliver(lambda message: None)
    post(there.target())

    def take(message: Any) -> None:
        if error is not None:
            raise error

    with pytest.raises(error) if error is not None else contextlib.nullcontext():
        there.deliver(take)
    assert here.session.unacked_bytes == 0


def test_what_comes_out_of_order_is_left_to_the_session(make: Make) -> None:
    way = make()
    kept = way.session.wrap([bytes(64), b"by the stream"], 77)  # number 1 goes another way
    post(way.target())
    frames = way.reader.pop(0)

    assert [type(frame) for frame in frames] == [list]
    with pytest.raises(RemoteProtocolError, match="frame 2 arrived after frame 0"):
        way.there.accept(list(frames[0]))
    for frame in (kept, frames[0]):
        assert way.there.accept(frame) is not None
        way.there.took(0, 0.0)


def test_what_was_read_and_not_delivered_comes_again_after_a_break(make: Make) -> None:
    way = make()
    for _ in range(3):
        post(way.target())
    first, *_ = way.reader.pop(0)
    way.there.took(first.size_bytes, 0.0)
    way.session.accept(way.there.control(FrameType.ACK))  # the others are read, and nobody is told of them

    after = make()
    after.reader.carry(way.there)
    assert after.writer.push(way.session.resume(way.there.received)) == 2
    assert [each.seq for each in after.reader.pop(0)] == [1, 2]


def test_a_message_whose_head_lies_is_left_to_the_session(make: Make) -> None:
    way = make()
    frame = way.session.wrap([bytes(64), b"x"], 65)
    frame[0] = frame[0][:16] + (99).to_bytes(8, "little") + frame[0][24:]  # acknowledges what was never sent
    way.writer.push([frame])
    (got,) = way.reader.pop(0)
    with pytest.raises(RemoteProtocolError, match="acknowledges frame 99 of 0"):
        way.there.accept(got)


def test_a_message_that_lacks_its_chain_is_refused(make: Make) -> None:
    way = make()
    head = bytearray(64)
    head[1] = Flag.CHAINED
    way.writer.push([way.session.wrap([bytes(head)], 64)])
    with pytest.raises(RemoteProtocolError, match="chain"):
        way.reader.pop(0)


def test_a_collection_in_the_middle_may_send_too(make: Make) -> None:
    """What the collector runs while a message is made is sent before it, whole, or waits."""
    way = make()
    sent: list[int] = []

    class Last:
        def __del__(self) -> None:
            sent.append(post(way.target(), parts=[b"of the collector"]))

    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(300):
            cycle: list[Any] = [Last()]
            cycle.append(cycle)
            del cycle
            post(way.target(), parts=[b"in turn"])
            way.session.acknowledge(way.session.sent)
            got = way.take()
            assert all(type(each) is Envelope for each in got)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    rest = way.take()
    assert set(sent) == {compiled.SENT} and len(sent) == 300 and all(type(each) is Envelope for each in rest)
    assert way.there.received == way.session.sent == 600


def test_no_signal_comes_between_a_number_and_its_message(make: Make) -> None:
    """Handlers that raise, as often as they can: whatever has a number is there."""
    way = make()

    def handler(number: int, frame: object) -> None:
        raise InterruptedError

    old = signal.signal(signal.SIGALRM, handler)
    interrupted = 0
    seen: list[int] = []
    try:
        for _ in range(20_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6)
                for _ in range(100):
                    post(way.target())
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedError:
                interrupted += 1
            way.session.acknowledge(way.session.sent)
            seen += [each.seq for each in way.reader.pop(0)]
            if interrupted == 200:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert interrupted == 200 and seen == list(range(len(seen))) and next(way.counter) == len(seen)


# To an actor of the same process


def _chain(*actors: tuple[int, int]) -> bytes:
    """Of calls that these served, as (process, number)."""
    return b"".join(chain.link((*actor, 1), "who called") for actor in actors)


def _here(mailbox: Mailbox, rank: int = 0) -> Any:
    return mailbox, None, 7, rank


def test_what_is_posted_here_is_what_would_be_put() -> None:
    mailbox = Mailbox(Signal())
    parts = [b"what", memoryview(bytearray(100))]

    assert post(_here(mailbox, rank=3), parts=parts) == compiled.SENT

    (got,) = mailbox.calls
    sent = Envelope(Kind.CALL, 7, 3, 4, 5, 6, parts, 0, 3, 0, 8, 60)
    assert type(got) is Envelope and fields(got) == fields(sent) and got.parts is parts
    assert mailbox.signal.is_set and take(mailbox) is got and take(mailbox) is None
    assert mailbox.come_bytes == size_of(sent)


def _stop(mailbox: Mailbox) -> None:
    mailbox.close(Down("stopped", "it was stopped"))
    mailbox.signal.clear()


def _weighs(mailbox: Mailbox) -> None:
    mailbox.weigh_at_bytes = mailbox.come_bytes + 100


@pytest.mark.parametrize("hinder", [_stop, _weighs])
def test_a_mailbox_that_python_has_to_look_at_stays_as_it_is(hinder: Callable[[Mailbox], None]) -> None:
    mailbox = Mailbox(Signal())
    hinder(mailbox)

    assert post(_here(mailbox)) == 0
    assert not mailbox.calls and not mailbox.come_bytes and not mailbox.signal.is_set


def test_a_call_that_comes_from_the_very_actor_that_it_is_for_is_left_to_python() -> None:
    mailbox = Mailbox(Signal())

    assert post(_here(mailbox), chain=_chain((7, 3), (9, 3))) == 0
    assert not mailbox.calls and not mailbox.signal.is_set

    assert post(_here(mailbox), chain=_chain((9, 3), (7, 4))) == compiled.SENT
    (call,) = mailbox.calls
    assert call.chain == _chain((9, 3), (7, 4)) and not call.flags & Flag.CHAINED


def test_what_is_no_mailbox_of_messages_is_refused() -> None:
    mailbox = Mailbox(Signal())
    mailbox.message = int  # type: ignore[assignment]

    with pytest.raises(TypeError, match="the type of its messages"):
        post(_here(mailbox))
    assert not mailbox.calls and not mailbox.signal.is_set


@pytest.mark.parametrize(("of", "name"), [("mailbox", "signal"), ("signal", "wake")])
def test_what_cannot_wake_is_refused_by_the_name_of_its_type(of: str, name: str) -> None:
    mailbox = Mailbox(Signal())
    setattr(mailbox if of == "mailbox" else mailbox.signal, name, object())

    with pytest.raises(TypeError, match=f"no <class 'monarch._compiled.{name.capitalize()}'>"):
        post(_here(mailbox))
    assert not mailbox.calls


def test_who_sleeps_on_the_lock_of_a_signal_is_woken_once() -> None:
    mailbox = Mailbox(Signal())
    for _ in range(2):
        assert post(_here(mailbox)) == compiled.SENT

    mailbox.signal.sleep_at_once(20.0)
    assert mailbox.signal._lock.locked() and len(mailbox) == 2


def test_who_looks_at_its_bell_needs_no_other_waking() -> None:
    mailbox = Mailbox(Signal())
    bell = mailbox.signal.bell = bytearray(1)

    assert post(_here(mailbox)) == compiled.SENT
    assert bell[0] and mailbox.signal._lock.locked()


def test_who_sleeps_on_a_descriptor_is_woken_there() -> None:
    mailbox = Mailbox(Signal())
    wake = mailbox.signal.wake = Wake()
    bell = wake.bell = bytearray(1)

    assert post(_here(mailbox)) == compiled.SENT
    assert bell[0]

    wake.bell = None
    mailbox.signal.clear()
    assert post(_here(mailbox)) == compiled.SENT
    assert os.eventfd_read(wake.fileno()) == 1

    wake.close()
    mailbox.signal.clear()
    assert post(_here(mailbox)) == compiled.SENT
    assert mailbox.signal._lock.locked() and len(mailbox) == 3


def test_a_thread_that_pumps_needs_not_wake_itself() -> None:
    mailbox = Mailbox(Signal())
    mailbox.signal.pumping = threading.get_ident()

    assert post(_here(mailbox)) == compiled.SENT
    assert mailbox.signal.is_set and mailbox.signal._lock.locked()


def test_no_signal_comes_between_a_call_and_the_waking_of_its_actor() -> None:
    """Handlers that raise, as often as they can: whoever has a call knows of it."""
    mailbox = Mailbox(Signal())
    interrupted = 0

    def handler(number: int, frame: object) -> None:
        raise InterruptedError

    old = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(20_000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 20e-6)
                for _ in range(100):
                    post(_here(mailbox))
                signal.setitimer(signal.ITIMER_REAL, 0)
            except InterruptedError:
                interrupted += 1
            if mailbox.calls:
                assert mailbox.signal.is_set and not mailbox.signal._lock.locked()
                mailbox.signal.sleep_at_once(0.0)
            mailbox.signal.clear()
            mailbox.drain()
            if interrupted == 200:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert interrupted == 200


# From a ring to whom it is for


class Home:
    """Those whom messages are for, and what is left to be delivered by `take`."""

    def __init__(self) -> None:
        self.mailbox = Mailbox(Signal())
        self.left: list[Any] = []
        self.values: list[Any] = []
        self.actors: dict[int, Any] = {3: self}
        self.ports: dict[int, Any] = {4: self}
        self.delivery: Any = compiled.delivery(self.left.append, self.actors, self.ports)

    def deliver(self, message: Any) -> None:
        self.values.append(message)


@pytest.fixture
def home() -> Home:
    return Home()


def test_a_call_that_is_next_goes_into_its_mailbox_as_if_it_had_been_put(make: Make, home: Home) -> None:
    way, by_hand = make(), Mailbox(Signal())
    for _ in range(3):
        post(way.target(rank=2))

    assert way.deliver(home.delivery)

    calls = list(home.mailbox.calls)
    for call in calls:
        by_hand.put(call)
    assert [call.seq for call in calls] == [0, 1, 2] and not home.left and way.there.received == 3
    for name in ("_expected", "_waiting", "_behind", "come_bytes"):
        assert getattr(home.mailbox, name) == getattr(by_hand, name), name
    assert home.mailbox.signal.is_set


def test_what_comes_another_way_than_through_the_ring_is_delivered_likewise(home: Home) -> None:
    for kind in (Kind.CALL, Kind.PORT, Kind.SYSTEM):
        home.delivery(Envelope(kind, 7, 3, 4, 5, 6, [b"", b""], Flag.SEQUENCED))

    assert [call.kind for call in home.mailbox.calls] == [Kind.CALL] and home.mailbox.signal.is_set
    assert [value.kind for value in home.values] == [Kind.PORT]
    assert [other.kind for other in home.left] == [Kind.SYSTEM]


def _is_stopped(home: Home) -> None:
    _stop(home.mailbox)


def _is_full(home: Home) -> None:
    _weighs(home.mailbox)


def _lacks_one_before(home: Home) -> None:
    home.mailbox.put(Envelope(Kind.CALL, 7, 3, 0, 5, 6, [b"", b""], Flag.SEQUENCED, seq=1))
    home.mailbox.signal.clear()


def _has_had_it(home: Home) -> None:
    home.mailbox.put(Envelope(Kind.CALL, 7, 3, 0, 5, 6, [b"", b""], Flag.SEQUENCED))
    home.mailbox.signal.clear()


def _is_to_tell_of_it(home: Home) -> None:
    home.mailbox.when_at((5, 6), 1, lambda: None)


def _is_not_there(home: Home) -> None:
    home.actors.clear()


def _has_no_mailbox(home: Home) -> None:
    home.actors[3] = object()


@pytest.mark.parametrize(
    "hinder",
    [_is_stopped, _is_full, _lacks_one_before, _has_had_it, _is_to_tell_of_it, _is_not_there, _has_no_mailbox],
)
def test_a_call_about_which_something_is_special_is_left_to_python(
    hinder: Callable[[Home], None], make: Make, home: Home
) -> None:
    way = make()
    hinder(home)
    before = list(home.mailbox.calls), dict(home.mailbox._expected), home.mailbox.come_bytes
    post(way.target())

    assert way.deliver(home.delivery)

    assert [message.seq for message in home.left] == [0] and way.there.received == 1
    assert (list(home.mailbox.calls), home.mailbox._expected, home.mailbox.come_bytes) == before
    assert not home.mailbox.signal.is_set


def test_a_call_from_elsewhere_that_comes_from_the_very_actor_is_left_to_python_too(make: Make, home: Home) -> None:
    way = make()
    post(way.target(), chain=_chain((9, 3), (7, 4)))
    post(way.target(), chain=_chain((7, 3), (9, 3)))
    post(way.target(), kind=Kind.SYSTEM)

    assert way.deliver(home.delivery)

    assert [message.kind for message in home.left] == [Kind.CALL, Kind.SYSTEM]
    assert [call.chain for call in home.mailbox.calls] == [_chain((9, 3), (7, 4))]


def test_a_value_goes_to_its_port(make: Make, home: Home) -> None:
    way = make()
    post(way.target(), kind=Kind.PORT)
    assert way.deliver(home.delivery)
    assert [message.dst_port for message in home.values] == [4] and not home.left

    home.ports.clear()
    post(way.target(), kind=Kind.PORT)
    assert way.deliver(home.delivery)
    assert len(home.values) == 1 and [message.dst_port for message in home.left] == [4]


def test_the_last_value_of_a_port_may_end_it(make: Make, home: Home) -> None:
    way = make()
    seen: list[int] = []

    class Once:
        def deliver(self, message: Any) -> None:
            home.ports.clear()
            seen.append(message.dst_port)

    home.ports[4] = Once()
    post(way.target(), kind=Kind.PORT)
    assert way.deliver(home.delivery) and seen == [4]


def test_a_port_that_fails_costs_its_own_value_only(make: Make, home: Home) -> None:
    way = make()

    class Fails:
        def deliver(self, message: Any) -> None:
            raise ValueError("a bug")

    home.ports[4] = Fails()
    post((way, None, 7, 0), kind=Kind.PORT)
    post(way.target())

    with pytest.raises(ValueError, match="a bug"):
        way.deliver(home.delivery)
    assert way.deliver(home.delivery) and len(home.mailbox.calls) == 1 and way.there.received == 2


def test_a_delivery_calls_what_it_was_made_of_and_goes_with_it() -> None:
    home = Home()
    home.delivery("anything")
    assert home.left == ["anything"]

    home.delivery = compiled.delivery(home.deliver, home.actors, home.ports)  # holds who holds it
    known = weakref.ref(home)
    del home
    gc.collect()
    assert known() is None


def test_a_mailbox_goes_with_what_is_to_be_done_once_messages_are_there() -> None:
    home = Home()
    home.mailbox.when_at((5, 6), 1, lambda home=home: None)  # type: ignore[misc]
    known = weakref.ref(home)
    del home
    gc.collect()
    assert known() is None
