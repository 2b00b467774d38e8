"""Streams over several gRPC calls: a request's outputs, exactly once, and the contents of the KV cache."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio

from stageline.client.connection import CLOSED, Connection, is_connection_loss, is_journalled, typed_errors
from stageline.client.errors import (
    Cancelled,
    DeadlineExceeded,
    ServerError,
    StagelineError,
    Unavailable,
    from_rpc_error,
    is_refused_stream,
)
from stageline.client.output import GenerateOutput, output_from
from stageline_rpc.v1 import cluster_pb2_grpc, inference_pb2, inference_pb2_grpc, kv_events_pb2
from wire.channels import ATTACH_SECRET_KEY
from wire.trace_context import trace_headers

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


class RetryPolicy:
    """Bounds each outage by `outage_s`, and the whole call by `timeout_s` after `now_s` (None: unbounded)."""

    def __init__(self, *, outage_s: float, timeout_s: float | None, now_s: float) -> None:
        self._outage_s = outage_s
        self._timeout_s = timeout_s
        self._deadline_s = None if timeout_s is None else now_s + timeout_s
        self._outage_ends_s: float | None = None
        self._num_failures = 0

    def time_left_s(self, now_s: float) -> float | None:
        """Remaining time of the call. Raises DeadlineExceeded."""
        if self._deadline_s is None:
            return None
        if now_s >= self._deadline_s:
            raise DeadlineExceeded(f"the timeout of {self._timeout_s:g} s has passed")
        return self._deadline_s - now_s

    def outage_left_s(self, now_s: float) -> float:
        """Remaining time of the current outage, 0 when it has lasted too long. Raises DeadlineExceeded."""
        time_left_s = self.time_left_s(now_s)
        ends_s = now_s + self._outage_s if self._outage_ends_s is None else self._outage_ends_s
        outage_left_s = max(0.0, ends_s - now_s)
        return outage_left_s if time_left_s is None else min(outage_left_s, time_left_s)

    def fail(self, now_s: float) -> float:
        """Count a failed call. Returns the pause before the next one: 0 at first, then growing."""
        if self._outage_ends_s is None:
            self._outage_ends_s = now_s + self._outage_s
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._num_failures - 1, 10))
        self._num_failures += 1
        return 0.0 if self._num_failures == 1 else pause_s

    def succeed(self) -> None:
        """Count a response: the outage, if any, is over."""
        self._outage_ends_s = None
        self._num_failures = 0


class ResumeAction(Enum):
    """RPC that reads the outputs of a request."""

    GENERATE = "generate"
    ATTACH = "attach"


class ResumePolicy:
    """Selects the next RPC of one detached request. `can_generate`: the request message is available.

    | failed call | error | next call |
    |---|---|---|
    | any | refused before it was read: it never arrived | the same |
    | any | connection lost | Attach |
    | Attach, after a loss | NOT_FOUND, without any output yet: it never arrived | Generate, same id |
    | Generate, after a loss | ALREADY_EXISTS: it did arrive | Attach |
    | any | any other | none |

    Repeating Generate is safe: its id is used once, and no output was delivered.
    """

    def __init__(self, *, can_generate: bool) -> None:
        self._can_generate = can_generate
        self.action = ResumeAction.GENERATE if can_generate else ResumeAction.ATTACH
        self.has_output = False
        """An output of the request was received."""
        self.was_lost = False

    def follow(self, code: grpc.StatusCode, *, is_connection_loss: bool) -> bool:
        """Whether to make another call after this error; `action` is its RPC."""
        if is_connection_loss:
            self.action, self.was_lost = ResumeAction.ATTACH, True
            return True
        if not self.was_lost:
            return False
        if code == grpc.StatusCode.NOT_FOUND and self.action is ResumeAction.ATTACH and not self.has_output:
            self.action = ResumeAction.GENERATE
            return self._can_generate
        if code == grpc.StatusCode.ALREADY_EXISTS and self.action is ResumeAction.GENERATE:
            self.action = ResumeAction.ATTACH
            return True
        return False


@dataclass(slots=True)
class _Position:
    """Delivered part of one choice. `num_characters` is None until the next message sets it."""

    num_tokens: int = 0
    num_characters: int | None = 0
    is_finished: bool = False


class StreamCursor:
    """Checks that every choice continues without gaps and repetitions.

    `num_choices` is None if only the server knows it. `starts` are the first wanted tokens by choice, else
    `first_token`.
    """

    def __init__(
        self, *, num_choices: int | None, first_token: int = 0, starts: Mapping[int, int] | None = None
    ) -> None:
        self._num_choices = num_choices
        self._first_token = first_token
        self._positions = {choice: _started_at(num_tokens) for choice, num_tokens in (starts or {}).items()}
        self._num_prompt_logprobs = 0
        self._was_interrupted = False

    def attach_request(self, request_id: str) -> inference_pb2.AttachRequest:
        """Ask for the tokens after the received ones."""
        return inference_pb2.AttachRequest(
            request_id=request_id,
            from_token=self._first_token,
            positions=[
                inference_pb2.ChoicePosition(choice=choice, from_token=position.num_tokens)
                for choice, position in sorted(self._positions.items())
            ],
        )

    @property
    def is_complete(self) -> bool:
        num_finished = sum(position.is_finished for position in self._positions.values())
        return num_finished == self._num_choices

    def interrupt(self) -> None:
        """Note another call, which may repeat the last messages and prompt log-probabilities."""
        self._was_interrupted = True

    def check(self, output: GenerateOutput) -> GenerateOutput | None:
        """New part of the output, or None. Raises ServerError for missing or repeated output."""
        position = self._position_of(output)
        if position.is_finished:
            self._check_is_repetition(output, position)
            return None
        output = self._without_known_prompt(output)
        if position.num_characters is None:
            position.num_characters = output.text_offset
        if (output.first_token_index, output.text_offset) != (position.num_tokens, position.num_characters):
            raise ServerError(
                f"{_name(output)} continues at token {output.first_token_index} and character "
                f"{output.text_offset}, after {position.num_tokens} tokens and "
                f"{position.num_characters} characters"
            )
        position.num_tokens += len(output.token_ids)
        position.num_characters += len(output.text)
        position.is_finished = output.finish_reason is not None
        return output if _has_content(output) else None

    def check_finished(self) -> None:
        """Raises ServerError when the stream has ended before all its choices."""
        for choice in self._choices():
            position = self._positions.get(choice, _Position())
            if not position.is_finished:
                raise ServerError(
                    f"the stream ended without a finish reason of choice {choice}, "
                    f"after {position.num_tokens} tokens"
                )

    def _choices(self) -> Iterable[int]:
        if self._num_choices is not None:
            return range(self._num_choices)
        return self._positions or (0,)

    def _position_of(self, output: GenerateOutput) -> _Position:
        if self._num_choices is not None and output.choice >= self._num_choices:
            raise ServerError(
                f"the server sent choice {output.choice}, expected choices below {self._num_choices}"
            )
        if output.choice not in self._positions:
            self._positions[output.choice] = _started_at(self._first_token)
        return self._positions[output.choice]

    def _check_is_repetition(self, output: GenerateOutput, position: _Position) -> None:
        is_empty = (
            not output.token_ids and not output.text and output.first_token_index == position.num_tokens
        )
        if not (self._was_interrupted and is_empty):
            raise ServerError(f"the server sent more after the last message of {_name(output)}")

    def _without_known_prompt(self, output: GenerateOutput) -> GenerateOutput:
        if output.prompt_logprobs is None:
            return output
        first, known = output.first_prompt_token_index, self._num_prompt_logprobs
        is_repeated = self._was_interrupted and first <= known
        if first != known and not is_repeated:
            raise ServerError(f"{_name(output)} continues at prompt logprob {first}, after {known}")
        new = output.prompt_logprobs[known - first :]
        self._num_prompt_logprobs += len(new)
        return replace(output, prompt_logprobs=new or None, first_prompt_token_index=known)


def _started_at(num_tokens: int) -> _Position:
    return _Position(num_tokens=num_tokens, num_characters=None if num_tokens else 0)


def _has_content(output: GenerateOutput) -> bool:
    return bool(output.token_ids or output.text or output.prompt_logprobs or output.finish_reason)


def _name(output: GenerateOutput) -> str:
    return f"choice {output.choice} of request {output.request_id}"


if TYPE_CHECKING:  # these classes are generic in the stubs only
    _Call: TypeAlias = (
        grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
        | grpc.aio.UnaryStreamCall[inference_pb2.AttachRequest, inference_pb2.GenerateResponse]
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpec:
    """A request to send, or, with `request` None, to attach to.

    With `reattaches`, the client reattaches even if the coordinator has no journal.
    """

    request_id: str
    secret: str = field(repr=False)
    request: inference_pb2.GenerateRequest | None
    reattaches: bool
    timeout_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """Maximum waits for the coordinator: before the first call, and in an outage."""

    connect_timeout_s: float
    reattach_timeout_s: float


class GenerateCall:
    """Reads one request, once; closing `outputs` cancels the current call."""

    def __init__(
        self, connection: Connection, spec: RequestSpec, cursor: StreamCursor, timeouts: Timeouts
    ) -> None:
        self._connection = connection
        self._spec = spec
        self._cursor = cursor
        self._timeouts = timeouts
        self._resume_policy = ResumePolicy(can_generate=spec.request is not None)
        self._loss = ""
        self._refusal: StagelineError | None = None
        self._reattaches = spec.reattaches

    async def outputs(self) -> AsyncGenerator[GenerateOutput, None]:
        """Yield outputs. Raises errors of the StagelineError tree."""
        with typed_errors():
            channel = await self._connection.ready(self._timeouts.connect_timeout_s)
            self._retry_policy = RetryPolicy(
                outage_s=self._timeouts.reattach_timeout_s, timeout_s=self._spec.timeout_s, now_s=_now_s()
            )
            while True:
                call = self._call(channel)
                try:
                    async for response in call:
                        output = self._take(response)
                        if output is not None:
                            yield output
                    self._cursor.check_finished()
                    return
                except grpc.aio.AioRpcError as error:
                    self._reattaches |= is_journalled(error)
                    if self._has_all(error):
                        return
                    self._check_worth_another_call(error)
                finally:
                    call.cancel()
                channel = await self._reconnected()

    def _call(self, channel: grpc.aio.Channel) -> "_Call":
        stub = inference_pb2_grpc.InferenceStub(channel)
        timeout_s = self._retry_policy.time_left_s(_now_s())
        secret = ((ATTACH_SECRET_KEY, self._spec.secret),)
        if self._resume_policy.action is ResumeAction.GENERATE:
            assert self._spec.request is not None, "GENERATE needs a request message"
            headers = (*trace_headers(), *secret)
            return stub.Generate(self._spec.request, timeout=timeout_s, metadata=headers)
        request = self._cursor.attach_request(self._spec.request_id)
        return stub.Attach(request, timeout=timeout_s, metadata=secret)

    def _take(self, response: inference_pb2.GenerateResponse) -> GenerateOutput | None:
        self._retry_policy.succeed()
        self._resume_policy.has_output = True
        return self._cursor.check(output_from(response))

    def _has_all(self, error: grpc.aio.AioRpcError) -> bool:
        """Whether the connection was lost between the last message and the status that ends the call."""
        return self._reattaches and self._cursor.is_complete and is_connection_loss(error)

    def _check_worth_another_call(self, error: grpc.aio.AioRpcError) -> None:
        """Raises the error that ends the generation, unless another call may continue."""
        typed = from_rpc_error(error)
        self._refusal = typed if is_refused_stream(error) else None
        if self._refusal is not None:
            return
        if not self._reattaches:
            raise typed from None
        is_loss = is_connection_loss(error)
        if is_loss:
            self._loss = typed.message
        if not self._resume_policy.follow(error.code(), is_connection_loss=is_loss):
            if self._resume_policy.was_lost and error.code() == grpc.StatusCode.NOT_FOUND:
                message = f"{self._loss}; the coordinator has lost the request"
                raise Unavailable(f"{message}: {typed.message}") from None
            raise typed from None

    async def _reconnected(self) -> grpc.aio.Channel:
        self._cursor.interrupt()
        try:
            return await _reconnect(
                self._connection,
                self._retry_policy,
                loss=self._loss,
                given_up=f"request {self._spec.request_id} could not be attached to for "
                f"{self._timeouts.reattach_timeout_s:g} s",
            )
        except Unavailable as unavailable:
            raise self._refusal or unavailable from None


async def _reconnect(
    connection: Connection, retry_policy: RetryPolicy, *, loss: str, given_up: str
) -> grpc.aio.Channel:
    """The channel for the next call, after a pause. Raises Unavailable after too long an outage."""
    pause_s = retry_policy.fail(_now_s()) * random.uniform(0.5, 1.0)
    await asyncio.sleep(min(pause_s, retry_policy.outage_left_s(_now_s())))
    if not connection.is_open:
        raise Cancelled(CLOSED)
    outage_left_s = retry_policy.outage_left_s(_now_s())
    if outage_left_s == 0:
        raise Unavailable(f"{loss}; {given_up}")
    try:
        return await connection.ready(outage_left_s)
    except Unavailable:
        retry_policy.time_left_s(_now_s())  # raises DeadlineExceeded if the timeout caused this
        raise Unavailable(f"no coordinator at {connection.address}; {given_up}") from None


_SUBSCRIPTION_ENDS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""The coordinator stops, or the subscriber was too slow."""


