"""Parsers of one answer: its text in pieces in, events out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.parsers.calls import AnswerReader, FormatReader, ToolDefinition
from gateway.parsers.events import EventWriter, ParserEvent
from gateway.parsers.source import Markers, Reading, TextSource


class AnswerParser(Protocol):
    """The parser of one answer. All events together do not depend on how its text is cut."""

    @property
    def num_complete_calls(self) -> int:
        """Calls whose arguments are complete."""

    @property
    def is_inside_call(self) -> bool:
        """The text ends within the markup of a call."""

    def feed(self, text: str) -> list[ParserEvent]:
        """Return what is certain with this further text. Text that may begin a marker waits."""

    def finish(self) -> list[ParserEvent]:
        """Return the rest at the end of the text."""


def finish_reason(reason: str, parser: AnswerParser, *, is_named: bool = False) -> str:
    """Return the finish reason of an answer that ended with `reason`, "stop" or "length".

    It follows what was parsed, after `finish`. OpenAI's table: "stop" for a call of a named function.
    """
    if not parser.num_complete_calls or (reason == "length" and parser.is_inside_call):
        return reason
    if reason not in ("stop", "length"):
        return reason
    return "stop" if is_named and reason == "stop" else "tool_calls"


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """What stands around the reasoning at the start of an answer.

    DeepSeek R1, Qwen 3 and GLM 4.5 write `<think>`, which some chat templates write into the prompt.
    """

    opens: str
    closes: str

    @property
    def markers(self) -> tuple[str, str]:
        return self.opens, self.closes

    def is_open(self, prompt: str) -> bool:
        """Whether the prompt ends with the opening tag."""
        return prompt.rstrip().endswith(self.opens)

    def is_closed(self, prompt: str) -> bool:
        """Whether the prompt ends with the closing tag, with which templates switch the reasoning off."""
        return prompt.rstrip().endswith(self.closes)


class TextParser:
    """Parses by the markup of a model family."""

    def __init__(
        self,
        read_calls: FormatReader,
        reasoning: ReasoningTags | None,
        *,
        prompt: str,
        tools: Sequence[ToolDefinition],
        id_seed: str,
        has_short_ids: bool = False,
    ) -> None:
        self._source = TextSource()
        self._writer = EventWriter(id_seed, has_short_ids=has_short_ids)
        reader = AnswerReader(self._source, self._writer, {tool.name: tool for tool in tools})
        self._reading = _read_answer(reader, read_calls, reasoning, prompt)
        self._is_read = False

    @property
    def num_complete_calls(self) -> int:
        return self._writer.num_complete_calls

    @property
    def is_inside_call(self) -> bool:
        return self._writer.is_inside_call

    def feed(self, text: str) -> list[ParserEvent]:
        if not text:
            return []
        self._source.append(text)
        next(self._reading)
        return self._writer.drain()

    def finish(self) -> list[ParserEvent]:
        self._source.finish()
        for _ in self._reading:
            raise AssertionError("a reader waits for text after the end")
        self._writer.finish()
        return self._writer.drain()


def _read_answer(
    reader: AnswerReader, read_calls: FormatReader, tags: ReasoningTags | None, prompt: str
) -> Reading[None]:
    if tags is not None:
        yield from _read_reasoning(reader, tags, is_open=tags.is_open(prompt))
    yield from read_calls(reader)
    yield from reader.source.rest(reader.writer.content)


def _read_reasoning(reader: AnswerReader, tags: ReasoningTags, *, is_open: bool) -> Reading[None]:
    source, writer = reader.source, reader.writer
    source.hold()
    yield from source.skip_space()
    has_tag = yield from source.literal(tags.opens)
    if not has_tag:
        source.rewind()
        if not is_open:
            return
    source.release()
    writer.boundary()
    if (yield from source.until(Markers(tags.closes), writer.reasoning)) is not None:
        writer.boundary()
