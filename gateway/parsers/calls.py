"""Reads tool calls in the markup of model families, from a text source to events.

Each function reads a whole answer. Markup that turns out to be no call is text: the reader goes back to just
after the marker. A call that breaks off after its start stays incomplete, and the rest of it is text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gateway.parsers.events import EventWriter
from gateway.parsers.source import Markers, Reading, TextSource
from text.json_text import HALF_CHARACTER, is_json_object, parse_json, whole_characters
from text.schema_types import SchemaTypes, properties_of, type_names


@dataclass(frozen=True, slots=True)
class ToolDefinition:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] | None = None
    description: str = ""
    is_strict: bool = False


@dataclass(slots=True)
class AnswerReader:
    """What reading an answer needs."""

    source: TextSource
    writer: EventWriter
    tools: Mapping[str, ToolDefinition] = field(default_factory=dict)

    def begin(self) -> None:
        """An opening marker was read: what follows may be a call."""
        self.writer.is_inside_call = True
        self.source.hold()

    def give_up(self, marker: str) -> None:
        """There is no call: the marker is text, and what follows it is read again."""
        self.writer.is_inside_call = self.source.ended_in_held
        self.source.rewind()
        self.writer.content(marker)

    def start(self, name: str) -> None:
        self.source.release()
        self.writer.start_call(name)

    def arguments(self) -> Reading[bool]:
        """Read the arguments of the started call; False if they are incomplete."""
        if not (yield from self.source.json_value(self.writer.arguments)):
            return False
        self.writer.end_call()
        return True

    def leave(self) -> None:
        """The markup of a call ends."""
        self.writer.is_inside_call = False
        self.writer.boundary()


FormatReader: TypeAlias = Callable[[AnswerReader], Reading[None]]

_HERMES = Markers("<tool_call>")
_HERMES_END = Markers("<tool_call>", "</tool_call>")
_PYTHON_TAG = Markers("<|python_tag|>")
_MISTRAL = Markers("[TOOL_CALLS]")
_DEEPSEEK = Markers("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_END = Markers("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"
_VALUE_END = Markers("</arg_value>")
_PARAMETER_END = Markers("</parameter>")
_KEY_END = Markers("</arg_key>")
_TAG_END = Markers(">")
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type"})


def read_hermes(reader: AnswerReader) -> Reading[None]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, several in a row.

    Hermes 2 Pro and later, Qwen 2.5 and 3: their chat templates, and github.com/NousResearch/
    Hermes-Function-Calling.
    """
    yield from _read_tagged(reader, _read_call_object)


def read_glm(reader: AnswerReader) -> Reading[None]:
    """`<tool_call>name`, `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>`, `</tool_call>`.

    GLM 4.5 and later: their chat template. Strings stand as they are, other values as JSON.
    """
    yield from _read_tagged(reader, _read_glm_call)


def read_qwen3_coder(reader: AnswerReader) -> Reading[None]:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Qwen3-Coder and Qwen 3.5: their chat template. A line break on either side of a value is not part of it.
    """
    yield from _read_tagged(reader, _read_coder_call)


def read_llama3_json(reader: AnswerReader) -> Reading[None]:
    """`{"name": ..., "parameters": {...}}` as the whole answer, or behind `<|python_tag|>`.

    Llama 3.1 and later: github.com/meta-llama/llama-models, models/llama3_1/prompt_format.md. Several calls
    are separated by semicolons. As an answer may be JSON of the user's, only names of tools count.
    """
    reader.begin()
    yield from reader.source.skip_space()
    is_call = yield from _read_known_call(reader)
    if not is_call:
        reader.give_up("")
    while True:
        if is_call:
            is_call = yield from _read_next_call(reader, ";", _read_known_call)
        elif (marker := (yield from reader.source.until(_PYTHON_TAG, reader.writer.content))) is not None:
            reader.begin()
            yield from reader.source.skip_space()
            is_call = yield from _read_known_call(reader)
            if not is_call:
                reader.give_up(marker)
        else:
            return


def read_mistral(reader: AnswerReader) -> Reading[None]:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` per call.

    Tokenizers up to version 7 and from version 11 on, of which some write `[CALL_ID]id` before `[ARGS]`:
    docs of mistral-common, and the chat templates.
    """
    source = reader.source
    while (marker := (yield from source.until(_MISTRAL, reader.writer.content))) is not None:
        reader.begin()
        yield from source.skip_space()
        if (yield from source.literal("[")):
            yield from source.skip_space()
            is_call = yield from _read_call_object(reader)
            has_next = is_call
            while has_next:
                has_next = yield from _read_next_call(reader, ",", _read_call_object)
            if is_call:
                yield from source.skip_space()
                yield from source.literal("]")
        elif (yield from source.peek()) == "{":
            is_call = yield from _read_call_object(reader)
        else:
            is_call = yield from _read_mistral_call(reader)
        if not is_call:
            reader.give_up(marker)


