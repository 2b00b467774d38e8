"""Parses, admits and submits requests, and restores journalled ones."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import TypeVar

from google.protobuf.message import DecodeError

from coordinator.api.call_context import CallContext
from coordinator.api.grammars import ClientGrammars
from coordinator.api.message_limits import INLINE_BYTES, GenerateDecoder
from coordinator.api.request_parser import (
    Resolved,
    check_text_size,
    compile_grammar,
    make_echoed_text,
    make_request,
    needs_tokenizer,
    num_sequences_of,
    refuse_unmockable,
    request_id_of,
    resolve_texts,
)
from coordinator.api.tenants import NO_PUBLIC_PREFIXES, PublicPrefixes, tenant_salt
from coordinator.cluster.controller import Controller
from coordinator.engine.durability import RequestEnd, restore
from coordinator.engine.engine import Engine
from coordinator.engine.output_stream import OpenStream, OutputStream
from coordinator.engine.request import Request
from coordinator.journal.records import AcceptedRequest, JournalledRequest
from coordinator.model import ServedModel
from coordinator.observability.request_traces import RequestTraces
from coordinator.planner.plan import Plan
from coordinator.scheduler.sequence import Priority, QueueOrder, queue_order
from stageline_rpc.internal.v1 import serve_pb2
from stageline_rpc.v1 import inference_pb2
from wire.errors import ClusterUnavailable, InvalidRequest, InvariantBroken, ServingError
from wire.ids import RequestId, id_text, new_request_id
from wire.log_context import log_context
from wire.peer_secrets import new_secret
from wire.tenant_threads import TenantThreads

log = logging.getLogger(__name__)


def accepted_of(
    message: inference_pb2.GenerateRequest,
    resolved: Resolved,
    request: Request,
    *,
    arrived_at: float,
    deadline_at: float | None,
) -> AcceptedRequest:
    """Journal record of a request created from `message`; times are the journal's."""
    kept = inference_pb2.GenerateRequest()
    kept.CopyFrom(message)
    if (prompt := kept.WhichOneof("prompt")) is not None:
        kept.ClearField(prompt)
    sequence, trace = request.choices[0].sequence, request.trace
    kept.request_id = id_text(request.name)
    kept.max_tokens = sequence.max_tokens
    kept.cache_salt = sequence.cache_salt
    kept.sampling.seed = sequence.sampling.seed
    return AcceptedRequest(
        request_id=request.id,
        message=_envelope(kept, request.tenant),
        prompt=resolved.prompt,
        bad_words=resolved.bad_words,
        grammar=resolved.grammar,
        client=request.client,
        attach_digest=request.attach_digest,
        arrived_at=arrived_at,
        deadline_at=deadline_at,
        traceparent="" if trace is None else trace.traceparent,
        caller_traceparent="" if trace is None else trace.caller_traceparent,
    )


def restored(
    journalled: JournalledRequest,
    model: ServedModel,
    place: Callable[[Priority, int], QueueOrder],
    public: PublicPrefixes = NO_PUBLIC_PREFIXES,
) -> Request:
    """Recreate a journalled request, without its output. Raises InvalidRequest."""
    accepted = journalled.accepted
    try:
        envelope = serve_pb2.SubmitEnvelope.FromString(accepted.message)
        message = inference_pb2.GenerateRequest.FromString(envelope.request)
    except DecodeError as error:
        raise InvalidRequest(f"its message cannot be decoded: {error}") from error
    _check_tokens(journalled, model.config.vocab_size)
    request = make_request(
        message,
        Resolved(prompt=accepted.prompt, bad_words=accepted.bad_words, grammar=accepted.grammar),
        accepted.request_id,
        model=model,
        plan=None,
        client=accepted.client,
        place=place,
        public=public,
    )
    request.attach_digest = accepted.attach_digest
    request.name, request.tenant = request_id_of(message), envelope.tenant
    return request


def _envelope(message: inference_pb2.GenerateRequest, tenant: str) -> bytes:
    """A message and whose it is, as gateways submit it."""
    return serve_pb2.SubmitEnvelope(request=message.SerializeToString(), tenant=tenant).SerializeToString()


def _check_tokens(journalled: JournalledRequest, vocab_size: int) -> None:
    """Raises InvalidRequest for tokens that no stage can compute."""
    outputs = [choice.tokens for choice in journalled.progress.choices.values()]
    tokens = (journalled.accepted.prompt, *journalled.accepted.bad_words, *outputs)
    largest = max((max(ids, default=0) for ids in tokens), default=0)
    if not journalled.accepted.prompt:
        raise InvalidRequest("it has no prompt")
    if largest >= vocab_size:
        raise InvalidRequest(f"token id {largest} is outside the vocabulary [0, {vocab_size})")


_Result = TypeVar("_Result")

TEXT_THREADS, TEXTS_PER_CLIENT = 3, 2
"""Texts tokenized concurrently; the admission queue bounds the waiting ones."""


