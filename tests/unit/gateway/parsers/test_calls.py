"""Tool calls in the markup of model families, with every cut of the text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.parsers.answer import finish_reason
from gateway.parsers.calls import ToolDefinition, argument_json, types_of
from gateway.parsers.events import ParsedAnswer, ToolCallArguments, ToolCallStart, call_id
from gateway.parsers.families import TOOL_FORMATS
from gateway.parsers.source import MAX_HELD_CHARACTERS, MAX_NAME_CHARACTERS
from tests.unit.gateway.parsers.answers import all_cuts, cut, new_parser, parse
from text.schema_types import ALL_TYPES, SchemaTypes

PARIS = {"city": "Paris"}
OSLO = {"city": "Oslo", "days": 3}
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city":"Oslo","days":3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
DEEPSEEK_V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'
    '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo", "days": 3}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
HERMES = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"arguments": {"city": "Oslo", "days": 3}, "name": "get_weather"}\n</tool_call>'
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n"
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
MISTRAL = (
    '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}, '
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}, "id": "abcdefghi"}]'
)
MISTRAL_V11 = (
    '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}'
    '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo", "days": 3}'
)
LLAMA = (
    '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
    '{"type": "function", "name": "get_weather", "parameters": {"city": "Oslo", "days": 3}}'
)
JSON_LINES = (
    '{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
    '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}}'
)
ANSWERS = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "hermes": HERMES,
    "glm45": GLM,
    "qwen3_coder": CODER,
    "mistral": MISTRAL,
    "mistral_v11": MISTRAL_V11,
    "llama3_json": LLAMA,
    "json": JSON_LINES,
}
MARKED = sorted(set(ANSWERS) - {"llama3_json", "json"})


def calls_of(answer: ParsedAnswer) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("family", sorted(TOOL_FORMATS))
def test_every_family_gives_its_calls_however_the_text_is_cut(family: str) -> None:
    for pieces in all_cuts(ANSWERS[family]):
        parser = new_parser(family)
        answer = parse(parser, pieces)
        assert calls_of(answer) == [("get_weather", PARIS), ("get_weather", OSLO)]
        assert (answer.content, answer.reasoning) == ("", "")
        assert parser.num_complete_calls == 2
        assert not parser.is_inside_call


@pytest.mark.parametrize("family", MARKED)
def test_text_around_calls_is_content_without_the_white_space_at_markers(family: str) -> None:
    for pieces in all_cuts(f"I look it up.\n\n{ANSWERS[family]}\n"):
        answer = parse(new_parser(family), pieces)
        assert answer.content == "I look it up."
        assert len(answer.calls) == 2


@pytest.mark.parametrize("family", sorted(TOOL_FORMATS))
def test_text_without_calls_is_content_to_the_letter(family: str) -> None:
    text = '  a < b [TOOL {"x": 1} <tool_ <｜tool▁call <|python {"name": "nobody"} \n\n'
    for pieces in all_cuts(text):
        assert parse(new_parser(family), pieces) == ParsedAnswer(text)


@pytest.mark.parametrize("family", sorted(TOOL_FORMATS))
def test_without_tools_markup_is_content(family: str) -> None:
    for pieces in ([ANSWERS[family]], cut(ANSWERS[family], 1)):
        assert parse(new_parser(family, tools=()), pieces) == ParsedAnswer(ANSWERS[family])


def test_arguments_stream_before_the_call_ends() -> None:
    parser = new_parser("hermes")
    events = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Par')
    assert events == [
        ToolCallStart(0, call_id("seed", 0), "get_weather"),
        ToolCallArguments(0, '{"city": "Par'),
    ]
    assert parser.feed("is") == [ToolCallArguments(0, "is")]


def test_content_is_held_back_only_while_it_may_begin_a_marker() -> None:
    parser = new_parser("hermes")
    texts = ["".join(getattr(event, "text", "") for event in parser.feed(piece)) for piece in "a <tool_x"]
    assert texts == ["a", "", "", "", "", "", "", "", " <tool_x"]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<tool_call>", "<tool_call>"),
        ("<tool_call>\n{", "<tool_call>\n{"),
        ("<tool_call>nothing</tool_call> x", "<tool_call>nothing</tool_call> x"),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>'),
        ('<tool_call>{"name": "a", "arguments": [1]}', '<tool_call>{"name": "a", "arguments": [1]}'),
        ('<tool_call>{"name": "a", "arguments": }', '<tool_call>{"name": "a", "arguments": }'),
        ('<tool_call>{"name": "a", "other": 1}', '<tool_call>{"name": "a", "other": 1}'),
        ('<tool_call>{"name": "a", "name": "b"}', '<tool_call>{"name": "a", "name": "b"}'),
        ('<tool_call>{"name": "a", "arguments": "no"}', '<tool_call>{"name": "a", "arguments": "no"}'),
    ],
)
def test_markup_that_is_no_call_is_content(text: str, content: str) -> None:
    for pieces in all_cuts(text):
        parser = new_parser("hermes")
        assert parse(parser, pieces) == ParsedAnswer(content)
        assert finish_reason("stop", parser) == "stop"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('<tool_call>{"name": "a"}</tool_call>', "{}"),
        ('<tool_call>{"name": "a", "arguments": null}</tool_call>', "{}"),
        ('<tool_call>{"name": "a", "arguments": {}},</tool_call>', "{}"),
        ('<tool_call>{"name": "a", "arguments": "{\\"b\\": 1}"}</tool_call>', '{"b": 1}'),
        ('<tool_call>{"name": "a", "arguments": {"b": 1, "b": 2}}</tool_call>', '{"b": 1, "b": 2}'),
        ('<tool_call>{"name": "a", "arguments": {"b": "\\ud83d\\ude00é\\n"}}', '{"b": "\\ud83d\\ude00é\\n"}'),
        ('<tool_call>{"name": "a", "arguments": {"b": "1\n2\t"}}', '{"b": "1\\n2\\t"}'),
        ('<tool_call>{"name": "a", "arguments": {"b": "</tool_call>"}}', '{"b": "</tool_call>"}'),
        (
            '<tool_call>{"name": "a", "arguments": {"b": [{}, [], [-1.5e3, true]]}}',
            '{"b": [{}, [], [-1.5e3, true]]}',
        ),
        ('<tool_call><tool_call>{"name": "a", "arguments": { } }', "{ }"),
        ('<tool_call>{"name": "a", "arguments": {}<tool_call>', "{}"),
    ],
)
def test_arguments_are_json_as_the_model_wrote_it(text: str, arguments: str) -> None:
    for pieces in all_cuts(text):
        parser = new_parser("hermes")
        answer = parse(parser, pieces)
        assert [(call.name, call.arguments) for call in answer.calls] == [("a", arguments)]
        json.loads(answer.calls[0].arguments)
        assert finish_reason("stop", parser) == "tool_calls"


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ('{"b": x}', "x}}"),
        ('{"b": 01}', "}}"),
        ('{"b" 1}', "1}}"),
        ('{"b": "\\x"}', '\\x"}}'),
        ("{,}", ",}}"),
    ],
)
def test_invalid_arguments_end_the_call_and_the_rest_is_content(arguments: str, content: str) -> None:
    text = f'<tool_call>{{"name": "a", "arguments": {arguments}}}</tool_call>'
    for pieces in all_cuts(text):
        parser = new_parser("hermes")
        answer = parse(parser, pieces)
        assert answer.content.endswith(content)
        assert parser.num_complete_calls == 0
        assert finish_reason("stop", parser) == "stop"
        assert not parser.is_inside_call


@pytest.mark.parametrize("family", sorted(TOOL_FORMATS))
def test_an_answer_cut_within_a_call_ends_by_length(family: str) -> None:
    text = ANSWERS[family]
    for end in range(len(text)):
        parser = new_parser(family)
        answer = parse(parser, [text[:end]])
        assert len(answer.calls) - parser.num_complete_calls in (0, 1)
        if len(answer.calls) > parser.num_complete_calls:
            assert parser.is_inside_call
        is_whole = parser.num_complete_calls and not parser.is_inside_call
        assert finish_reason("length", parser) == ("tool_calls" if is_whole else "length")
        assert finish_reason("stop", parser) == ("tool_calls" if parser.num_complete_calls else "stop")


@pytest.mark.parametrize("family", MARKED)
def test_the_budget_may_end_within_a_call_after_a_complete_one(family: str) -> None:
    text = ANSWERS[family]
    end = text.rindex("get_weather") + 3
    for pieces in all_cuts(text[:end]):
        parser = new_parser(family)
        assert len(parse(parser, pieces).calls) == parser.num_complete_calls == 1
        assert finish_reason("length", parser) == "length"


def test_finish_reasons_follow_openais_table() -> None:
    parser = new_parser("hermes")
    parse(parser, [HERMES])
    assert finish_reason("stop", parser) == "tool_calls"
    assert finish_reason("length", parser) == "tool_calls"
    assert finish_reason("stop", parser, is_named=True) == "stop"
    assert finish_reason("abort", parser) == "abort"
    assert finish_reason("stop", new_parser("hermes")) == "stop"


def test_llama_calls_behind_a_python_tag_and_only_those_of_known_tools() -> None:
    known = '<|python_tag|>{"name": "clock", "parameters": {}}'
    for pieces in all_cuts("Well. " + known):
        answer = parse(new_parser("llama3_json"), pieces)
        assert (answer.content, calls_of(answer)) == ("Well.", [("clock", {})])
    for text in ('{"name": "Bob", "parameters": {}}', '<|python_tag|>brave_search.call(query="x")'):
        for pieces in all_cuts(text):
            assert parse(new_parser("llama3_json"), pieces) == ParsedAnswer(text)


def test_values_without_quotes_follow_the_schema() -> None:
    def call(key: str, value: str) -> str:
        return (
            f"<tool_call>get_weather\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"
        )

    values = [("zip", "007", '"007"'), ("days", "7", "7"), ("metric", "True", "true"), ("days", "x", '"x"')]
    for key, text, value in [*values, ("tags", '["a"]', '["a"]'), ("new", "5", "5"), ("new", "5a", '"5a"')]:
        for pieces in all_cuts(call(key, text)):
            answer = parse(new_parser("glm45"), pieces)
            assert answer.calls[0].arguments == f'{{"{key}": {value}}}'


def argument(text: str, schema: object, definitions: dict[str, Any] | None = None) -> str:
    return argument_json(text, types_of(schema, SchemaTypes({"$defs": definitions or {}})))


def test_the_types_of_a_value_may_be_a_union() -> None:
    assert argument("3", {"anyOf": [{"type": "integer"}, {"type": "null"}]}) == "3"
    assert argument("null", {"type": ["string", "null"]}) == "null"
    assert argument("3", {"enum": ["3", "4"]}) == '"3"'
    assert argument("NaN", {"type": "number"}) == '"NaN"'
    assert argument("True", {"type": "string"}) == '"True"'
    assert argument("true", {"type": "integer"}) == '"true"'


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"const": "5"}, "5", '"5"'),
        ({"const": 5}, "5", "5"),
        ({"enum": ["1", None]}, "1", '"1"'),
        ({"enum": ["1", None]}, "null", "null"),
        ({"anyOf": [{"const": "1"}, {"const": "2"}]}, "1", '"1"'),
        ({"allOf": [{"type": "string"}]}, "1", '"1"'),
        ({"allOf": [{"type": ["string", "number"]}, {"type": "integer"}]}, "1.5", '"1.5"'),
        ({"anyOf": [{}, {"type": "null"}]}, "5", "5"),
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, '{"x": 1}', '{"x": 1}'),
        ({"anyOf": [{"$ref": "#/$defs/point"}, {"type": "null"}]}, "null", "null"),
        ({"$ref": "#/$defs/point"}, "5", '"5"'),
        ({"$ref": "#/$defs/word"}, "5", '"5"'),
        ({"$ref": "#/$defs/loop"}, "5", "5"),
        ({"$ref": "#/$defs/none"}, "5", "5"),
        ({"$ref": "other.json#/$defs/word"}, "5", "5"),
        ({"type": "number"}, "5", "5"),
        ({"type": "integer"}, "5.5", '"5.5"'),
        ({"type": "string", "const": 5}, "5", "5"),
    ],
)
def test_types_are_those_that_the_schema_allows_through_its_references(
    schema: object, text: str, value: str
) -> None:
    definitions = {
        "point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "word": {"allOf": [{"$ref": "#/$defs/text"}]},
        "text": {"type": "string"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
    }
    assert argument(text, schema, definitions) == value


def test_long_and_branching_chains_of_references_have_an_end() -> None:
    def chain(length: int, branches: int) -> dict[str, Any]:
        links = {
            str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * branches, "title": "x"} for n in range(length)
        }
        return {**links, str(length): {"type": "string"}}

    assert argument("5", {"$ref": "#/$defs/0"}, chain(30, 3)) == '"5"'
    assert argument("5", {"$ref": "#/$defs/0"}, chain(5000, 1)) == "5"


@pytest.mark.parametrize("family", ["glm45", "qwen3_coder"])
@pytest.mark.parametrize("place", ["properties", "$ref", "allOf"])
def test_values_without_quotes_follow_definitions_of_the_schema(family: str, place: str) -> None:
    properties = {"b": {"anyOf": [{"$ref": "#/definitions/P"}, {"type": "null"}]}}
    arguments = {"type": "object", "properties": properties}
    definitions = {"P": {"type": "object"}, "Arguments": arguments}
    reference = {"$ref": "#/definitions/Arguments"}
    whole = {"properties": arguments, "$ref": reference, "allOf": {"allOf": [reference]}}[place]
    tool = ToolDefinition("clock", {**whole, "definitions": definitions})
    texts = {
        "glm45": "<tool_call>clock\n<arg_key>b</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        "qwen3_coder": "<tool_call>\n<function=clock>\n<parameter=b>\n%s\n</parameter>\n"
        "</function>\n</tool_call>",
    }
    for value in ('{"x": 1}', "null"):
        answer = parse(new_parser(family, tools=[tool]), [texts[family] % value])
        assert json.loads(answer.calls[0].arguments) == {"b": json.loads(value)}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": None},
        {"type": 5},
        {"type": [None, 3]},
        {"enum": None},
        {"enum": 7},
        {"anyOf": [{"type": None}]},
    ],
)
def test_a_schema_of_wrong_types_allows_any_value(schema: object) -> None:
    assert argument("5", schema) == "5"
    assert argument("five", schema) == '"five"'


NAME, ARGUMENTS = '{"name": "\\ud83d", "arguments": {}}', '{"name": "clock", "arguments": '
HALF_PAIRS = {
    ARGUMENTS + '{"a": "\\ud83d"}}': '{"a": "\\ufffd"}',
    ARGUMENTS + '{"a": "\\ud83d\\ude00\\ude00\\ud83dx"}}': '{"a": "\\ud83d\\ude00\\ufffd\\ufffdx"}',
    ARGUMENTS + '"{\\"a\\": \\"\\ud83d\\"}"}': '{"a": "\ufffd"}',
    ARGUMENTS + '"{\\"a\\": \\"\\\\ud83d\\"}"}': '{"a": "\\ufffd"}',
    ARGUMENTS + '{"a": "\\ud83d\\n"}}': '{"a": "\\ufffd\\n"}',
}


@pytest.mark.parametrize("body", HALF_PAIRS)
def test_half_of_a_surrogate_pair_in_arguments_is_replaced(body: str) -> None:
    for pieces in all_cuts(f"<tool_call>{body}</tool_call>"):
        assert calls_of(parse(new_parser("hermes"), pieces)) == [("clock", json.loads(HALF_PAIRS[body]))]


@pytest.mark.parametrize("family", ["hermes", "mistral", "llama3_json", "json"])
def test_a_name_with_half_of_a_surrogate_pair_is_no_call(family: str) -> None:
    opens = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(family, "")
    for pieces in all_cuts(opens + NAME):
        assert parse(new_parser(family), pieces) == ParsedAnswer(opens + NAME)


def test_half_of_a_surrogate_pair_in_a_value_without_quotes_is_replaced() -> None:
    assert argument('{"a": "\\ud83d"}', {"type": "object"}) == '{"a": "\\ufffd"}'
    assert argument('"\\ud83d"', {}) == '"\\"\\\\ud83d\\""'


def test_mistrals_ids_are_short_and_the_same_at_each_parse() -> None:
    first, second = (parse(new_parser("mistral"), [MISTRAL]) for _ in range(2))
    assert first == second
    assert all(len(call.id) == 9 and call.id.isalnum() for call in first.calls)
    assert len({call.id for call in first.calls}) == 2
    assert parse(new_parser("hermes"), [HERMES]).calls[0].id.startswith("call_")


PIECES = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<function=a>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *(
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "<parameter=b>",
        "</parameter>",
        "</function>",
    ),
    *(
        '{"name": "clock", "arguments": ',
        '{"name": "clock"',
        '"parameters": ',
        '{"b": 1}',
        "clock",
        "function",
    ),
    *("{", "}", "[", "]", '"', ":", ",", "\\", "\\u12", "1", "true", " ", "\n", ";", "<", "```", "```json\n"),
    *("<think>", "</think>", "text", "é😀"),
]


@given(
    family=st.sampled_from(sorted(TOOL_FORMATS)),
    parts=st.lists(st.sampled_from(PIECES), max_size=25),
    seed=st.integers(0, 1000),
)
def test_hostile_text_gives_the_same_events_for_every_cut(family: str, parts: list[str], seed: int) -> None:
    text = "".join(parts)
    results = []
    for pieces in ([text], list(text), cut(text, seed)):
        parser = new_parser(family, "think")
        results.append((parse(parser, pieces), parser.num_complete_calls, parser.is_inside_call))
    assert results[0] == results[1] == results[2]
    answer, num_complete, _ = results[0]
    valid = [call for call in answer.calls if isinstance(_loads(call.arguments), dict)]
    assert len(valid) == num_complete


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


@pytest.mark.matrix(5)
@pytest.mark.parametrize("family", sorted(TOOL_FORMATS))
@pytest.mark.parametrize(
    "unit", ["<", "<tool_call>", '<tool_call>{"', "[TOOL_CALLS][", " ", "{", '{"name": "']
)
def test_a_megabyte_of_hostile_text_is_content(family: str, unit: str) -> None:
    text = unit * (1_000_000 // len(unit))
    answer = parse(new_parser(family, "think"), [text])
    assert answer.content == text


def test_a_call_whose_name_is_too_far_away_is_content() -> None:
    early = '{"city": "' + "a" * MAX_HELD_CHARACTERS + '"}'
    for text in (
        f'<tool_call>{{"arguments": {early}, "name": "a"}}',
        f"<tool_call>{' ' * (MAX_HELD_CHARACTERS + 1)}{{}}",
    ):
        for pieces in ([text], [text[at : at + 1000] for at in range(0, len(text), 1000)]):
            assert parse(new_parser("hermes"), pieces) == ParsedAnswer(text)
    far = f"<tool_call>{' ' * MAX_HELD_CHARACTERS}clock\n</tool_call>"
    for pieces in ([far], [far[at : at + 1000] for at in range(0, len(far), 1000)]):
        assert parse(new_parser("glm45"), pieces) == ParsedAnswer(far)
    name = "a" * (MAX_NAME_CHARACTERS + 1)
    assert parse(new_parser("glm45"), [f"<tool_call>{name}\n</tool_call>"]).calls == []
    assert len(parse(new_parser("glm45"), [f"<tool_call>{name[1:]}\n</tool_call>"]).calls) == 1


@pytest.mark.parametrize(
    "schema", [{"type": None}, {"type": 5}, {"enum": None}, {"enum": 7}, {"anyOf": [{"type": None}]}, None]
)
def test_a_schema_that_says_nothing_of_types_allows_all(schema: object) -> None:
    assert types_of(schema) == ALL_TYPES
    assert types_of({"type": ["integer", "null"]}) == {"integer", "null"}