def read_deepseek(reader: AnswerReader) -> Reading[None]:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, arguments in a JSON fence, `<｜tool▁call▁end｜>`.

    DeepSeek V3 and R1; V3.1 writes `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}`. The markers for all calls
    around them are not text: model cards and chat templates.
    """
    source, markers = reader.source, _DEEPSEEK
    while (marker := (yield from source.until(markers, reader.writer.content))) is not None:
        if marker != _DEEPSEEK_CALL:
            reader.leave()
            markers = _DEEPSEEK
            continue
        reader.begin()
        if (yield from _read_deepseek_call(reader)):
            yield from source.skip_space()
            yield from source.literal(_FENCE)
            markers = _DEEPSEEK_END
        else:
            reader.give_up(marker)


def read_json(reader: AnswerReader) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}`, one per line: for models without a format."""
    reader.begin()
    yield from reader.source.skip_space()
    is_call = yield from _read_known_call(reader)
    if not is_call:
        reader.give_up("")
    while is_call:
        is_call = yield from _read_next_call(reader, "", _read_known_call)
    yield from reader.source.rest(reader.writer.content)


def read_no_calls(reader: AnswerReader) -> Reading[None]:
    """All text is content."""
    yield from reader.source.rest(reader.writer.content)


def _read_tagged(reader: AnswerReader, read_call: Callable[[AnswerReader], Reading[bool]]) -> Reading[None]:
    """Read calls between `<tool_call>` and `</tool_call>`; a second marker without the end is a new call."""
    source, markers = reader.source, _HERMES
    while (marker := (yield from source.until(markers, reader.writer.content))) is not None:
        if marker == "</tool_call>":
            reader.leave()
            markers = _HERMES
            continue
        reader.begin()
        yield from source.skip_space()
        if (yield from read_call(reader)):
            markers = _HERMES_END
        else:
            reader.give_up(marker)


def _read_next_call(
    reader: AnswerReader, separator: str, read_call: Callable[[AnswerReader], Reading[bool]]
) -> Reading[bool]:
    """Read a further call of a list; False, without reading anything, if there is none."""
    if reader.writer.is_inside_call:  # the last one broke off
        return False
    reader.begin()
    yield from reader.source.skip_space()
    if not separator or (yield from reader.source.literal(separator)):
        yield from reader.source.skip_space()
        if (yield from read_call(reader)):
            return True
    reader.give_up("")
    return False


def _read_mistral_call(reader: AnswerReader) -> Reading[bool]:
    source = reader.source
    name = yield from source.name()
    if (yield from source.literal("[CALL_ID]")):
        yield from source.name()
    yield from source.literal("[ARGS]")
    return (yield from _read_arguments(reader, name))


def _read_deepseek_call(reader: AnswerReader) -> Reading[bool]:
    source = reader.source
    name = yield from source.name()
    if not (yield from source.literal(_SEPARATOR)):
        return False
    yield from source.skip_space()
    if (yield from source.peek()) != "{":
        name = yield from source.name()
        yield from source.skip_space()
        if (yield from source.literal(_FENCE)):
            yield from source.literal("json")
    return (yield from _read_arguments(reader, name))


def _read_arguments(reader: AnswerReader, name: str) -> Reading[bool]:
    """Read the arguments of a call whose name is known; False if none begin here."""
    yield from reader.source.skip_space()
    if not name or (yield from reader.source.peek()) != "{" or reader.source.is_overfull:
        return False
    reader.start(name)
    yield from reader.arguments()
    return True


def _read_glm_call(reader: AnswerReader) -> Reading[bool]:
    source = reader.source
    name = yield from source.name()
    yield from source.skip_space()
    if not name or not (yield from source.sees("<arg_key>", "</tool_call>")):
        return False
    arguments = _ArgumentsWriter(reader, name)
    while (yield from source.literal("<arg_key>")):
        key: list[str] = []
        value: list[str] = []
        yield from source.until(_KEY_END, key.append)
        yield from source.skip_space()
        yield from source.literal("<arg_value>")
        if (yield from source.until(_VALUE_END, value.append)) is None:
            arguments.give_up(value)
            return True
        arguments.add("".join(key), "".join(value))
        yield from source.skip_space()
    if (yield from source.sees("</tool_call>")):
        arguments.end()
    return True


def _read_coder_call(reader: AnswerReader) -> Reading[bool]:
    source = reader.source
    if not (yield from source.literal("<function=")):
        return False
    name = yield from source.name()
    if not name or not (yield from source.literal(">")):
        return False
    arguments = _ArgumentsWriter(reader, name)
    yield from source.skip_space()
    while (yield from source.literal("<parameter=")):
        key: list[str] = []
        value: list[str] = []
        yield from source.until(_TAG_END, key.append)
        if (yield from source.until(_PARAMETER_END, value.append)) is None:
            arguments.give_up(value)
            return True
        arguments.add("".join(key), "".join(value).removeprefix("\n").removesuffix("\n"))
        yield from source.skip_space()
    if (yield from source.literal("</function>")):
        arguments.end()
    return True


