"""All workers are restarted one after another while 32 requests run at any time; no request fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from stageline import Client
from tests.e2e.clusters import VOCAB_SIZE
from tests.e2e.recovery_setup import DEADLINE_S, config, is_idle, now_s
from tests.faults.cluster import FaultyCluster
from tests.faults.figures import Figures
from tests.faults.load import ConstantLoad
from tests.faults.streams import Ask, mixed_asks, undisturbed

pytestmark = pytest.mark.nightly  # of two versions: tests/e2e/test_versions.py


NUM_STREAMS = 32


async def test_a_rolling_restart_of_three_workers_fails_no_request(
    steady: Path, tmp_path: Path, figures: Figures
) -> None:
    cases = mixed_asks(NUM_STREAMS, lengths=(1, 90), max_tokens=60, vocab_size=VOCAB_SIZE, seed=45)
    async with (
        FaultyCluster(config(steady, 3, num_stages=3, logs=tmp_path)) as cluster,
        Client(cluster.address) as client,
    ):
        answers = dict(zip(cases, await undisturbed(client, cases), strict=True))

        def expected(case: Ask) -> Sequence[int]:
            return answers[case]

        async with ConstantLoad(client, cases, expected, num_streams=NUM_STREAMS) as load:
            await load.next_token(timeout_s=DEADLINE_S)
            for name in cluster.worker_names:
                started_s = now_s()
                assert await cluster.terminate(name) == "exit code 0"
                await cluster.restart(name)
                await cluster.until(cluster.has_all_workers)
                await load.next_token(timeout_s=DEADLINE_S)
                figures.record(
                    "SIGTERM and restart of a worker, no spare: pause",
                    load.longest_silence_s(since_s=started_s),
                )
        assert load.problems == []
        assert load.num_finished >= NUM_STREAMS
        assert (await cluster.until(is_idle)).requests.failed == 0
