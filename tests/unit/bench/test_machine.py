from __future__ import annotations

import asyncio
import os
import sys
import time

import psutil
import pytest

from bench.harness import machine
from bench.harness.machine import ForeignLoad


async def test_own_children_are_no_neighbours() -> None:
    parent = os.getppid()
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    try:
        pids = {pid for (pid, _), _ in machine._foreign_cpu_s()}
        assert parent in pids
        assert not pids & {os.getpid(), child.pid}
    finally:
        await child.communicate(b"\n")


def test_only_processes_with_a_share_are_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    idle, busy, new = ((1, 0.0), "idle"), ((2, 0.0), "busy"), ((3, 5.0), "new")
    now_s = 0.0
    cpu_s = {idle: 10.0, busy: 10.0}
    monkeypatch.setattr(machine, "_foreign_cpu_s", lambda: dict(cpu_s))
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 2)
    load = ForeignLoad()
    assert load.neighbours() == ()
    now_s = 10.0
    cpu_s |= {busy: 14.0, new: 10.0}
    neighbours = load.neighbours()
    assert [neighbour.name for neighbour in neighbours] == ["new", "busy"]
    assert [neighbour.share for neighbour in neighbours] == pytest.approx([0.5, 0.2])
