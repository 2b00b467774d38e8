"""One HTTP request's generation: streams of the coordinator to deltas of choices."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

from google.protobuf.duration_pb2 import Duration

from gateway.output import ChoiceOutput, Delta, OutputRules
from gateway.text_thread import TextThread
from gateway.upstream.contract import ChoiceEnd, PromptLogprobs, Tokens, TokenStream
from stageline_rpc.v1 import inference_pb2
from stageline_rpc.v1.inference_pb2 import TokenLogprobs

FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}

_Item: TypeAlias = Tokens | PromptLogprobs | ChoiceEnd
_Rendered = TypeVar("_Rendered")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpec:
    """What a request wants of its streams.

    Attributes:
        num_choices: Choices per prompt; choice c of prompt p is choice p * num_choices + c of the response.
        echo: The output begins with the prompt.
        wants_tokens: Deltas without text are of use, for their tokens.
        echoes_logprobs: The prompt's log-probabilities are part of its echo.
    """

    rules: OutputRules
    num_choices: int = 1
    echo: bool = False
    wants_tokens: bool = False
    echoes_logprobs: bool = False


@dataclass(slots=True)
class UsageCounts:
    """Token counts and times of a request, in seconds from its acceptance.

    Cached tokens are those of the first choice of each prompt. The times are those of the choice that began
    first, and the longest decoding. None before the coordinator has reported them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    restarts: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None

    def add_end(self, choice: int, usage: inference_pb2.Usage) -> None:
        """Add what the coordinator reports at the end of a choice, except its tokens."""
        self.restarts = max(self.restarts, usage.restarts)
        if choice == 0:
            self.cached_tokens += usage.cached_tokens
        if usage.HasField("queue_time"):
            self.queue_s = _reduce(min, self.queue_s, usage.queue_time)
        if usage.HasField("first_token_time"):
            self.first_token_s = _reduce(min, self.first_token_s, usage.first_token_time)
        if usage.HasField("decode_time"):
            self.decode_s = _reduce(max, self.decode_s, usage.decode_time)


def _reduce(choose: Callable[[float, float], float], known_s: float | None, duration: Duration) -> float:
    duration_s = duration.ToMicroseconds() / 1e6
    return duration_s if known_s is None else choose(known_s, duration_s)


@dataclass(slots=True)
class PromptState:
    """A prompt and the outputs of its choices."""

    ids: Sequence[int]
    stream: TokenStream
    outputs: list[ChoiceOutput]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_echoed: bool = False
    num_live: int = 0
    held: list[Tokens | ChoiceEnd] = field(default_factory=list)


