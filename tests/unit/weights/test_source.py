"""A stream over ranges reads few more bytes than are wanted, in few requests."""

from __future__ import annotations

import random

import pytest

from weights.source import FIRST_BYTES, MOST_BYTES, RangeStream

CONTENT = random.Random(0).randbytes(3_000_000)


class Ranges:
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def read(self, begin: int, end: int) -> bytes:
        assert 0 <= begin < end <= len(CONTENT)
        self.sizes.append(end - begin)
        return CONTENT[begin:end]


@pytest.mark.parametrize("end", [1, 8, FIRST_BYTES, FIRST_BYTES + 1, 1_000_000, len(CONTENT)])
def test_bytes_are_those_of_the_file_and_less_than_twice_as_many_are_read(end: int) -> None:
    ranges = Ranges()
    stream = RangeStream(ranges.read, len(CONTENT))
    sizes, found = random.Random(1), b""
    while len(found) < end:
        found += stream.read(min(sizes.choice((1, 8, 5000)), end - len(found)))
    assert found == CONTENT[:end] == stream.before(end)
    assert sum(ranges.sizes) <= max(2 * end, FIRST_BYTES)
    assert len(ranges.sizes) <= 10
    assert max(ranges.sizes) <= MOST_BYTES


def test_what_is_skipped_is_read_when_it_is_wanted() -> None:
    stream = RangeStream(Ranges().read, len(CONTENT))
    assert stream.seek(2_000_000) == 2_000_000
    assert stream.read(4) == CONTENT[2_000_000:2_000_004]
    assert stream.seek(0) == 0
    assert stream.read(3) == CONTENT[:3]
    assert stream.seek(len(CONTENT) - 2) and stream.read(10) == CONTENT[-2:]
    assert stream.read(1) == b""
