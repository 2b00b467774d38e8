"""Requested generations, their requests and their expected output."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import cast

from hypothesis import strategies as st

from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.request import Choice, Request
from coordinator.scheduler.sequence import FinishReason, Priority, Sequence, queue_order
from tests.unit.coordinator.scheduler.stage_replica import VOCAB_SIZE, kv_entries, kv_entry, sample, score
from tests.unit.text.letters_codec import LettersCodec, letters
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import TextCodec
from wire.ids import RequestId, SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import TokenLogprobs

AGE_S = 10.0
MOST_TOKENS = 11
"""Generated after a prompt of at most 17, in `request_cases`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCase:
    """One GenerateRequest. `stops` are strings of letters; every token is one letter."""

    prompt: tuple[int, ...] = (1, 2, 3)
    max_tokens: int = 4
    n: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    stops: tuple[str, ...] = ()
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    keep_s: float | None = None
    priority: Priority = Priority.NORMAL
    client: str = "client"

    @property
    def has_echoed_logprobs(self) -> bool:
        return self.echo and self.logprobs is not None

    def request(
        self, *, arrival: int = 0, arrived_s: float = 0.0, request_id: RequestId | None = None
    ) -> Request:
        request_id = request_id or new_request_id()
        return Request(
            request_id,
            [self._choice(request_id, index, arrival, arrived_s) for index in range(self.n)],
            client=self.client,
            keep_s=self.keep_s,
            num_top_prompt_logprobs=self.prompt_logprobs,
            num_top_echoed=self.logprobs if self.echo else None,
        )

    def _choice(self, request_id: RequestId, index: int, arrival: int, arrived_s: float) -> Choice:
        scored = max(self.prompt_logprobs or 0, self.logprobs or 0 if self.echo else 0)
        wants_scores = self.prompt_logprobs is not None or self.has_echoed_logprobs
        sequence = Sequence(
            SequenceKey(request_id, index),
            self.prompt,
            max_tokens=self.max_tokens,
            sampling=StepSampling(logprobs=self.logprobs, prompt_logprobs=scored),
            stop_token_ids=self.stop_token_ids,
            order=queue_order(self.priority, arrived_s=arrived_s, arrival=arrival, choice=index, age_s=AGE_S),
            wants_prompt_logprobs=wants_scores and index == 0,
        )
        codec = cast(TextCodec, LettersCodec())
        buffer = OutputBuffer(
            IncrementalDetokenizer(codec, () if self.echo else self.prompt),
            stops=self.stops,
            prompt=self.prompt if self.echo else (),
            has_logprobs=self.logprobs is not None,
        )
        return Choice(sequence, buffer)


@st.composite
def request_cases(draw: st.DrawFn) -> RequestCase:
    """Prompts with shared prefixes around block boundaries, and every finish reason."""
    num_prompt_tokens = draw(st.sampled_from([1, 3, 4, 5, 8, 9, 13, 17]))
    beginning = [draw(st.integers(0, 1))] * num_prompt_tokens
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=2))
    letter = st.sampled_from(letters(range(VOCAB_SIZE)))
    return RequestCase(
        prompt=tuple((*beginning, *own)[-num_prompt_tokens:]),
        max_tokens=draw(st.integers(0, MOST_TOKENS) | st.just(MOST_TOKENS)),
        n=draw(st.sampled_from([1, 1, 1, 2, 3])),
        stop_token_ids=draw(st.just(frozenset()) | st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=1)),
        stops=tuple(draw(st.just([]) | st.lists(st.text(letter, min_size=1, max_size=3), max_size=2))),
        echo=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 3])),
        keep_s=draw(st.sampled_from([None, 5.0, 50.0])),
        priority=draw(st.sampled_from(Priority)),
    )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Expected output of one undisturbed choice."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs | None, ...]
    reason: FinishReason


def solo(case: RequestCase, choice: int = 0) -> Outcome:
    """The expected choice without other requests, computed without the code under test."""
    entry = kv_entries(case.prompt)[-1]
    generated, logprobs = list[int](), list[TokenLogprobs | None]()
    text, reason = "", FinishReason.LENGTH if case.max_tokens == 0 else None
    while reason is None:
        token = sample(entry, choice)
        generated.append(token)
        logprobs.append(score(entry, token, case.logprobs or 0))
        text += letters([token])
        if completed := [stop for stop in case.stops if text.endswith(stop)]:
            text, reason = text[: -max(map(len, completed))], FinishReason.STOP
        elif token in case.stop_token_ids:
            reason = FinishReason.STOP
        elif len(generated) == case.max_tokens:
            reason = FinishReason.LENGTH
        entry = kv_entry(entry, token)
    if case.echo:
        text = letters(case.prompt) + text
        logprobs = [*prompt_scores(case.prompt, case.logprobs or 0), *logprobs]
    tokens = (*case.prompt, *generated) if case.echo else tuple(generated)
    return Outcome(tokens, text, tuple(logprobs) if case.logprobs is not None else (), reason)


def prompt_scores(prompt: abc.Sequence[int], num_top: int) -> list[TokenLogprobs | None]:
    """One per token of the prompt; nothing precedes the first."""
    pairs = zip(kv_entries(prompt), prompt[1:], strict=False)
    return [None, *(score(entry, token, num_top) for entry, token in pairs)]
