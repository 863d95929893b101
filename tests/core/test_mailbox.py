"""A mailbox restores each sender's order, whatever overtook what, and loses nothing when it closes."""

from __future__ import annotations

import gc
import threading
import weakref

from hypothesis import given
from hypothesis import strategies as st

from monarch.core.driver import Signal
from monarch.core.envelope import Envelope, Flag, Kind
from monarch.core.mailbox import FEW, Mailbox, size_of
from monarch.core.monitor import Down
from tests.core.net import take

_DOWN = Down("stopped", "it was stopped")


def _message(sender: int, seq: int, proc: int = 5) -> Envelope:
    return Envelope(Kind.CALL, 1, 2, 0, proc, sender, [], Flag.SEQUENCED, seq=seq)


def _take_all(mailbox: Mailbox) -> list[Envelope]:
    taken = []
    while (envelope := take(mailbox)) is not None:
        taken.append(envelope)
    return taken


@st.composite
def arrivals(draw: st.DrawFn) -> list[tuple[int, int]]:
    counts = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    messages = [(sender, seq) for sender, count in enumerate(counts) for seq in range(count)]
    return draw(st.permutations(messages))


@given(arrivals(), st.integers(0, 50))
def test_the_order_of_each_sender_is_restored_for_any_interleaving(order: list[tuple[int, int]], look: int) -> None:
    mailbox = Mailbox(Signal())
    taken = []
    for at, (sender, seq) in enumerate(order):
        assert mailbox.put(_message(sender, seq)) is None
        if at == look:
            taken += _take_all(mailbox)
    taken += _take_all(mailbox)

    assert len(taken) == len(order) and not mailbox and mailbox.drain() == []
    for sender in {sender for sender, _ in order}:
        assert [e.seq for e in taken if e.src_actor == sender] == list(range(sum(s == sender for s, _ in order)))


def _take_in_turns(mailbox: Mailbox) -> list[Envelope]:
    taken = []
    while (envelope := mailbox.take_in_turn()) is not None:
        taken.append(envelope)
    return taken


@given(arrivals(), st.integers(0, 50))
def test_senders_take_turns_and_each_keeps_its_order(order: list[tuple[int, int]], look: int) -> None:
    mailbox, taken = Mailbox(Signal()), []
    for at, (sender, seq) in enumerate(order):
        mailbox.put(_message(sender, seq))
        if at == look and (first := mailbox.take_in_turn()) is not None:
            taken.append(first)
    assert len(mailbox) == len(order) - len(taken)
    taken += _take_in_turns(mailbox)

    senders = {sender for sender, _ in order}
    assert len(taken) == len(order) and not len(mailbox) and mailbox.drain() == []
    for sender in senders:
        assert [e.seq for e in taken if e.src_actor == sender] == list(range(sum(s == sender for s, _ in order)))
    if look >= len(order):
        assert {e.src_actor for e in taken[: len(senders)]} == senders


def test_one_call_does_not_wait_behind_all_that_another_sender_has_piled_up() -> None:
    mailbox = Mailbox(Signal())
    for seq in range(1000):
        mailbox.put(_message(1, seq))
    mailbox.take_in_turn()
    mailbox.put(_message(2, 0))

    assert [each.src_actor for each in _take_in_turns(mailbox)][:3] == [1, 2, 1]


@given(arrivals(), st.integers(0, 20))
def test_the_place_of_a_call_is_how_many_are_served_before_it(order: list[tuple[int, int]], at_first: int) -> None:
    mailbox = Mailbox(Signal())
    calls = []
    for port, (sender, seq) in enumerate(sorted(order), 1):  # none waits for an earlier one
        calls.append(message := _message(sender, seq))
        message.reply_port = port
        mailbox.put(message)
    takes_turns = at_first > 0 or (mailbox.is_mixed and len(calls) > FEW)
    served = [found.reply_port for _ in range(at_first) if (found := mailbox.take_in_turn()) is not None]
    places = {call.reply_port: mailbox.place(call.call) for call in calls}
    left = [each.reply_port for each in (_take_in_turns if takes_turns else _take_all)(mailbox)]
    assert [places[port] for port in left] == list(range(len(left)))
    assert all(places[port] is None for port in served)


def test_calls_that_are_in_turns_are_withdrawn_weighed_and_drained() -> None:
    mailbox = Mailbox(Signal())
    calls = [_message(sender, seq) for sender in (1, 2) for seq in range(3)]
    for port, call in enumerate(calls, 1):
        call.reply_port = port
        mailbox.put(call)
    first = mailbox.take_in_turn()
    mailbox.put(late := _message(3, 0))

    assert first is calls[0] and len(mailbox) == 6
    assert mailbox.withdraw(first.call) is None
    assert mailbox.withdraw(calls[4].call) is calls[4]
    assert [mailbox.withdraw(each.call) for each in calls[1:3]] == calls[1:3] and len(mailbox) == 3
    assert mailbox.weigh().total() == sum(map(size_of, [calls[3], calls[5], late]))
    assert mailbox.lighten(0) == mailbox.come_bytes > 0
    assert mailbox.drain() == [calls[3], calls[5], late] and not len(mailbox) and mailbox.take_in_turn() is None


