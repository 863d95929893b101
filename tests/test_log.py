"""Records of the library go to the logger `monarch`, and never stand in its own way."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from monarch.log import Logger, Sparing

NAME = "monarch.test_log"


@pytest.fixture
def records() -> Iterator[list[str]]:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    kept: list[str] = []
    keep = Keep()
    logging.getLogger(NAME).addHandler(keep)
    yield kept
    logging.getLogger(NAME).removeHandler(keep)


def test_a_record_is_its_event_and_facts(records: list[str]) -> None:
    Logger(NAME).warning("link.severed", peer="a", tries=3)

    assert records == ["link.severed peer='a' tries=3"]


def test_a_record_is_there_when_structlog_cannot_be_imported(
    records: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "structlog", None)

    Logger(NAME).error("link.severed", peer="a")
    assert "link.severed" in records[0] and "'a'" in records[0]


def test_a_handler_that_raises_does_not_reach_who_logs(records: list[str]) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise LookupError("broken")

    broken = Broken()
    logging.getLogger(NAME).addHandler(broken)
    try:
        Logger(NAME).error("link.severed")
    finally:
        logging.getLogger(NAME).removeHandler(broken)
    assert records


def test_what_strangers_cause_is_told_once_a_kind_and_bounded(records: list[str]) -> None:
    now_s = 0.0
    sparing = Sparing(Logger(NAME), lambda: now_s)
    for kind in [*range(100), *range(100)]:
        sparing.warning("peer.refused", kind, peer=kind)
    assert records == [f"peer.refused peer={kind}" for kind in range(20)]
    now_s = 600.0
    sparing.warning("peer.refused", 0, peer=0)
    assert records[20:] == ["peer.refused peer=0 left_out_before=180"]
