"""One HTTP request's generation: streams of the coordinator to deltas of choices."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.duration_pb2 import Duration

from gateway.output import ChoiceOutput, Delta, OutputRules
from gateway.rendering import Rendering
from gateway.spans import OutputTimes
from gateway.text_thread import TenantText
from gateway.upstream.contract import ChoiceEnd, Item, PromptLogprobs, Tokens, TokenStream
from stageline_rpc.v1 import inference_pb2
from stageline_rpc.v1.inference_pb2 import TokenLogprobs

FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: "stop",
    inference_pb2.FINISH_REASON_LENGTH: "length",
}

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

    Cached tokens belong to the first choice of each prompt. The times belong to the choice that began
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

    def times_body(self) -> dict[str, float | int | None]:
        """Our extension of `usage` in every API."""
        return {
            "restarts": self.restarts,
            "queue_s": self.queue_s,
            "first_token_s": self.first_token_s,
            "decode_s": self.decode_s,
        }

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
        text: TenantText,
        times: OutputTimes | None = None,
    ) -> None:
        """`times` takes the times of the output, if they are recorded."""
        self._spec, self._text, self._times = spec, text, times
        self._has_stops = bool(spec.rules.stops)
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

    def rendering(self, render: Callable[[Delta], _Rendered | None]) -> Rendering[_Rendered]:
        """Return what reads the output once, as `render` of each delta, except None."""
        return Rendering(self, self._text, render, self._times)

    async def cancel(self) -> None:
        """Cancel the streams that have not ended."""
        for prompt in self.prompts:
            if prompt.num_live:
                prompt.num_live = 0
                await prompt.stream.cancel()

    def stop_choices(self) -> None:
        """Tell the coordinator of choices that a stop string ended; it discards the tokens after it."""
        if not self._has_stops:
            return
        for prompt in self.prompts:
            for choice, output in enumerate(prompt.outputs):
                if output.is_stopped and not output.is_stop_sent:
                    output.is_stop_sent = True
                    prompt.stream.stop(choice, output.num_generated)

    def deltas(self, prompt: PromptState, item: Item) -> Iterable[Delta]:
        """Return what an item adds to the output; on the text thread."""
        if self._spec.echo and not prompt.has_echoed:
            return self._echo(prompt, item)
        if isinstance(item, Tokens):
            return self._push(prompt.outputs[item.choice], item)
        if isinstance(item, ChoiceEnd):
            return self._finish(prompt, item)
        prompt.logprobs[item.first_index :] = item.logprobs
        return ()

    def _echo(self, prompt: PromptState, item: Item) -> Iterator[Delta]:
        """Output follows the prompt, which waits for its log-probabilities if they are part of it."""
        if isinstance(item, PromptLogprobs):
            prompt.logprobs[item.first_index :] = item.logprobs
        else:
            prompt.held.append(item)
        if self._spec.echoes_logprobs and len(prompt.logprobs) < len(prompt.ids):
            return
        prompt.has_echoed = True
        logprobs = prompt.logprobs if self._spec.echoes_logprobs else ()
        for output in prompt.outputs:
            yield output.echo(prompt.ids, logprobs)
        held, prompt.held = prompt.held, []
        for waiting in held:
            yield from self.deltas(prompt, waiting)

    def _push(self, output: ChoiceOutput, item: Tokens) -> Iterable[Delta]:
        """Add tokens, except those that arrive after a stop string."""
        if output.is_stopped:
            return ()
        delta = output.push(item.token_ids, item.logprobs)
        self.usage.completion_tokens += len(delta.token_ids)
        return (delta,) if delta.text or delta.finish_reason or self._spec.wants_tokens else ()

    def _finish(self, prompt: PromptState, end: ChoiceEnd) -> Iterable[Delta]:
        """End a choice, unless a stop string did."""
        prompt.num_live -= 1
        self.usage.add_end(end.choice, end.usage)
        output = prompt.outputs[end.choice]
        if output.is_stopped:
            return ()
        return (output.finish(FINISH_REASONS.get(end.finish_reason, "abort")),)
