"""Events and body of a response, from its tokens. Pure: the same tokens give the same bytes.

A response can be read again from any event, at another gateway and in other portions of tokens than before.
So the unit is the token: text, calls and events of a token are complete before the next one is looked at,
and an event's sequence number depends on the tokens before it alone, never on when they arrived.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from gateway.answers import AnswerRules, Answers
from gateway.api.logprobs import LogprobWriter
from gateway.api.responses.stored import StoredResponse, item_id
from gateway.generation import UsageCounts
from gateway.output import ChoiceOutput, OutputRules
from gateway.parsers.events import Content, ParserEvent, Reasoning, ToolCallArguments, ToolCallStart
from gateway.upstream.contract import UpstreamFailure
from stageline_rpc.v1 import inference_pb2
from stageline_rpc.v1.inference_pb2 import TokenLogprobs

ALL_EVENTS = -1
NO_EVENTS = 1 << 62
"""Sequence numbers after which events are written."""

_RATE_LIMITED = ("OVERLOADED",)


class Status(Enum):
    """Status of a response."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class ResponseRules:
    """How tokens become text, and text an answer."""

    output: OutputRules
    answer: AnswerRules


class _Kind(Enum):
    MESSAGE = "msg"
    REASONING = "rs"
    CALL = "fc"


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written; `body` is the item, `part` its content part."""

    kind: _Kind
    body: dict[str, Any]
    part: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, text: str) -> None:
        self.texts.append(text)


class ResponseWriter:
    """Writes one response. Events up to `after` are counted and not written."""

    def __init__(
        self,
        identity: str,
        stored: StoredResponse,
        rules: ResponseRules,
        logprobs: LogprobWriter,
        *,
        after: int = ALL_EVENTS,
    ) -> None:
        self.identity, self._stored = identity, stored
        self._counts = UsageCounts()
        self._output = ChoiceOutput(0, rules.output, stored.prompt_tail)
        self._answers = Answers(rules.answer, self._counts, 1, identity[5:37])  # without the secret
        self._logprobs = logprobs
        self._num_top = stored.request.top_logprobs or 0
        self._after = after
        self._next_number = 0
        self._frames: list[bytes] = []
        self._status = Status.QUEUED if stored.request.background else Status.IN_PROGRESS
        self._items: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._rows: list[dict[str, Any]] = []
        self._ending: dict[str, Any] = {}
        self._usage: inference_pb2.Usage | None = None
        self.num_tokens = 0

    @property
    def items(self) -> Sequence[Mapping[str, Any]]:
        """The items of the output so far."""
        return [*self._items, *([] if self._open is None else [self._snapshot(self._open)])]

    @property
    def is_over(self) -> bool:
        return self._status not in (Status.QUEUED, Status.IN_PROGRESS)

    def begin(self) -> bytes:
        """Events before the first token."""
        self._emit_response("response.created")
        if self._status is Status.QUEUED:
            self._emit_response("response.queued")
        else:
            self._emit_response("response.in_progress")
        return self._take()

    def push(self, token_ids: Sequence[int], rows: Sequence[TokenLogprobs]) -> bytes:
        """Events of new tokens."""
        self._start()
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if rows:
                self._rows += self._logprobs.chat([rows[index]], self._num_top)["content"]
            self._write(self._answers.read(self._output.push((token_id,), ())).events)
        return self._take()

    def end(self, *, is_cut: bool, usage: inference_pb2.Usage) -> bytes:
        """The last events; `is_cut` if the number of tokens was exhausted."""
        self._start()
        self._write(self._answers.read(self._output.finish("length" if is_cut else "stop")).events)
        if self._open is None and not self._items:
            self._open_text(_Kind.MESSAGE)
        self._usage = usage
        self._close("incomplete" if is_cut else "completed")
        if is_cut:
            self._ending = {"incomplete_details": {"reason": "max_output_tokens"}}
        self._status = Status.INCOMPLETE if is_cut else Status.COMPLETED
        self._emit_response(f"response.{self._status.value}")
        return self._take()

    def fail(self, failure: UpstreamFailure) -> bytes:
        """The last event of a response that failed or was cancelled, with the output until then."""
        self._start()
        if failure.reason == "REQUEST_CANCELLED":
            self._status = Status.CANCELLED
        else:
            self._status = Status.FAILED
            code = "rate_limit_exceeded" if failure.reason in _RATE_LIMITED else "server_error"
            self._ending = {"error": {"code": code, "message": failure.message}}
        self._emit_response("response.failed")
        return self._take()

    def interruption(self, error: Mapping[str, Any]) -> bytes:
        """An event for a stream that cannot go on, of a response that may.

        It has the number of the event before it: a reader that continues after it misses nothing.
        """
        event = {"type": "error", **{name: error[name] for name in ("code", "message", "param")}}
        return _frame("error", {**event, "sequence_number": max(self._next_number - 1, 0)})

    def body(self) -> dict[str, Any]:
        """The response as it is now."""
        request, stored = self._stored.request, self._stored
        return {
            "id": self.identity,
            "object": "response",
            "created_at": stored.created,
            "status": self._status.value,
            "background": bool(request.background),
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "model": stored.model,
            "output": self.items,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {
                "effort": None if request.reasoning is None else request.reasoning.effort,
                "summary": None,
            },
            "service_tier": "default",
            "store": request.is_stored,
            "temperature": stored.temperature,
            "text": _text_body(stored),
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": request.tools or [],
            "top_logprobs": self._num_top,
            "top_p": stored.top_p,
            "truncation": "disabled",
            "usage": None if self._usage is None else self._usage_body(self._usage),
            **self._stored.labels,
            "metadata": request.metadata or {},
            **self._ending,
        }

    def _start(self) -> None:
        if self._status is Status.QUEUED:
            self._status = Status.IN_PROGRESS
            self._emit_response("response.in_progress")

    def _write(self, events: Sequence[ParserEvent]) -> None:
        for event in events:
            match event:
                case Content(text):
                    self._add_text(_Kind.MESSAGE, text)
                case Reasoning(text):
                    self._rows.clear()
                    self._add_text(_Kind.REASONING, text)
                case ToolCallStart(_, call_id, name):
                    self._rows.clear()
                    self._close("completed")
                    body = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                    self._open_item(_Kind.CALL, body)
                case ToolCallArguments(_, fragment):
                    assert self._open is not None
                    self._open.add(fragment)
                    self._emit("response.function_call_arguments.delta", delta=fragment)

    def _add_text(self, kind: _Kind, text: str) -> None:
        if self._open is None or self._open.kind is not kind:
            self._close("completed")
            self._open_text(kind)
        assert self._open is not None
        self._open.add(text)
        if kind is _Kind.MESSAGE:
            rows, self._rows = self._rows, []
            self._open.part["logprobs"] += rows
            self._emit("response.output_text.delta", content_index=0, delta=text, logprobs=rows)
        else:
            self._emit("response.reasoning_text.delta", content_index=0, delta=text)

    def _open_text(self, kind: _Kind) -> None:
        if kind is _Kind.MESSAGE:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = self._open_item(kind, {"type": "message", "role": "assistant", "content": []})
        else:
            part = {"type": "reasoning_text", "text": ""}
            item = self._open_item(kind, {"type": "reasoning", "summary": [], "content": []})
        item.part = part
        self._emit("response.content_part.added", content_index=0, part=dict(part))

    def _open_item(self, kind: _Kind, body: Mapping[str, Any]) -> _OpenItem:
        identity = item_id(kind.value, self.identity, len(self._items))
        item = self._open = _OpenItem(kind, {"id": identity, **body, "status": "in_progress"})
        self._emit_item("response.output_item.added", item.body)
        return item

    def _close(self, status: str) -> None:
        """End the open item, if there is one."""
        if (item := self._open) is None:
            return
        text = item.text
        match item.kind:
            case _Kind.MESSAGE:
                rows = item.part["logprobs"]
                self._emit("response.output_text.done", content_index=0, text=text, logprobs=rows)
            case _Kind.REASONING:
                self._emit("response.reasoning_text.done", content_index=0, text=text)
            case _Kind.CALL:
                name = item.body["name"]
                self._emit("response.function_call_arguments.done", name=name, arguments=text)
        if item.part:
            self._emit("response.content_part.done", content_index=0, part={**item.part, "text": text})
        body = {**self._snapshot(item), "status": status}
        self._emit_item("response.output_item.done", body)
        self._items.append(body)
        self._open = None

    def _snapshot(self, item: _OpenItem) -> dict[str, Any]:
        body = {**item.body, "status": "incomplete"} if self.is_over else dict(item.body)
        if item.kind is _Kind.CALL:
            return {**body, "arguments": item.text}
        return {**body, "content": [{**item.part, "text": item.text}]}

    def _usage_body(self, usage: inference_pb2.Usage) -> dict[str, Any]:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._counts.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "stageline": {"restarts": usage.restarts},  # no times: a restarted coordinator measures others
        }

    def _emit_response(self, kind: str) -> None:
        self._put(kind, lambda: {"response": self.body()})

    def _emit_item(self, kind: str, item: Mapping[str, Any]) -> None:
        self._put(kind, lambda: {"output_index": len(self._items), "item": item})

    def _emit(self, kind: str, **fields: Any) -> None:
        assert self._open is not None
        item_id = self._open.body["id"]
        self._put(kind, lambda: {"item_id": item_id, "output_index": len(self._items), **fields})

    def _put(self, kind: str, fields: Any) -> None:
        number, self._next_number = self._next_number, self._next_number + 1
        if number > self._after:
            self._frames.append(_frame(kind, {"type": kind, "sequence_number": number, **fields()}))

    def _take(self) -> bytes:
        frames, self._frames = self._frames, []
        return b"".join(frames)


def to_json(value: Mapping[str, Any]) -> bytes:
    """Encode what a client sent too, such as integers of its schemas that orjson cannot encode."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, separators=(",", ":")).encode()


def _frame(kind: str, event: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + to_json(event) + b"\n\n"


def _text_body(stored: StoredResponse) -> dict[str, Any]:
    text = stored.request.text
    form = None if text is None or text.format is None else text.format
    return {
        "format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True),
        "verbosity": "medium",
    }
