"""One run of chaos: a cluster under constant load, disturbed again and again until the time is over."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deploy import ClusterFailed, LocalClusterConfig
from stageline import Client, StagelineError
from tests.chaos.disturbances import DISTURBANCES, Disturbance
from tests.chaos.report import Report, Seen
from tests.e2e.clusters import VOCAB_SIZE
from tests.e2e.recovery_setup import (
    TYPED_ERRORS,
    config,
    is_idle,
    make_recurrent_model,
    make_steady_model,
    mock_config,
    recurrent_config,
)
from tests.faults.cluster import FaultyCluster
from tests.faults.load import ConstantLoad
from tests.faults.streams import Ask, mixed_asks, undisturbed
from tests.mock_answers import mock_tokens
from tests.temporary import run_directory
from wire.tensors import HopRoute

NUM_WORKERS = 4
NUM_STAGES = 3
NUM_STREAMS = 16
LOAD, RECURRENT_LOAD = (64, 80), (16, 30)
"""Requests, and tokens of each. Recurrent layers take several times as long on a CPU."""
RECOVERS_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosConfig:
    """`is_real` computes with a small model instead of mock stages, `is_recurrent` with one that has
    recurrent states. With a journal requests go on under the next coordinator. `names` are parts of the names
    of the disturbances to choose from; all without any. `logs`: where logs and journal are kept.
    """

    seconds: float
    seed: int
    is_real: bool = False
    is_recurrent: bool = False
    has_journal: bool = True
    hidden_states: HopRoute = HopRoute.AUTO
    names: tuple[str, ...] = ()
    logs: Path | None = None
    say: Callable[[str], None] = print


async def run_chaos(chaos: ChaosConfig, free_address: str) -> Report:
    """Returns when the time is over and the cluster has ended. Everything random follows from the seed,
    except when a disturbance meets which request.
    """
    report = Report(chaos.seed, chaos.seconds)
    with run_directory("chaos", chaos.logs) as directory:
        made = _cluster_config(chaos, directory, free_address)
        try:
            async with FaultyCluster(made, seed=chaos.seed, has_frame_proxies=True) as cluster:
                await _disturb(chaos, cluster, report)
        except (AssertionError, TimeoutError, ClusterFailed, StagelineError) as error:
            report.problems.append(f"{type(error).__name__}: {error}")
    return report


async def _disturb(chaos: ChaosConfig, cluster: FaultyCluster, report: Report) -> None:
    num_asks, max_tokens = RECURRENT_LOAD if chaos.is_recurrent else LOAD
    asks = mixed_asks(
        num_asks, lengths=(1, 200), max_tokens=max_tokens, vocab_size=VOCAB_SIZE, seed=chaos.seed
    )
    async with Client(cluster.address) as client:
        answers = await _answers(chaos, client, asks)
        load = ConstantLoad(
            client, asks, lambda ask: answers[ask], num_streams=NUM_STREAMS, errors=TYPED_ERRORS
        )
        try:
            async with load:
                await _until_the_end(chaos, cluster, load, report)
        finally:
            report.problems += load.problems
            report.num_finished, report.num_tokens = load.num_finished, load.num_tokens
            report.ended_with = load.ended_with
        await cluster.until(is_idle)


async def _until_the_end(
    chaos: ChaosConfig, cluster: FaultyCluster, load: ConstantLoad, report: Report
) -> None:
    now = asyncio.get_running_loop().time
    await load.next_token(timeout_s=RECOVERS_WITHIN_S)
    started_s = now()
    choices = [d for d in DISTURBANCES if not chaos.names or any(name in d.name for name in chaos.names)]
    while now() - started_s < chaos.seconds:
        # A generator for each: what one draws does not depend on how long another took.
        generator = random.Random(f"{chaos.seed} {len(report.seen)}")
        (disturbance,) = generator.choices(choices, [d.weight for d in choices])
        chaos.say(f"{now() - started_s:6.1f} s  {load.num_finished:5} finished  {disturbance.name}")
        report.seen.append(await _one(cluster, load, disturbance, generator))
        await asyncio.sleep(generator.uniform(0.1, 0.6))


async def _one(
    cluster: FaultyCluster, load: ConstantLoad, disturbance: Disturbance, generator: random.Random
) -> Seen:
    """Inflicts one disturbance and waits for recovery within its time limit."""
    started_s = asyncio.get_running_loop().time()
    epoch = (await cluster.until(timeout_s=RECOVERS_WITHIN_S)).epoch
    try:
        await disturbance.inflict(cluster, generator)
        await cluster.until(cluster.has_all_workers, timeout_s=RECOVERS_WITHIN_S)
        await load.next_token(timeout_s=RECOVERS_WITHIN_S)
        status = await cluster.until(timeout_s=RECOVERS_WITHIN_S)
    except (AssertionError, TimeoutError) as error:
        raise AssertionError(f"after {disturbance.name!r}: {error or 'no token'}") from error
    return Seen(disturbance.name, load.longest_silence_s(since_s=started_s), status.epoch != epoch)


async def _answers(chaos: ChaosConfig, client: Client, asks: Sequence[Ask]) -> dict[Ask, list[int]]:
    if chaos.is_real or chaos.is_recurrent:
        return dict(zip(asks, await undisturbed(client, asks), strict=True))
    return {ask: mock_tokens(ask.prompt, ask.max_tokens, vocab_size=VOCAB_SIZE) for ask in asks}


def _cluster_config(chaos: ChaosConfig, directory: Path, free_address: str) -> LocalClusterConfig:
    logs = directory / "logs"
    if chaos.is_recurrent:
        model = make_recurrent_model(directory / "model")
        made = recurrent_config(model, NUM_WORKERS, num_stages=NUM_STAGES, logs=logs, listen=free_address)
    elif chaos.is_real:
        model = make_steady_model(directory / "model")
        made = config(model, NUM_WORKERS, num_stages=NUM_STAGES, logs=logs, listen=free_address)
    else:
        made = mock_config(NUM_WORKERS, num_stages=NUM_STAGES, logs=logs, listen=free_address)
    journal = ("--journal", str(directory / "journal.db")) if chaos.has_journal else ()
    hops = ("--hidden-states", chaos.hidden_states.value)
    return replace(made, coordinator_arguments=(*made.coordinator_arguments, *journal, *hops))
