"""An attacker without certificate and key, as a process: `python -m tests.attacker GRPC HTTP WORKER SECONDS`.

All attacks run at once until the time is over, and on until each has ended as it should or PATIENCE_S have
passed; then it prints as JSON how often each was refused, by what it was told.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.unfinished_calls import UnfinishedCalls

PAUSE_S = 0.05
PATIENCE_S = 120.0
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_metadata_size", 1 << 20)]
BOMBS = {
    "depth": b'{"prompt":"a","x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "schema": json.dumps({"prompt": "a", "regex": "(a|aa|aaa|b|ab|ba)*" * 2000}).encode(),
    "values": b'{"prompt":[' + b"1," * 400_000 + b"1]}",
}
MANY_HEADERS = b"".join(b"X-%d: y\r\n" % index for index in range(200))
COMPRESSED = b"Content-Encoding: gzip\r\n"
JOIN = "/stageline.internal.v1.MembershipService/Join"
GENERATE = "/stageline.v1.Inference/Generate"
REFERENCE = "/stageline.internal.v1.StageService/ComputeReference"
LARGE = bytes((16 << 20) - 1)
"""A message, and a body, of which the last byte is not sent."""
UNFINISHED_CALLS = 10
"""Of one connection."""
EXPECTED = {
    "slow head: 408",
    "silent HTTP: 408",
    "silent gRPC: closed",
    "many headers: 431",
    "large head: 431",
    "compressed body: 415",
    "body: depth: 400",
    "body: schema: 400",
    "body: values: 413",
    "metadata: RESOURCE_EXHAUSTED",
    "compressed message: UNIMPLEMENTED",
    "large message: INVALID_ARGUMENT",
    "watches: OK",
    "telemetry: RESOURCE_EXHAUSTED",
    "join: INVALID_ARGUMENT",
    "unfinished message: the call's message is incomplete",
    "unfinished message to a worker: the call's message is incomplete",
    "unfinished body: 503",
}
"""How each attack ends at least once."""


class Attacker:
    """Attacks on one coordinator, one gateway and one worker."""

    def __init__(self, coordinator: str, gateway: str, worker: str) -> None:
        self._coordinator, self._gateway, self._worker = coordinator, gateway, worker
        self.refused = Counter[str]()
        self._stopped: set[str] = set()

    def all(self) -> dict[str, tuple[int, Callable[[], Awaitable[str]]]]:
        """How many of each run at once, and one try of it, which returns how it ended."""
        host, port = self._coordinator.rsplit(":", 1)
        web, web_port = self._gateway.rsplit(":", 1)
        return {
            "silent gRPC": (100, partial(self._raw, host, int(port), b"", to_the_end=True)),
            "silent HTTP": (100, partial(self._raw, web, int(web_port), b"")),
            "slow head": (100, partial(self._raw, web, int(web_port), b"GET / HTTP/1.1\r\nX: ")),
            "many headers": (4, partial(self._raw, web, int(web_port), self._head(MANY_HEADERS))),
            "large head": (4, partial(self._raw, web, int(web_port), b"GET /" + b"y" * 100_000)),
            "compressed body": (
                4,
                partial(self._raw, web, int(web_port), self._head(b"Content-Encoding: gzip\r\n")),
            ),
            **{f"body: {name}": (2, partial(self._post, body)) for name, body in BOMBS.items()},
            "metadata": (4, partial(self._model, metadata=[("key", "x" * 50_000)])),
            "compressed message": (2, partial(self._generate, bytes(1 << 25), grpc.Compression.Gzip)),
            "large message": (2, partial(self._generate, bytes(1 << 23))),
            "watches": (4, self._watch),
            "telemetry": (1, self._export),
            "join": (4, self._join),
            "unfinished message": (2, partial(self._unfinished, self._coordinator, GENERATE)),
            "unfinished message to a worker": (2, partial(self._unfinished, self._worker, REFERENCE)),
            "unfinished body": (20, partial(self._post, LARGE, num_missing=1)),
        }

    async def run(self, seconds: float) -> None:
        loops = {
            asyncio.create_task(self._repeat(name, attack)): name
            for name, (num, attack) in self.all().items()
            for _ in range(num)
        }
        await asyncio.wait(loops, timeout=seconds)
        end_s = time.monotonic() + PATIENCE_S
        while (missing := self._missing()) and time.monotonic() < end_s:
            print("waiting for", *missing, file=sys.stderr)
            # A slow machine would take minutes for all at once.
            self._stop({task: name for task, name in loops.items() if name not in missing})
            await asyncio.wait(loops, timeout=1.0)
            _raise_first_error(loops)
        _raise_first_error(loops)
        self._stop(loops)
        await asyncio.gather(*loops, return_exceptions=True)

    def _stop(self, loops: dict[asyncio.Task[None], str]) -> None:
        """A loop ends by its name if grpc.aio swallows the cancellation of a call that begins."""
        self._stopped.update(loops.values())
        for task in loops:
            task.cancel()

    def _missing(self) -> list[str]:
        """Attacks that have not ended as expected; others may take the time that an answer needs."""
        return sorted(end.rpartition(": ")[0] for end in EXPECTED - self.refused.keys())

    async def _repeat(self, name: str, attack: Callable[[], Awaitable[str]]) -> None:
        while name not in self._stopped:
            try:
                told = await attack()
            except grpc.aio.AioRpcError as error:
                told = error.code().name
            except (OSError, asyncio.IncompleteReadError) as error:
                told = type(error).__name__
            self.refused[f"{name}: {told}"] += 1
            await asyncio.sleep(PAUSE_S)

    # HTTP

    def _head(self, *headers: bytes) -> bytes:
        return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"".join(headers) + b"\r\n"

    async def _raw(self, host: str, port: int, data: bytes, *, to_the_end: bool = False) -> str:
        """Send something, and read an answer, or on until the connection is closed; return the status."""
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(data)
            answer = part = await reader.read(4096)
            while to_the_end and part:
                part = await reader.read(4096)
        finally:
            writer.close()
        return answer.split()[1].decode() if answer.startswith(b"HTTP/1.1") else "closed"

    async def _post(self, body: bytes, num_missing: int = 0) -> str:
        host, port = self._gateway.rsplit(":", 1)
        size = len(body) + num_missing
        head = self._head(b"Content-Type: application/json\r\nContent-Length: %d\r\n" % size)
        return await self._raw(host, int(port), head + body)

    # gRPC

    def _channel(self, compression: grpc.Compression | None = None) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._coordinator, options=OPTIONS, compression=compression)

    async def _unfinished(self, address: str, method: str) -> str:
        async with UnfinishedCalls(address) as calls:
            for _ in range(UNFINISHED_CALLS):
                calls.open(method, LARGE)
            await calls.until(lambda: bool(calls.ended))
            await asyncio.sleep(40 * PAUSE_S)  # the others keep what they have
            return next((text for _, text in calls.ended.values()), "closed").split(",")[0]

    async def _model(self, metadata: list[tuple[str, str]]) -> str:
        async with self._channel() as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata)
        return "OK"

    async def _generate(self, text: bytes, compression: grpc.Compression | None = None) -> str:
        async with self._channel(compression) as channel:
            request = inference_pb2.GenerateRequest(text=text.decode())
            await inference_pb2_grpc.InferenceStub(channel).Generate(request).read()
        return "OK"

    async def _watch(self) -> str:
        """Open calls, and leave them open for a while."""
        async with self._channel() as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            calls = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(500)]
            await asyncio.gather(*(call.read() for call in calls))
            await asyncio.sleep(20 * PAUSE_S)
        return "OK"

    async def _export(self) -> str:
        """Twice what a worker may send at once."""
        request = trace_service_pb2.ExportTraceServiceRequest()
        request.resource_spans.add().resource.attributes.add(key="x").value.string_value = "x" * 4_000_000
        async with self._channel() as channel:
            stub = trace_service_pb2_grpc.TraceServiceStub(channel)
            await asyncio.gather(*(stub.Export(request) for _ in range(32)))
        return "OK"

    async def _join(self) -> str:
        hello = join_pb2.WorkerHello(name="x" * 300_000, address="127.0.0.1:1", incarnation=bytes(16))
        async with self._channel() as channel:
            # With its one message at the begin: a later write could meet the refusal.
            join: Any = channel.unary_stream(JOIN)
            await join(join_pb2.JoinRequest(hello=hello).SerializeToString()).read()
        return "OK"


def _raise_first_error(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raise the error of an attack that cannot be made."""
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()


async def _main(coordinator: str, gateway: str, worker: str, seconds: str) -> None:
    attacker = Attacker(coordinator, gateway, worker)
    await attacker.run(float(seconds))
    print(json.dumps(attacker.refused))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