class _ArgumentsWriter:
    """Writes arguments that are not JSON as the members of a JSON object; begins the call."""

    def __init__(self, reader: AnswerReader, name: str) -> None:
        self._writer = reader.writer
        tool = reader.tools.get(name)
        schema = {} if tool is None or tool.parameters is None else tool.parameters
        self._types = SchemaTypes(schema)
        self._properties = properties_of(schema)
        self._separator = "{"
        reader.start(name)

    def add(self, key: str, text: str) -> None:
        value = argument_json(text, types_of(self._properties.get(key), self._types))
        self._writer.arguments(f"{self._separator}{json.dumps(key, ensure_ascii=False)}: {value}")
        self._separator = ", "

    def end(self) -> None:
        self._writer.arguments("}" if self._separator == ", " else "{}")
        self._writer.end_call()

    def give_up(self, value: list[str]) -> None:
        """The text ends within a value, which is text then."""
        self._writer.content("".join(value))


def types_of(schema: object, known: SchemaTypes | None = None) -> AbstractSet[str]:
    """Types of JSON that a schema allows; `known` has the whole one where it is a part."""
    whole = schema if isinstance(schema, dict) else {}
    return (known or SchemaTypes(whole)).allowed(schema).types


def argument_json(text: str, types: AbstractSet[str]) -> str:
    """Return an argument that stands without quotes as JSON of one of these types."""
    word = _PYTHON_WORDS.get(text.strip(), text)
    value = parse_json(word)
    if isinstance(value, str) or not type_names(value) & types:
        return json.dumps(text, ensure_ascii=False)
    return whole_characters(word.strip())


_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def _read_call_object(reader: AnswerReader) -> Reading[bool]:
    """Read `{"name": ..., "arguments": {...}}`, in any order; False if this is no call."""
    return (yield from _CallObject(reader).read())


def _read_known_call(reader: AnswerReader) -> Reading[bool]:
    """`_read_call_object` for names of tools alone."""
    return (yield from _CallObject(reader, reader.tools).read())


class _CallObject:
    """The JSON object of one call. Unknown keys make it no call."""

    def __init__(self, reader: AnswerReader, names: Mapping[str, object] | None = None) -> None:
        self._reader, self._source, self._writer = reader, reader.source, reader.writer
        self._names = names
        self._name: str | None = None
        self._early: str | None = None
        self._is_started = False

    def read(self) -> Reading[bool]:
        source = self._source
        if not (yield from source.literal("{")):
            return False
        yield from source.skip_space()
        while not (yield from source.sees("}")):
            if not (yield from self._member()):
                return self._is_started
            yield from source.skip_space()
            if not (yield from source.literal(",")):
                break
            yield from source.skip_space()
        if (yield from source.literal("}")):
            self._start("{}")
        return self._is_started

    def _member(self) -> Reading[bool]:
        """Read a key and its value; False where the object cannot go on."""
        source = self._source
        key = yield from source.json_string()
        yield from source.skip_space()
        if key is None or not (yield from source.literal(":")):
            return False
        yield from source.skip_space()
        if key == "name" and self._name is None:
            return (yield from self._read_name())
        if key in _ARGUMENT_KEYS and self._early is None and not self._is_started:
            return (yield from self._read_arguments())
        return key in _OTHER_KEYS and (yield from source.json_value(lambda _: None))

    def _read_name(self) -> Reading[bool]:
        name = yield from self._source.json_string()
        if not name or HALF_CHARACTER in name or (self._names is not None and name not in self._names):
            return False
        self._name = name
        if self._early is not None:
            self._start(self._early)
        return True

    def _read_arguments(self) -> Reading[bool]:
        """Pass the arguments on, or keep them until the name is known."""
        if self._name is not None and (yield from self._source.peek()) == "{":
            self._is_started = True
            self._reader.start(self._name)
            return (yield from self._reader.arguments())
        parts: list[str] = []
        if not (yield from self._source.json_value(parts.append)):
            return False
        value = parse_json(text := "".join(parts))
        if value is None:
            text = "{}"
        elif isinstance(value, str):  # JSON within a string
            text = whole_characters(value)
        if not is_json_object(text):
            return False
        self._early = text
        if self._name is not None:
            self._start(text)
        return True

    def _start(self, arguments: str) -> None:
        """Write the whole call, unless it has started."""
        if self._is_started or self._name is None:
            return
        self._is_started = True
        self._reader.start(self._name)
        self._writer.arguments(arguments)
        self._writer.end_call()
