"""Places: their text forms, and which of them counts where."""

from __future__ import annotations

import pytest

from monarch.core.address import EVERYWHERE, Place, best, domain_of, host_identity, joined, split

SECRET, OTHER = b"s" * 32, b"o" * 32


@pytest.mark.parametrize(
    "places",
    [
        [],
        [Place(EVERYWHERE, "tcp://10.0.0.1:1")],
        [Place("ab.cd", "shm://@x"), Place(EVERYWHERE, "tcp://[::1]:5")],
        [Place("ab.cd", "ipc:///tmp/with space/100%/a=b"), Place(EVERYWHERE, "ipc:///a=b")],
    ],
)
def test_places_survive_their_text_form(places: list[Place]) -> None:
    assert split(joined(places)) == places


def test_the_first_place_that_counts_is_the_best() -> None:
    near, far = Place("ab.cd", "shm://@x"), Place(EVERYWHERE, "tcp://10.0.0.1:1")
    address = joined([near, far])
    assert best(address, {"ab.cd", EVERYWHERE}) == near
    assert best(address, {EVERYWHERE}) == far
    assert best(address, {"ef.gh"}) is None
    assert best("", {EVERYWHERE}) is None


def test_what_stays_on_a_host_counts_there_for_those_with_the_secret() -> None:
    near = domain_of("ipc:///tmp/x", SECRET)
    assert near == domain_of("tcp://127.0.0.1:1", SECRET) == domain_of("shm://@x", SECRET)
    assert near != domain_of("ipc:///tmp/x", OTHER)
    assert near.startswith(host_identity())
    assert SECRET.hex() not in near


def test_the_network_is_everywhere() -> None:
    assert domain_of("tcp://10.0.0.1:1", SECRET) == domain_of("tcp://host.example:1", OTHER) == EVERYWHERE


def test_another_identity_makes_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    before = host_identity()
    monkeypatch.setenv("MONARCH_HOST_ID", "elsewhere")
    assert host_identity() != before
