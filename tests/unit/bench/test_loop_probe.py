from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from bench.harness import loop_probe
from bench.harness.loop_probe import INTERVAL_S, LoopProbe, read_lags


async def test_a_blocked_loop_is_late_for_every_timer_that_was_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_probe, "_KEPT", 1)
    file = tmp_path / "lags"
    assert read_lags(file) == []
    probe = LoopProbe(str(file))
    blocked_s = time.monotonic()
    while time.monotonic() < blocked_s + 20 * INTERVAL_S:
        pass
    async with asyncio.timeout(10):
        while not (lags := read_lags(file)):
            await asyncio.sleep(INTERVAL_S)
    probe.close()
    late = [lag for lag in lags if lag.due_s < blocked_s + 20 * INTERVAL_S]
    assert len(late) >= 19
    ran_s = [lag.due_s + lag.lag_s for lag in late]
    assert max(ran_s) - min(ran_s) < INTERVAL_S, "one callback counts for all of them"
    assert late[0].lag_s > late[-1].lag_s
    assert min(ran_s) >= blocked_s + 20 * INTERVAL_S
