"""The Python client of a coordinator."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Self, Unpack

from stageline.client.call import GenerateCall, RequestSpec, StreamCursor, Timeouts
from stageline.client.connection import AttachSecrets, Connection, answer, new_attach_secret
from stageline.client.errors import RequestNotFound, WorkerNotFound
from stageline.client.output import Completion, Completions, GenerateOutput
from stageline.client.request import GenerateOptions, Prompt, build_request, seconds, text, uint32
from stageline_rpc.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    telemetry_pb2,
    telemetry_pb2_grpc,
)
from wire.channels import ATTACH_SECRET_KEY, AUTHORIZATION_KEY

_UNARY_TIMEOUT_S = 10.0


class Client:
    """Talks to the coordinator at `address` (HOST:PORT). Methods raise errors of the `StagelineError` tree.

        async with Client("127.0.0.1:7480") as client:
            async for output in client.generate("Once upon a time", max_tokens=100):
                print(output.text, end="", flush=True)

    One client carries any number of calls at once. Each waits for the coordinator up to `connect_timeout_s`.
    A detached request outlives an outage of up to `reattach_timeout_s`.
    """

    def __init__(
        self, address: str, *, connect_timeout_s: float = 5.0, reattach_timeout_s: float = 30.0
    ) -> None:
        self._connection = Connection(address)
        self._secrets = AttachSecrets()
        self._waits = Timeouts(connect_timeout_s=connect_timeout_s, reattach_timeout_s=reattach_timeout_s)

    async def __aenter__(self) -> Self:
        self._connection.open()
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._connection.close()

    def generate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Generates completions of a text, of token ids, or of a conversation, and yields them as they grow.

        `GenerateOptions` lists the keywords; what is left out or None has the server's default. Raises
        InvalidRequest at once for values that a message cannot carry. Called inside a span of OpenTelemetry,
        the request's trace goes on below it.

        Leaving the loop, closing the generator, cancelling the task or losing the connection cancels the
        request on the server. With `on_disconnect="detach"` (or `Detach(keep_s=...)`) it goes on instead:
        `attach` finds it, `cancel` ends it, and a connection that breaks is no error. (Other clients need the
        `attach_secret` for both.) The client attaches again by itself, and the outputs go on where they were,
        with nothing missing and nothing twice. That fails with Unavailable when the coordinator cannot be
        reached for `reattach_timeout_s`, or does not know the request any more.
        """
        request = build_request(prompt, options)
        secret = options.get("attach_secret") or new_attach_secret()
        self._secrets.remember(request.request_id, secret)
        ask = RequestSpec(
            request_id=request.request_id,
            secret=secret,
            request=request,
            reattaches=request.on_disconnect.action == inference_pb2.OnDisconnect.DETACH,
            timeout_s=_timeout_s(options.get("timeout_s")),
        )
        num_choices = request.sampling.n if request.sampling.HasField("n") else 1
        return self._outputs(ask, StreamCursor(num_choices=num_choices))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """What `generate` yields, as one whole completion for each of the `n` choices."""
        completions = Completions()
        async with aclosing(self.generate(prompt, **options)) as outputs:
            async for output in outputs:
                completions.add(output)
        return completions.in_order()

    def attach(
        self,
        request_id: str,
        *,
        secret: str | None = None,
        from_token: int = 0,
        positions: Mapping[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Yields the outputs of a request from token `from_token` on, or by choice from `positions`.

        The call that had them before ends with `Superseded`. `timeout_s` takes the place of that of the call
        before. Attaches again when the connection breaks, as `generate` does. `secret` is the request's
        `attach_secret`, which this client knows of requests that it has sent. Raises RequestNotFound when the
        request is not live and its output is not kept, PermissionDenied for another secret.
        """
        given = positions or {}
        starts = {
            uint32("a choice", choice): uint32(f"positions[{choice}]", position)
            for choice, position in given.items()
        }
        ask = RequestSpec(
            request_id=text("request_id", request_id),
            secret=self._secrets.of(request_id, secret),
            request=None,
            reattaches=True,
            timeout_s=_timeout_s(timeout_s),
        )
        first_token = uint32("from_token", from_token)
        return self._outputs(ask, StreamCursor(num_choices=None, first_token=first_token, starts=starts))

    async def cancel(self, request_id: str, *, secret: str | None = None, token: str | None = None) -> None:
        """Cancels a live request: its `generate` raises `Cancelled`. Of one that has ended, drops the output.

        `secret` is as in `attach`; the operator `token` cancels any request. Raises RequestNotFound or
        PermissionDenied.
        """
        request = inference_pb2.CancelRequest(request_id=text("request_id", request_id))
        if token is not None:
            metadata = _bearer(token)
        else:
            metadata = ((ATTACH_SECRET_KEY, self._secrets.of(request_id, secret)),)
        stub = await self._inference()
        await answer(stub.Cancel(request, timeout=_UNARY_TIMEOUT_S, metadata=metadata))

    async def model(self) -> inference_pb2.GetModelResponse:
        """Which model is served, and what it can take."""
        stub = await self._inference()
        return await answer(stub.GetModel(inference_pb2.GetModelRequest(), timeout=_UNARY_TIMEOUT_S))

    async def drain(self, worker: str, *, token: str) -> None:
        """Moves the layers of the worker with this name to others and lets it exit; returns when it has left.

        `token` is the operator token of the coordinator. Raises WorkerNotFound or PermissionDenied.
        """
        channel = await self._connection.ready(self._waits.connect_timeout_s)
        request = cluster_pb2.DrainRequest(worker=text("worker", worker))
        try:
            await answer(cluster_pb2_grpc.ClusterStub(channel).Drain(request, metadata=_bearer(token)))
        except RequestNotFound as error:
            raise WorkerNotFound(error.message) from None

    async def activity(self, *, after_step: int = 0, since_us: int = 0) -> telemetry_pb2.GetActivityResponse:
        """What the pipeline has done in the last seconds.

        Leaves out the steps up to number `after_step`, and the seconds before `since_us`.
        """
        channel = await self._connection.ready(self._waits.connect_timeout_s)
        stub = telemetry_pb2_grpc.TelemetryStub(channel)
        request = telemetry_pb2.GetActivityRequest(after_step=after_step, since_us=since_us)
        return await answer(stub.GetActivity(request, timeout=_UNARY_TIMEOUT_S))

    async def status(self) -> cluster_pb2.GetStatusResponse:
        """The plan, the workers, memory, KV use and requests, as of now."""
        channel = await self._connection.ready(self._waits.connect_timeout_s)
        stub = cluster_pb2_grpc.ClusterStub(channel)
        return await answer(stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=_UNARY_TIMEOUT_S))

    async def traces(self, max_traces: int | None = None) -> telemetry_pb2.ListTracesResponse:
        """The requests whose traces the coordinator keeps, newest first; all of them unless told."""
        stub = await self._telemetry()
        wanted = 0 if max_traces is None else uint32("max_traces", max_traces)
        request = telemetry_pb2.ListTracesRequest(max_traces=wanted)
        return await answer(stub.ListTraces(request, timeout=_UNARY_TIMEOUT_S))

    async def trace(self, request_id: str) -> telemetry_pb2.GetTraceResponse:
        """All spans of a request, by its id, by the beginning or the end of it, or by the id of its trace.

        Raises RequestNotFound when none is kept, and InvalidRequest when several are meant.
        """
        stub = await self._telemetry()
        request = telemetry_pb2.GetTraceRequest(request_id=text("request_id", request_id))
        return await answer(stub.GetTrace(request, timeout=_UNARY_TIMEOUT_S))

    def _outputs(self, ask: RequestSpec, continuity: StreamCursor) -> AsyncGenerator[GenerateOutput, None]:
        return GenerateCall(self._connection, ask, continuity, self._waits).outputs()

    async def _telemetry(self) -> telemetry_pb2_grpc.TelemetryStub:
        channel = await self._connection.ready(self._waits.connect_timeout_s)
        return telemetry_pb2_grpc.TelemetryStub(channel)

    async def _inference(self) -> inference_pb2_grpc.InferenceStub:
        channel = await self._connection.ready(self._waits.connect_timeout_s)
        return inference_pb2_grpc.InferenceStub(channel)


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return ((AUTHORIZATION_KEY, f"Bearer {token}"),)


def _timeout_s(given: float | None) -> float | None:
    return None if given is None else seconds("timeout_s", given)