def test_senders_are_told_apart_by_process_and_actor() -> None:
    mailbox = Mailbox(Signal())
    for proc in (5, 6):
        for sender in (1, 2):
            mailbox.put(_message(sender, 0, proc))

    assert len(mailbox) == 4


def test_messages_without_a_number_are_taken_as_they_come() -> None:
    mailbox = Mailbox(Signal())
    mailbox.put(_message(1, 3))
    plain = Envelope(Kind.CALL, 1, 2, 0, 5, 1, [])
    mailbox.put(plain)

    assert take(mailbox) is plain and take(mailbox) is None


def test_control_messages_are_kept_apart_and_taken_after_close_too() -> None:
    mailbox, done = Mailbox(Signal()), []
    mailbox.put(_message(1, 0))
    mailbox.close(_DOWN)
    mailbox.control(lambda: done.append(1))
    action = mailbox.take_control()
    assert action is not None
    action()

    assert done == [1] and mailbox.take_control() is None and len(mailbox) == 1


def test_a_put_wakes_and_a_message_that_must_wait_does_not() -> None:
    signal = Signal()
    mailbox = Mailbox(signal)
    mailbox.put(_message(1, 1))
    assert not signal.is_set
    mailbox.put(_message(1, 0))
    assert signal.is_set and len(mailbox) == 2


def test_closing_refuses_with_the_first_reason_and_drain_returns_all() -> None:
    mailbox = Mailbox(Signal())
    for sender, seq in [(1, 0), (1, 2), (2, 1), (2, 0), (3, 7)]:
        mailbox.put(_message(sender, seq))
    mailbox.close(_DOWN)
    mailbox.close(Down("failed", "later"))

    assert mailbox.put(_message(1, 1)) == _DOWN
    assert sorted((e.src_actor, e.seq) for e in mailbox.drain()) == [(1, 0), (1, 2), (2, 0), (2, 1), (3, 7)]
    assert mailbox.drain() == [] and take(mailbox) is None


def test_a_forgotten_process_leaves_nothing_behind_and_others_keep_their_place() -> None:
    mailbox = Mailbox(Signal())
    mailbox.put(_message(1, 0, proc=5))
    mailbox.put(_message(2, 4, proc=5))  # its first never came
    mailbox.put(_message(1, 0, proc=6))
    mailbox.forget_sender(5)

    assert len(mailbox) == 2
    assert set(mailbox._expected) == {(6, 1)} and not mailbox._waiting
    mailbox.put(_message(1, 1, proc=6))
    assert len(mailbox) == 3


def test_books_on_messages_that_waited_are_closed_when_all_have_come() -> None:
    mailbox = Mailbox(Signal())
    for seq in (2, 1, 0):
        mailbox.put(_message(1, seq))

    assert not mailbox._waiting


def test_puts_that_race_with_a_close_are_either_refused_or_drained() -> None:
    for _ in range(100):
        mailbox = Mailbox(Signal())
        accepted = [0, 0]
        barrier = threading.Barrier(3)

        def put(sender: int) -> None:
            barrier.wait(10)
            for seq in range(50):
                if mailbox.put(_message(sender, seq)) is None:
                    accepted[sender] += 1

        threads = [threading.Thread(target=put, args=(sender,)) for sender in (0, 1)]
        for thread in threads:
            thread.start()
        barrier.wait(10)
        mailbox.close(_DOWN)
        drained = mailbox.drain()
        for thread in threads:
            thread.join(10)
        assert len(drained) == sum(accepted) and mailbox.drain() == []


def test_a_number_that_no_message_will_have_holds_nobody_up() -> None:
    mailbox = Mailbox(Signal())
    late = _message(1, seq=2)
    assert mailbox.put(late) is None
    assert mailbox.put(_message(1, seq=0)) is None
    skip = _message(1, seq=1)
    skip.flags |= Flag.SKIP
    assert mailbox.put(skip) is None
    assert [take(mailbox), take(mailbox)][1] is late
    assert take(mailbox) is None


def test_a_message_that_comes_again_is_dropped() -> None:
    mailbox = Mailbox(Signal())
    mailbox.put(_message(1, seq=0))
    mailbox.put(_message(1, seq=0))
    assert len(mailbox) == 1 and not mailbox._waiting


def _call(seq: int, port: int) -> Envelope:
    return Envelope(Kind.CALL, 1, 2, 0, 5, 0, [], Flag.SEQUENCED, seq=seq, reply_port=port)


def test_a_call_that_is_withdrawn_leaves_the_others_in_order() -> None:
    mailbox = Mailbox(Signal())
    calls = [_call(seq, 100 + seq) for seq in range(4)]
    for each in calls[:3]:
        mailbox.put(each)

    assert [mailbox.place((5, port)) for port in (100, 101, 102, 103)] == [0, 1, 2, None]
    assert mailbox.withdraw((5, 101)) is calls[1] and mailbox.withdraw((5, 101)) is None
    assert mailbox.withdraw((6, 102)) is None  # of another process
    mailbox.put(calls[3])
    assert _take_all(mailbox) == [calls[0], calls[2], calls[3]] and mailbox.withdraw((5, 100)) is None


