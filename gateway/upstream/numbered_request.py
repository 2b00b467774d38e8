"""One request of a gateway: its place in the output, its credit, and what its reader has not taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from gateway.upstream.contract import (
    NO_OWNER,
    ChoiceEnd,
    Found,
    Item,
    PromptLogprobs,
    RequestOwner,
    Tokens,
    UpstreamFailure,
)
from stageline_rpc.v1 import inference_pb2
from wire.errors import ClusterUnavailable, reason_of

if TYPE_CHECKING:
    from gateway.upstream.serve_call import ServeCall

_STATUS = {code.value[0]: code for code in grpc.StatusCode}
_ATTACH_AGAIN = ("REQUEST_SUSPENDED",)


class NumberedRequest:
    """A request on the calls that carry it, one after the other."""

    def __init__(
        self,
        request_id: str,
        secret: str,
        *,
        message: inference_pb2.GenerateRequest | None = None,
        credit: int,
        deadline_s: float | None = None,
        traceparent: str = "",
        owner: RequestOwner = NO_OWNER,
    ) -> None:
        """Without `message`, the request was submitted before, and is observed from its first token on.

        `deadline_s` is a time of the event loop.
        """
        self.request_id, self.secret = request_id, secret
        self.is_accepted = self.was_connected = False
        self.created_s = asyncio.get_running_loop().time()
        self.found = Found()
        self.on_end: Callable[[NumberedRequest], None] = lambda request: None
        self._message, self._deadline_s = message, deadline_s
        self._traceparent, self._owner = traceparent, owner
        self._observes, self._window = message is None, credit
        self._client_state = None if message is None else message.client_state
        self._was_sent = message is None
        num_choices = 1 if message is None else max(1, message.sampling.n)
        self._received = dict.fromkeys(range(num_choices), 0)
        self._stops: dict[int, int] = {}
        self._ended: set[int] = set()
        self._num_prompt_logprobs = self._num_queued = self._num_taken = 0
        self._items = deque[Item]()
        self._failure: UpstreamFailure | None = None
        self._is_over = False
        self._changed = asyncio.Event()
        self._listener: Callable[[], None] | None = None
        self._call: ServeCall | None = None
        self._number = 0

    # The side of the call

    def first_command(self, number: int) -> inference_pb2.ServeRequest:
        """The command that begins this request on a new call."""
        credit = max(0, self._window - self._num_queued)
        if self._message is not None and not self._was_sent:
            self._was_sent = True
            submit = inference_pb2.Submit(
                number=number,
                request=self._message,
                credit=credit,
                attach_secret=self.secret,
                traceparent=self._traceparent,
                tenant=self._owner.tenant,
                client=self._owner.client,
                max_tenant_sequences=self._owner.max_sequences,
            )
            self._set_timeout(submit)
            return inference_pb2.ServeRequest(submit=submit)
        attach = inference_pb2.AttachNumber(
            number=number,
            request=self._position(),
            credit=credit,
            attach_secret=self.secret,
            tenant=self._owner.tenant,
            client=self._owner.client,
        )
        self._set_timeout(attach)
        return inference_pb2.ServeRequest(attach=attach)

    def connect(self, call: ServeCall, number: int) -> None:
        """The first command is on its way under `number`."""
        self._call, self._number, self._num_taken = call, number, 0
        self.was_connected = True

    def disconnect(self) -> None:
        """The call broke; another one follows."""
        self._call, self.is_accepted = None, False

    def accept(self, accepted: inference_pb2.Accepted) -> None:
        """The coordinator reads the request out; its `client_state` comes with the first attach."""
        self.is_accepted = True
        if self._client_state is None:
            self._client_state = accepted.client_state
            self.found = Found(sum(accepted.num_tokens), has_ended=accepted.has_ended)
        for choice, after_token in self._stops.items():
            if choice not in self._ended:
                self._send_stop(choice, after_token)
        self._signal()

    def push(
        self, choice: int, token_ids: Sequence[int], logprobs: Sequence[inference_pb2.TokenLogprobs]
    ) -> None:
        """Take new tokens for the reader."""
        first, count = self._received.get(choice, 0), len(token_ids)
        self._received[choice] = first + count
        self._num_queued += count
        self._owner.spend(count)
        self._items.append(Tokens(choice, first, token_ids, logprobs))
        self._signal()

    def push_prompt(self, rows: PromptLogprobs) -> None:
        """Take new log-probabilities of the prompt for the reader."""
        count = len(rows.logprobs)
        self._num_prompt_logprobs = rows.first_index + count
        self._num_queued += count
        self._items.append(rows)
        self._signal()

    def end(self, end: ChoiceEnd) -> bool:
        """Take the end of a choice, which comes again after each attach; whether all have ended."""
        if end.choice not in self._ended:
            self._ended.add(end.choice)
            self._items.append(end)
        if is_over := len(self._ended) == len(self._received):
            self._finish()
        self._signal()
        return is_over

    def reject(self, failure: inference_pb2.NumberFailure) -> None:
        """Take the failure of the number: the request's own, or one of the way to it."""
        call, self._call = self._call, None
        is_untouched = self._message is not None and not any(self._received.values())
        if failure.reason == "REQUEST_EXISTS" and self._message is not None and call is not None:
            call.begin(self)  # it was submitted by a call that broke
        elif failure.reason == "REQUEST_NOT_FOUND" and is_untouched and call is not None:
            self._was_sent = False
            call.begin(self)
        elif failure.reason in _ATTACH_AGAIN:
            self.disconnect()
        else:
            self.fail(_failure_of(failure, was_running=self._client_state is not None))

    def fail(self, failure: UpstreamFailure) -> None:
        """End the request with an error, which follows the output before it."""
        self._failure = self._failure or failure
        self._finish()

    @property
    def is_over(self) -> bool:
        """Whether nothing more arrives for the reader."""
        return self._is_over

    @property
    def is_running(self) -> bool:
        """Whether the coordinator has the request, as far as is known, and not all choices have ended."""
        return self.was_connected and len(self._ended) < len(self._received)

    @property
    def tenant(self) -> str:
        return self._owner.tenant

    def is_late(self, now_s: float) -> bool:
        return self._deadline_s is not None and now_s >= self._deadline_s

    # The side of the reader

    async def wait_accepted(self) -> None:
        """Wait until the coordinator has accepted the request. Raises UpstreamFailure.

        A request that failed without output can be observed: its failure is the end of what there is.
        """
        while not self.is_accepted and not self._is_over:
            self._changed.clear()
            await self._changed.wait()  # the link bounds it
        is_found = self._observes and self._client_state is not None
        if self._failure is not None and not self._items and not is_found:
            raise self._failure.again()

    async def next(self) -> Item | None:
        """The next item; None after the last one. Raises UpstreamFailure."""
        while True:
            while self._items:
                item = self._items.popleft()
                self._return_credit(item)
                if (shown := self._shown(item)) is not None:
                    return shown
            if self._failure is not None:
                raise self._failure.again()
            if self._is_over:
                return None
            self._changed.clear()
            await self._changed.wait()  # no timeout: the request has a deadline, or none

    def take(self) -> Sequence[Item] | None:
        """All items that arrived; None after the last one. Raises UpstreamFailure."""
        if items := self._items:
            self._items = deque()
            for item in items:
                self._return_credit(item)
            if not self._stops:
                return items
            return [shown for item in items if (shown := self._shown(item)) is not None] or self.take()
        if self._failure is not None:
            raise self._failure.again()
        return None if self._is_over else ()

    def notify(self, changed: Callable[[], None] | None) -> None:
        """Call `changed` when there is something to take."""
        self._listener = changed
        if self._items or self._is_over:
            self._signal()

    def stop(self, choice: int, num_tokens: int) -> None:
        """End a choice after its first `num_tokens` tokens."""
        self._stops.setdefault(choice, num_tokens)
        if self.is_accepted and choice not in self._ended:
            self._send_stop(choice, num_tokens)

    @property
    def client_state(self) -> bytes:
        return self._client_state or b""

    def cancel(self) -> None:
        """Cancel the request, without an error for its reader."""
        number = inference_pb2.CancelNumber(number=self._number)
        self._leave(inference_pb2.ServeRequest(cancel=number))

    def detach(self) -> None:
        """Stop reading; the request continues. One that is not accepted yet is cancelled."""
        if not self.is_accepted and not self._observes:
            self.cancel()
            return
        number = inference_pb2.DetachNumber(number=self._number)
        self._leave(inference_pb2.ServeRequest(detach=number))

    def drop(self) -> None:
        """End the request: its reader is gone."""
        if self._observes:
            self.detach()
        else:
            self.cancel()

    def interrupt(self, failure: UpstreamFailure) -> None:
        """Drop the request, with an error for its reader."""
        self._failure = self._failure or failure
        self.drop()

    def _leave(self, command: inference_pb2.ServeRequest) -> None:
        if self._call is not None and not self._is_over:
            self._call.send(command)
            self._call.leave(self._number)
        self._items.clear()
        self._finish()

    def _finish(self) -> None:
        self._is_over = True
        self._call = None
        self._signal()
        self.on_end(self)

    def _signal(self) -> None:
        if self._listener is not None:
            self._listener()
        else:
            self._changed.set()

    def _shown(self, item: Item) -> Item | None:
        """What the reader sees of an item: nothing after a stop but the end that it asked for."""
        if isinstance(item, PromptLogprobs) or (num_tokens := self._stops.get(item.choice)) is None:
            return item
        if isinstance(item, Tokens):
            return None
        usage = inference_pb2.Usage()
        usage.CopyFrom(item.usage)
        usage.completion_tokens = num_tokens
        return replace(item, finish_reason=inference_pb2.FINISH_REASON_STOP, usage=usage)

    def _return_credit(self, item: Item) -> None:
        if isinstance(item, ChoiceEnd):
            return
        count = len(item.token_ids) if isinstance(item, Tokens) else len(item.logprobs)
        self._num_queued -= count
        self._num_taken += count
        if self._num_taken >= self._window // 2 and self._call is not None:
            self._call.grant(self._number, self._num_taken)
            self._num_taken = 0

    def _send_stop(self, choice: int, num_tokens: int) -> None:
        if self._call is not None:
            stop = inference_pb2.StopChoice(number=self._number, choice=choice, after_token=num_tokens)
            self._call.send(inference_pb2.ServeRequest(stop=stop))

    def _position(self) -> inference_pb2.AttachRequest:
        request = inference_pb2.AttachRequest(
            request_id=self.request_id,
            from_prompt_token=self._num_prompt_logprobs,
            include_client_state=self._client_state is None,
            observe=self._observes,
        )
        for choice, count in self._received.items():
            request.positions.add(choice=choice, from_token=min(count, self._stops.get(choice, count)))
        return request

    def _set_timeout(self, command: inference_pb2.Submit | inference_pb2.AttachNumber) -> None:
        if self._deadline_s is not None:
            remaining_s = max(0.0, self._deadline_s - asyncio.get_running_loop().time())
            command.timeout.FromMicroseconds(round(remaining_s * 1e6))


