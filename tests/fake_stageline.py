"""Stands in for `python -m stageline coordinator|worker|gateway` where a test is about clients or launching.

The gRPC and the membership are real: workers join over the wire, and the coordinator reports SERVING while as
many have joined as there are stages. The tokens are made up. What it does wrong on purpose is chosen by the
prompt and by FAKE_* variables in the environment.
"""

# ruff: noqa: N802 - gRPC names the methods

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from stageline_rpc.internal.v1 import join_pb2, join_pb2_grpc
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from tests.fake_inference import FakeInference
from wire.channels import SERVER_OPTIONS
from wire.transport import PLAIN

_Context = grpc.aio.ServicerContext[Any, Any]


class FakeCluster(cluster_pb2_grpc.ClusterServicer, join_pb2_grpc.MembershipServiceServicer):
    """Counts joined workers; each gets two layers."""

    def __init__(self, num_stages: int, inference: FakeInference) -> None:
        self._num_stages = num_stages
        self._inference = inference
        self._joined: dict[str, join_pb2.WorkerHello] = {}

    async def Join(
        self, messages: AsyncIterator[join_pb2.JoinRequest], context: _Context
    ) -> AsyncIterator[join_pb2.JoinResponse]:
        hello = (await anext(aiter(messages))).hello
        self._joined[hello.name] = hello
        yield join_pb2.JoinResponse(welcome=join_pb2.Welcome())
        try:
            async for _ in messages:
                pass
        finally:
            del self._joined[hello.name]

    async def GetStatus(
        self, request: cluster_pb2.GetStatusRequest, context: _Context
    ) -> cluster_pb2.GetStatusResponse:
        is_complete = len(self._joined) == self._num_stages
        return cluster_pb2.GetStatusResponse(
            model="fake-stories",
            dtype=cluster_pb2.DTYPE_F32,
            state=self._state(is_complete=is_complete),
            detail="" if is_complete else f"{len(self._joined)} of {self._num_stages} workers joined",
            num_stages=self._num_stages,
            num_blocks=64,
            block_size=16,
            workers=[self._worker(stage, name) for stage, name in enumerate(sorted(self._joined))],
            requests=cluster_pb2.RequestCounts(finished=3, cancelled=self._inference.num_ended_early),
        )

    def _state(self, *, is_complete: bool) -> cluster_pb2.ClusterState:
        if os.environ.get("FAKE_BLOCKED"):
            return cluster_pb2.CLUSTER_STATE_BLOCKED
        return (
            cluster_pb2.CLUSTER_STATE_SERVING
            if is_complete
            else cluster_pb2.CLUSTER_STATE_WAITING_FOR_WORKERS
        )

    def _worker(self, stage: int, name: str) -> cluster_pb2.WorkerStatus:
        roles = [cluster_pb2.STAGE_ROLE_MIDDLE] * self._num_stages
        roles[0], roles[-1] = cluster_pb2.STAGE_ROLE_FIRST, cluster_pb2.STAGE_ROLE_LAST
        return cluster_pb2.WorkerStatus(
            name=name,
            address="127.0.0.1:1",
            device="cpu",
            state=cluster_pb2.WORKER_STATE_READY,
            stage=stage,
            role=roles[stage],
            layer_begin=2 * stage,
            layer_end=2 * stage + 2,
            memory_bytes=2**30,
            weight_bytes=3 * 2**20,
            kv_bytes=2**20,
            kv=cluster_pb2.KvUsage(blocks_active=5, blocks_inactive=1, blocks_free=58),
        )


async def serve(
    listen: str, num_stages: int, inference: FakeInference | None = None
) -> tuple[grpc.aio.Server, str, FakeInference]:
    """Starts a fake coordinator in this process; returns the server, its address and what it saw.

    An `inference` that was served before knows its requests still.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    inference = inference or FakeInference()
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    cluster = FakeCluster(num_stages, inference)
    cluster_pb2_grpc.add_ClusterServicer_to_server(cluster, server)
    join_pb2_grpc.add_MembershipServiceServicer_to_server(cluster, server)
    port = server.add_insecure_port(listen)
    await server.start()
    return server, f"{listen.rpartition(':')[0]}:{port}", inference


async def _coordinator(arguments: argparse.Namespace) -> None:
    if os.environ.get("FAKE_COORDINATOR_FAILS"):
        sys.exit("no such model")
    server, address, _ = await serve(arguments.listen, arguments.stages)
    print(f"stageline coordinator listening on {address}", flush=True)
    await _until_signal()
    await server.stop(0)


async def _worker(arguments: argparse.Namespace) -> None:
    if os.environ.get("FAKE_FAILING_WORKER") == arguments.name:
        print("first line")
        sys.exit("out of memory")
    print(f"stageline worker {arguments.name} listening on 127.0.0.1:1", flush=True)
    async with PLAIN.channel(arguments.coordinator) as channel:
        call = join_pb2_grpc.MembershipServiceStub(channel).Join()
        await call.write(join_pb2.JoinRequest(hello=join_pb2.WorkerHello(name=arguments.name)))
        await _until_signal()


ANSWER = b'{"choices": [{"message": {"content": "A fake answer."}}]}'


async def _gateway(arguments: argparse.Namespace) -> None:
    """Gives the same answer to every request."""

    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(ANSWER)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + ANSWER)
        await writer.drain()
        writer.close()

    host, _, port = arguments.listen.rpartition(":")
    async with await asyncio.start_server(respond, host, int(port)) as server:
        print(f"stageline gateway listening on {host}:{server.sockets[0].getsockname()[1]}", flush=True)
        await _until_signal()


def _hangs() -> bool:
    return bool(os.environ.get("FAKE_HANGS"))


async def _until_signal() -> None:
    ended = asyncio.Event()
    if not _hangs():
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
    await ended.wait()


def main() -> None:
    """Runs the command line that `stageline` would get; flags that a fake has no use for are let pass."""
    if _hangs():
        # Before it joins.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    coordinator = commands.add_parser("coordinator")
    coordinator.add_argument("--listen", required=True)
    coordinator.add_argument("--stages", type=int, required=True)
    worker = commands.add_parser("worker")
    worker.add_argument("--coordinator", required=True)
    worker.add_argument("--name", required=True)
    gateway = commands.add_parser("gateway")
    gateway.add_argument("--listen", required=True)
    arguments, _ = parser.parse_known_args()
    roles = {"coordinator": _coordinator, "worker": _worker, "gateway": _gateway}
    asyncio.run(roles[arguments.command](arguments))


if __name__ == "__main__":
    main()
