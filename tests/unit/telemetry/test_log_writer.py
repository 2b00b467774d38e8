"""Lines reach the other end in order; whoever does not read them holds up nobody."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest

from telemetry.log_writer import LogWriter

MAX_WAITING = 8
FILLS_A_PIPE = "x" * (1 << 21)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


def say(writer: LogWriter, message: str) -> None:
    writer.handle(logging.LogRecord("a", logging.INFO, __file__, 0, message, (), None))


def read_to_end(descriptor: int) -> list[str]:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        return file.read().decode().splitlines()


def test_lines_are_written_in_order(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing)
    for number in range(1000):
        say(writer, f"line {number} \N{SNOWMAN}")
    writer.flush()
    writer.close()
    os.close(writing)
    assert read_to_end(reading) == [f"line {number} \N{SNOWMAN}" for number in range(1000)]


def test_nobody_waits_for_a_reader_and_what_is_lost_is_counted(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    writer = LogWriter(writing, max_waiting=MAX_WAITING)
    say(writer, FILLS_A_PIPE)
    assert os.read(reading, 1) == b"x"  # it is being written, and the pipe is full
    for number in range(MAX_WAITING + 5):
        say(writer, f"line {number}")
    assert writer.num_dropped == 5

    remaining = len(FILLS_A_PIPE)  # the end of its line included
    while remaining:
        remaining -= len(os.read(reading, remaining))
    writer.flush()
    writer.close()
    os.close(writing)
    lost = "5 lines of this log are lost: they came faster than they could be written"
    assert read_to_end(reading) == [*(f"line {number}" for number in range(MAX_WAITING)), lost]


def test_a_reader_that_is_gone_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LogWriter(writing)
    for _ in range(3):
        say(writer, "to nobody")
        writer.flush()
    writer.close()
    os.close(writing)
    assert capfd.readouterr().err == ""
