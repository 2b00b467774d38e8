"""The link to a coordinator: one Serve stream that is opened again when it breaks, and its requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from secrets import token_urlsafe
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.sampling import Sampler

from gateway.config import DEFAULT_COORDINATOR_TIMEOUT_S
from gateway.upstream.contract import NO_OWNER, ModelInfo, RequestOwner, UpstreamFailure
from gateway.upstream.numbered_request import NumberedRequest, RequestStream
from gateway.upstream.serve_call import ServeCall
from gateway.upstream.tokenizer_files import TokenizerFiles, fetch_tokenizer
from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from telemetry.settings import described_sampler
from wire.channels import ATTACH_SECRET_KEY, TENANT_KEY
from wire.clock import ClusterClock, Exchange, wall_clock_us
from wire.errors import ClusterUnavailable, DeadlinePassed, reason_of
from wire.ids import id_text, new_request_id
from wire.interceptors import CONDITION_KEY, READINESS
from wire.transport import PLAIN, RenewedChannel, Transport
from wire.unreachable import SILENT, unreachable_cause

log = logging.getLogger(__name__)

_REFUSALS = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
ALWAYS = "parentbased_always_on"
"""Sampler before the coordinator's is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPolicy:
    """Waits of a link, in seconds."""

    unreachable_s: float = DEFAULT_COORDINATOR_TIMEOUT_S
    """Time without a coordinator after which requests fail."""
    retry_s: float = 0.1
    """Pause before a new attempt to reach it."""
    max_retry_s: float = 1.0
    """The same after several attempts."""
    refresh_s: float = 5.0
    """Interval between two looks at the model's limits; `retry_s` before they are planned."""
    health_s: float = 1.0
    """Interval between two looks at whether the coordinator serves; `retry_s` while it does not."""
    call_s: float = 10.0
    """Deadline of single calls."""
    keep_s: float = 60.0
    """How long the coordinator keeps the output of a request of a gateway that is lost."""
    credit: int = 512
    """Tokens of a request that may be on the way."""


DEFAULT_POLICY = LinkPolicy()


class OtherModel(Exception):
    """The coordinator at the link's address serves another model than before."""


