"""A storm: faults at random times, overlapping recoveries, on a cluster with known outputs."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy import ClusterFailed, LocalClusterConfig
from deploy.local import COORDINATOR
from stageline import Client, StagelineError
from tests.chaos.recovery_log import LogLine, read_log, spans_of
from tests.chaos.storm_cluster import StormCluster
from tests.chaos.storm_faults import draw_fault
from tests.chaos.storm_load import StormLoad
from tests.chaos.storm_report import StormReport
from tests.e2e.clusters import VOCAB_SIZE
from tests.e2e.recovery_setup import config, is_idle, make_steady_model, mock_config
from tests.faults.streams import Ask, mixed_asks, undisturbed
from tests.mock_answers import mock_tokens
from tests.temporary import run_directory
from wire.tensors import HopRoute

NUM_WORKERS = 4
NUM_STAGES = 3
NUM_STREAMS = 24
NUM_ASKS = 48
MAX_TOKENS = 160
MOCK_TIMES = "step=15ms,token=0.02ms"
"""A request lasts long enough that most meet several faults."""
BETWEEN_FAULTS_S = (0.3, 5.0)
HEALS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StormConfig:
    """`is_real`: stages compute, in the place of mock ones. `kills_coordinator`: the coordinator is killed,
    too, and a request that it had not accepted counts as failed. `logs`: where logs and journal are kept.
    """

    seconds: float
    seed: int
    is_real: bool = False
    kills_coordinator: bool = False
    hidden_states: HopRoute = HopRoute.AUTO
    logs: Path | None = None
    say: Callable[[str], None] = print


async def run_storm(storm: StormConfig, free_address: str) -> StormReport:
    """Returns when the time is over, every request has ended and the cluster has stopped."""
    report = StormReport(storm.seed, storm.seconds)
    with run_directory("storm", storm.logs) as directory:
        await _run_in(directory, storm, free_address, report)
    return report


async def _run_in(directory: Path, storm: StormConfig, free_address: str, report: StormReport) -> None:
    made = _cluster_config(storm, directory, free_address)
    cluster = StormCluster(made, seed=storm.seed)
    wall_minus_loop_s = time.time() - asyncio.get_running_loop().time()
    try:
        async with cluster:
            await _serve_through(storm, cluster, report)
    except AssertionError as error:
        report.leaks.append(str(error))
    except (TimeoutError, ClusterFailed, StagelineError) as error:
        report.errors.append(f"{type(error).__name__}: {error}")
    report.restarts = cluster.restarts
    report.load_averages = os.getloadavg()
    lines = [
        LogLine(line.at_s - wall_minus_loop_s, line.message)
        for line in read_log(directory / "logs" / f"{COORDINATOR}.log")
    ]
    downs = [
        (restart.ended_s, restart.listening_s) for restart in cluster.restarts if restart.name == COORDINATOR
    ]
    report.spans = spans_of(lines, downs, end_s=asyncio.get_running_loop().time())


async def _serve_through(storm: StormConfig, cluster: StormCluster, report: StormReport) -> None:
    asks = mixed_asks(
        NUM_ASKS, lengths=(1, 200), max_tokens=MAX_TOKENS, vocab_size=VOCAB_SIZE, seed=storm.seed
    )
    async with Client(cluster.address) as client:
        answers = await _answers(storm, client, asks)
        load = StormLoad(client, asks, lambda ask: answers[ask], num_streams=NUM_STREAMS)
        report.ended = load.ended
        load.start()
        try:
            await _inflict_faults(storm, cluster, load, report)
            async with asyncio.timeout(HEALS_WITHIN_S + 60):
                await load.finish()
        finally:
            await load.cancel()
    await cluster.until(cluster.has_all_workers, timeout_s=HEALS_WITHIN_S)
    await cluster.until(is_idle, timeout_s=HEALS_WITHIN_S)


async def _inflict_faults(
    storm: StormConfig, cluster: StormCluster, load: StormLoad, report: StormReport
) -> None:
    """Inflicts random faults until the time is over, then waits until their causes have ended."""
    now = asyncio.get_running_loop().time
    started_s = now()
    generator = random.Random(storm.seed)
    async with asyncio.TaskGroup() as faults:
        while True:
            # A generator for each: what one draws does not depend on how long another took.
            await asyncio.sleep(generator.uniform(*BETWEEN_FAULTS_S))
            if now() - started_s >= storm.seconds:
                break
            fault = draw_fault(generator, kills_coordinator=storm.kills_coordinator)
            own = random.Random(generator.getrandbits(64))
            report.faults.append((now(), fault.name))
            storm.say(f"{now() - started_s:6.1f} s  {len(load.ended):5} ended  {fault.name}")
            faults.create_task(fault.inflict(cluster, own))
    cluster.heal()


async def _answers(storm: StormConfig, client: Client, asks: Sequence[Ask]) -> dict[Ask, list[int]]:
    if storm.is_real:
        return dict(zip(asks, await undisturbed(client, asks), strict=True))
    return {ask: mock_tokens(ask.prompt, ask.max_tokens, vocab_size=VOCAB_SIZE) for ask in asks}


def _cluster_config(storm: StormConfig, directory: Path, free_address: str) -> LocalClusterConfig:
    logs = directory / "logs"
    if storm.is_real:
        model = make_steady_model(directory / "model")
        made = config(model, NUM_WORKERS, num_stages=NUM_STAGES, logs=logs, listen=free_address)
    else:
        made = mock_config(
            NUM_WORKERS, num_stages=NUM_STAGES, logs=logs, times=MOCK_TIMES, listen=free_address
        )
    arguments = (
        *made.coordinator_arguments,
        *("--max-step-tokens", "256"),
        *("--hidden-states", storm.hidden_states.value),
        *("--journal", str(directory / "journal.db")),
        *("--log-format", "json", "--log-level", "debug"),
    )
    return replace(made, coordinator_arguments=arguments)
