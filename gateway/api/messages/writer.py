"""Bodies and events of a message. Content blocks follow the order of the model's answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.answers import AnswerDelta, Answers
from gateway.api.call import Call
from gateway.generation import UsageCounts
from gateway.output import Delta
from gateway.parsers.events import Content, ParserEvent, Reasoning, ToolCallArguments, ToolCallStart
from text.json_text import parse_json
from wire.ids import RequestId

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


def event(kind: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def message_id(request_id: RequestId) -> str:
    return f"msg_{request_id.hex()}"


def usage_body(usage: UsageCounts) -> dict[str, Any]:
    """`usage` of a message; `stageline` is an extension."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
        "stageline": usage.times_body(),
    }


class MessageWriter:
    """Used on the text thread."""

    def __init__(self, call: Call, answers: Answers, usage: UsageCounts) -> None:
        self._call, self._answers, self._usage = call, answers, usage
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self) -> bytes:
        """Return the events before the first output. How much of the prompt is cached is known at the end."""
        return event("message_start", message=self._body([])) + PING

    def delta(self, delta: Delta) -> bytes | None:
        """Return the events of a delta; None while all of the text waits."""
        answer = self._answers.read(delta)
        events = b"".join(part for parser_event in answer.events for part in self._events(parser_event))
        if answer.finish_reason is not None:
            self._finish(answer)
            events += self._close()
        return events or None

    def end(self) -> bytes:
        """Return the events after the last delta."""
        stop = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        return event("message_delta", delta=stop, usage=usage_body(self._usage)) + event("message_stop")

    def add(self, delta: Delta) -> None:
        answer = self._answers.read(delta)
        for parser_event in answer.events:
            for _ in self._events(parser_event):
                pass
        if answer.finish_reason is not None:
            self._finish(answer)

    def whole(self) -> bytes:
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = _arguments(block["input"])
        return orjson.dumps(self._body(self._blocks))

    def _body(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": message_id(self._call.request_id),
            "type": "message",
            "role": "assistant",
            "model": self._call.model,
            "content": content,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": usage_body(self._usage),
        }

    def _events(self, parser_event: ParserEvent) -> Iterator[bytes]:
        """Add to the blocks, and yield what says so. The input of a tool use is text until its end."""
        match parser_event:
            case Content(text):
                yield from self._text("text", text)
            case Reasoning(text):
                yield from self._text("thinking", text)
            case ToolCallStart(_, identifier, name):
                block = {"type": "tool_use", "id": identifier, "name": name, "input": {}}
                yield from self._open(block)
                block["input"] = ""
            case ToolCallArguments(_, fragment):
                self._blocks[-1]["input"] += fragment
                yield self._block_delta(type="input_json_delta", partial_json=fragment)

    def _text(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._open(
                {"type": kind, kind: "", **({"signature": ""} if kind == "thinking" else {})}
            )
        self._blocks[-1][kind] += text
        yield self._block_delta(**{"type": f"{kind}_delta", kind: text})

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield self._close()
        self._blocks.append(block)
        self._is_open = True
        yield event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open = False
        return event("content_block_stop", index=len(self._blocks) - 1)

    def _block_delta(self, **delta: str) -> bytes:
        return event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _finish(self, answer: AnswerDelta) -> None:
        reason = answer.finish_reason or "stop"
        if reason == "stop" and any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_calls"  # of a function that the caller named
        if reason == "stop" and isinstance(answer.stop_reason, str):
            self._stop_reason, self._stop_sequence = "stop_sequence", answer.stop_reason
        else:
            self._stop_reason = _STOP_REASONS.get(reason, "end_turn")


def _arguments(text: str) -> Any:
    """The input of a tool use; an object also where `max_tokens` cut it."""
    found = parse_json(text)
    return found if isinstance(found, dict) else {}
