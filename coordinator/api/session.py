"""One client request from acceptance to its last message."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

from coordinator.api.intake import (
    check_text_size,
    make_sequence,
    refuse_unknown_fields,
    request_id_of,
    resolve_prompt,
)
from coordinator.cluster.controller import Controller
from coordinator.model import ServedModel
from coordinator.requests.engine import Engine
from coordinator.requests.output import OutputChannel
from coordinator.scheduling.sequence import FinishReason, Sequence
from coordinator.text.detokenizer import IncrementalDetokenizer
from stageline_rpc.v1 import inference_pb2
from wire.ids import RequestId

TOKENIZER_THREADS = 2
"""Texts that are tokenized at once; the queue's bound holds for those that wait."""


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens and text of one message; the last one has a finish reason."""

    first_token_index: int
    tokens: tuple[int, ...]
    text: str
    text_offset: int
    finish_reason: FinishReason | None


class Session:
    """Reads a request's channel and turns tokens into text, outside the engine."""

    def __init__(
        self,
        sequence: Sequence,
        channel: OutputChannel,
        detokenizer: IncrementalDetokenizer | None,
        cancel: Callable[[RequestId], None],
    ) -> None:
        self.sequence = sequence
        self._channel = channel
        self._detokenizer = detokenizer
        self._cancel = cancel

    async def outputs(self) -> AsyncIterator[Output]:
        """One output per batch of tokens, until the request ends. Raises the error that ended it."""
        num_tokens = num_characters = 0
        reason = None
        while reason is None:
            batch = await self._channel.read()
            reason = batch.finish_reason
            text = self._text(batch.tokens, is_last=reason is not None)
            yield Output(num_tokens, batch.tokens, text, num_characters, reason)
            num_tokens += len(batch.tokens)
            num_characters += len(text)

    def close(self) -> None:
        """The client is gone, or served: cancels the request if it is still live."""
        if self.sequence.state.is_live:
            self._cancel(self.sequence.key.request_id)

    def _text(self, tokens: tuple[int, ...], *, is_last: bool) -> str:
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(tokens)
        return text + self._detokenizer.flush() if is_last else text


class Sessions:
    """Accepts requests."""

    def __init__(self, engine: Engine, controller: Controller, model: ServedModel) -> None:
        self._engine = engine
        self._controller = controller
        self._model = model
        self._arrivals = count()
        self._tokenizers = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    async def accept(self, request: inference_pb2.GenerateRequest) -> Session:
        """Validates and queues a request.

        Raises InvalidRequest, RequestExists, Overloaded, or ClusterUnavailable when there is no pipeline in
        time.
        """
        refuse_unknown_fields(request)
        request_id = request_id_of(request)
        self._engine.check_new(request_id)
        with self._engine.preparing():
            prompt = await self._prompt(request)
            plan = await self._controller.wait_serving()
            sequence = make_sequence(
                request, prompt, request_id, model=self._model, plan=plan, arrival=next(self._arrivals)
            )
            text = self._model.text
            detokenizer = None if text is None else IncrementalDetokenizer(text, prompt)
            return Session(sequence, self._engine.submit(sequence), detokenizer, self._engine.cancel)

    def close(self) -> None:
        """Ends the tokenizer's threads as soon as they are idle."""
        self._tokenizers.shutdown(wait=False, cancel_futures=True)

    async def _prompt(self, request: inference_pb2.GenerateRequest) -> tuple[int, ...]:
        """Texts take milliseconds to tokenize, and the event loop has streams to serve; ids take none."""
        if request.WhichOneof("prompt") in ("text", "conversation"):
            check_text_size(request, self._model)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._tokenizers, resolve_prompt, request, self._model)
        return resolve_prompt(request, self._model)
