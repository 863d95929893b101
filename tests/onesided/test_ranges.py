"""What is refused before a byte moves."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.onesided.ranges import Range, check_conflicts, check_slice, check_timeout, check_word, pieces


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (0, 100), (99, 1), (40, 60)])
def test_a_slice_inside_is_allowed(offset, size):
    check_slice(offset, size, 100)


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (0, 0), (0, -1), (0, 101), (100, 1), (99, 2), (1 << 64, 1)])
def test_a_slice_that_is_not_inside_is_refused(offset, size):
    with pytest.raises(ValueError, match="not inside a buffer of 100 bytes"):
        check_slice(offset, size, 100)


@pytest.mark.parametrize(("offset", "size"), [(0.0, 1), (0, "1"), (True, 1), (None, 1)])
def test_a_slice_is_in_whole_bytes(offset, size):
    with pytest.raises(TypeError, match="whole number of bytes"):
        check_slice(offset, size, 100)


A, B, C = Range(1, 0, 10, "a"), Range(1, 10, 20, "b"), Range(1, 5, 15, "c")
ELSEWHERE = Range(2, 5, 15, "elsewhere")


@pytest.mark.parametrize(
    ("reads", "writes", "new_reads", "new_writes", "allowed"),
    [
        ([], [], [A], [B], True),
        ([], [], [A], [A], False),
        ([], [], [A], [C], False),
        ([], [], [A, C, A], [], True),
        ([A], [], [A], [B], True),
        ([A], [], [], [C], False),
        ([], [A], [C], [], False),
        ([], [A], [], [C], False),
        ([], [A], [], [B], True),
        ([], [], [], [A, C], False),
        ([], [A], [ELSEWHERE], [ELSEWHERE], False),
        ([A], [B], [], [ELSEWHERE], True),
    ],
)
def test_what_one_transfer_of_a_batch_writes_no_other_may_touch(reads, writes, new_reads, new_writes, allowed):
    if allowed:
        check_conflicts(reads, writes, new_reads, new_writes)
    else:
        with pytest.raises(ValueError, match=r"overlap by \d+ bytes"):
            check_conflicts(reads, writes, new_reads, new_writes)


small = st.integers(0, 30)


@given(small, small, small, small)
def test_ranges_overlap_when_they_have_a_byte_in_common(start, size, other_start, other_size):
    one, other = Range(0, start, start + size), Range(0, other_start, other_start + other_size)
    common = set(range(start, start + size)) & set(range(other_start, other_start + other_size))

    if size and other_size:
        assert one.overlaps(other) == other.overlaps(one) == bool(common)


@pytest.mark.parametrize(("address", "size"), [(0, 4), (0, 16), (4, 8), (8, 9)])
def test_atomics_need_an_aligned_word(address, size):
    check_word(64, 8)
    with pytest.raises(ValueError, match="atomics work on 8 bytes"):
        check_word(address, size)


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_pieces_cover_every_byte_once(size, most):
    cut = list(pieces(size, most))

    ends = list(accumulate(s for _, s in cut))
    assert [offset for offset, _ in cut] == [0, *ends[:-1]]
    assert ends[-1] == size
    assert all(0 < s <= most for _, s in cut)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [(-1, OverflowError), (float("nan"), ValueError), (float("inf"), ValueError), ("1", TypeError), (None, TypeError)],
)
def test_a_time_that_is_none_is_refused(timeout, error):
    assert check_timeout(0) == 0.0
    with pytest.raises(error, match="timeout is"):
        check_timeout(timeout)