class PipelineHealth:
    """Whether a coordinator's pipeline serves, from the answers of its health check. Pure.

    It is well from the first answer that it serves, also through an interruption.
    New requests wait for a pipeline that recovers. So a gateway stays ready for `grace_s` after the pipeline
    stopped, else each lost worker would make all gateways unready at once.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._ends_s = 0.0
        self._state = "no answer of its health check yet"
        self._is_serving = False

    def note(self, state: str, now_s: float, *, is_serving: bool) -> None:
        """Take an answer; `state` says in a few words what the coordinator does."""
        if self._is_serving and not is_serving:
            self._ends_s = now_s + self._grace_s
        self._state = state
        self._is_serving = is_serving

    def problem(self, now_s: float) -> str:
        """Return why the coordinator does not serve; empty if it does, or recovers."""
        return "" if self._is_serving or now_s < self._ends_s else self._state


class CoordinatorLink:
    """Owns the connection to one coordinator and the requests on it.

    A request survives a broken connection: it attaches again from the tokens that it has, by its secret, and
    fails when the coordinator stays away. So requests are submitted to detach, unless they say otherwise.

    Attributes:
        other_model: Set when the coordinator serves another model, whose tokens this link's readers would
            misread; all requests have failed then, and a new link is needed.
    """

    def __init__(
        self,
        address: str,
        *,
        cache_directory: Path | None = None,
        policy: LinkPolicy = DEFAULT_POLICY,
        clock: ClusterClock | None = None,
        transport: Transport = PLAIN,
    ) -> None:
        """`cache_directory` keeps the tokenizer's files; None for a temporary one.

        The link keeps `clock` on the coordinator's time.
        """
        self._address = address
        self._policy = policy
        self._transport = transport
        self._channel = RenewedChannel(transport, address)
        self._files = TokenizerFiles(cache_directory)
        self._model: ModelInfo | None = None
        self._clock = clock or ClusterClock()
        self._sampler = described_sampler(ALWAYS)
        self._requests: dict[NumberedRequest, bool] = {}
        """And whether they end with their readers; others go on at the coordinator."""
        self._orphans: list[NumberedRequest] = []
        self._call: ServeCall | None = None
        self._health = PipelineHealth(policy.unreachable_s)
        self._away_since_s: float | None = None
        self._is_lost = False
        self._refusal = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelling: asyncio.Task[None] | None = None
        self.other_model = asyncio.Event()

    @property
    def model(self) -> ModelInfo:
        """The model, with the limits that the coordinator last reported; after `start`."""
        assert self._model is not None, "the link is not started"
        return self._model

    @property
    def _stub(self) -> Any:
        return inference_pb2_grpc.InferenceStub(self._channel.current())

    @property
    def sampler(self) -> Sampler:
        """Decides which requests are traced as the coordinator does; after `start`."""
        return self._sampler

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator takes requests, which wait for a pipeline."""
        return self._call is not None

    @property
    def is_ready(self) -> bool:
        """Whether the coordinator is connected and serves, or recovers while requests wait for it."""
        return self.is_connected and not self._pipeline_problem

    @property
    def problem(self) -> str:
        """Why the coordinator does not serve."""
        if not self.is_connected:
            return self._refusal or f"the coordinator {self._address} is not connected"
        return f"the coordinator {self._address} does not serve: {self._pipeline_problem}"

    @property
    def _pipeline_problem(self) -> str:
        problem = self._health.problem(asyncio.get_running_loop().time())
        return problem or ("" if self.model.max_sequence_tokens else "its limit of tokens is not known yet")

    @property
    def tokenizer_directory(self) -> Path | None:
        """The tokenizer's files, as in the checkpoint; None for a model without one, and before `start`."""
        return self._files.directory

    async def start(self) -> None:
        """Wait for the coordinator, and fetch its model and tokenizer.

        Raises UpstreamFailure if something else than a coordinator answers.
        """
        pause_s, warned_s = self._policy.retry_s, -self._policy.unreachable_s
        while True:
            try:
                await self._fetch()
                break
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise _no_coordinator(self._address, error) from None
                if (now_s := asyncio.get_running_loop().time()) - warned_s >= self._policy.unreachable_s:
                    warned_s = now_s
                    cause = await unreachable_cause(self._address, self._transport)
                    reason = error.details() if cause == SILENT else cause
                    log.warning("waiting for coordinator %s: %s", self._address, reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._policy.max_retry_s)
        self._tasks = [
            asyncio.create_task(self._until_other_model(self._run())),
            asyncio.create_task(self._until_other_model(self._refresh())),
            asyncio.create_task(self._watch_health()),
        ]

    def interrupt(self) -> None:
        """Fail all requests, and cancel them at the coordinator; those that are observed go on there."""
        for request in list(self._requests):
            request.interrupt(_failure(ClusterUnavailable("the gateway is stopping")))

    async def stop(self) -> None:
        """Close the stream; the coordinator keeps what its requests generate."""
        tasks = [*self._tasks, *([] if self._cancelling is None else [self._cancelling])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in list(self._requests):
            request.fail(_failure(ClusterUnavailable("the gateway is stopping")))
        await self._channel.close()
        self._files.close()

    async def submit(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        deadline_s: float | None = None,
        traceparent: str = "",
        owner: RequestOwner = NO_OWNER,
    ) -> RequestStream:
        """Return once the request is accepted. Raises UpstreamFailure.

        After `deadline_s` seconds the request is cancelled. Without `on_disconnect` it is detached when the
        connection breaks.
        """
        message = inference_pb2.GenerateRequest()
        message.CopyFrom(request)
        message.request_id = message.request_id or id_text(new_request_id())
        ends_with_reader = not message.HasField("on_disconnect")
        if ends_with_reader:
            message.on_disconnect.action = inference_pb2.OnDisconnect.ACTION_DETACH
            message.on_disconnect.keep_for.FromMilliseconds(round(self._policy.keep_s * 1000))
        return await self._open(
            NumberedRequest(
                message.request_id,
                token_urlsafe(32),
                message=message,
                credit=self._policy.credit,
                deadline_s=self._deadline(deadline_s),
                traceparent=traceparent,
                owner=owner,
            ),
            ends_with_reader=ends_with_reader,
        )

    async def observe(self, request_id: str, secret: str, *, owner: RequestOwner = NO_OWNER) -> RequestStream:
        """Read a request of one choice from its first token, beside other readers. Raises UpstreamFailure."""
        return await self._open(
            NumberedRequest(
                request_id,
                secret,
                credit=self._policy.credit,
                owner=RequestOwner(tenant=owner.tenant, client=owner.client),
            )
        )

    async def cancel(self, request_id: str, secret: str, *, tenant: str = "") -> None:
        """Cancel a request, or drop the kept output of an ended one. Raises UpstreamFailure."""
        try:
            await self._stub.Cancel(
                inference_pb2.CancelRequest(request_id=request_id),
                metadata=((ATTACH_SECRET_KEY, secret), *(((TENANT_KEY, tenant),) if tenant else ())),
                timeout=self._policy.call_s,
            )
        except grpc.aio.AioRpcError as error:
            raise _call_failure(error) from None

    async def _open(self, request: NumberedRequest, *, ends_with_reader: bool = False) -> RequestStream:
        if self.other_model.is_set():
            raise self._other_model_failure()
        if self._refusal:
            raise self._refused()
        self._requests[request] = ends_with_reader
        request.on_end = self._forget
        if self._call is not None:
            self._call.begin(request)
        try:
            await request.wait_accepted()
        except asyncio.CancelledError:
            request.drop()
            raise
        return RequestStream(request)

    def _refused(self) -> UpstreamFailure:
        return _failure(ClusterUnavailable(self._refusal), retry_after_s=self._policy.max_retry_s)

    def _forget(self, request: NumberedRequest) -> None:
        ends_with_reader = self._requests.pop(request, False)
        if ends_with_reader and self._call is None and request.is_running:
            self._orphans.append(request)

    async def _cancel_orphans(self) -> None:
        """Cancel what ended for its readers while the coordinator was away, and would run on for nobody."""
        while self._orphans and self._call is not None:  # the others wait for the next connection
            request = self._orphans.pop()
            with contextlib.suppress(UpstreamFailure):  # it has ended, or ends by itself after `keep_s`
                await self.cancel(request.request_id, request.secret, tenant=request.tenant)

    def _deadline(self, deadline_s: float | None) -> float | None:
        return None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s

    async def _fetch(self) -> None:
        """Fetch tokenizer and model. Raises AioRpcError and UpstreamFailure."""
        await fetch_tokenizer(self._stub, self._files, timeout_s=self._policy.call_s)
        await self._fetch_model()

    async def _fetch_model(self) -> None:
        """Raises AioRpcError, UpstreamFailure and OtherModel."""
        self._clock.refresh()
        sent_us = wall_clock_us()
        response = await self._stub.GetModel(
            inference_pb2.GetModelRequest(), timeout=self._policy.call_s, wait_for_ready=True
        )
        self._follow_tracing(response.tracing, sent_us)
        self._check_model(response.fingerprint)
        known = self._model
        # A restarted coordinator has no limit before it has workers; its requests wait for them meanwhile.
        limit = response.max_sequence_tokens or (0 if known is None else known.max_sequence_tokens)
        self._model = ModelInfo(
            name=response.name,
            fingerprint=response.fingerprint,
            vocab_size=response.vocab_size,
            max_sequence_tokens=limit,
            generation_config=self._files.generation_config,
        )

    def _follow_tracing(self, tracing: inference_pb2.Tracing, sent_us: int) -> None:
        if tracing.sampler and tracing.sampler != self._sampler.get_description():
            self._sampler = described_sampler(tracing.sampler)
        if tracing.HasField("now"):
            now_us = tracing.now.ToMicroseconds()
            self._clock.note(Exchange(sent_us, now_us, now_us, wall_clock_us()))

    def _check_model(self, fingerprint: str) -> None:
        if self._model is not None and self._model.fingerprint != fingerprint:
            raise OtherModel

    async def _until_other_model(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except OtherModel:
            self._call = None
            self.other_model.set()
            for request in list(self._requests):
                request.fail(self._other_model_failure())

    def _other_model_failure(self) -> UpstreamFailure:
        error = ClusterUnavailable(f"coordinator {self._address} serves another model now")
        return UpstreamFailure(str(error), status=grpc.StatusCode.UNAVAILABLE, reason=reason_of(error))

    async def _refresh(self) -> None:
        while True:
            is_planned = self.model.max_sequence_tokens > 0
            await asyncio.sleep(self._policy.refresh_s if is_planned else self._policy.retry_s)
            try:
                await self._fetch_model()
            except grpc.aio.AioRpcError as error:
                log.debug("failed to read the model: %s", error.details())
            except UpstreamFailure as failure:
                log.warning("failed to read the model, the gateway tries again: %s", failure.message)

    async def _watch_health(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                await self._ask_health()
            except grpc.aio.AioRpcError as error:
                log.debug("failed to ask whether the coordinator serves: %s", error.details())
            is_well = not self._health.problem(loop.time())
            await asyncio.sleep(self._policy.health_s if is_well else self._policy.retry_s)

    async def _ask_health(self) -> None:
        """Raises AioRpcError."""
        stub = health_pb2_grpc.HealthStub(self._channel.current())
        call = stub.Check(health_pb2.HealthCheckRequest(service=READINESS), timeout=self._policy.call_s)
        is_serving = (await call).status == health_pb2.HealthCheckResponse.SERVING
        state = dict(await call.trailing_metadata() or ()).get(CONDITION_KEY, "")
        self._health.note(str(state), asyncio.get_running_loop().time(), is_serving=is_serving)

    async def _run(self) -> None:
        """Keep a stream open; requests that cannot wait longer fail."""
        loop, pause_s = asyncio.get_running_loop(), self._policy.retry_s
        self._away_since_s = loop.time()
        while True:
            call = ServeCall(self._stub, on_open=self._opened)
            try:
                await call.run()
                reason = "the stream ended"
                self._refusal = ""
            except grpc.aio.AioRpcError as error:
                reason = f"{error.code().name}: {error.details()}"
                self._note_refusal(error)
            if self._call is not None:
                self._call, self._away_since_s, self._is_lost = None, loop.time(), True
                pause_s = self._policy.retry_s
                log.warning(
                    "lost coordinator %s (%s): %d requests wait to attach again",
                    *(self._address, reason, len(self._requests)),
                )
            self._fail_overdue(reason)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._policy.max_retry_s)

    def _note_refusal(self, error: grpc.aio.AioRpcError) -> None:
        """Fail requests that were never sent if the coordinator answers, but refuses the stream."""
        if error.code() not in _REFUSALS or self._call is not None:
            self._refusal = ""
            return
        former, details = self._refusal, f"{error.code().name}: {error.details()}"
        self._refusal = f"coordinator {self._address} refuses this gateway: {details}"
        if self._refusal != former:
            self._is_lost = True
            log.warning("%s; requests fail until it accepts a stream", self._refusal)
        for request in list(self._requests):
            if not request.was_connected:
                request.fail(self._refused())

    def _opened(self, call: ServeCall, fingerprint: str) -> None:
        """Raises OtherModel."""
        self._check_model(fingerprint)
        if self._is_lost:
            self._is_lost = False
            log.info("connected to coordinator %s again", self._address)
        self._call, self._away_since_s, self._refusal = call, None, ""
        for request in list(self._requests):
            call.begin(request)
        if self._orphans and (self._cancelling is None or self._cancelling.done()):
            self._cancelling = asyncio.create_task(self._cancel_orphans(), name="cancel orphans")

    def _fail_overdue(self, reason: str) -> None:
        """Fail requests past their deadline, and all when the coordinator has been away too long."""
        now_s, since_s = asyncio.get_running_loop().time(), self._away_since_s
        away_s = 0.0 if since_s is None else now_s - since_s
        for request in list(self._requests):
            waited_s = min(away_s, now_s - request.created_s)
            text = f"coordinator {self._address} cannot be reached for {waited_s:.1f} s ({reason})"
            if request.is_late(now_s):
                request.fail(_late(f"the deadline passed: {text}"))
            elif waited_s >= self._policy.unreachable_s:
                request.fail(_failure(ClusterUnavailable(text), retry_after_s=1.0))


def _failure(error: ClusterUnavailable, *, retry_after_s: float | None = None) -> UpstreamFailure:
    return UpstreamFailure(
        str(error),
        status=grpc.StatusCode.UNAVAILABLE,
        reason=reason_of(error),
        retry_after_s=retry_after_s,
        may_continue=True,
    )


def _late(text: str) -> UpstreamFailure:
    return UpstreamFailure(
        text, status=grpc.StatusCode.DEADLINE_EXCEEDED, reason=reason_of(DeadlinePassed(""))
    )


def _no_coordinator(address: str, error: grpc.aio.AioRpcError) -> UpstreamFailure:
    text = f"coordinator {address} answers {error.code().name}: {error.details()}: is it a coordinator?"
    return UpstreamFailure(text, status=error.code(), reason=reason_of(ClusterUnavailable("")))


def _call_failure(error: grpc.aio.AioRpcError) -> UpstreamFailure:
    """The failure of a single call, whose status says enough of its reason."""
    return UpstreamFailure(error.details() or "", status=error.code(), reason=error.code().name)
