"""Faults of a storm: each returns when its cause has ended, without waiting for a recovery."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from deploy.local import COORDINATOR
from stageline import Client, StagelineError
from stageline_rpc.v1 import cluster_pb2
from tests.chaos.storm_cluster import StormCluster
from tests.faults.byte_proxy import ByteProxy, Direction

STATUS_TIMEOUT_S = 0.3
"""A coordinator that is down or busy does not delay the storm: then the victim is any worker."""

Inflict = Callable[[StormCluster, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StormFault:
    """`weight` is its relative frequency among killing or non-killing faults."""

    name: str
    inflict: Inflict
    weight: float = 1.0


async def kill_worker(cluster: StormCluster, generator: random.Random) -> None:
    cluster.signal(generator.choice(cluster.worker_names), signal.SIGKILL)


async def kill_two_workers(cluster: StormCluster, generator: random.Random) -> None:
    for victim in generator.sample(cluster.worker_names, 2):
        cluster.signal(victim, signal.SIGKILL)


async def kill_loading_worker(cluster: StormCluster, generator: random.Random) -> None:
    """Kills a loading worker, else the most recently started one."""
    loading = await _workers(cluster, lambda worker: worker.state == cluster_pb2.WORKER_STATE_LOADING)
    newest = max(cluster.worker_names, key=lambda name: cluster.started_s.get(name, 0.0))
    cluster.signal(generator.choice(loading or [newest]), signal.SIGKILL)


async def kill_coordinator(cluster: StormCluster, generator: random.Random) -> None:
    cluster.signal(COORDINATOR, signal.SIGKILL)


def kill_stage(role: cluster_pb2.StageRole.ValueType) -> Inflict:
    async def inflict(cluster: StormCluster, generator: random.Random) -> None:
        holders = await _workers(cluster, lambda worker: worker.HasField("stage") and worker.role == role)
        cluster.signal(generator.choice(holders or cluster.worker_names), signal.SIGKILL)

    return inflict


async def restart_worker(cluster: StormCluster, generator: random.Random) -> None:
    """SIGTERM: its layers move first."""
    cluster.signal(generator.choice(cluster.worker_names), signal.SIGTERM)


def freeze(least_s: float, most_s: float) -> Inflict:
    async def inflict(cluster: StormCluster, generator: random.Random) -> None:
        victim = generator.choice(cluster.worker_names)
        cluster.signal(victim, signal.SIGSTOP)
        try:
            await asyncio.sleep(generator.uniform(least_s, most_s))
        finally:
            cluster.signal(victim, signal.SIGCONT)

    return inflict


async def stall_connection(cluster: StormCluster, generator: random.Random) -> None:
    line = _line(cluster, generator)
    line.stall()
    try:
        await asyncio.sleep(generator.uniform(0.2, 1.5))
    finally:
        line.flow()


async def partition(cluster: StormCluster, generator: random.Random) -> None:
    """Longer than a lease of 2 s."""
    lines = cluster.lines[generator.choice(cluster.worker_names)]
    lines.partition()
    try:
        await asyncio.sleep(generator.uniform(2.5, 4.0))
    finally:
        lines.end_partition()


async def cut_connection(cluster: StormCluster, generator: random.Random) -> None:
    _line(cluster, generator).cut()


async def flip_bit(cluster: StormCluster, generator: random.Random) -> None:
    """In what a worker receives from its predecessor; the connection ends a moment later, because a falsified
    length makes the receiver wait for bytes that never arrive.
    """
    line = cluster.lines[generator.choice(cluster.worker_names)].into
    line.flip(generator.choice(list(Direction)), within_bytes=generator.choice((200, 5_000, 50_000)))
    await asyncio.sleep(1.0)
    line.cut()


async def flip_payload_bit(cluster: StormCluster, generator: random.Random) -> None:
    line = cluster.lines[generator.choice(cluster.worker_names)].payloads
    line.flip(Direction.FORTH, within_bytes=generator.choice((80, 5_000, 50_000)))
    await asyncio.sleep(1.0)


async def slow_connections(cluster: StormCluster, generator: random.Random) -> None:
    for lines in cluster.lines.values():
        lines.into.delay(generator.uniform(0.001, 0.02))
    await asyncio.sleep(generator.uniform(0.5, 2.0))
    for lines in cluster.lines.values():
        lines.into.delay(0)


KILLS = (
    StormFault(name="kill -9 a worker", inflict=kill_worker, weight=5),
    StormFault(name="kill -9 the first stage", inflict=kill_stage(cluster_pb2.STAGE_ROLE_FIRST)),
    StormFault(name="kill -9 the last stage", inflict=kill_stage(cluster_pb2.STAGE_ROLE_LAST)),
    StormFault(name="kill -9 a loading worker", inflict=kill_loading_worker),
    StormFault(name="kill -9 two workers", inflict=kill_two_workers, weight=1.5),
)
KILL_COORDINATOR = StormFault(name="kill -9 the coordinator", inflict=kill_coordinator, weight=0.5)
OTHERS = (
    StormFault(name="freeze a worker briefly", inflict=freeze(0.1, 1.0), weight=2),
    StormFault(name="freeze a worker until it is lost", inflict=freeze(2.5, 4.0)),
    StormFault(name="restart a worker (SIGTERM)", inflict=restart_worker, weight=2),
    StormFault(name="cut a connection", inflict=cut_connection, weight=2),
    StormFault(name="stall a connection", inflict=stall_connection),
    StormFault(name="partition a worker", inflict=partition),
    StormFault(name="flip a bit", inflict=flip_bit),
    StormFault(name="flip a bit of a payload", inflict=flip_payload_bit),
    StormFault(name="slow connections", inflict=slow_connections),
)


def draw_fault(generator: random.Random, *, kills_coordinator: bool = False) -> StormFault:
    """Alternates between killing and non-killing faults."""
    kills = (*KILLS, KILL_COORDINATOR) if kills_coordinator else KILLS
    faults = generator.choice((kills, OTHERS))
    (fault,) = generator.choices(faults, [fault.weight for fault in faults])
    return fault


async def _workers(cluster: StormCluster, condition: Callable[[cluster_pb2.WorkerStatus], bool]) -> list[str]:
    """Names of the workers for which the condition holds; none when the coordinator does not answer."""
    try:
        async with asyncio.timeout(STATUS_TIMEOUT_S), Client(cluster.address) as client:
            return [worker.name for worker in (await client.status()).workers if condition(worker)]
    except (TimeoutError, StagelineError):
        return []


def _line(cluster: StormCluster, generator: random.Random) -> ByteProxy:
    lines = cluster.lines[generator.choice(cluster.worker_names)]
    return generator.choice((lines.into, lines.out, lines.payloads))
