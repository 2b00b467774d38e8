"""Clients on the generated stubs, and the responses that they received."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self

import grpc
from httpx2 import AsyncClient

from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.cluster import DEADLINE_S, RequestCase
from wire.channels import ATTACH_SECRET_KEY, CHANNEL_OPTIONS
from wire.ids import id_text, new_request_id

SECRET = "the-attach-secret-of-every-test-request"
StatusCode = grpc.StatusCode
STOP, LENGTH = inference_pb2.FINISH_REASON_STOP, inference_pb2.FINISH_REASON_LENGTH
_DETACH = inference_pb2.OnDisconnect.ACTION_DETACH


_WITH_SECRET = ((ATTACH_SECRET_KEY, SECRET),)


async def until(holds: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():
            await asyncio.sleep(0.002)


async def until_ready(http: AsyncClient) -> None:
    """Wait until a gateway's coordinator serves: requests wait for that, `/readyz` does not."""
    async with asyncio.timeout(DEADLINE_S):
        while (await http.get("/readyz")).status_code != HTTPStatus.OK:
            await asyncio.sleep(0.01)


def message(
    prompt: Sequence[int] | str,
    max_tokens: int,
    *,
    keep_s: float | None = None,
    priority: inference_pb2.Priority.ValueType = inference_pb2.PRIORITY_UNSPECIFIED,
    cache_salt: str = "",
    **sampling: Any,
) -> inference_pb2.GenerateRequest:
    """Build a request with a new id; a seed implies temperature 1, `keep_s` implies DETACH."""
    if "seed" in sampling:
        sampling.setdefault("temperature", 1.0)
    request = inference_pb2.GenerateRequest(
        request_id=id_text(new_request_id()),
        max_tokens=max_tokens,
        sampling=inference_pb2.SamplingParameters(**sampling),
        priority=priority,
        cache_salt=cache_salt,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    if keep_s is not None:
        request.on_disconnect.action = _DETACH
        request.on_disconnect.keep_for.FromMicroseconds(round(keep_s * 1e6))
    return request


def message_of(case: RequestCase, **more: Any) -> inference_pb2.GenerateRequest:
    """Convert a request, keeping its id."""
    seeded: dict[str, Any] = {} if case.seed is None else {"seed": case.seed}
    request = message(case.prompt, case.max_tokens, **seeded, **more)
    request.request_id = id_text(case.request_id)
    return request


def again(request: inference_pb2.GenerateRequest) -> inference_pb2.GenerateRequest:
    """Copy the request with a new id."""
    copy = inference_pb2.GenerateRequest()
    copy.CopyFrom(request)
    copy.request_id = id_text(new_request_id())
    return copy


@dataclass(eq=False)
class ReceivedChoice:
    """Received output of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: inference_pb2.FinishReason.ValueType = inference_pb2.FINISH_REASON_UNSPECIFIED
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)

    @property
    def is_ended(self) -> bool:
        return self.finish_reason != inference_pb2.FINISH_REASON_UNSPECIFIED

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        """Append a response, which must start where the previous one ended.

        An attaching call cannot state that it has a choice's end, and receives it again: no tokens, and the
        text that was held back until the end.
        """
        if self.is_ended:
            assert not response.token_ids, "tokens after the end"
            assert response.text == self.text[response.text_offset :], "another end than before"
            return
        assert response.first_token_index == len(self.tokens), "a token is repeated or missing"
        assert response.text_offset == len(self.text), "text is repeated or missing"
        self.tokens += response.token_ids
        self.text += response.text
        self.finish_reason = response.finish_reason
        self.usage.CopyFrom(response.usage)


class Received:
    """Output of one request, received over one or more calls."""

    def __init__(self, request_id: str = "") -> None:
        self.request_id = request_id
        self.choices: defaultdict[int, ReceivedChoice] = defaultdict(ReceivedChoice)

    @property
    def tokens(self) -> list[int]:
        """Of the first choice."""
        return self.choices[0].tokens

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text

    @property
    def outputs(self) -> list[tuple[list[int], str, inference_pb2.FinishReason.ValueType]]:
        """Tokens, text and finish reason per choice."""
        return [
            (choice.tokens, choice.text, choice.finish_reason) for _, choice in sorted(self.choices.items())
        ]

    def add(self, response: inference_pb2.GenerateResponse) -> None:
        assert response.request_id == self.request_id, "a message of another request"
        self.choices[response.choice].add(response)


class Reader:
    """One call; `code` and `details` are its status."""

    def __init__(self, call: Any, received: Received) -> None:
        self.received = received
        self.num_messages = 0
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailing_metadata: Any = ()
        self._call = call

    async def next(self) -> inference_pb2.GenerateResponse | None:
        """Read the next message; None at the end of the call."""
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self.code, self.details = error.code(), error.details() or ""
            self.trailing_metadata = error.trailing_metadata()
            return None
        if not isinstance(response, inference_pb2.GenerateResponse):
            self.code = StatusCode.OK
            return None
        self.num_messages += 1
        self.received.add(response)
        return response

    async def until(self, num_tokens: int, *, choice: int = 0) -> None:
        """Read until a choice has `num_tokens` tokens."""
        while len(self.received.choices[choice].tokens) < num_tokens:
            assert await self.next() is not None, f"ended with {self.code} {self.details}"

    async def end(self) -> grpc.StatusCode:
        """Read to the end; return the status code."""
        while await self.next() is not None:
            pass
        assert self.code is not None
        return self.code

    def cancel(self) -> None:
        """Cancel the call from the client."""
        self._call.cancel()


class Caller:
    """A client with its own connection; leaving the block closes it during its calls."""

    def __init__(self, address: str, *, options: Iterable[tuple[str, int]] = ()) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[*CHANNEL_OPTIONS, *options])
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._channel.close()

    def generate(
        self,
        request: inference_pb2.GenerateRequest,
        *,
        timeout_s: float = DEADLINE_S,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Reader:
        headers = ((ATTACH_SECRET_KEY, SECRET), *metadata)
        call = self._stub.Generate(request, timeout=timeout_s, metadata=headers)
        return Reader(call, Received(request.request_id))

    def attach(self, received: Received, *, timeout_s: float = DEADLINE_S) -> Reader:
        """Attach at the first token not received."""
        positions = [
            inference_pb2.ChoicePosition(choice=index, from_token=len(choice.tokens))
            for index, choice in received.choices.items()
        ]
        request = inference_pb2.AttachRequest(request_id=received.request_id, positions=positions)
        return Reader(self._stub.Attach(request, timeout=timeout_s, metadata=_WITH_SECRET), received)

    def attach_at(self, request_id: str, from_token: int, *, choice: int | None = None) -> Reader:
        """Attach at `from_token`, of all choices or of one."""
        request = inference_pb2.AttachRequest(request_id=request_id)
        if choice is None:
            request.from_token = from_token
        else:
            request.positions.add(choice=choice, from_token=from_token)
        call = self._stub.Attach(request, timeout=DEADLINE_S, metadata=_WITH_SECRET)
        return Reader(call, Received(request_id))

    async def cancel(self, request_id: str) -> grpc.StatusCode:
        """Call Inference.Cancel; return the status code."""
        try:
            request = inference_pb2.CancelRequest(request_id=request_id)
            await self._stub.Cancel(request, timeout=DEADLINE_S, metadata=_WITH_SECRET)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return StatusCode.OK

    async def run(self, request: inference_pb2.GenerateRequest) -> Received:
        """Generate to the end, which must be OK."""
        reader = self.generate(request)
        assert await reader.end() is StatusCode.OK, reader.details
        return reader.received
