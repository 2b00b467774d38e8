"""One Serve call: numbers its requests, writes commands, and hands out what arrives."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc

from gateway.upstream.contract import ChoiceEnd, PromptLogprobs
from gateway.upstream.numbered_request import NumberedRequest
from stageline_rpc.v1 import inference_pb2
from wire.channels import MODEL_KEY

log = logging.getLogger(__name__)


class ServeCall:
    """Owns one Serve stream until it ends.

    Commands are queued and written one after the other; credit that readers return meanwhile is one message.
    """

    def __init__(self, stub: Any, *, on_open: Callable[[ServeCall, str], None]) -> None:
        """`on_open` is called when the coordinator answers, with the fingerprint of its model; may raise."""
        self._stub = stub
        self._on_open = on_open
        self._requests: dict[int, NumberedRequest] = {}
        self._commands: deque[inference_pb2.ServeRequest] = deque()
        self._credit: dict[int, int] = {}
        self._written = asyncio.Event()
        self._next_number = 0

    async def run(self) -> None:
        """Serve the stream until it ends. Raises AioRpcError, and what `on_open` raises."""
        call = self._stub.Serve()
        writer = asyncio.create_task(self._write(call))
        try:
            metadata = dict(await call.initial_metadata())
            if not call.done():
                self._on_open(self, metadata.get(MODEL_KEY, ""))
            async for message in call:
                self._dispatch(message)
        finally:
            writer.cancel()
            call.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            requests, self._requests = self._requests, {}
            for request in requests.values():
                request.disconnect()

    def begin(self, request: NumberedRequest) -> None:
        """Submit a request, or attach to one that may have been submitted before."""
        number, self._next_number = self._next_number, self._next_number + 1
        self._requests[number] = request
        self.send(request.first_command(number))
        request.connect(self, number)

    def send(self, command: inference_pb2.ServeRequest) -> None:
        self._commands.append(command)
        self._written.set()

    def grant(self, number: int, tokens: int) -> None:
        """Return credit to a request."""
        self._credit[number] = self._credit.get(number, 0) + tokens
        self._written.set()

    def leave(self, number: int) -> None:
        """Ignore what still arrives for a number."""
        self._requests.pop(number, None)
        self._credit.pop(number, None)

    async def _write(self, call: Any) -> None:
        while True:
            await self._written.wait()
            self._written.clear()
            try:
                while self._commands:
                    await call.write(self._commands.popleft())
                if self._credit:
                    credit, self._credit = self._credit, {}
                    grant = inference_pb2.GrantCredit(numbers=credit.keys(), tokens=credit.values())
                    await call.write(inference_pb2.ServeRequest(credit=grant))
            except (grpc.aio.BaseError, asyncio.InvalidStateError):
                return  # the reader reports the end of the stream

    def _dispatch(self, message: inference_pb2.ServeResponse) -> None:
        find = self._requests.get
        for accepted in message.accepted:
            if (request := find(accepted.number)) is not None:
                request.accept(accepted)
        for prompt in message.prompt_logprobs:
            if (request := find(prompt.number)) is not None:
                request.push_prompt(PromptLogprobs(prompt.first_prompt_token_index, prompt.tokens))
        self._dispatch_tokens(message)
        for end in message.ends:
            if (request := find(end.number)) is not None and request.end(
                ChoiceEnd(end.choice, end.finish_reason, end.usage)
            ):
                self.leave(end.number)
        for failure in message.failures:
            if (request := self._requests.pop(failure.number, None)) is not None:
                request.reject(failure)
        for rejection in message.rejections:
            log.warning("coordinator rejected a command: %s", rejection.message)
            if (request := find(rejection.number)) is not None and not request.is_accepted:
                self.leave(rejection.number)
                request.reject(rejection)

    def _dispatch_tokens(self, message: inference_pb2.ServeResponse) -> None:
        token_ids, begin, find = list(message.token_ids), 0, self._requests.get
        logprobs = {(rows.number, rows.choice): rows.tokens for rows in message.logprobs}
        for number, choice, count in zip(message.numbers, message.choices, message.counts, strict=True):
            end = begin + count
            if (request := find(number)) is not None:
                rows = logprobs.get((number, choice), ()) if logprobs else ()
                request.push(choice, token_ids[begin:end], rows)
            begin = end
