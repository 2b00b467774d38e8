"""The probe records only functions that run while a window is open."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import house_probe
from tools.house_trace import Windows

PROGRAM = """
import asyncio, sys, threading

class Body:
    inside = (lambda: 1)()

def asked(name): return name
def in_thread(): pass
async def resumed():
    while True:
        word = await asyncio.to_thread(sys.stdin.readline)
        if not word:
            return
        globals()[word.strip()]()
        print("done", flush=True)
def one():
    asked([number for number in range(2)])
    (lambda: 1)()
def two():
    threading.Thread(target=in_thread).start()
    exec(compile("class Late: pass", __file__, "exec"))
def never(): pass

asyncio.run(resumed())
"""


class Program:
    """A process with the probe; runs functions by name."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "program" / "main.py"
        self.file.parent.mkdir()
        self.file.write_text(PROGRAM)
        probe = directory / "probe"
        probe.mkdir()
        self.windows = Windows(probe)
        shutil.copyfile(house_probe.__file__, probe / "sitecustomize.py")
        environment = {
            **os.environ,
            "PYTHONPATH": str(probe),
            "STAGELINE_TEST_HOUSE_PROBE": str(probe),
            "STAGELINE_TEST_HOUSE_ROOT": f"{self.file.parent}/",
        }
        self.process = subprocess.Popen(
            [sys.executable, self.file],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def call(self, function: str) -> None:
        """Runs one of its functions and waits for the end."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{function}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def ran(self, window: str) -> set[str]:
        """Names of the functions that ran in a window."""
        functions = self.windows.functions(window)
        assert {path for _, path, _ in functions} <= {str(self.file)}
        return {name for _, _, name in functions}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    program.call("one")  # once it answers, its probe follows the windows
    yield program
    with program.process as process:
        process.kill()


def test_functions_lambdas_comprehensions_and_resumed_coroutines_count(program: Program) -> None:
    program.windows.open("first")
    program.call("one")
    program.windows.close("first")
    expected = {"one", "asked", "one.<locals>.<lambda>", "resumed"}
    comprehension = {"one.<locals>.<listcomp>"}  # inlined from Python 3.12 on
    assert program.ran("first") - comprehension == expected


def test_a_window_excludes_earlier_calls_and_class_bodies(program: Program) -> None:
    program.windows.open("second")
    program.call("two")
    program.windows.close("second")
    program.call("one")
    program.windows.open("third")
    program.windows.close("third")
    assert program.ran("second") == {"two", "in_thread", "resumed"}
    assert program.ran("third") == set()


def test_a_killed_process_delays_no_window(program: Program) -> None:
    program.process.kill()
    program.process.wait()
    program.windows.open("late")
    program.windows.close("late")
    assert program.ran("late") == set()
