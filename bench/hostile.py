"""Processor time of the coordinator's event loop for one hostile message.

    python -m bench.hostile [--rounds 5]

The messages are those of `tests/hostile_messages.py`, and the largest requests that are accepted; the bound
is 20 ms. The worker is a process of its own; the client is a thread, whose time does not count. The figure is
the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import Callable

import grpc

from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from coordinator.server import CoordinatorServer
from stageline_rpc.v1 import inference_pb2
from tests.hostile_messages import GENERATE, HOSTILE, open_channel, send

BOUND_MS = 20.0
MODEL = "layers=1,hidden=32,vocab=131072"
WORKER = (sys.executable, "-P", "-m", "stageline", "worker", "--mock", "step=0us", "--log-level", "error")


def _accepted() -> dict[str, inference_pb2.GenerateRequest]:
    sampling = inference_pb2.SamplingParameters
    ids = inference_pb2.TokenIds(ids=range(100_000, 104_000))
    return {
        "prompt of 4,000 ids": inference_pb2.GenerateRequest(token_ids=ids, max_tokens=1),
        "the same for 64 choices": inference_pb2.GenerateRequest(
            token_ids=ids, max_tokens=1, sampling=sampling(n=64)
        ),
        "65,536 biases": inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[1]),
            max_tokens=1,
            sampling=sampling(logit_bias=dict.fromkeys(range(65536), 1.0)),
        ),
        "131,072 allowed ids": inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=[1]),
            max_tokens=1,
            sampling=sampling(allowed_token_ids=range(131_072)),
        ),
    }


def _generate(channel: grpc.Channel, data: bytes) -> None:
    call: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)
    for _ in call(data, timeout=60):
        pass


async def _loop_ms(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds + 1):  # warm up imports and connection
        started_s = time.thread_time()
        await asyncio.to_thread(call)
        await asyncio.sleep(0.05)  # work after the response
        times.append(time.thread_time() - started_s)
    return statistics.median(times[1:]) * 1000


async def _measure(rounds: int) -> None:
    config = CoordinatorConfig(
        model=None,
        listen="127.0.0.1:0",
        http=None,
        num_stages=1,
        layers=None,
        dtype=None,
        block_size=16,
        max_step_tokens=512,
        max_step_sequences=64,
        max_sequence_tokens=None,
        max_kv_tokens=65_536,
        queue_size=256,
        mock_model=MODEL,
    )
    server = CoordinatorServer(config, open_model(config))
    await server.start()
    worker = await asyncio.create_subprocess_exec(*WORKER, "--coordinator", server.address)
    try:
        await server.controller.availability.wait_serving()
        with open_channel(server.address) as channel:
            for name, hostile in HOSTILE.items():
                _show(name, await _loop_ms(lambda message=hostile: send(channel, message), rounds))  # type: ignore[misc]
            for name, message in _accepted().items():
                data = message.SerializeToString()
                _show(f"accepted: {name}", await _loop_ms(lambda sent=data: _generate(channel, sent), rounds))  # type: ignore[misc]
    finally:
        worker.kill()
        await worker.wait()
        await server.stop()


def _show(name: str, loop_ms: float) -> None:
    print(f"{name:<45} {loop_ms:>7.1f}{'  above the bound' if loop_ms > BOUND_MS else ''}", flush=True)


def main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(f"{'ms of the event loop for one message':<45} {'median':>7}")
    asyncio.run(_measure(options.rounds))


if __name__ == "__main__":
    main()
