"""Frames with 16 MiB of hidden states on one hop, against raw TCP; and the receiver's event loop.

Steps of 2,048 tokens take time in the event loop whatever their hidden states: the same steps with narrow
ones are subtracted.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from bench.harness.cluster import BenchCluster
from bench.harness.figure import Better, Figure, NotMeasured, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.mock_cluster import mock_cluster
from bench.harness.peer import Peer
from bench.harness.tcp_sink import send_frames
from stageline_rpc.v1 import cluster_pb2

NUM_STAGES = 3
CHUNK_TOKENS, WIDTH, BF16_BYTES = 2048, 4096, 2
NARROW = 8
FRAME_BYTES = CHUNK_TOKENS * WIDTH * BF16_BYTES
NUM_PROMPTS, PROMPT_CHUNKS = 4, 4
OF_TCP = 0.7
CPU_LIMIT_MS = 1.0
RESOLUTION_MS = 0.01
"""What noise hides: frames may take less of the loop than the same ones with narrow hidden states."""
GIGA = 1e9

HOW = (
    "16 MiB / time from a stage's output until LAST has the whole frame, checksum included, one in flight : "
    "one sendall until recv_into has filled a buffer, in turns"
)
HOW_CPU = (
    "CPU time of the thread that runs LAST's event loop, kernel included, per frame, beyond the same frames "
    "with 32 KiB of hidden states : the limit"
)


@dataclass(frozen=True, slots=True)
class Received:
    """Frames of one round at LAST: median seconds of the hop, mean CPU seconds of its threads per frame."""

    hop_s: float
    loop_cpu_s: float
    process_cpu_s: float


async def measure(setting: Setting) -> list[Figure]:
    """Rounds of frames between mock stages and of raw TCP."""
    frame = os.urandom(FRAME_BYTES)
    received, narrow, tcp_s = list[Received](), list[Received](), list[float]()
    async with AsyncExitStack() as stack:
        wide_cluster = await stack.enter_async_context(_cluster(WIDTH))
        narrow_cluster = await stack.enter_async_context(_cluster(NARROW))
        sink = await stack.enter_async_context(Peer("bench.harness.tcp_sink"))
        for cluster in (wide_cluster, narrow_cluster):
            await _receive(cluster)
        for _ in range(setting.rounds(7, 2)):
            received.append(await _receive(wide_cluster))
            narrow.append(await _receive(narrow_cluster))
            port = (await sink.ask({"size_bytes": FRAME_BYTES}))["port"]
            times_s = await asyncio.to_thread(send_frames, port, frame, NUM_PROMPTS * PROMPT_CHUNKS)
            tcp_s.append(statistics.median(times_s))
            setting.say(
                f"{_rate(received[-1].hop_s):.2f} GB/s, raw TCP {_rate(tcp_s[-1]):.2f} GB/s, "
                f"event loop {received[-1].loop_cpu_s * 1e3:.2f} ms per frame, "
                f"{narrow[-1].loop_cpu_s * 1e3:.2f} ms with narrow hidden states"
            )
    return _figures(received, narrow, tcp_s)


def _cluster(width: int) -> BenchCluster:
    arguments = ("--steps-in-flight", "1", "--max-step-tokens", str(CHUNK_TOKENS))
    return mock_cluster(["step=0ms"] * NUM_STAGES, coordinator_arguments=arguments, hidden_size=width)


def _rate(time_s: float) -> float:
    return FRAME_BYTES / time_s / GIGA


def _figures(received: list[Received], narrow: list[Received], tcp_s: list[float]) -> list[Figure]:
    beyond_ms = [
        (wide.loop_cpu_s - other.loop_cpu_s) * 1e3 for wide, other in zip(received, narrow, strict=True)
    ]
    pairs = zip(received, tcp_s, strict=True)
    return [
        of_rounds(
            "big frames, 16 MiB of hidden states on a hop : raw TCP",
            [Round(_rate(ours.hop_s), _rate(raw_s)) for ours, raw_s in pairs],
            unit="GB/s",
            target=OF_TCP,
            how=HOW,
        ),
        of_rounds(
            f"big frames, event loop of the receiving stage per frame : {CPU_LIMIT_MS:g} ms",
            [Round(max(RESOLUTION_MS, own_ms), CPU_LIMIT_MS) for own_ms in beyond_ms],
            unit="ms",
            better=Better.LOWER,
            target=1.0,
            noise=0.25,
            how=HOW_CPU,
            details={
                "loop_cpu_ms": statistics.median(ours.loop_cpu_s for ours in received) * 1e3,
                "narrow_loop_cpu_ms": statistics.median(ours.loop_cpu_s for ours in narrow) * 1e3,
                "process_cpu_ms": statistics.median(ours.process_cpu_s for ours in received) * 1e3,
            },
        ),
    ]


async def _last_pid(cluster: BenchCluster) -> int:
    """Process of LAST, whose frames have the memory of a received frame, not a page of zeros."""
    workers = (await cluster.status()).workers
    return next(worker.pid for worker in workers if worker.role == cluster_pb2.STAGE_ROLE_LAST)


async def _receive(cluster: BenchCluster) -> Received:
    pid = await _last_pid(cluster)
    begin_s, loop_s, process_s = time.monotonic(), _thread_cpu_s(pid), _process_cpu_s(pid)
    for _ in range(NUM_PROMPTS):
        await cluster.generate(PROMPT_CHUNKS * CHUNK_TOKENS, 1)
    frames = [step for step in cluster.steps(begin_s) if step.num_tokens == CHUNK_TOKENS]
    if not frames or not all(step.hops for step in frames):
        raise NotMeasured(f"{len(frames)} steps of {CHUNK_TOKENS} tokens with times of their hops")
    return Received(
        statistics.median(step.hops[-1] for step in frames) / 1e6,
        (_thread_cpu_s(pid) - loop_s) / len(frames),
        (_process_cpu_s(pid) - process_s) / len(frames),
    )


def _thread_cpu_s(pid: int) -> float:
    """CPU seconds of a process's main thread. Source: proc(5), schedstat."""
    return _schedstat_s(Path(f"/proc/{pid}/task/{pid}/schedstat"))


def _process_cpu_s(pid: int) -> float:
    return sum(_schedstat_s(task / "schedstat") for task in Path(f"/proc/{pid}/task").iterdir())


def _schedstat_s(file: Path) -> float:
    try:
        return int(file.read_text().split()[0]) / 1e9
    except OSError as error:
        raise NotMeasured(f"no CPU time of a thread: {error}") from error