@dataclass(frozen=True, slots=True)
class _Recreated:
    """A request of a former coordinator; `arrived_s` and `ended` are in time of the engine's clock."""

    accepted: AcceptedRequest
    request: Request
    ended: RequestEnd | None
    arrived_s: float


@dataclass(frozen=True, slots=True)
class _Arrival:
    """One Generate call; `number` is the order of arrival, `is_large` if parsing takes milliseconds.

    `name` is the caller's id for the request, and `request_id` the one under which it is served.
    """

    message: inference_pb2.GenerateRequest
    caller: CallContext
    name: RequestId
    request_id: RequestId
    arrived_s: float
    number: int
    is_large: bool


class RequestHandler:
    """Submits clients' requests and journalled ones."""

    def __init__(
        self,
        engine: Engine,
        controller: Controller,
        model: ServedModel,
        traces: RequestTraces,
        *,
        priority_age_s: float,
        max_model_len: int | None = None,
        public: PublicPrefixes = NO_PUBLIC_PREFIXES,
    ) -> None:
        """`max_model_len` (default: the model's) also limits messages; `priority_age_s` is worth a class."""
        self._engine = engine
        self._state, self._availability = controller.state, controller.availability
        self._model = model
        self._traces = traces
        self._priority_age_s = priority_age_s
        config = model.config
        self._decoder = GenerateDecoder(
            max_model_len=min(config.longest_sequence, max_model_len or config.max_position_embeddings),
            vocab_size=config.vocab_size,
        )
        self._public = public
        # Caches end with this process, so their salts do, too.
        self._salt_secret = new_secret()
        self._arrivals = count()
        self._arriving: set[RequestId] = set()
        self._texts = TenantThreads(TEXT_THREADS, per_tenant=TEXTS_PER_CLIENT, name="tokenizer")
        self._grammars = ClientGrammars(
            lambda sampling, bad_words: compile_grammar(sampling, model, bad_words)
        )

    async def submit(
        self,
        data: bytes,
        caller: CallContext,
        attach_digest: bytes = b"",
        *,
        tokens_only: bool = False,
        open_stream: OpenStream = OutputStream,
    ) -> OutputStream:
        """Validate and queue an encoded GenerateRequest. Raises ServingError.

        With `tokens_only` no text is made of the output, whatever the message says.
        """
        with self._traces.nameless_arrival():
            message = await self._decode(data, caller)
            if tokens_only:
                message.output = inference_pb2.OUTPUT_TOKENS_ONLY
            name, arrived_s = request_id_of(message), self._engine.now_s()
        with (
            self._unused_id(name, caller.tenant) as request_id,
            self._traces.arrival(request_id, caller.span, arrived_s) as trace,
        ):
            try:
                number, is_large = next(self._arrivals), len(data) > INLINE_BYTES
                arrival = _Arrival(message, caller, name, request_id, arrived_s, number, is_large)
                request, resolved = await self._prepare(arrival)
                request.trace, request.attach_digest = trace, attach_digest
                request.name, request.tenant = name, caller.tenant
                return self._engine.submit(
                    request,
                    deadline_s=caller.deadline_s,
                    accepted=self._journal_record(arrival, resolved, request),
                    open_stream=open_stream,
                )
            except ServingError as error:
                error.request_id = name
                raise

    @contextmanager
    def _unused_id(self, name: RequestId, tenant: str) -> Iterator[RequestId]:
        """The id under which a request is served: its name, unless a request of any tenant has that id.

        A tenant may use the name of its own finished request again.
        """
        is_used = name in self._arriving or self._engine.uses_id(name, tenant)
        request_id = new_request_id() if is_used else name
        self._arriving.add(request_id)
        try:
            yield request_id
        finally:
            self._arriving.discard(request_id)

    async def _decode(self, data: bytes, caller: CallContext) -> inference_pb2.GenerateRequest:
        """Decode large messages on another thread, since they take milliseconds."""
        self._decoder.check_size(data)
        if len(data) <= INLINE_BYTES:
            return self._decoder.decode(data)
        with self._engine.preparing(caller.client):
            return await self.beside(caller.client, self._decoder.decode, data)

    async def beside(self, client: str, function: Callable[..., _Result], *arguments: object) -> _Result:
        """Run `function` on a thread of the tokenizer, when it is the client's turn."""
        return await self._texts.run(client, function, *arguments)

    async def _prepare(self, arrival: _Arrival) -> tuple[Request, Resolved]:
        """Wait for a plan, then validate the request."""
        message, request_id, is_large = arrival.message, arrival.request_id, arrival.is_large
        caller, client = arrival.caller, arrival.caller.client
        message.cache_salt = tenant_salt(self._salt_secret, caller.tenant, message.cache_salt)
        self._engine.check_accepts(arrival.name, caller.tenant)

        def place(priority: Priority, choice: int) -> QueueOrder:
            return self._place(priority, arrival.arrived_s, arrival.number, choice)

        def make(resolved: Resolved, plan: Plan) -> Request:
            return make_request(
                message,
                resolved,
                request_id,
                model=self._model,
                plan=plan,
                client=caller.client,
                place=place,
                public=self._public,
            )

        with self._engine.preparing(
            caller.client, num_sequences_of(message), client_limit=caller.max_tenant_sequences
        ):
            resolved = await self._resolve(message, caller, is_large=is_large)
            plan = await self._plan_for(request_id)
            if self._state.has_mock_stages:
                refuse_unmockable(message.sampling)
            request = (
                make(resolved, plan) if not is_large else await self.beside(client, make, resolved, plan)
            )
            if message.sampling.echo:
                await self.beside(client, make_echoed_text, request)
        return request, resolved

    def resume(self, journalled: list[JournalledRequest]) -> int:
        """Restore a former coordinator's requests, before new ones; return the number of live ones.

        Of two requests with one name of a tenant, the first had ended before the tenant used the name again.
        """
        recreated = [found for record in journalled if (found := self._recreated(record)) is not None]
        last = {(found.request.tenant, found.request.name): found for found in recreated}
        for found in last.values():
            self._restore(found)
        return sum(found.ended is None for found in last.values())

    def close(self) -> None:
        """End the tokenizer's threads once they are idle."""
        self._texts.close()
        self._grammars.close()

    async def _plan_for(self, request_id: RequestId) -> Plan:
        """Raises ClusterUnavailable; only clients past their deadline receive it."""
        try:
            return await self._availability.wait_serving()
        except ClusterUnavailable as error:
            level = logging.DEBUG if self._availability.is_ending else logging.WARNING
            log.log(
                level,
                "rejected request %s: %s",
                *(id_text(request_id), error),
                extra=log_context(request_id=request_id),
            )
            raise

    def _recreated(self, journalled: JournalledRequest) -> _Recreated | None:
        durability, now_s = self._engine.durability, self._engine.now_s()
        assert durability.journal is not None, "it has the requests"
        ahead_s = now_s - durability.journal.clock.now_at()
        accepted, arrival = journalled.accepted, next(self._arrivals)

        def place(priority: Priority, choice: int) -> QueueOrder:
            return self._place(priority, accepted.arrived_at + ahead_s, arrival, choice)

        try:
            request = restored(journalled, self._model, place, self._public)
            ended = restore(request, journalled.progress, journalled.end)
        except (InvalidRequest, InvariantBroken) as error:
            log.error(
                "failed to restore request %s: %s",
                *(id_text(accepted.request_id), error),
                extra=log_context(request_id=accepted.request_id),
            )
            return None
        if accepted.deadline_at is not None:
            request.deadline_s = accepted.deadline_at + ahead_s
        if request.keep_s is None:
            request.reattach_until_s = now_s + durability.reattach_timeout_s
        return _Recreated(accepted, request, ended and ended.shifted(ahead_s), accepted.arrived_at + ahead_s)

    def _restore(self, recreated: _Recreated) -> None:
        accepted, request = recreated.accepted, recreated.request
        if recreated.ended is None:
            request.trace = self._traces.resumed(
                accepted.traceparent, accepted.caller_traceparent, recreated.arrived_s
            )
        self._engine.restore(request, ended=recreated.ended)

    def _place(self, priority: Priority, arrived_s: float, arrival: int, choice: int) -> QueueOrder:
        return queue_order(
            priority, arrived_s=arrived_s, arrival=arrival, choice=choice, age_s=self._priority_age_s
        )

    def _journal_record(
        self, arrival: _Arrival, resolved: Resolved, request: Request
    ) -> AcceptedRequest | None:
        """Journal record of an accepted request; None without a journal."""
        durability, now_s = self._engine.durability, self._engine.now_s()
        if durability.journal is None:
            return None
        to_journal = partial(durability.journal.clock.to_journal, now_s=now_s)
        deadline_s = arrival.caller.deadline_s
        return accepted_of(
            arrival.message,
            resolved,
            request,
            arrived_at=to_journal(arrival.arrived_s),
            deadline_at=None if deadline_s is None else to_journal(deadline_s),
        )

    async def _resolve(
        self, message: inference_pb2.GenerateRequest, caller: CallContext, *, is_large: bool
    ) -> Resolved:
        """Tokenize texts on another thread, since they take milliseconds; token ids take none."""
        tenant, client = caller.tenant, caller.client
        if message.WhichOneof("prompt") in ("text", "conversation"):
            check_text_size(message, self._model)
        if not is_large and not needs_tokenizer(message):
            resolved = resolve_texts(message, self._model, tenant)
        else:
            resolved = await self.beside(client, resolve_texts, message, self._model, tenant)
        grammar = await self._grammars.grammar_of(client, message.sampling, resolved.bad_words)
        return replace(resolved, grammar=grammar)