class RequestStream:
    """The reader's end of a request; one that is dropped cancels it, unless it observes."""

    def __init__(self, request: NumberedRequest) -> None:
        self.request_id = request.request_id
        self.secret = request.secret
        self._request = request
        self._loop = asyncio.get_running_loop()

    def __del__(self) -> None:
        # No weakref.finalize: its registry holds the request, and what holds the stream could never end.
        if not self._request.is_over and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._request.drop)

    async def __aiter__(self) -> AsyncIterator[Item]:
        """Yield output until every choice has ended. Raises UpstreamFailure."""
        while (item := await self._request.next()) is not None:
            yield item

    def take(self) -> Sequence[Item] | None:
        """Take all that arrived, instead of iterating; None after the end. Raises UpstreamFailure."""
        return self._request.take()

    def notify(self, changed: Callable[[], None] | None) -> None:
        """Call `changed` when there is something to `take`; None ends that."""
        self._request.notify(changed)

    def stop(self, choice: int, num_tokens: int) -> None:
        """End a choice after its first `num_tokens` generated tokens; its ChoiceEnd still comes."""
        self._request.stop(choice, num_tokens)

    async def cancel(self) -> None:
        """Cancel the request; no effect after its end. Iteration is then over."""
        self._request.cancel()

    @property
    def client_state(self) -> bytes:
        return self._request.client_state

    @property
    def found(self) -> Found:
        return self._request.found

    def detach(self) -> None:
        """Stop reading; the request continues. Iteration is then over."""
        self._request.detach()


def _failure_of(failure: inference_pb2.NumberFailure, *, was_running: bool) -> UpstreamFailure:
    """The error of a request; one that its coordinator forgot was lost with it."""
    if failure.reason == "REQUEST_NOT_FOUND" and was_running:
        error = ClusterUnavailable("the request was lost with its coordinator, which keeps no journal")
        return UpstreamFailure(str(error), status=grpc.StatusCode.UNAVAILABLE, reason=reason_of(error))
    delay = failure.retry_delay
    return UpstreamFailure(
        failure.message,
        status=_STATUS.get(failure.code, grpc.StatusCode.UNKNOWN),
        reason=failure.reason,
        may_continue=failure.reason == "SUPERSEDED",
        field=failure.field,
        retry_after_s=delay.seconds + delay.nanos / 1e9 if failure.HasField("retry_delay") else None,
    )
