"""One client request: its choices, who reads it, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from coordinator.requests.transcript import Transcript
from coordinator.scheduling.sequence import Sequence
from wire.errors import ServingError, require
from wire.ids import RequestId
from wire.steps import TokenLogprobs

if TYPE_CHECKING:
    from coordinator.requests.attachment import Attachment


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the request's sequences, with the output that the client gets of it."""

    sequence: Sequence
    transcript: Transcript

    @property
    def index(self) -> int:
        return self.sequence.key.choice


class Trace(Protocol):
    """The trace of a request, as far as requests know it."""

    arrived_s: float
    """When the call came, on the engine's clock."""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""

    @property
    def traceparent(self) -> str:
        """W3C's header, of the request's span."""

    @property
    def caller_traceparent(self) -> str:
        """Of the span that it is below, or empty."""


class Request:
    """Lives until each of its choices has finished, or it has ended as a whole with an error.

    `keep_s` None: it ends with the call that reads it. Otherwise it goes on without a reader, and when it has
    ended its output is kept for so long after the last reader has left.
    """

    def __init__(
        self,
        request_id: RequestId,
        choices: Items[Choice],
        *,
        client: str,
        keep_s: float | None = None,
        num_top_prompt_logprobs: int | None = None,
        num_top_echoed: int | None = None,
    ) -> None:
        """Log-probabilities of the prompt, with so many most likely tokens each, are for the client as such,
        and for the transcripts that echo it; None: they are not.
        """
        require(
            [choice.sequence.key for choice in choices]
            == [(request_id, index) for index in range(len(choices))],
            "the choices of a request are its sequences in order",
        )
        self._id = request_id
        self._choices = tuple(choices)
        self.client = client
        self.keep_s = keep_s
        self.num_top_prompt_logprobs = num_top_prompt_logprobs
        self._num_top_echoed = num_top_echoed
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._error: ServingError | None = None
        self._ended_s: float | None = None
        self.attachment: Attachment | None = None
        self.deadline_s: float | None = None
        self.accepted_s = 0.0
        self.left_s = 0.0
        self.num_faults = 0
        self.num_tokens_at_fault = 0
        self.num_deaths_alone = 0
        self.num_setbacks = 0
        """Faults, breaks and deaths that came while steps of it were unfinished."""
        self.num_unrelated_before_deaths = 0
        self.num_device_failures_alone = 0
        self.trace: Trace | None = None
        self.attach_digest = b""
        """Of the secret that Attach and Cancel need; empty: nobody has one."""
        self.num_breaks_alone = 0
        self.num_tokens_before_breaks = 0
        self.awaited_until_s: float | None = None
        """Its reader was cut off by the end of a coordinator, and is expected back until then."""
        self.add_prompt_logprobs(())

    @property
    def id(self) -> RequestId:
        return self._id

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    @property
    def is_live(self) -> bool:
        """It has not ended yet."""
        return self._ended_s is None

    @property
    def is_finished(self) -> bool:
        """The output of every choice is complete. (Sequences know it earlier: one step may end several.)"""
        return all(choice.transcript.is_finished for choice in self._choices)

    @property
    def is_detached(self) -> bool:
        """Nobody reads it, and that is as it should be."""
        return self.attachment is None and self.is_kept

    @property
    def is_kept(self) -> bool:
        """Without a reader it goes on, and its output is kept when it has ended."""
        return self.keep_s is not None or self.awaited_until_s is not None

    @property
    def live_sequences(self) -> list[Sequence]:
        return [choice.sequence for choice in self._choices if choice.sequence.state.is_live]

    @property
    def num_queued(self) -> int:
        """Sequences that wait for blocks."""
        return sum(choice.sequence.state.is_queued for choice in self._choices)

    @property
    def num_generated_tokens(self) -> int:
        """Of all choices."""
        return sum(choice.sequence.num_generated_tokens for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return self._choices[0].sequence.num_prompt_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """The most tokens that one of its sequences may come to."""
        return self.num_prompt_tokens + self._choices[0].sequence.max_tokens

    @property
    def num_known_prompt_logprobs(self) -> int:
        """Leading tokens of the prompt whose log-probabilities are known; the first one has none, and waits
        for the second.
        """
        num_known = len(self._prompt_logprobs) + 1
        return num_known if num_known > 1 or self.num_prompt_tokens == 1 else 0

    @property
    def known_prompt_logprobs(self) -> list[TokenLogprobs]:
        """From the prompt's second token on, with as many of the most likely tokens as were computed."""
        return list(self._prompt_logprobs)

    def prompt_logprobs(self, start: int, end: int) -> tuple[TokenLogprobs | None, ...]:
        """Those of the prompt's tokens [start, end), which are known, as the client wants them."""
        assert self.num_top_prompt_logprobs is not None
        return _with_top([None, *self._prompt_logprobs][start:end], self.num_top_prompt_logprobs)

    @property
    def error(self) -> ServingError | None:
        """What ended it, if it did not finish."""
        return self._error

    @property
    def expires_s(self) -> float | None:
        """When its output is forgotten; None while it is live or read."""
        if self._ended_s is None or self.attachment is not None:
            return None
        return max(max(self._ended_s, self.left_s) + (self.keep_s or 0.0), self.awaited_until_s or 0.0)

    def add_prompt_logprobs(self, logprobs: Items[TokenLogprobs]) -> None:
        """Takes those that follow the known ones."""
        self._prompt_logprobs.extend(logprobs)
        waiting = [choice for choice in self._choices if choice.transcript.is_waiting_for_prompt_logprobs]
        if not waiting or self.num_known_prompt_logprobs < self.num_prompt_tokens:
            return
        assert self._num_top_echoed is not None
        echoed = _with_top([None, *self._prompt_logprobs], self._num_top_echoed)
        for choice in waiting:
            choice.transcript.set_prompt_logprobs(echoed)

    def end(self, now_s: float, error: ServingError | None = None) -> None:
        """Every choice has ended: all of them finished, or `error` ended what was live. Once."""
        require(self._ended_s is None, "a request ends twice")
        require(not self.live_sequences, "a request ends before its last choice")
        self._ended_s = now_s
        self._error = error
        self.wake()

    def wake(self) -> None:
        """There is news for whoever reads."""
        if self.attachment is not None:
            self.attachment.wake()


def _with_top(logprobs: Items[TokenLogprobs | None], num_top: int) -> tuple[TokenLogprobs | None, ...]:
    return tuple(each and replace(each, top=each.top[:num_top]) for each in logprobs)
