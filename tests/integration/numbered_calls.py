"""A gateway on the generated stubs: one Serve stream, and what arrived on it per number."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import grpc

from stageline_rpc.v1 import inference_pb2, inference_pb2_grpc
from tests.integration.calls import SECRET
from tests.integration.cluster import DEADLINE_S
from wire.channels import CHANNEL_OPTIONS

PLENTY = 1 << 20


@dataclass(eq=False)
class Numbered:
    """What arrived for one number; checks order while it arrives."""

    request_id: str = ""
    secret: str = ""
    client_state: bytes = b""
    is_accepted: bool = False
    tokens: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    logprobs: defaultdict[int, list[inference_pb2.TokenLogprobs]] = field(
        default_factory=lambda: defaultdict(list)
    )
    prompt_logprobs: list[inference_pb2.TokenLogprobs] = field(default_factory=list)
    ends: dict[int, inference_pb2.ChoiceEnd] = field(default_factory=dict)
    failure: inference_pb2.NumberFailure | None = None
    rejections: list[inference_pb2.NumberFailure] = field(default_factory=list)
    num_choices: int = 1

    @property
    def is_ended(self) -> bool:
        return self.failure is not None or len(self.ends) == self.num_choices

    def add_tokens(self, choice: int, tokens: list[int]) -> None:
        assert self.is_accepted, "tokens before accepted"
        assert tokens, "an entry without tokens"
        assert choice not in self.ends and self.failure is None, "tokens after the end"
        self.tokens[choice] += tokens


class Gateway:
    """One Serve stream with its own connection; leaving the block breaks it."""

    def __init__(self, address: str, *, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self.call = stub.Serve(metadata=metadata)
        self.numbers: defaultdict[int, Numbered] = defaultdict(Numbered)
        self.messages: list[inference_pb2.ServeResponse] = []
        self.error: grpc.aio.AioRpcError | None = None
        self._changed = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._next = 0

    async def __aenter__(self) -> Self:
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Break the stream."""
        self.call.cancel()
        assert self._reader is not None
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def send(self, **command: Any) -> None:
        await self.call.write(inference_pb2.ServeRequest(**command))

    async def submit(
        self, request: inference_pb2.GenerateRequest, *, credit: int = PLENTY, **more: Any
    ) -> Numbered:
        number, self._next = self._next, self._next + 1
        numbered = self.numbers[number]
        numbered.num_choices = max(1, request.sampling.n)
        submit = inference_pb2.Submit(
            number=number, request=request, credit=credit, **{"attach_secret": SECRET, **more}
        )
        await self.send(submit=submit)
        return numbered

    async def attach(
        self,
        old: Numbered,
        *,
        request_id: str = "",
        secret: str = SECRET,
        credit: int = PLENTY,
        observe: bool = False,
        include_client_state: bool = False,
        **more: Any,
    ) -> Numbered:
        """Attach at the tokens of `old`, under a new number with a copy of them."""
        number, self._next = self._next, self._next + 1
        numbered = self.numbers[number]
        numbered.num_choices = old.num_choices
        positions = [
            inference_pb2.ChoicePosition(choice=choice, from_token=len(tokens))
            for choice, tokens in old.tokens.items()
        ]
        for choice, tokens in old.tokens.items():
            numbered.tokens[choice] = list(tokens)
        request = inference_pb2.AttachRequest(
            request_id=request_id or old.request_id,
            positions=positions,
            observe=observe,
            include_client_state=include_client_state,
        )
        attach = inference_pb2.AttachNumber(
            number=number, request=request, credit=credit, attach_secret=secret, **more
        )
        await self.send(attach=attach)
        return numbered

    async def cancel(self, number: int) -> None:
        await self.send(cancel=inference_pb2.CancelNumber(number=number))

    async def detach(self, number: int) -> None:
        await self.send(detach=inference_pb2.DetachNumber(number=number))

    async def stop(self, number: int, choice: int, after_token: int) -> None:
        stop = inference_pb2.StopChoice(number=number, choice=choice, after_token=after_token)
        await self.send(stop=stop)

    async def grant(self, tokens: dict[int, int]) -> None:
        await self.send(credit=inference_pb2.GrantCredit(numbers=tokens.keys(), tokens=tokens.values()))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until the condition holds, or the stream has ended."""
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                assert self._reader is not None
                if self._reader.done():
                    self._reader.result()  # what is wrong with a message
                    raise AssertionError(f"the stream ended: {self.error}")
                self._changed.clear()
                await self._changed.wait()

    async def end(self) -> grpc.aio.AioRpcError | None:
        """Wait for the end of the stream; its error, if any."""
        assert self._reader is not None
        async with asyncio.timeout(DEADLINE_S):
            await self._reader
        return self.error

    async def _read(self) -> None:
        try:
            async for message in self.call:
                self._add(message)
                self._changed.set()
        except grpc.aio.AioRpcError as error:
            self.error = error
        finally:
            self._changed.set()

    def _add(self, message: inference_pb2.ServeResponse) -> None:
        self.messages.append(message)
        for accepted in message.accepted:
            numbered = self.numbers[accepted.number]
            assert not numbered.is_accepted, "accepted twice"
            numbered.is_accepted, numbered.request_id = True, accepted.request_id
            numbered.secret, numbered.client_state = accepted.attach_secret, accepted.client_state
        self._add_tokens(message)
        for rows in message.prompt_logprobs:
            known = self.numbers[rows.number].prompt_logprobs
            assert rows.first_prompt_token_index == len(known), "prompt log-probabilities with a gap"
            known += rows.tokens
        for end in message.ends:
            assert end.choice not in self.numbers[end.number].ends, "a choice ended twice"
            self.numbers[end.number].ends[end.choice] = end
        for failure in message.failures:
            assert not self.numbers[failure.number].is_ended, "a number ended twice"
            self.numbers[failure.number].failure = failure
        for rejection in message.rejections:
            self.numbers[rejection.number].rejections.append(rejection)

    def _add_tokens(self, message: inference_pb2.ServeResponse) -> None:
        assert sum(message.counts) == len(message.token_ids)
        entries = list(zip(message.numbers, message.choices, strict=True))
        assert len(set(entries)) == len(entries), "a choice has two entries"
        begin, taken = 0, {}
        for entry, count in zip(entries, message.counts, strict=True):
            self.numbers[entry[0]].add_tokens(entry[1], list(message.token_ids[begin : begin + count]))
            taken[entry] = message.token_ids[begin : begin + count]
            begin += count
        for rows in message.logprobs:
            assert [row.token_id for row in rows.tokens] == taken[rows.number, rows.choice]
            self.numbers[rows.number].logprobs[rows.choice] += rows.tokens
