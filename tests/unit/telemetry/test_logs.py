"""Format and level of log lines."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from telemetry import logs
from telemetry.logs import (
    PACKAGES,
    ConsoleFormatter,
    JsonFormatter,
    LogFormat,
    LogLevel,
    LogSettings,
    LogWriter,
)
from tests.repository import REPOSITORY
from wire.ids import id_text, new_request_id
from wire.log_context import FIELDS, log_context

TRACE = {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "span_id": "00f067aa0ba902b7"}


def record(
    message: str, *arguments: object, name: str = "coordinator.server", **extra: Any
) -> logging.LogRecord:
    logger = logging.Logger(name)
    made = logger.makeRecord(name, logging.WARNING, __file__, 1, message, arguments, None, extra=extra)
    made.created, made.msecs = 1769860800.25, 250.0
    return made


def test_a_console_line_is_human_readable() -> None:
    formatter = ConsoleFormatter("worker", "gpu-a")
    line = formatter.format(record("epoch %d: stage %d is ready", 3, 1, **log_context(epoch=3, stage=1)))
    assert re.fullmatch(r"\S+ \S+,250 WARNING worker gpu-a: epoch 3: stage 1 is ready", line)


def test_a_console_line_ends_with_the_trace_and_names_other_libraries() -> None:
    line = ConsoleFormatter("coordinator").format(record("odd", name="asyncio", **log_context(**TRACE)))
    assert line.endswith(" WARNING asyncio: odd (trace 4bf92f3577b34da6a3ce929d0e0e4736)")


def test_a_json_line_has_message_and_fields() -> None:
    request_id = new_request_id()
    extra = log_context(
        request_id=request_id, epoch=3, step=0, stage=1, worker="gpu-a", duration_s=0.31234, **TRACE
    )
    line = JsonFormatter("coordinator").format(record('a "line"\nof %s', "two", **extra))
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2026-01-31T12:00:00.250Z",
        "level": "warning",
        "process": "coordinator",
        "logger": "coordinator.server",
        "message": 'a "line"\nof two',
        "request_id": id_text(request_id),
        "epoch": 3,
        "step": 0,
        "stage": 1,
        "worker": "gpu-a",
        "duration_s": 0.312,
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "span_id": "00f067aa0ba902b7",
    }


def test_a_json_line_has_the_worker() -> None:
    formatter = JsonFormatter("worker", "gpu-a")
    assert json.loads(formatter.format(record("joined")))["worker"] == "gpu-a"


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        made = record("step 3 failed")
        made.exc_info = sys.exc_info()
    line = json.loads(JsonFormatter("worker").format(made))
    assert line["message"] == "step 3 failed"
    assert line["exception"].startswith("Traceback ")
    assert line["exception"].endswith("RuntimeError: broken")


def test_the_document_explains_every_field() -> None:
    document = (
        (REPOSITORY / "docs" / "telemetry.md").read_text().split("## Logs\n", 1)[1].split("\n## ", 1)[0]
    )
    cells = re.findall(r"^\| (`[^|]*) \|", document, flags=re.MULTILINE)
    assert tuple(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == FIELDS


def test_unknown_fields_are_omitted() -> None:
    assert log_context(step=0) == {"step": 0}
    assert log_context(request_ids=()) == {}


def test_no_field_shadows_a_logging_attribute() -> None:
    assert not set(FIELDS) & set(vars(logging.makeLogRecord({})))


def test_the_level_applies_to_all_our_packages() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    roots = set(project["tool"]["importlinter"]["root_packages"]) - {"stageline_rpc"}
    assert set(PACKAGES) == roots


@pytest.mark.parametrize(
    ("level", "written"),
    [
        (LogLevel.DEBUG, ["wire DEBUG", "wire INFO", "wire WARNING", "other WARNING", "wire ERROR"]),
        (LogLevel.INFO, ["wire INFO", "wire WARNING", "other WARNING", "wire ERROR"]),
        (LogLevel.ERROR, ["wire ERROR"]),
    ],
)
def test_of_other_libraries_only_warnings_are_written(level: LogLevel, written: list[str]) -> None:
    script = """
