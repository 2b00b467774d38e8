"""Disturbances of a cluster, each a coroutine that returns when its cause has ended."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from stageline_rpc.v1 import cluster_pb2
from tests.faults.byte_proxy import ByteProxy, Direction
from tests.faults.cluster import FaultyCluster
from tests.faults.result_proxy import RESULT_FAULTS, ResultFault, has_tokens
from tests.integration.alterations import (
    corrupt_signal,
    drop,
    drop_hidden,
    drop_step,
    flip_byte,
    hold_until_next,
    repeat,
    truncate,
)
from tests.integration.alterations import delay as delay_frame
from tests.integration.stream_proxy import Alteration

HAPPENS_WITHIN_S = 5.0
"""A fault of frames or bytes needs traffic; a spare has none, and then the fault does not happen."""

Inflict = Callable[[FaultyCluster, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Disturbance:
    """`weight` is its relative frequency."""

    name: str
    inflict: Inflict
    weight: float = 1.0


def pause_s(generator: random.Random, least_s: float, most_s: float) -> Awaitable[None]:
    """Random pause of a schedule."""
    return asyncio.sleep(generator.uniform(least_s, most_s))


async def kill_one(cluster: FaultyCluster, generator: random.Random) -> None:
    victim = generator.choice(cluster.worker_names)
    await cluster.kill(victim)
    await pause_s(generator, 0.0, 1.0)
    await cluster.restart(victim)


async def kill_two(cluster: FaultyCluster, generator: random.Random) -> None:
    victims = generator.sample(cluster.worker_names, 2)
    await cluster.kill(*victims)
    await pause_s(generator, 0.0, 1.0)
    await cluster.restart(*victims)


async def kill_during_recovery(cluster: FaultyCluster, generator: random.Random) -> None:
    """Kills one worker, then another during or right after the recovery."""
    first, second = generator.sample(cluster.worker_names, 2)
    await cluster.kill(first)
    await pause_s(generator, 0.0, 0.3)
    await cluster.kill(second)
    await cluster.restart(first, second)


async def restart_one(cluster: FaultyCluster, generator: random.Random) -> None:
    victim = generator.choice(cluster.worker_names)
    how = await cluster.terminate(victim)
    assert how == "exit code 0", f"{victim} after SIGTERM: {how}"
    await cluster.restart(victim)


async def freeze_briefly(cluster: FaultyCluster, generator: random.Random) -> None:
    """Shorter than a lease of two seconds."""
    victim = generator.choice(cluster.worker_names)
    cluster.freeze(victim)
    await pause_s(generator, 0.1, 1.0)
    cluster.thaw(victim)


async def freeze_until_lost(cluster: FaultyCluster, generator: random.Random) -> None:
    victim = generator.choice(cluster.worker_names)
    cluster.freeze(victim)
    try:
        await cluster.until(lambda status: victim not in _live(status))
        await pause_s(generator, 0.0, 1.0)
    finally:
        cluster.thaw(victim)


async def partition_until_lost(cluster: FaultyCluster, generator: random.Random) -> None:
    victim = generator.choice(cluster.worker_names)
    cluster.lines[victim].partition()
    try:
        await cluster.until(lambda status: victim not in _live(status))
        await pause_s(generator, 0.0, 1.0)
    finally:
        cluster.heal()


async def slow_bytes(cluster: FaultyCluster, generator: random.Random) -> None:
    for lines in cluster.lines.values():
        lines.into.delay(generator.uniform(0.001, 0.02))
        lines.out.delay(generator.uniform(0.001, 0.02))
    await pause_s(generator, 0.5, 2.0)
    cluster.heal()


async def stall_bytes(cluster: FaultyCluster, generator: random.Random) -> None:
    line = _line(cluster, generator)
    line.stall()
    await pause_s(generator, 0.2, 1.5)
    line.flow()


async def cut_bytes(cluster: FaultyCluster, generator: random.Random) -> None:
    _line(cluster, generator).cut()


async def flip_bits(cluster: FaultyCluster, generator: random.Random) -> None:
    """In frames sent to a worker; of its messages to the coordinator only frames have a checksum."""
    victim = (await cluster.places())[generator.choice(("FIRST", "MIDDLE", "LAST"))]
    line = cluster.lines[victim].into
    flip = line.flip(generator.choice(list(Direction)), within_bytes=generator.choice((200, 5_000, 50_000)))
    await _until_happened(flip.happened)
    # After a falsified length, the receiver waits for bytes that never arrive.
    line.cut()


async def cut_payloads(cluster: FaultyCluster, generator: random.Random) -> None:
    (await _payload_line(cluster, generator)).cut()


async def stall_payloads(cluster: FaultyCluster, generator: random.Random) -> None:
    line = await _payload_line(cluster, generator)
    line.stall()
    await pause_s(generator, 0.2, 1.5)
    line.flow()


async def flip_payload_bits(cluster: FaultyCluster, generator: random.Random) -> None:
    """Also in greetings and headers; after a falsified length the receiver waits for bytes in vain."""
    line = await _payload_line(cluster, generator)
    flip = line.flip(Direction.FORTH, within_bytes=generator.choice((80, 5_000, 50_000)))
    await _until_happened(flip.happened)


async def kill_coordinator(cluster: FaultyCluster, generator: random.Random) -> None:
    await cluster.kill("coordinator")
    await pause_s(generator, 0.0, 0.5)
    await cluster.restart("coordinator")


async def kill_coordinator_and_a_worker(cluster: FaultyCluster, generator: random.Random) -> None:
    """The worker rejoins after the coordinator, or the cluster serves without it for a while."""
    victim = generator.choice(cluster.worker_names)
    await cluster.kill("coordinator", victim)
    await pause_s(generator, 0.0, 0.5)
    await cluster.restart("coordinator")
    await pause_s(generator, 0.0, 5.0)
    await cluster.restart(victim)


def fault_of_frames(alter: Alteration) -> Inflict:
    async def inflict(cluster: FaultyCluster, generator: random.Random) -> None:
        victim = (await cluster.places())[generator.choice(("FIRST", "MIDDLE", "LAST"))]
        rate = generator.choice((0.02, 0.3))
        injection = cluster.lines[victim].frames.inject(
            alter,
            when=lambda frame: bool(frame.step.slices) and generator.random() < rate,
            times=generator.randint(1, 3),
        )
        await _until_happened(injection.happened)
        cluster.heal()

    return inflict


def fault_of_results(fault: ResultFault) -> Inflict:
    async def inflict(cluster: FaultyCluster, generator: random.Random) -> None:
        last = (await cluster.places())["LAST"]
        injection = cluster.lines[last].results.inject(
            fault,
            when=lambda result: has_tokens(result) and generator.random() < 0.2,
            times=generator.randint(1, 3),
        )
        await _until_happened(injection.happened)
        cluster.heal()

    return inflict


FRAME_FAULTS: dict[str, Alteration] = {
    "dropped": drop,
    "without its step": drop_step,
    "without its hidden states": drop_hidden,
    "repeated": repeat,
    "reordered": hold_until_next,
    "truncated": truncate,
    "falsified": flip_byte,
    "altered": corrupt_signal,
    "delayed": delay_frame(0.3),
}

DISTURBANCES = (
    Disturbance("kill a worker", kill_one, weight=4),
    Disturbance("kill two workers", kill_two, weight=2),
    Disturbance("kill another during recovery", kill_during_recovery, weight=2),
    Disturbance("restart a worker (SIGTERM)", restart_one, weight=2),
    Disturbance("freeze a worker briefly", freeze_briefly, weight=2),
    Disturbance("freeze a worker until it is lost", freeze_until_lost),
    Disturbance("partition a worker until it is lost", partition_until_lost),
    Disturbance("kill the coordinator", kill_coordinator),
    Disturbance("kill the coordinator and a worker", kill_coordinator_and_a_worker),
    Disturbance("slow connections", slow_bytes),
    Disturbance("stall a connection", stall_bytes, weight=2),
    Disturbance("cut a connection", cut_bytes, weight=2),
    Disturbance("flip a bit", flip_bits, weight=2),
    Disturbance("cut a payload connection", cut_payloads),
    Disturbance("stall a payload connection", stall_payloads),
    Disturbance("flip a bit of a payload", flip_payload_bits),
    *(
        Disturbance(f"frame {name}", fault_of_frames(alter), weight=0.5)
        for name, alter in FRAME_FAULTS.items()
    ),
    *(
        Disturbance(f"result {name}", fault_of_results(fault), weight=0.5)
        for name, fault in RESULT_FAULTS.items()
    ),
)


async def _until_happened(event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(HAPPENS_WITHIN_S):
            await event.wait()
    except TimeoutError:
        return


async def _payload_line(cluster: FaultyCluster, generator: random.Random) -> ByteProxy:
    """The connection of hidden states into MIDDLE or LAST."""
    return cluster.lines[(await cluster.places())[generator.choice(("MIDDLE", "LAST"))]].payloads


def _line(cluster: FaultyCluster, generator: random.Random) -> ByteProxy:
    lines = cluster.lines[generator.choice(cluster.worker_names)]
    return generator.choice((lines.into, lines.out))


def _live(status: cluster_pb2.GetStatusResponse) -> set[str]:
    return {w.name for w in status.workers if w.state != cluster_pb2.WORKER_STATE_LOST}
