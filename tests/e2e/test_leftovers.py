"""Test runs and test programs leave no file, whether they pass, fail or are terminated by a signal."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos import storm
from tests.e2e.leftovers import leftover_files
from tests.fake_processes import ROOT

TIMEOUT_S = 60.0

WAITING_TEST = """
import asyncio
import os

from tests.e2e.commands import ENVIRONMENT


async def test_it():
    assert os.path.isdir(ENVIRONMENT["XDG_CACHE_HOME"])
    open({started!r}, "w").close()
    await asyncio.sleep({sleep_s})
    assert {passes}
"""


async def start(temporary: Path, *arguments: str) -> asyncio.subprocess.Process:
    temporary.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = {**inherited, "TMPDIR": str(temporary), "PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments), cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
    )


async def end(
    process: asyncio.subprocess.Process, number: signal.Signals | None, *, after: Callable[[], bool]
) -> int:
    """Send the signal once `after` holds; return the exit code."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while number is not None and not after():
                assert process.returncode is None, "the process ended too soon"
                await asyncio.sleep(0.02)
            if number is not None:
                process.send_signal(number)
            await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode


@pytest.mark.matrix(0, full=2)
@pytest.mark.parametrize(
    ("number", "passes", "code", "parallel"),
    [
        (None, True, 0, ()),
        (None, False, 1, ("-n", "2")),
        (signal.SIGINT, True, 2, ()),
        (signal.SIGTERM, True, 2, ()),
        (signal.SIGTERM, True, 2, ("-n", "2")),
    ],
    ids=["passes", "fails", "SIGINT", "SIGTERM", "SIGTERM in parallel"],
)
async def test_a_test_run_leaves_no_file(
    tmp_path: Path, number: signal.Signals | None, passes: bool, code: int, parallel: tuple[str, ...]
) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    (tmp_path / "test_it.py").write_text(
        WAITING_TEST.format(
            started=str(tmp_path / "started"), sleep_s=0 if number is None else TIMEOUT_S, passes=passes
        )
    )
    options = (*parallel, "-p", "no:cacheprovider", "-p", "tests.conftest", "--rootdir", str(tmp_path))
    options += ("--basetemp", str(tmp_path / "base"))
    temporary = tmp_path / "temporary"
    process = await start(temporary, "-m", "pytest", *options, str(tmp_path / "test_it.py"))
    assert await end(process, number, after=(tmp_path / "started").exists) == code
    assert (tmp_path / "started").exists()
    assert leftover_files(temporary) == []


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize(
    ("program", "number"),
    [
        (("tests.chaos", "--storm"), signal.SIGTERM),
        (("tests.chaos",), signal.SIGINT),
        (("tests.churn",), signal.SIGTERM),
    ],
    ids=["storm", "chaos", "churn"],
)
async def test_a_terminated_program_leaves_no_file(
    tmp_path: Path, program: tuple[str, ...], number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    process = await start(temporary, "-m", *program)
    assert await end(process, number, after=lambda: any(temporary.glob("*/journal.db"))) == 130
    assert leftover_files(temporary) == []


@pytest.mark.full
@pytest.mark.parametrize("keeps", [False, True])
async def test_a_failed_storm_leaves_only_the_requested_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_address: str, keeps: bool
) -> None:
    async def fail(*_: object) -> None:
        raise AssertionError("a request is stuck")

    monkeypatch.setattr(storm, "_serve_through", fail)
    temporary, logs = tmp_path / "temporary", tmp_path / "logs"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    report = await storm.run_storm(
        storm.StormConfig(seconds=1, seed=1, logs=logs if keeps else None), free_address
    )
    assert report.leaks == ["a request is stuck"]
    assert leftover_files(temporary) == []
    assert (logs / "logs" / "coordinator.log").exists() is keeps
