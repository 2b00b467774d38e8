"""What the tokens of a conversation's answer say: content, reasoning and tool calls. Pure.

The same tokens give the same events and ids of calls wherever they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.generation import UsageCounts
from gateway.output import Delta, StopReason
from gateway.parsers.answer import AnswerParser, finish_reason
from gateway.parsers.events import (
    Content,
    ParsedAnswer,
    ParserEvent,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from stageline_rpc.v1.inference_pb2 import TokenLogprobs


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What new tokens add to the answer of a choice.

    `finish_reason` is set by the last one: "stop", "length", "tool_calls" or "abort".
    """

    choice: int
    events: Sequence[ParserEvent]
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: str | None = None
    stop_reason: StopReason = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """How an answer is read.

    Attributes:
        new_parser: Makes a parser from the seed of the ids of calls; None if all text is content.
        is_named: The caller named the function to call.
        max_calls: Further calls are dropped; None for no limit.
        hides_reasoning: Reasoning is not part of the answer.
        is_call: Apart from reasoning, the answer is a call: a text is one that was cut off.
    """

    new_parser: Callable[[str], AnswerParser] | None = None
    is_named: bool = False
    max_calls: int | None = None
    hides_reasoning: bool = False
    is_call: bool = False


class Answers:
    """Reads the answers of one request; for one thread."""

    def __init__(self, rules: AnswerRules, usage: UsageCounts, num_choices: int, request_id: str) -> None:
        """Reasoning is counted in `usage`; ids of calls are made from `request_id`."""
        self._rules, self._usage = rules, usage
        self._choices = [
            _Answer(rules.new_parser and rules.new_parser(f"{request_id}:{choice}"))
            for choice in range(num_choices)
        ]

    def content(self, delta: Delta) -> str | None:
        """Return the text of a delta that is content alone; None for others, which `read` takes."""
        if delta.finish_reason is not None or self._choices[delta.choice].parser is not None:
            return None
        return delta.text

    def read(self, delta: Delta) -> AnswerDelta:
        """Return what the new text says. Text that may begin a marker waits for more."""
        answer = self._choices[delta.choice]
        if (parser := answer.parser) is None:
            events: list[ParserEvent] = [Content(delta.text)] if delta.text else []
            reason = delta.finish_reason
        else:
            events = parser.feed(delta.text)
            if reason := delta.finish_reason:
                events += parser.finish()
                reason = finish_reason(reason, parser, is_named=self._rules.is_named)
            self._usage.reasoning_tokens += answer.count_reasoning(events, len(delta.token_ids))
        return AnswerDelta(
            delta.choice,
            [event for event in events if self._is_shown(event)],
            delta.token_ids,
            delta.logprobs,
            reason,
            delta.stop_reason,
        )

    def _is_shown(self, event: ParserEvent) -> bool:
        match event:
            case Reasoning():
                return not self._rules.hides_reasoning
            case Content():
                return not self._rules.is_call
            case ToolCallStart() | ToolCallArguments():
                return self._rules.max_calls is None or event.index < self._rules.max_calls


@dataclass(slots=True)
class _Answer:
    parser: AnswerParser | None
    num_waiting: int = 0
    """Tokens whose text waits in the parser."""

    def count_reasoning(self, events: Sequence[ParserEvent], num_tokens: int) -> int:
        """Return how many tokens are reasoning: the tokens of a text that begins with it."""
        self.num_waiting += num_tokens
        if not events:
            return 0
        num, self.num_waiting = self.num_waiting, 0
        return num if isinstance(events[0], Reasoning) else 0


@dataclass(slots=True)
class WholeAnswer:
    """All deltas of a choice together."""

    parsed: ParsedAnswer = field(default_factory=ParsedAnswer)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: StopReason = None

    def add(self, delta: AnswerDelta) -> None:
        self.parsed.add(delta.events)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
