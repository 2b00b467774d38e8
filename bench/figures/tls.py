"""The cost of certificates: decode, prefill and bare hops with TLS at both ends, against plain text."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TypeVar

from bench.harness.bare_hop import BareHop
from bench.harness.certified import BenchAuthority
from bench.harness.cluster import BenchCluster
from bench.harness.figure import Figure, Round, of_rounds
from bench.harness.group import Setting
from bench.harness.real_cluster import NEW_TOKENS, PROMPT_TOKENS, real_cluster, warm_up
from bench.harness.running import running_streams
from bench.harness.streams import decode_rate, decode_window, prefill_rate
from certificates.identity import Role

STREAMS = (1, 16)
MOST_NEW_TOKENS = 2048
NUM_PROMPTS = 16
CONNECTIONS = (1, 2, 4)
NUM_MESSAGES = 256
"""In all, over all connections."""
TARGET = 0.95
GIGA = 1e9

HOW_DECODE = (
    "tokens/s while all streams decode, 88 M model, two workers : the same without --tls-dir, in turns"
)
HOW_PREFILL = "2,048 tokens until the last first token, 88 M model, two workers : without --tls-dir, in turns"
HOW_PAYLOADS = (
    "Stageline's payload connections to another process, checksums included : in plain text, in turns"
)
HOW_GRPC = "grpc.aio streams to another process, an answer to each message : in plain text, in turns"


_T = TypeVar("_T")
_Run = Callable[[BareHop, int, int], Awaitable[float]]


async def measure(setting: Setting) -> list[Figure]:
    """Both clusters, then both kinds of bare hops, in turns."""
    return [*await _of_clusters(setting), *await _of_hops(setting)]


async def _of_clusters(setting: Setting) -> list[Figure]:
    decoded: dict[int, list[Round]] = {streams: [] for streams in STREAMS}
    prefilled = list[Round]()
    async with AsyncExitStack() as stack:
        plain = await stack.enter_async_context(real_cluster(setting))
        secure = await stack.enter_async_context(real_cluster(setting, has_tls=True))
        for cluster in (plain, secure):
            await warm_up(cluster)
        cpu_ms: dict[BenchCluster, list[float]] = {secure: [], plain: []}
        for number in range(setting.rounds(15)):
            for streams, rounds in decoded.items():
                rounds.append(await _in_turns(number, secure, plain, _decode(streams, cpu_ms)))
                setting.say(f"decode, {streams} streams: {_described(rounds[-1])} tok/s")
            prefilled.append(await _in_turns(number, secure, plain, _prefill))
            setting.say(f"prefill: {_described(prefilled[-1])} tok/s")
    figures = [
        of_rounds(
            f"decode, {streams} stream{'s' if streams > 1 else ''}, TLS : plain",
            rounds,
            unit="tok/s",
            how=HOW_DECODE,
            target=TARGET,
            details={
                "cpu_ms_per_token": statistics.median(cpu_ms[secure][place :: len(STREAMS)]),
                "cpu_ms_per_token_plain": statistics.median(cpu_ms[plain][place :: len(STREAMS)]),
            },
        )
        for place, (streams, rounds) in enumerate(decoded.items())
    ]
    name = f"prefill, {NUM_PROMPTS} prompts, TLS : plain"
    return [*figures, of_rounds(name, prefilled, unit="tok/s", how=HOW_PREFILL, target=TARGET)]


async def _of_hops(setting: Setting) -> list[Figure]:
    num_messages = 16 if setting.is_quick else NUM_MESSAGES
    figures = []
    with tempfile.TemporaryDirectory(prefix="stageline-bench-") as folder:
        authority = BenchAuthority(Path(folder))
        ends = authority.issue(Role.WORKER, "a"), authority.issue(Role.WORKER, "b")
        async with BareHop() as plain, BareHop(ends) as secure:
            for name, how, run in (
                ("payload connection", HOW_PAYLOADS, BareHop.over_payload_connections),
                ("raw grpc.aio stream", HOW_GRPC, BareHop.over_grpc),
            ):
                for num in CONNECTIONS:

                    async def send(hop: BareHop, num: int = num, run: _Run = run) -> float:
                        return await run(hop, num, num_messages // num) / GIGA

                    rounds = [
                        await _in_turns(number, secure, plain, send) for number in range(setting.rounds(7))
                    ]
                    what = f"1 MiB, {num} {name}{'s' if num > 1 else ''}, TLS : plain"
                    setting.say(f"{what}: {_described(rounds[-1])} GB/s")
                    figures.append(of_rounds(what, rounds, unit="GB/s", how=how, noise=0.15))
    return figures


async def _in_turns(number: int, secure: _T, plain: _T, rate: Callable[[_T], Awaitable[float]]) -> Round:
    """Each of both goes first in every other round."""
    if number % 2:
        bound = await rate(plain)
        return Round(await rate(secure), bound)
    return Round(await rate(secure), await rate(plain))


def _decode(
    num_streams: int, cpu_ms: dict[BenchCluster, list[float]]
) -> Callable[[BenchCluster], Awaitable[float]]:
    """Rate of a cluster; also notes the processor time of its processes per token."""

    async def rate(cluster: BenchCluster) -> float:
        before_s = cluster.cpu_s()
        async with running_streams(
            cluster, num_streams, prompt_tokens=PROMPT_TOKENS, max_tokens=MOST_NEW_TOKENS
        ) as running:
            streams = running.streams
            await running.until(lambda streams: decode_window(streams, NEW_TOKENS - 1) is not None)
            used_s = cluster.cpu_s() - before_s
        cpu_ms[cluster].append(used_s * 1e3 / sum(len(stream.arrivals_s) for stream in streams))
        window = decode_window(streams, NEW_TOKENS - 1)
        assert window is not None, "found above"
        return decode_rate(streams, window)

    return rate


async def _prefill(cluster: BenchCluster) -> float:
    return prefill_rate(await cluster.generate_all(NUM_PROMPTS, PROMPT_TOKENS, 1), PROMPT_TOKENS)


def _described(both: Round) -> str:
    return f"{both.measured:.4g} with TLS, {both.bound:.4g} without"