class KvSubscriptions:
    """Subscribes until the reader leaves; after a lost or ended subscription, once more."""

    def __init__(self, connection: Connection, timeouts: Timeouts, *, with_token_ids: bool) -> None:
        self._connection = connection
        self._timeouts = timeouts
        self._request = kv_events_pb2.WatchKvEventsRequest(with_token_ids=with_token_ids)

    async def events(self) -> AsyncGenerator[kv_events_pb2.KvSnapshot | kv_events_pb2.KvEvent, None]:
        """Yield a snapshot and its events, per subscription. Raises errors of the StagelineError tree."""
        with typed_errors():
            channel = await self._connection.ready(self._timeouts.connect_timeout_s)
            outage_s = self._timeouts.reattach_timeout_s
            retry_policy = RetryPolicy(outage_s=outage_s, timeout_s=None, now_s=_now_s())
            while True:
                call = cluster_pb2_grpc.ClusterStub(channel).WatchKvEvents(self._request)
                try:
                    async for item in _checked(call):
                        retry_policy.succeed()
                        yield item
                    raise ServerError("the stream of KV events ended without a status")
                except grpc.aio.AioRpcError as error:
                    if error.code() not in _SUBSCRIPTION_ENDS and not is_connection_loss(error):
                        raise
                    loss = from_rpc_error(error).message
                finally:
                    call.cancel()
                given_up = f"KV events could not be subscribed to for {outage_s:g} s"
                channel = await _reconnect(self._connection, retry_policy, loss=loss, given_up=given_up)


async def _checked(
    messages: AsyncIterable[kv_events_pb2.WatchKvEventsResponse],
) -> AsyncIterator[kv_events_pb2.KvSnapshot | kv_events_pb2.KvEvent]:
    """One whole snapshot, then events. Raises ServerError for a missing or repeated event."""
    snapshot = await _read_snapshot(messages)
    next_event_id = snapshot.next_event_id
    yield snapshot
    async for message in messages:
        event = message.event
        if message.WhichOneof("message") != "event" or event.event_id != next_event_id:
            raise ServerError(f"the server sent KV event {event.event_id}, expected event {next_event_id}")
        next_event_id += 1
        yield event


async def _read_snapshot(
    messages: AsyncIterable[kv_events_pb2.WatchKvEventsResponse],
) -> kv_events_pb2.KvSnapshot:
    whole = kv_events_pb2.KvSnapshot()
    async for message in messages:
        if message.WhichOneof("message") != "snapshot":
            raise ServerError("the server sent a KV event before the end of the snapshot")
        whole.MergeFrom(message.snapshot)
        if whole.is_last:
            return whole
    raise ServerError("the stream of KV events ended within the snapshot")


def _now_s() -> float:
    return asyncio.get_running_loop().time()
