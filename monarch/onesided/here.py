"""The path to buffers of this very process: a copy."""

from __future__ import annotations

from attrs import define

from monarch.onesided import words
from monarch.onesided.exports import Exports
from monarch.onesided.local import Local, copy
from monarch.onesided.path import Remote


@define(frozen=True)
class Here:
    """See `Path`."""

    name: str
    exports: Exports
    reason: str = "the buffer is in this process"
    helped: bool = False

    def read(self, remote: Remote, target: Local, deadline_s: float) -> None:
        with self.exports.using(remote.number):
            copy(target.address, remote.address, remote.size_bytes)

    def write(self, remote: Remote, source: Local, deadline_s: float) -> None:
        with self.exports.using(remote.number):
            copy(remote.address, source.address, remote.size_bytes)

    def fetch_add(self, remote: Remote, add: int, deadline_s: float) -> int:
        with self.exports.using(remote.number):
            return words.fetch_add(remote.address, add)

    def compare_and_swap(self, remote: Remote, expected: int, desired: int, deadline_s: float) -> int:
        with self.exports.using(remote.number):
            return words.compare_and_swap(remote.address, expected, desired)