class Generation:
    """The output of all prompts of a request, in order of arrival."""

    def __init__(
        self,
        spec: GenerationSpec,
        prompts: Sequence[Sequence[int]],
        streams: Sequence[TokenStream],
        text: TextThread,
    ) -> None:
        self._spec, self._text = spec, text
        self.usage = UsageCounts(prompt_tokens=sum(map(len, prompts)))
        self.prompts = [
            PromptState(ids, stream, self._new_outputs(index, ids), num_live=spec.num_choices)
            for index, (ids, stream) in enumerate(zip(prompts, streams, strict=True))
        ]

    def _new_outputs(self, index: int, prompt: Sequence[int]) -> list[ChoiceOutput]:
        spec = self._spec
        first = index * spec.num_choices
        return [
            ChoiceOutput(first + choice, spec.rules, prompt, echoes_prompt=spec.echo)
            for choice in range(spec.num_choices)
        ]

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self._spec.num_choices

    def prompt_of(self, choice: int) -> PromptState:
        """The prompt of a choice of the response."""
        return self.prompts[choice // self._spec.num_choices]

    async def rendered(self, render: Callable[[Delta], _Rendered | None]) -> AsyncGenerator[_Rendered, None]:
        """Yield `render` of each delta, unless None; it runs on the text thread. Raises UpstreamFailure.

        Streams that have not ended are cancelled at the end.
        """
        try:
            async with aclosing(self._items()) as items:
                async for prompt, item in items:
                    for work in self._works(prompt, item):
                        result = await self._text.run(partial(self._render, work, render))
                        if result is not None:
                            yield result
                    _stop_upstream(prompt)
        finally:
            await self.cancel()

    async def cancel(self) -> None:
        """Cancel the streams that have not ended."""
        for prompt in self.prompts:
            if prompt.num_live:
                prompt.num_live = 0
                await prompt.stream.cancel()

    def _render(
        self, work: Callable[[], Delta | None], render: Callable[[Delta], _Rendered | None]
    ) -> _Rendered | None:
        delta = work()
        if delta is None:
            return None
        is_useful = bool(delta.text or delta.finish_reason) or self._spec.wants_tokens
        return render(delta) if is_useful else None

    async def _items(self) -> AsyncGenerator[tuple[PromptState, _Item], None]:
        if len(self.prompts) == 1:
            async for item in self.prompts[0].stream:
                yield self.prompts[0], item
            return
        queue: asyncio.Queue[tuple[PromptState, _Item | Exception | None]] = asyncio.Queue(len(self.prompts))
        readers = [asyncio.create_task(_read(prompt, queue)) for prompt in self.prompts]
        try:
            num_live = len(readers)
            while num_live:
                prompt, found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is None:
                    num_live -= 1
                else:
                    yield prompt, found
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    def _works(self, prompt: PromptState, item: _Item) -> Iterator[Callable[[], Delta | None]]:
        """Yield what the text thread has to do for an item."""
        if isinstance(item, PromptLogprobs):
            prompt.logprobs[item.first_index :] = item.logprobs
        if self._spec.echo and not prompt.has_echoed:
            if self._spec.echoes_logprobs and len(prompt.logprobs) < len(prompt.ids):
                if not isinstance(item, PromptLogprobs):
                    prompt.held.append(item)
                return
            prompt.has_echoed = True
            logprobs = prompt.logprobs if self._spec.echoes_logprobs else ()
            for output in prompt.outputs:
                yield partial(output.echo, prompt.ids, logprobs)
        held, prompt.held = prompt.held, []
        for waiting in held:
            yield from self._output_works(prompt, waiting)
        if not isinstance(item, PromptLogprobs):
            yield from self._output_works(prompt, item)

    def _output_works(
        self, prompt: PromptState, item: Tokens | ChoiceEnd
    ) -> Iterator[Callable[[], Delta | None]]:
        output = prompt.outputs[item.choice]
        if isinstance(item, Tokens):
            yield partial(self._push, output, item)
            return
        prompt.num_live -= 1
        self.usage.add_end(item.choice, item.usage)
        if not output.is_stopped:
            yield partial(output.finish, FINISH_REASONS.get(item.finish_reason, "abort"))

    def _push(self, output: ChoiceOutput, item: Tokens) -> Delta | None:
        """Add tokens, except those that arrive after a stop string."""
        if output.is_stopped:
            return None
        delta = output.push(item.token_ids, item.logprobs)
        self.usage.completion_tokens += len(delta.token_ids)
        return delta


async def _read(
    prompt: PromptState, queue: asyncio.Queue[tuple[PromptState, _Item | Exception | None]]
) -> None:
    """Put the items of a stream into the queue, then its failure, or None."""
    end = None
    try:
        async for item in prompt.stream:
            await queue.put((prompt, item))
    except Exception as error:
        end = error
    await queue.put((prompt, end))


def _stop_upstream(prompt: PromptState) -> None:
    """Tell the coordinator of choices that a stop string ended; it discards the tokens after it."""
    for choice, output in enumerate(prompt.outputs):
        if output.is_stopped and not output.is_stop_sent:
            output.is_stop_sent = True
            prompt.stream.stop(choice, output.num_generated)