for level in (10, 20, 30):
    for name in ("wire", "other"):
        logging.getLogger(name).log(level, "%s %s", name, logging.getLevelName(level))
logging.getLogger("wire").error("wire ERROR")
"""
    lines = stderr_of(script, LogSettings(format=LogFormat.JSON, level=level))
    assert [json.loads(line)["message"] for line in lines] == written


def test_the_last_line_and_warnings_are_objects_too() -> None:
    script = """
import warnings
warnings.warn("old", stacklevel=1)
logs.log_fatal(settings, "stageline worker: no way")
"""
    warned, last = map(json.loads, stderr_of(script, LogSettings(format=LogFormat.JSON)))
    assert "UserWarning: old" in warned["message"]
    assert (last["level"], last["message"]) == ("critical", "stageline worker: no way")


def test_the_last_console_line_has_no_prefix() -> None:
    assert stderr_of('logs.log_fatal(settings, "stageline worker: no way")', LogSettings()) == [
        "stageline worker: no way"
    ]


@pytest.mark.parametrize("format_", LogFormat)
def test_nothing_is_written_after_the_last_line(format_: LogFormat) -> None:
    script = """
import time
write = logs._write
logs._write = lambda *line: (time.sleep(0.2), write(*line))
log = logging.getLogger("wire")
log.info("before")
logs.log_fatal(settings, "no way")
log.error("after")
logging.shutdown()
"""
    lines = stderr_of(script, LogSettings(format=format_))
    assert len(lines) == 2
    assert "before" in lines[0] and "no way" in lines[1]


def test_the_last_line_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=written.append, flush=lambda: None))
    logs.log_fatal(LogSettings(), "no way")
    assert written == ["no way\n"]


def stderr_of(script: str, settings: LogSettings) -> list[str]:
    """Lines logged by a separate process (pytest owns the log of this one)."""
    begin = f"""
import logging
from telemetry import logs
settings = logs.LogSettings(
    format=logs.LogFormat("{settings.format.value}"), level=logs.LogLevel("{settings.level.value}")
)
logs.configure(settings, "worker", worker="gpu-a")
"""
    ran = subprocess.run(
        [sys.executable, "-c", begin + script],
        env={"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'proto'}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ran.stderr.splitlines()


FORGED = "a\nERROR forged\r\x1b[2J\u2028\u202eb\x85"


@pytest.mark.parametrize("formatter", [ConsoleFormatter("coordinator"), JsonFormatter("coordinator")])
def test_untrusted_text_is_escaped_in_its_line(
    formatter: logging.Formatter,
) -> None:
    line = formatter.format(record("worker %s joined", FORGED, worker=FORGED))
    assert line.isprintable()
    assert "ERROR forged" in line
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line)["message"] == f"worker {FORGED} joined"


def test_a_traceback_cannot_look_like_another_line() -> None:
    made = record("it failed")
    try:
        raise ValueError(FORGED)
    except ValueError:
        made.exc_info = sys.exc_info()
    first, *others = ConsoleFormatter("coordinator").format(made).split("\n")
    assert first.endswith("it failed")
    assert others and all(line.isprintable() and line.startswith("  ") for line in others)


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


def test_logging_never_blocks_and_lost_lines_are_counted(pipe: tuple[int, int]) -> None:
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
    lost = "dropped 5 log lines: writer too slow"
    assert read_to_end(reading) == [*(f"line {number}" for number in range(MAX_WAITING)), lost]


def test_a_closed_reader_is_not_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    writer = LogWriter(writing)
    for _ in range(3):
        say(writer, "to nobody")
        writer.flush()
    writer.close()
    os.close(writing)
    assert capfd.readouterr().err == ""
