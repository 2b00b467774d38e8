"""Stands in for `python -m stageline coordinator|worker` where a test is about clients or launching.

The gRPC and the membership are real: workers join over the wire, and the coordinator says SERVING while as
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

from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, stage_pb2
from wire.channels import client_channel

REQUEST_ID = "01890a5d-ac96-774b-bcce-b302099a8057"
_Context = grpc.aio.ServicerContext[Any, Any]


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Answers " 0", " 1", ... one token each.

    A prompt "!after:CODE" fails with that status after one token, "!endless" never ends, "!gap" leaves a
    token out, "!unfinished" ends without a finish reason. A conversation is answered with its length.
    """

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.ended_early = asyncio.Event()
        self.num_ended_early = 0
        self.cancelled_ids: list[str] = []
        self.has_tokenizer = os.environ.get("FAKE_TOKENIZER", "1") == "1"
        self.has_chat_template = os.environ.get("FAKE_CHAT_TEMPLATE", "1") == "1"

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: _Context
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        prompt = request.text
        num_tokens = 10**9 if prompt == "!endless" else request.max_tokens or 4
        try:
            async for response in self._tokens(num_tokens, request):
                yield response
                if prompt.startswith("!after:"):
                    await context.abort(grpc.StatusCode[prompt.removeprefix("!after:")], "said the server")
                await asyncio.sleep(0.01 if prompt == "!endless" else 0)
        except (asyncio.CancelledError, GeneratorExit):
            # gRPC cancels the wait inside, or closes this generator where it stands at `yield`.
            self.ended_early.set()
            self.num_ended_early += 1
            raise

    async def _tokens(
        self, num_tokens: int, request: inference_pb2.GenerateRequest
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        offset = 0
        for index in range(num_tokens):
            text = self._text(index, request) if self.has_tokenizer else ""
            response = inference_pb2.GenerateResponse(
                request_id=request.request_id or REQUEST_ID,
                first_token_index=index + (1 if request.text == "!gap" and index else 0),
                token_ids=[index],
                text=text,
                text_offset=offset,
            )
            if index == num_tokens - 1 and request.text != "!unfinished":
                response.finish_reason = inference_pb2.FINISH_REASON_LENGTH
                response.usage.CopyFrom(_usage(request, num_tokens))
            offset += len(text)
            yield response

    def _text(self, index: int, request: inference_pb2.GenerateRequest) -> str:
        num_messages = len(request.conversation.messages)
        return f" {num_messages} messages" if num_messages else f" {index}"

    async def Cancel(
        self, request: inference_pb2.CancelRequest, context: _Context
    ) -> inference_pb2.CancelResponse:
        if request.request_id != REQUEST_ID:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no request {request.request_id}")
        self.cancelled_ids.append(request.request_id)
        return inference_pb2.CancelResponse()

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: _Context
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(
            name="fake-stories",
            has_tokenizer=self.has_tokenizer,
            has_chat_template=self.has_chat_template,
        )


def _usage(request: inference_pb2.GenerateRequest, num_tokens: int) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=len(request.text.split()) or len(request.token_ids.ids),
        completion_tokens=num_tokens,
        seed=request.sampling.seed or 7,
    )


class FakeCluster(cluster_pb2_grpc.ClusterServicer):
    """Counts who has joined; each gets two layers."""

    def __init__(self, num_stages: int, inference: FakeInference) -> None:
        self._num_stages = num_stages
        self._inference = inference
        self._joined: dict[str, cluster_pb2.WorkerHello] = {}

    async def Join(
        self, messages: AsyncIterator[cluster_pb2.WorkerMessage], context: _Context
    ) -> AsyncIterator[cluster_pb2.CoordinatorMessage]:
        hello = (await anext(aiter(messages))).hello
        self._joined[hello.name] = hello
        yield cluster_pb2.CoordinatorMessage(welcome=cluster_pb2.Welcome())
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
            dtype=stage_pb2.DTYPE_F32,
            state=self._state(is_complete=is_complete),
            detail="" if is_complete else f"{len(self._joined)} of {self._num_stages} workers have joined",
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
            heartbeat=cluster_pb2.Heartbeat(
                weight_bytes=3 * 2**20,
                kv_bytes=2**20,
                kv=cluster_pb2.KvUsage(blocks_active=5, blocks_inactive=1, blocks_free=58),
            ),
        )


async def serve(listen: str, num_stages: int) -> tuple[grpc.aio.Server, str, FakeInference]:
    """Starts a fake coordinator in this process; returns the server, its address and what it saw."""
    server = grpc.aio.server()
    inference = FakeInference()
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    cluster_pb2_grpc.add_ClusterServicer_to_server(FakeCluster(num_stages, inference), server)
    port = server.add_insecure_port(listen)
    await server.start()
    return server, f"{listen.rpartition(':')[0]}:{port}", inference


async def _coordinator(arguments: argparse.Namespace) -> None:
    if os.environ.get("FAKE_COORDINATOR_FAILS"):
        sys.exit("no such model")
    server, address, _ = await serve(arguments.listen, arguments.stages)
    print(f"stageline coordinator listening on {address}", flush=True)
    await _until_sigterm()
    await server.stop(0)


async def _worker(arguments: argparse.Namespace) -> None:
    if os.environ.get("FAKE_FAILING_WORKER") == arguments.name:
        print("first line")
        sys.exit("out of memory")
    print(f"stageline worker {arguments.name} listening on 127.0.0.1:1", flush=True)
    async with client_channel(arguments.coordinator) as channel:
        call = cluster_pb2_grpc.ClusterStub(channel).Join()
        await call.write(cluster_pb2.WorkerMessage(hello=cluster_pb2.WorkerHello(name=arguments.name)))
        await _until_sigterm()


def _hangs() -> bool:
    return bool(os.environ.get("FAKE_HANGS"))


async def _until_sigterm() -> None:
    ended = asyncio.Event()
    if not _hangs():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()


def main() -> None:
    """Runs the command line that `stageline` would get; flags that a fake has no use for are let pass."""
    if _hangs():
        # Before it tells anybody that it is here.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(dest="command", required=True)
    coordinator = commands.add_parser("coordinator")
    coordinator.add_argument("--listen", required=True)
    coordinator.add_argument("--stages", type=int, required=True)
    worker = commands.add_parser("worker")
    worker.add_argument("--coordinator", required=True)
    worker.add_argument("--name", required=True)
    arguments, _ = parser.parse_known_args()
    asyncio.run(_coordinator(arguments) if arguments.command == "coordinator" else _worker(arguments))


if __name__ == "__main__":
    main()