def test_the_number_of_one_that_is_withdrawn_too_early_still_counts() -> None:
    mailbox = Mailbox(Signal())
    calls = [_call(seq, 100 + seq) for seq in range(3)]
    mailbox.put(calls[1])
    mailbox.put(calls[2])

    assert mailbox.withdraw((5, 101)) is calls[1] and mailbox.withdraw((5, 101)) is None
    mailbox.put(calls[0])

    assert _take_all(mailbox) == [calls[0], calls[2]] and mailbox.drain() == []


def test_what_is_to_come_behind_the_messages_of_a_sender_waits_for_them() -> None:
    mailbox = Mailbox(Signal())
    done: list[str] = []
    mailbox.when_at((5, 1), 0, lambda: done.append("at once"))
    mailbox.when_at((5, 1), 2, lambda: done.append("behind two"))
    mailbox.put(_message(1, 1))
    mailbox.put(_message(2, 0))
    assert done == ["at once"]
    mailbox.put(_message(1, 0))
    assert done == ["at once", "behind two"]


def test_what_is_to_come_behind_a_sender_does_not_wait_for_one_that_is_gone() -> None:
    mailbox = Mailbox(Signal())
    done: list[int] = []
    mailbox.when_at((5, 1), 2, lambda: done.append(5))
    mailbox.when_at((6, 1), 2, lambda: done.append(6))
    mailbox.forget_sender(5)
    assert done == [5]
    mailbox.close(_DOWN)
    mailbox.when_at((7, 1), 9, lambda: done.append(7))
    assert done == [5, 6, 7]


def test_it_knows_about_what_it_holds() -> None:
    """Also what waits for an earlier message, and not what was taken or withdrawn since it was weighed last."""
    mailbox = Mailbox(Signal())
    sizes = [0, 100, 70_000]
    for seq, size_bytes in enumerate(sizes):
        envelope = _message(1, seq)
        envelope.parts = [b"head", bytes(size_bytes)]
        envelope.reply_port = 10 + seq
        mailbox.put(envelope)
    late = _message(2, 1)
    late.parts = [bytes(500)]
    mailbox.put(late)
    whole = mailbox.weigh().total()
    assert whole == mailbox.come_bytes == sum(sizes) + 3 * 4 + 500 + 4 * 1024

    first = take(mailbox)
    assert first is not None and mailbox.come_bytes == whole  # an upper limit
    assert mailbox.lighten(size_of(first)) == whole - 1024 - 4
    assert mailbox.withdraw((5, 12)) is not None
    assert mailbox.weigh().total() == 100 + 4 + 500 + 2 * 1024
    take(mailbox)
    assert mailbox.lighten(0) == 0  # nothing is left that can be taken


def test_it_forgets_who_is_to_hear_of_room_with_his_process() -> None:
    mailbox = Mailbox(Signal())
    mailbox.told_full |= {5: 0, 6: 1}
    mailbox.forget_sender(5)

    assert mailbox.told_full == {6: 1}


def test_others_may_come_while_it_forgets_a_process() -> None:
    mailbox = Mailbox(Signal())
    for sender in range(3):
        mailbox.put(_message(sender, 0, proc=6))
    mailbox.put(_message(1, 0, proc=5))

    class Key(int):
        def __eq__(self, other: object) -> bool:
            mailbox._expected[7, len(mailbox._expected)] = 1  # as the compiled part may
            return int(self) == other

        __hash__ = int.__hash__

    mailbox.forget_sender(Key(5))

    assert {sender for sender in mailbox._expected if sender[0] != 7} == {(6, 0), (6, 1), (6, 2)}


def test_a_mailbox_goes_with_who_waits_for_its_messages() -> None:
    class Owner:
        def __init__(self) -> None:
            self.mailbox = Mailbox(Signal())
            self.mailbox.when_at((5, 1), 1, self.come)

        def come(self) -> None: ...

    known = weakref.ref(Owner())
    gc.collect()

    assert known() is None


def test_what_comes_while_it_is_weighed_is_not_forgotten() -> None:
    mailbox = Mailbox(Signal())
    late = _message(1, 0)

    class Part:
        def __len__(self) -> int:
            if not late.flags & Flag.SILENT:  # once
                late.flags |= Flag.SILENT
                mailbox.calls.append(late)  # as the compiled part may
                mailbox.come_bytes += size_of(late)
            return 10

    mailbox.put(Envelope(Kind.CALL, 1, 2, 0, 5, 1, []))
    mailbox.calls[0].parts.append(Part())  # type: ignore[arg-type]

    assert mailbox.weigh().total() == size_of(mailbox.calls[0])
    assert mailbox.come_bytes == sum(map(size_of, mailbox.calls))
