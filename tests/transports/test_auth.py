"""The mutual proof, wired back to back."""

from __future__ import annotations

import pytest

from monarch.errors import AuthenticationError, RemoteProtocolError
from monarch.transports.auth import MAGIC, VERSION, Handshake


def shake(dialer: Handshake, acceptor: Handshake, chunk_bytes: int = 1 << 16) -> None:
    """Carry the bytes of both until neither has anything to say."""
    to_acceptor, to_dialer = dialer.greeting, acceptor.greeting
    while to_acceptor or to_dialer:
        for end, inbox in ((acceptor, "a"), (dialer, "d")):
            data = to_acceptor if inbox == "a" else to_dialer
            count = min(len(data), end.missing_bytes, chunk_bytes)
            answer = end.feed(data[:count]) if count else b""
            if inbox == "a":
                to_acceptor, to_dialer = data[count:], to_dialer + answer
            else:
                to_dialer, to_acceptor = data[count:], to_acceptor + answer


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1 << 16])
def test_two_who_know_the_secret_agree(chunk_bytes):
    dialer, acceptor = Handshake("dialer", b"s"), Handshake("acceptor", b"s")
    shake(dialer, acceptor, chunk_bytes)
    assert dialer.done and acceptor.done
    assert dialer.missing_bytes == acceptor.missing_bytes == 0


def test_the_dialer_proves_nothing_to_one_who_does_not_know_the_secret():
    dialer, squatter = Handshake("dialer", b"s"), Handshake("acceptor", b"t")
    dialer.feed(squatter.greeting)
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        dialer.feed(squatter.feed(dialer.greeting))
    assert not dialer.done


def test_the_acceptor_refuses_a_wrong_proof():
    dialer, acceptor = Handshake("dialer", b"s"), Handshake("acceptor", b"s")
    acceptor.feed(dialer.greeting)
    with pytest.raises(AuthenticationError):
        acceptor.feed(bytes(32))
    assert not acceptor.done


def test_our_own_proof_sent_back_is_refused():
    """A stranger who repeats all we send: same nonce, but the roles differ."""
    acceptor = Handshake("acceptor", b"s")
    proof = acceptor.feed(acceptor.greeting)
    with pytest.raises(AuthenticationError):
        acceptor.feed(proof)


def test_a_recorded_handshake_is_refused():
    dialer, acceptor = Handshake("dialer", b"s", bytes(32)), Handshake("acceptor", b"s")
    dialer.feed(acceptor.greeting)
    recorded = dialer.feed(acceptor.feed(dialer.greeting))
    later = Handshake("acceptor", b"s")
    later.feed(dialer.greeting)
    with pytest.raises(AuthenticationError):
        later.feed(recorded)


def test_another_version_is_explained_in_plain_words():
    with pytest.raises(RemoteProtocolError, match=rf"version 7 of .* this process version {VERSION}: install the same"):
        Handshake("dialer", b"s").feed(MAGIC + b"\0\7")


@pytest.mark.parametrize("data", [b"G", b"MONARCX", b"\x80\x04\x95", bytes(42)])
def test_another_protocol_is_refused_at_the_first_wrong_byte(data):
    with pytest.raises(RemoteProtocolError, match="does not speak"):
        Handshake("acceptor", b"s").feed(data)


def test_input_is_bounded():
    with pytest.raises(RemoteProtocolError):
        Handshake("acceptor", b"s").feed(MAGIC + bytes(1000))


def test_an_empty_secret_is_refused():
    with pytest.raises(ValueError, match="empty"):
        Handshake("dialer", b"")
