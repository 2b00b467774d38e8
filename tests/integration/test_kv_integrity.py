"""KV accounting of coordinator and stages is checked while serving; a mismatch ends the epoch."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from kvcache import BlockPool, integrity
from stage_worker import epoch_session
from stage_worker.policy import WORKER_POLICY
from stageline_rpc.v1 import cluster_pb2
from tests.integration.cluster import DEADLINE_S, Cluster, RequestCase
from tests.integration.request_cases import mixed_cases

LAYERS = (1, 2)


@pytest.fixture
def at_every_poll() -> Iterator[None]:
    """Check the accounting at every idle poll."""
    with (
        mock.patch.object(integrity, "IDLE_POLLS", 1),
        mock.patch.object(epoch_session, "WORKER_POLICY", replace(WORKER_POLICY, idle_check_interval_s=0.05)),
    ):
        yield


@pytest.fixture
def every_eighth_step() -> Iterator[None]:
    """Whatever a check takes on a busy machine."""
    anything = {"MAX_INTERVAL_COST_S": math.inf, "MAX_PAUSE_S": math.inf}
    with mock.patch.multiple(integrity, CHECK_INTERVAL_STEPS=8, **anything):
        yield


def checks(status: cluster_pb2.GetStatusResponse) -> list[cluster_pb2.KvIntegrity]:
    return [status.kv.ledger, *(worker.kv_integrity for worker in status.workers)]


def pool_of(cluster: Cluster, owner: str) -> BlockPool:
    """Block pool of the coordinator's ledger or of a worker."""
    if owner == "coordinator":
        kv = cluster.server.engine.scheduler.kv
        assert kv is not None
        return kv._ledger.pool
    loaded = cluster.workers[owner].worker._stage.loaded
    assert loaded is not None
    return loaded.executor._tables.pool


def lose_a_page(pool: BlockPool) -> None:
    """Remove a cached block and its page; no signal reports it."""
    pool._inactive.popitem(last=True)


def give_a_page_an_owner(pool: BlockPool) -> None:
    """Give a free page an owner."""
    pool._freed[0].num_owners += 1


async def test_idle_accounting_is_checked_and_shown_in_status(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=LAYERS) as cluster:
        await cluster.generate_all(mixed_cases(3))
        status = await cluster.wait_status(lambda status: all(check.num_checks for check in checks(status)))
        assert {check.verdict for check in checks(status)} == {cluster_pb2.KV_INTEGRITY_VERDICT_CONSISTENT}
        assert status.kv.integrity == cluster_pb2.KV_INTEGRITY_VERDICT_CONSISTENT
        assert [check.detail for check in checks(status)] == ["", "", ""]
        assert all(check.checked_at.seconds > 1_700_000_000 for check in checks(status))
        assert cluster.epoch == status.epoch


async def test_accounting_is_checked_between_steps(tiny_llama: Path, every_eighth_step: None) -> None:
    async with Cluster(tiny_llama, layers=LAYERS) as cluster:
        await cluster.generate(RequestCase(prompt=(1, 2, 3), max_tokens=60))
        assert cluster.server.controller.ledger_check.report.num_checks >= 6
        executor = cluster.workers["w0"].worker._stage.loaded
        assert executor is not None
        assert executor.executor.stats.integrity.num_checks >= 6


@pytest.mark.matrix(1)
@pytest.mark.parametrize("harm", [lose_a_page, give_a_page_an_owner], ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("owner", ["coordinator", "w0", "w1"])
async def test_broken_accounting_ends_the_epoch_while_idle(
    tiny_llama: Path,
    owner: str,
    harm: Callable[[BlockPool], None],
    at_every_poll: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    case = RequestCase(prompt=tuple(range(1, 30)), max_tokens=8)
    async with Cluster(tiny_llama, layers=LAYERS) as cluster:
        first = await cluster.generate(case)
        await cluster.wait_drained()
        epoch = cluster.epoch
        harm(pool_of(cluster, owner))
        status = await cluster.wait_status(
            lambda status: status.epoch > epoch and status.state == cluster_pb2.CLUSTER_STATE_SERVING
        )
        problems = [record for record in caplog.records if "KV accounting" in record.getMessage()]
        assert {record.levelno for record in problems} >= {logging.ERROR}
        again = await cluster.generate(case.again())
        assert again.succeeded
        assert again.tokens == first.tokens
        status = await cluster.wait_status(
            lambda status: all(check.num_checks and not check.detail for check in checks(status))
        )
        assert status.epoch == epoch + 1


@pytest.mark.full
async def test_broken_accounting_between_steps_ends_the_epoch_but_no_request(
    tiny_llama: Path, every_eighth_step: None
) -> None:
    case = RequestCase(prompt=(1, 2, 3), max_tokens=100)
    async with Cluster(tiny_llama, layers=LAYERS) as cluster:
        expected = await cluster.generate(case)
        for owner in ("coordinator", "w1"):
            epoch = cluster.epoch
            async with cluster.generating([case.again()]) as (answer,):
                async with asyncio.timeout(DEADLINE_S):
                    while len(answer.tokens) < 20:
                        await asyncio.sleep(0.001)
                pool_of(cluster, owner)._num_made += 1
            assert answer.succeeded
            assert answer.tokens == expected.tokens
            assert cluster.epoch == epoch + 1
