"""A coordinator that answers with tokens written down before, and a gateway in front of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache

import grpc
from google.protobuf.duration_pb2 import Duration
from httpx2 import ASGITransport, AsyncClient

from builtin_model import MODEL_DIRECTORY
from gateway.access.visitors import Doorkeeper
from gateway.api.app import make_app
from gateway.api.call import Gateway
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from gateway.spans import GatewaySpans
from gateway.upstream.contract import (
    NO_OWNER,
    ChoiceEnd,
    Found,
    ModelInfo,
    PromptLogprobs,
    RequestOwner,
    Tokens,
    UpstreamFailure,
)
from stageline_rpc.v1 import inference_pb2
from text.tokenizer import TextCodec, load_text_codec
from web.server import HttpServer
from wire.addresses import Address

Item = Tokens | PromptLogprobs | ChoiceEnd | UpstreamFailure
EOS = 0
SECRET = "the_secret-of_a_fake_request_of_a_gateway_43"
MODEL = ModelInfo(name="tiny", fingerprint="abc", vocab_size=2048, max_sequence_tokens=256)
STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH


@cache
def builtin_codec() -> TextCodec:
    codec = load_text_codec(MODEL_DIRECTORY)
    assert codec is not None
    return codec


def token_logprobs(
    token_id: int, logprob: float | None, *top: tuple[int, float]
) -> inference_pb2.TokenLogprobs:
    return inference_pb2.TokenLogprobs(
        token_id=token_id,
        logprob=logprob,
        rank=1,
        top=[inference_pb2.TopLogprob(token_id=token, logprob=value) for token, value in top],
    )


def end_of(choice: int, num_tokens: int, reason: inference_pb2.FinishReason.ValueType = LENGTH) -> ChoiceEnd:
    usage = inference_pb2.Usage(
        prompt_tokens=3,
        completion_tokens=num_tokens,
        cached_tokens=2,
        restarts=1,
        queue_time=Duration(nanos=250_000_000 * (choice + 1)),
        first_token_time=Duration(nanos=500_000_000 * (choice + 1)),
        decode_time=Duration(seconds=2 * (choice + 1)),
    )
    return ChoiceEnd(choice, reason, usage)


def answer(
    text: str, *, reason: inference_pb2.FinishReason.ValueType = LENGTH, codec: TextCodec | None = None
) -> Callable[..., list[Item]]:
    """Every choice says `text`, one token at a time, with the most likely tokens if they are wanted."""
    ids = (codec or builtin_codec()).encode(text)

    def items(request: inference_pb2.GenerateRequest) -> list[Item]:
        found: list[Item] = []
        if request.sampling.HasField("prompt_logprobs"):
            prompt = request.token_ids.ids
            rows = [
                token_logprobs(token, -0.5 if index else None, (token, -0.5))
                for index, token in enumerate(prompt)
            ]
            found += [PromptLogprobs(0, rows[:2]), PromptLogprobs(2, rows[2:])]
        num = len(ids) if request.max_tokens else 0
        for index, token in enumerate(ids[:num]):
            for choice in range(request.sampling.n):
                rows = [token_logprobs(token, -0.25, (token, -0.25), (7, -2.0))]
                logprobs = rows if request.sampling.HasField("logprobs") else []
                found.append(Tokens(choice, index, [token], logprobs))
        return found + [end_of(choice, num, reason) for choice in range(request.sampling.n)]

    return items


@dataclass
class FakeStream:
    """One request; `items` may wait for `gate`, and the ends of choices for `end_gate`.

    An observer finds `found` first; its `items` are in larger portions.
    """

    request: inference_pb2.GenerateRequest
    items: Sequence[Item]
    gate: asyncio.Event
    end_gate: asyncio.Event
    request_id: str = ""
    secret: str = SECRET
    found: Found = field(default_factory=Found)
    detached: asyncio.Event = field(default_factory=asyncio.Event)
    on_cancel: Callable[[], None] = lambda: None
    stops: list[tuple[int, int]] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: list[Tokens | PromptLogprobs | ChoiceEnd] = field(default_factory=list)
    end: UpstreamFailure | bool = False
    changed: Callable[[], None] | None = None
    arriving: asyncio.Task[None] | None = None

    def notify(self, changed: Callable[[], None] | None) -> None:
        self.changed = changed
        if self.arriving is None:
            self.arriving = asyncio.create_task(self._arrive())

    def take(self) -> Sequence[Tokens | PromptLogprobs | ChoiceEnd] | None:
        if self.arrived:
            arrived, self.arrived = self.arrived, []
            return arrived
        if isinstance(self.end, UpstreamFailure):
            raise self.end
        return None if self.end else ()

    async def _arrive(self) -> None:
        try:
            async for item in self:
                self.arrived.append(item)
                self._signal()
            self.end = True
        except UpstreamFailure as failure:
            self.end = failure
        self._signal()

    def _signal(self) -> None:
        if self.changed is not None:
            self.changed()

    async def __aiter__(self) -> AsyncIterator[Tokens | PromptLogprobs | ChoiceEnd]:
        await self.gate.wait()
        for item in self.items:
            await asyncio.sleep(0)
            if isinstance(item, ChoiceEnd):
                await self.end_gate.wait()
            if isinstance(item, UpstreamFailure):
                raise item
            yield item

    def stop(self, choice: int, after_token: int) -> None:
        self.stops.append((choice, after_token))

    @property
    def client_state(self) -> bytes:
        return self.request.client_state

    async def cancel(self) -> None:
        self.on_cancel()
        self.cancelled.set()

    def detach(self) -> None:
        self.detached.set()


class FakeUpstream:
    """Answers every request with `script`; `refusal` refuses them."""

    def __init__(self, script: Callable[[inference_pb2.GenerateRequest], Sequence[Item]]) -> None:
        self.script = script
        self.model = MODEL
        self.is_ready = True
        self.problem = "the coordinator is not connected"
        self.owners: list[RequestOwner] = []
        self.refusal: UpstreamFailure | None = None
        self.gate, self.end_gate = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.end_gate.set()
        self.streams: list[FakeStream] = []
        self.observers: list[FakeStream] = []
        self.forgotten: set[str] = set()
        self.traceparents: list[str] = []
        self.progress: int | None = None
        """Tokens that there are of a request in progress, for observers; None after its end."""

    async def submit(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        deadline_s: float | None,
        traceparent: str,
        owner: RequestOwner = NO_OWNER,
    ) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        self.traceparents.append(traceparent)
        self.owners.append(owner)
        stream = FakeStream(request, self.script(request), self.gate, self.end_gate, request.request_id)
        self.streams.append(stream)
        return stream

    async def observe(self, request_id: str, secret: str, *, owner: RequestOwner) -> FakeStream:
        """All there is in one portion; if `progress` is set, the first tokens, and the others later."""
        origin = self._find(request_id, secret)
        observer = FakeStream(
            origin.request, self._portions(origin), self.gate, self.end_gate, request_id, secret
        )
        num_tokens = sum(isinstance(item, Tokens) for item in origin.items)
        is_live = self.progress is not None
        observer.found = Found(self.progress if self.progress is not None else num_tokens, not is_live)
        observer.on_cancel = lambda: self._cancel(origin)
        self.observers.append(observer)
        return observer

    async def cancel(self, request_id: str, secret: str, *, tenant: str) -> None:
        origin = self._find(request_id, secret)
        if self.progress is None:
            self.forgotten.add(request_id)
        self._cancel(origin)

    def _find(self, request_id: str, secret: str) -> FakeStream:
        origin = next((each for each in self.streams if each.request_id == request_id), None)
        if origin is None or request_id in self.forgotten:
            raise failure(grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        if secret != origin.secret:
            raise failure(grpc.StatusCode.PERMISSION_DENIED, "ATTACH_SECRET_MISMATCH")
        return origin

    def _cancel(self, origin: FakeStream) -> None:
        if self.progress is not None:
            cancelled = failure(grpc.StatusCode.CANCELLED, "REQUEST_CANCELLED")
            tokens = [item for item in origin.items if isinstance(item, Tokens)]
            origin.items = [*tokens[: self.progress], cancelled]
            self.progress = None

    def _portions(self, origin: FakeStream) -> list[Item]:
        tokens = [item for item in origin.items if isinstance(item, Tokens)]
        others = [item for item in origin.items if not isinstance(item, Tokens)]
        cut = len(tokens) if self.progress is None else self.progress
        found: list[Item] = []
        for portion in (tokens[:cut], tokens[cut:]):
            ids = [token_id for item in portion for token_id in item.token_ids]
            rows = [row for item in portion for row in item.logprobs]
            found += [Tokens(0, len(found) and cut, ids, rows)] if ids else []
        return [*found, *others]


@dataclass
class Served:
    """A gateway in front of `upstream`, and a client of it."""

    client: AsyncClient
    upstream: FakeUpstream
    gateway: Gateway

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        """The last request."""
        return self.upstream.streams[-1].request


@asynccontextmanager
async def serve(
    script: Callable[[inference_pb2.GenerateRequest], Sequence[Item]] | None = None,
    *,
    has_text: bool = True,
    over_tcp: bool = False,
    beside: Served | None = None,
    spans: GatewaySpans | None = None,
    doorkeeper: Doorkeeper | None = None,
    **settings: object,
) -> AsyncIterator[Served]:
    """Serve in this task, or with `over_tcp` over connections; `settings` are those of GatewayConfig.

    A gateway `beside` another one has the same coordinator.
    """
    upstream = FakeUpstream(script or answer(" a bird sang")) if beside is None else beside.upstream
    gateway = Gateway(
        config=GatewayConfig(listen="127.0.0.1:0", **settings),  # type: ignore[arg-type]
        upstream=upstream,
        codec=builtin_codec() if has_text else None,
        metrics=GatewayMetrics(),
        spans=spans,
        doorkeeper=doorkeeper,
    )
    app = make_app(gateway)
    server = HttpServer(app, Address("127.0.0.1", 0), name="a gateway", hint="") if over_tcp else None
    try:
        if server is not None:
            await server.start()
        transport = None if over_tcp else ASGITransport(app)
        base_url = "http://gateway" if server is None else server.url
        async with AsyncClient(transport=transport, base_url=base_url, timeout=20) as client:
            yield Served(client, upstream, gateway)
    finally:
        if server is not None:
            await server.stop()
        gateway.close()


def failure(
    status: grpc.StatusCode, reason: str = "REASON", *, retry_after_s: float | None = None
) -> UpstreamFailure:
    return UpstreamFailure("it failed", status=status, reason=reason, retry_after_s=retry_after_s)


async def events_of(served: Served, path: str, **body: object) -> list[str]:
    """The data of every event of a stream."""
    response = await served.client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), lines
    return [line.removeprefix("data: ") for line in lines]
