"""The Python client of a coordinator."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Self, Unpack

from stageline.client.call import GenerateCall, KvSubscriptions, RequestSpec, StreamCursor, Timeouts
from stageline.client.connection import AttachSecrets, Connection, answer, new_attach_secret
from stageline.client.errors import RequestNotFound, WorkerNotFound
from stageline.client.output import Completion, Completions, GenerateOutput
from stageline.client.request import (
    ChatMessage,
    GenerateOptions,
    Prompt,
    build_request,
    detokenize_request,
    flag,
    seconds,
    text,
    tokenize_request,
    uint32,
)
from stageline_rpc.v1 import (
    cluster_pb2,
    cluster_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    kv_events_pb2,
    telemetry_pb2,
    telemetry_pb2_grpc,
)
from wire.channels import ATTACH_SECRET_KEY, AUTHORIZATION_KEY
from wire.transport import PLAIN, client_transport

_UNARY_TIMEOUT_S = 10.0
_TRACES_PER_PAGE = 100


class Client:
    """Client of the coordinator at `address` (HOST:PORT). Methods raise errors of the `StagelineError`
    tree.

        async with Client("127.0.0.1:7480") as client:
            async for output in client.generate("Once upon a time", max_tokens=100):
                print(output.text, end="", flush=True)

    Calls can be concurrent. Each waits up to `connect_timeout_s` for the coordinator. Detached requests
    survive outages of up to `reattach_timeout_s`.
    """

    def __init__(
        self,
        address: str,
        *,
        tls_dir: Path | str | None = None,
        connect_timeout_s: float = 5.0,
        reattach_timeout_s: float = 30.0,
    ) -> None:
        """`tls_dir` has `ca.crt`, `tls.crt` and `tls.key`, where the cluster has certificates.

        Raises OSError for files that cannot be used.
        """
        transport = PLAIN if tls_dir is None else client_transport(Path(tls_dir))
        self._connection = Connection(address, transport)
        self._secrets = AttachSecrets()
        self._timeouts = Timeouts(connect_timeout_s=connect_timeout_s, reattach_timeout_s=reattach_timeout_s)

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
        """Generate completions of a text, token ids, or a conversation; yield outputs as they arrive.

        Keywords are fields of `GenerateOptions`; omitted ones, and None, have the server's default. Invalid
        types raise InvalidRequest immediately. Inside an OpenTelemetry span, the request's trace continues
        that span.

        Leaving the loop, closing the generator, cancelling the task or losing the connection cancels the
        request on the server. With `on_disconnect="detach"` (or `Detach(keep_s=...)`) the request
        continues: `attach` reads it, `cancel` ends it, and the client reattaches after a lost connection,
        delivering each output exactly once. (Other clients need the `attach_secret` for both.) Raises
        Unavailable when the coordinator is unreachable for `reattach_timeout_s`, or has lost the request.
        """
        request = build_request(prompt, options)
        secret = options.get("attach_secret") or new_attach_secret()
        self._secrets.remember(request.request_id, secret)
        ask = RequestSpec(
            request_id=request.request_id,
            secret=secret,
            request=request,
            reattaches=request.on_disconnect.action == inference_pb2.OnDisconnect.ACTION_DETACH,
            timeout_s=_timeout_s(options.get("timeout_s")),
        )
        num_choices = request.sampling.n if request.sampling.HasField("n") else 1
        return self._outputs(ask, StreamCursor(num_choices=num_choices))

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> list[Completion]:
        """Return the outputs of `generate` as one complete `Completion` per choice."""
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
        """Yield the outputs of a request from token `from_token` on, or, per choice, from `positions`.

        The call that read them before ends with `Superseded`, and `timeout_s` replaces its timeout.
        Reattaches after a lost connection, like `generate`. `secret` is the request's `attach_secret`,
        which the client keeps for its own requests. Raises RequestNotFound when the request is not live
        and its output is not kept, PermissionDenied for a wrong secret.
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
        """Cancel a live request (its `generate` raises `Cancelled`), or drop the output of an ended one.

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

    async def tokenize(self, prompt: str | Sequence[ChatMessage]) -> list[int]:
        """Return the token ids that `generate` would compute for a text or a conversation.

        Raises InvalidRequest for a model without tokenizer or chat template, and for a text that can never
        fit into the model.
        """
        request = tokenize_request(prompt)
        stub = await self._inference()
        return list((await answer(stub.Tokenize(request, timeout=_UNARY_TIMEOUT_S))).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Raises InvalidRequest for an id outside the vocabulary."""
        request = detokenize_request(token_ids, skip_special_tokens=skip_special_tokens)
        stub = await self._inference()
        return (await answer(stub.Detokenize(request, timeout=_UNARY_TIMEOUT_S))).text

    async def model(self) -> inference_pb2.GetModelResponse:
        """Return the served model and its limits."""
        stub = await self._inference()
        return await answer(stub.GetModel(inference_pb2.GetModelRequest(), timeout=_UNARY_TIMEOUT_S))

    async def drain(self, worker: str, *, token: str | None = None) -> None:
        """Drain a worker with the operator `token`, or an operator's certificate; return when it has left.

        Raises WorkerNotFound or PermissionDenied.
        """
        channel = await self._connection.ready(self._timeouts.connect_timeout_s)
        request = cluster_pb2.DrainRequest(worker=text("worker", worker))
        try:
            metadata = None if token is None else _bearer(token)
            await answer(cluster_pb2_grpc.ClusterStub(channel).Drain(request, metadata=metadata))
        except RequestNotFound as error:
            raise WorkerNotFound(error.message) from None

    async def activity(self, *, after_step: int = 0, since_us: int = 0) -> telemetry_pb2.GetActivityResponse:
        """Recent activity without steps up to `after_step` and seconds before `since_us`."""
        channel = await self._connection.ready(self._timeouts.connect_timeout_s)
        stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
        request = telemetry_pb2.GetActivityRequest(after_step=after_step, since_us=since_us)
        return await answer(stub.GetActivity(request, timeout=_UNARY_TIMEOUT_S))

    async def status(self) -> cluster_pb2.GetStatusResponse:
        """Return the current plan, workers, memory, KV use and requests."""
        channel = await self._connection.ready(self._timeouts.connect_timeout_s)
        stub = cluster_pb2_grpc.ClusterStub(channel)
        return await answer(stub.GetStatus(cluster_pb2.GetStatusRequest(), timeout=_UNARY_TIMEOUT_S))

    def kv_events(
        self, *, with_token_ids: bool = False
    ) -> AsyncGenerator[kv_events_pb2.KvSnapshot | kv_events_pb2.KvEvent, None]:
        """Yield what is in the KV cache: a `KvSnapshot`, then each change as a `KvEvent`, without gaps.

        Another `KvSnapshot` follows whenever the subscription was renewed, after a lost connection, a
        restart of the coordinator, or more than 4,096 unread changes: it replaces all that is known, and
        the changes before it are not sent. Its `next_event_id` minus the one expected is the number of
        missed events; a smaller one is from a restarted coordinator. Raises Unavailable when the
        coordinator is unreachable for `reattach_timeout_s`: until then, what is known may be out of date.
        """
        given = flag("with_token_ids", with_token_ids)
        return KvSubscriptions(self._connection, self._timeouts, with_token_ids=given).events()

    async def traces(self, max_traces: int | None = None) -> telemetry_pb2.ListTracesResponse:
        """List requests with kept traces, newest first (default: all), page by page."""
        stub = await self._telemetry()
        missing = None if max_traces is None else uint32("max_traces", max_traces)
        found = telemetry_pb2.ListTracesResponse()
        while missing is None or missing > 0:
            request = telemetry_pb2.ListTracesRequest(
                page_size=min(missing or _TRACES_PER_PAGE, _TRACES_PER_PAGE),
                page_token=found.next_page_token,
            )
            page = await answer(stub.ListTraces(request, timeout=_UNARY_TIMEOUT_S))
            missing = None if missing is None else missing - len(page.traces)
            page.traces.extend(found.traces)
            found = page
            if not page.next_page_token:
                break
        return found

    async def trace(self, request_id: str) -> telemetry_pb2.GetTraceResponse:
        """All spans of a request, by its id, an end of it, or trace id. Raises RequestNotFound,
        InvalidRequest.
        """
        stub = await self._telemetry()
        request = telemetry_pb2.GetTraceRequest(request_id=text("request_id", request_id))
        return await answer(stub.GetTrace(request, timeout=_UNARY_TIMEOUT_S))

    def _outputs(self, ask: RequestSpec, continuity: StreamCursor) -> AsyncGenerator[GenerateOutput, None]:
        return GenerateCall(self._connection, ask, continuity, self._timeouts).outputs()

    async def _telemetry(self) -> telemetry_pb2_grpc.TelemetryServiceStub:
        channel = await self._connection.ready(self._timeouts.connect_timeout_s)
        return telemetry_pb2_grpc.TelemetryServiceStub(channel)

    async def _inference(self) -> inference_pb2_grpc.InferenceStub:
        channel = await self._connection.ready(self._timeouts.connect_timeout_s)
        return inference_pb2_grpc.InferenceStub(channel)


def _bearer(token: str) -> tuple[tuple[str, str], ...]:
    return ((AUTHORIZATION_KEY, f"Bearer {token}"),)


def _timeout_s(given: float | None) -> float | None:
    return None if given is None else seconds("timeout_s", given)
