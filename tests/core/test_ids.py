"""Names: text forms round trip, equality goes by what is named, nonsense is refused."""

from __future__ import annotations

import pickle
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.core.ids import ActorId, PortId, ProcId, Uid, base58, from_base58, new_number

numbers = st.integers(1, 2**63 - 1)
labels = st.text(string.ascii_letters + string.digits + "_. -", max_size=12)
instances = st.builds(Uid, labels, numbers)
singletons = st.builds(Uid.singleton, st.text(string.ascii_letters + string.digits + "_.", min_size=1, max_size=12))
addresses = st.sampled_from(["", "tcp://127.0.0.1:80", "ipc://@monarch-1a", "ipc:///tmp/x", "inproc://a"])
uids = st.one_of(instances, singletons)


@given(st.integers(0, 2**70))
def test_base_58_round_trips(number: int) -> None:
    assert from_base58(base58(number)) == number


@pytest.mark.parametrize("text", ["0", "O", "I", "l", "1!", "a b"])
def test_what_is_no_digit_of_base_58_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no digit of it"):
        from_base58(text)


@given(uids)
def test_the_text_of_a_uid_round_trips(uid: Uid) -> None:
    assert Uid.from_string(str(uid)) == uid


@pytest.mark.parametrize("text", ["", "-", "label-", "label-0"])
def test_what_is_no_uid_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Uid.from_string(text)


def test_a_uid_is_a_singleton_or_an_instance() -> None:
    assert Uid.singleton("a").is_singleton and not Uid.singleton("a").is_instance
    assert Uid.instance("a").is_instance and Uid.anonymous().is_instance
    assert Uid.instance("a") != Uid.instance("a")
    assert Uid.anonymous().label == ""


@given(uids, addresses)
def test_the_text_of_a_process_with_an_address_round_trips(uid: Uid, address: str) -> None:
    proc = ProcId(uid, address)
    back = ProcId.from_string(str(proc))

    assert (back, back.address, back.keeper) == (proc, address, None)


@given(st.lists(uids, min_size=2, max_size=4), addresses)
def test_the_text_of_a_process_with_keepers_round_trips(chain: list[Uid], address: str) -> None:
    proc = ProcId(chain[0], address)
    for uid in chain[1:]:
        proc = ProcId(uid, "", proc)
    back: ProcId | None = ProcId.from_string(str(proc))
    kept: ProcId | None = proc
    while kept is not None:
        assert back is not None
        assert (back, back.address) == (kept, kept.address)
        back, kept = back.keeper, kept.keeper
    assert back is None


def test_a_process_may_have_an_at_sign_in_its_name() -> None:
    proc = ProcId(Uid.instance("me@home 100%"), "ipc://@x")

    assert ProcId.from_string(str(proc)) == proc


def test_processes_are_equal_however_they_are_reached() -> None:
    uid = Uid.instance("p")
    keeper = ProcId(Uid.instance("k"), "inproc://k")

    assert ProcId(uid, "inproc://a") == ProcId(uid, "", keeper) == ProcId(uid)
    assert len({ProcId(uid, "inproc://a"), ProcId(uid, "", keeper), ProcId(uid)}) == 1
    assert ProcId(uid) != ProcId(Uid.instance("p"))


def test_actors_are_equal_whatever_their_name_and_differ_by_process_and_number() -> None:
    one, other = ProcId(Uid.instance("p")), ProcId(Uid.instance("q"))

    assert ActorId(one, 1, "a") == ActorId(one, 1, "b")
    assert hash(ActorId(one, 1, "a")) == hash(ActorId(one, 1, "b"))
    assert len({ActorId(one, 1), ActorId(one, 2), ActorId(other, 1)}) == 3
    assert PortId(ActorId(one, 1), 5) != PortId(ActorId(one, 1), 6)


@given(uids)
def test_a_key_fits_64_bits_and_those_of_labels_never_meet_those_of_instances(uid: Uid) -> None:
    key = ProcId(uid).key

    assert 0 < key < 2**64
    assert (key >= 2**63) == uid.is_singleton
    assert key == ProcId(Uid.from_string(str(uid))).key


def test_numbers_differ_and_ids_pickle() -> None:
    assert len({new_number() for _ in range(1000)}) == 1000
    port = PortId(ActorId(ProcId(Uid.instance("p"), "", ProcId(Uid.instance("k"), "inproc://k")), 3, "a"), 4)
    back = pickle.loads(pickle.dumps(port))

    assert back == port and str(back) == str(port)
    assert back.actor.proc.keeper.address == "inproc://k"
