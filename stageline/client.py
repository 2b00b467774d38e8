"""The Python client of a coordinator."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from types import TracebackType
from typing import Self, TypeVar

import grpc.aio

from stageline.errors import Cancelled, Unavailable, from_rpc_error
from stageline.output import Continuity, GenerateOutput, output_from
from stageline.prompt import Prompt, build_request
from stageline_rpc.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from wire.addresses import parse_peer_address
from wire.channels import client_channel

_UNARY_TIMEOUT_S = 10.0
_CLOSED = "the client was closed during the call"

_Response = TypeVar("_Response")


class Client:
    """Talks to the coordinator at `address` (HOST:PORT). Methods raise errors of the `StagelineError` tree.

        async with Client("127.0.0.1:7480") as client:
            async for output in client.generate("Once upon a time", max_tokens=100):
                print(output.text, end="", flush=True)

    One client carries any number of calls at once. Each waits for the coordinator up to `connect_timeout_s`.
    """

    def __init__(self, address: str, *, connect_timeout_s: float = 5.0) -> None:
        self._address = str(parse_peer_address(address))
        self._connect_timeout_s = connect_timeout_s
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = client_channel(self._address)
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        ignore_eos: bool = False,
        cache_salt: str = "",
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Generates a completion of a text, of token ids, or of a conversation, and yields it as it grows.

        What is left out has the server's default: greedy sampling (temperature 0), up to 256 new tokens, a
        request_id (UUIDv7) of the server's making. Requests share cached prefixes only with those of the same
        `cache_salt`, which keeps tenants apart. `timeout_s` bounds the whole generation. Leaving the loop,
        closing the generator or cancelling the task cancels the request on the server.
        """
        request = build_request(
            prompt,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            ignore_eos=ignore_eos,
            cache_salt=cache_salt,
            request_id=request_id,
        )
        stub = inference_pb2_grpc.InferenceStub(await self._connected())
        call = stub.Generate(request, timeout=timeout_s)
        continuity = Continuity()
        try:
            async for response in call:
                yield continuity.check(output_from(response))
            continuity.check_finished()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            if _is_task_cancelled():
                raise
            raise Cancelled(_CLOSED) from None
        finally:
            call.cancel()

    async def cancel(self, request_id: str) -> None:
        """Cancels a live request: its `generate` raises `Cancelled`. Raises RequestNotFound."""
        stub = inference_pb2_grpc.InferenceStub(await self._connected())
        request = inference_pb2.CancelRequest(request_id=request_id)
        await _answer(stub.Cancel(request, timeout=_UNARY_TIMEOUT_S))

    async def model(self) -> inference_pb2.GetModelResponse:
        """Which model is served, and what it can take."""
        stub = inference_pb2_grpc.InferenceStub(await self._connected())
        return await _answer(stub.GetModel(inference_pb2.GetModelRequest(), timeout=_UNARY_TIMEOUT_S))

    async def status(self) -> cluster_pb2.GetStatusResponse:
        """The plan, the workers, memory, KV use and requests, as of now."""
        stub = cluster_pb2_grpc.ClusterStub(await self._connected())
        return await _answer(stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=_UNARY_TIMEOUT_S))

    async def _connected(self) -> grpc.aio.Channel:
        if self._channel is None:
            raise RuntimeError("the client is not open: use it as `async with Client(address) as client:`")
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await self._channel.channel_ready()
        except TimeoutError:
            message = f"no coordinator at {self._address} within {self._connect_timeout_s:g} s"
            raise Unavailable(message) from None
        return self._channel


async def _answer(call: Awaitable[_Response]) -> _Response:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
    except asyncio.CancelledError:
        if _is_task_cancelled():
            raise
        raise Cancelled(_CLOSED) from None


def _is_task_cancelled() -> bool:
    # Closing the channel under a call raises CancelledError too, in a task that nobody cancelled.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
