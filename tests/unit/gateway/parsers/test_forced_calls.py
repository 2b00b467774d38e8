"""Grammars that force calls accept what the parsers read, and nothing else."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher
from tokenizers import AddedToken, Tokenizer

from checkpoint.grammar_tokenizer import GrammarError, GrammarTokenizer
from gateway.parsers.answer import finish_reason
from gateway.parsers.calls import ToolDefinition
from gateway.parsers.families import TOOL_FORMATS
from gateway.parsers.forced_calls import (
    ForcedCalls,
    OversizedTools,
    UnenforceableSchema,
    call_grammar,
    special_marker_ids,
)
from tests.unit.gateway.parsers.answers import CLOCK, TOOLS, WEATHER, choice_of, parse
from tests.unit.gateway.parsers.test_calls import ANSWERS
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer
from text import json_schema
from text.grammars import GrammarCompiler, GrammarKind
from text.tokenizer import TextCodec, load_text_codec

VOCAB_SIZE = 500
EOS = (2,)
EMPTY_CALL = {
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "glm45": "<tool_call>clock\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
    "mistral_v11": "[TOOL_CALLS]clock[ARGS]{}",
    "llama3_json": '{"name": "clock", "parameters": {}}',
    "json": '{"name": "clock", "arguments": {}}',
}
ODD_FORMS = {
    "deepseek_v3": ('{"city":"Oslo","days":3}', '{"city": "Oslo", "days": 3}'),
    "hermes": ('"arguments": {"city": "Oslo", "days": 3}, "name": "get_weather"',) * 2,
    "mistral": (', "id": "abcdefghi"', ""),
    "mistral_v11": ("[CALL_ID]abcdefghi", ""),
    "llama3_json": ('"type": "function", ', ""),
}
"""Parts of the answers that are read but never forced, and what is forced instead."""
FORCED = {family: text.replace(*ODD_FORMS.get(family, ("", ""))) for family, text in ANSWERS.items()}
FORCED["hermes"] = ANSWERS["hermes"].replace(
    ODD_FORMS["hermes"][0], '"name": "get_weather", "arguments": {"city": "Oslo", "days": 3}'
)


@cache
def tokenizer_json(special: tuple[str, ...]) -> str:
    tokenizer = Tokenizer.from_str(byte_level())
    tokenizer.add_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer.to_str()


class Model:
    """A small tokenizer, with or without special tokens for markers, and its grammars."""

    def __init__(self, directory: Path, special: tuple[str, ...] = ()) -> None:
        save_tokenizer(directory, tokenizer_json(special))
        self._compiler = GrammarCompiler(directory, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        self._tables = GrammarTokenizer.open(directory, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
        codec = load_text_codec(directory)
        assert codec is not None
        self.codec: TextCodec = codec

    def accepts(self, family: str, forced: ForcedCalls, *texts: str) -> bool:
        """Whether the texts, which are tokenized one by one, are an answer."""
        tool_format = TOOL_FORMATS[family]
        tags = forced.reasoning
        markers = (*tool_format.markers, *((tags.opens, tags.closes) if tags else ()))
        forced = dataclasses.replace(forced, special_ids=special_marker_ids(markers, self.codec))
        spec = self._compiler.compile(GrammarKind.GRAMMAR, [call_grammar(tool_format, forced)])
        matcher = self._tables.matcher(spec.definition)
        try:
            for text in texts:
                matcher.consume(self.codec.spellings(text)[0])
        except GrammarError:
            return False
        return matcher.is_accepting


@pytest.fixture(params=["plain", "special"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    markers = sorted({marker for each in TOOL_FORMATS.values() for marker in each.markers} | {"</think>"})
    return Model(tmp_path, tuple(markers) if request.param == "special" else ())


FAMILIES = sorted(TOOL_FORMATS)
BOTH = ForcedCalls(tools=TOOLS)


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_calls_are_those_that_the_parser_reads(model: Model, family: str) -> None:
    for text, num_calls in ((FORCED[family], 2), (EMPTY_CALL[family], 1)):
        assert model.accepts(family, BOTH, text)
        parser = choice_of(family).new_parser(prompt="", tools=TOOLS, id_seed="", is_forced=True)
        answer = parse(parser, [text])
        assert (len(answer.calls), parser.num_complete_calls, answer.content) == (num_calls, num_calls, "")
        assert finish_reason("stop", parser) == "tool_calls"


@pytest.mark.parametrize("family", FAMILIES)
def test_neither_text_nor_broken_nor_unknown_calls_are_accepted(model: Model, family: str) -> None:
    call = EMPTY_CALL[family]
    for text in ("Yes.", f"x{call}", f"{call}x", call[:-1], call.replace("clock", "clocks")):
        assert not model.accepts(family, BOTH, text)
    assert not model.accepts(family, BOTH, FORCED[family].replace("days", "hours"))
    assert not model.accepts(family, BOTH, FORCED[family].replace("3", '"three"'))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_named_choice_and_one_call_at_a_time(model: Model, family: str) -> None:
    assert not model.accepts(family, ForcedCalls(tools=[WEATHER]), EMPTY_CALL[family])
    assert model.accepts(family, ForcedCalls(tools=[CLOCK]), EMPTY_CALL[family])
    single = ForcedCalls(tools=TOOLS, is_parallel=False)
    assert model.accepts(family, single, EMPTY_CALL[family])
    assert not model.accepts(family, single, FORCED[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_reasoning_may_come_before_the_call(model: Model, family: str) -> None:
    tags = choice_of("none", "think").reasoning
    closed = ForcedCalls(tools=TOOLS, reasoning=tags)
    opened = ForcedCalls(tools=TOOLS, reasoning=tags, is_reasoning_open=True)
    call = EMPTY_CALL[family]
    assert model.accepts(family, closed, f"<think>\nHm {{.\n</think>\n\n{call}")
    assert model.accepts(family, closed, call)
    assert model.accepts(family, opened, f"Hm.</think>{call}")
    assert not model.accepts(family, opened, call)
    assert not model.accepts(family, opened, "Hm.</think>Yes.")


@pytest.mark.parametrize("family", FAMILIES)
def test_strict_tools_may_stay_uncalled_but_not_be_called_otherwise(model: Model, family: str) -> None:
    optional = ForcedCalls(tools=TOOLS, is_required=False)
    has_marker = bool(TOOL_FORMATS[family].markers) and family != "llama3_json"
    assert model.accepts(family, optional, "I know: 5 < 6.\n")
    assert model.accepts(family, optional, FORCED[family])
    assert model.accepts(family, optional, f"I look it up.\n{FORCED[family]}") or not has_marker
    if has_marker:
        marker = TOOL_FORMATS[family].markers[0]
        assert model.accepts(family, optional, "Hm. ", marker[:3])
        assert not model.accepts(family, optional, "Hm. ", marker[:3], marker[3:])
        assert not model.accepts(family, optional, f"Hm. {EMPTY_CALL[family].replace('clock', 'clocks')}")
    assert not model.accepts(family, optional, EMPTY_CALL[family].replace("clock", "clocks"))


STRING = {"type": "string"}


@pytest.mark.parametrize("family", ["glm45", "qwen3_coder"])
def test_values_without_quotes_follow_their_types(model: Model, family: str) -> None:
    begin, end = ("<arg_key>", "</arg_value>\n") if family == "glm45" else ("<parameter=", "\n</parameter>\n")
    middle = "</arg_key>\n<arg_value>" if family == "glm45" else ">\n"
    properties = {
        "a": {"enum": ["x", "y"]},
        "b": {"type": "array", "items": {"$ref": "#/$defs/s"}},
        "c": STRING,
    }
    schema = {"type": "object", "$defs": {"s": STRING}, "properties": properties, "required": ["c"]}
    tool = ToolDefinition("clock", schema)
    forced = ForcedCalls(tools=[tool])

    def accepts(**values: str) -> bool:
        texts = "".join(f"{begin}{key}{middle}{value}{end}" for key, value in values.items())
        closing = "</tool_call>" if family == "glm45" else "</function>"
        return model.accepts(family, forced, EMPTY_CALL[family].replace(closing, texts + closing, 1))

    assert accepts(a="x", b='["u"]', c="any\n<text> \"'")
    assert accepts(c="")
    assert not accepts(a="x")
    assert not accepts(a="z", c="t")
    assert not accepts(b="u", c="t")
    assert not accepts(c="t", a="x")


RAW_CALLS = {
    "glm45": "<tool_call>clock\n<arg_key>b</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=clock>\n<parameter=b>\n%s\n</parameter>\n</function>\n"
    "</tool_call>",
}
NULL = {"type": "null"}
DEFINITIONS = {
    "flag": {"type": "boolean"},
    "point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]},
    "words": {"type": "array", "items": {"$ref": "#/$defs/word"}},
    "word": {"enum": ["up", "down"]},
    "tree": {
        "type": "object",
        "properties": {"left": {"$ref": "#/$defs/tree"}, "at": {"$ref": "#/$defs/point"}},
    },
}


@pytest.mark.parametrize("family", RAW_CALLS)
@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"anyOf": [{"$ref": "#/$defs/flag"}, NULL]}, ("true", "null"), ("yes", "3")),
        ({"$ref": "#/$defs/point"}, ('{"x": 1}',), ('{"x": "1"}', "{}", "text")),
        ({"anyOf": [{"$ref": "#/$defs/point"}, NULL]}, ('{"x": 1}', "null"), ('{"x": "1"}', "text")),
        ({"$ref": "#/$defs/words"}, ('["up"]', "[]"), ('["left"]', "up")),
        ({"anyOf": [{"$ref": "#/$defs/word"}, NULL]}, ("up", "null"), ("left", "3", '"up"')),
        ({"anyOf": [{"const": "up"}, {"const": 3}]}, ("up", "3"), ("left", "4")),
        ({"$ref": "#/$defs/tree"}, ('{"left": {"at": {"x": 1}}}',), ('{"left": {"at": {"x": "1"}}}',)),
        ({"allOf": [{"$ref": "#/$defs/word"}]}, ("up",), ("left",)),
        ({"type": "array", "items": {"$ref": "#/properties/c"}}, ("[true]",), ('["true"]',)),
        ({"anyOf": [STRING, NULL]}, ("text", "null", "3"), ()),
    ],
)
def test_strict_values_without_quotes_follow_definitions_of_the_schema(
    family: str,
    schema: dict[str, Any],
    right: tuple[str, ...],
    wrong: tuple[str, ...],
    tmp_path: Path,
) -> None:
    properties = {"b": schema, "c": {"type": "boolean"}}
    whole = {"type": "object", "$defs": DEFINITIONS, "properties": properties, "required": ["b"]}
    forced = ForcedCalls(tools=[ToolDefinition("clock", whole, is_strict=True)])
    model = Model(tmp_path)
    for value in right:
        assert model.accepts(family, forced, RAW_CALLS[family] % value)
    for value in wrong:
        assert not model.accepts(family, forced, RAW_CALLS[family] % value)


@pytest.mark.parametrize("family", RAW_CALLS)
def test_values_without_quotes_are_forced_where_the_schema_itself_is_a_reference(
    family: str, tmp_path: Path
) -> None:
    arguments = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    schema = {"$ref": "#/definitions/A", "definitions": {"A": arguments}}
    model = Model(tmp_path)
    for is_strict in (True, False):
        forced = ForcedCalls(tools=[ToolDefinition("clock", schema, is_strict=is_strict)])
        assert model.accepts(family, forced, RAW_CALLS[family] % "true")
        assert not model.accepts(family, forced, RAW_CALLS[family] % "yes")
        assert not model.accepts(family, forced, EMPTY_CALL[family])


@pytest.mark.parametrize("family", RAW_CALLS)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"properties": {"b": {"$ref": "#/$defs/s"}}}, "'pattern' of 'b'"),
        ({"properties": {"b": {"anyOf": [STRING, {"$ref": "#/$defs/list"}]}}}, "'items' of 'b'"),
        ({"properties": {"b": {"anyOf": [STRING, {"type": "integer", "minimum": 1}]}}}, "'minimum' of 'b'"),
        ({"properties": {"b": {"anyOf": [STRING, {"const": 5}]}}}, "'enum' of 'b'"),
        ({"properties": {"b": {"$ref": "#s"}}}, "'\\$ref' of 'b'"),
        (
            {"properties": {"b": STRING}, "required": ["b"], "minProperties": 2},
            "'minProperties' of arguments",
        ),
        ({"anyOf": [{"properties": {"b": STRING}}]}, "'anyOf' of arguments"),
    ],
)
def test_what_cannot_be_enforced_of_strict_values_without_quotes_is_named(
    family: str, schema: dict[str, Any], reason: str
) -> None:
    definitions = {
        "s": {"$anchor": "s", "type": "string", "pattern": "x"},
        "list": {"type": "array", "items": STRING},
    }
    tool = ToolDefinition("clock", {"type": "object", "$defs": definitions, **schema}, is_strict=True)
    with pytest.raises(UnenforceableSchema, match=reason):
        call_grammar(TOOL_FORMATS[family], ForcedCalls(tools=[tool]))


def test_names_of_properties_that_refer_to_any_string_are_enforced_as_any(tmp_path: Path) -> None:
    value = {
        "type": "object",
        "propertyNames": {"$ref": "#/$defs/k"},
        "additionalProperties": {"type": "integer"},
    }
    definitions = {"k": {"$ref": "#/$defs/s"}, "s": {"type": "string", "title": "Key"}}
    schema = {"$defs": definitions, "properties": {"b": value}, "required": ["b"]}
    model = Model(tmp_path)
    for extra, is_strict in (({}, True), ({"not": {"type": "null"}}, False)):
        tool = ToolDefinition("clock", {**schema, **extra}, is_strict=is_strict)
        forced = ForcedCalls(tools=[tool])
        text = '{"name": "clock", "arguments": {"b": {"any": %s}}}'
        assert model.accepts("json", forced, text % "5")
        assert not model.accepts("json", forced, text % '"x"')
    definitions["s"]["pattern"] = "^k"
    strict = ToolDefinition("clock", schema, is_strict=True)
    with pytest.raises(UnenforceableSchema, match="propertyNames"):
        call_grammar(TOOL_FORMATS["json"], ForcedCalls(tools=[strict]))


BEYOND_THE_LIBRARY = {
    "nullable": {"type": "string", "enum": ["x", "y"], "nullable": True},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^k"}},
    "not": {"not": {"type": "null"}},
    "required": {"type": "object", "required": None},
    "null": {"type": None},
    "no schema": None,
    "deep": {"type": "object", "properties": {"c": {"type": "array", "uniqueItems": True}}},
    "definition": {"$ref": "#/$defs/d"},
}


@pytest.mark.parametrize("family", ["json", "glm45", "qwen3_coder"])
@pytest.mark.parametrize("name", BEYOND_THE_LIBRARY)
def test_a_keyword_beyond_the_library_leaves_the_other_parameters_enforced(
    family: str, name: str, tmp_path: Path
) -> None:
    properties = {"a": {"type": "boolean"}, "b": BEYOND_THE_LIBRARY[name]}
    definitions = {"d": {"type": "object", "uniqueItems": True, "not": {}}}
    schema = {"type": "object", "$defs": definitions, "properties": properties, "required": ["a", "b"]}
    forced = ForcedCalls(tools=[ToolDefinition("clock", schema)])
    model = Model(tmp_path)
    value = "x" if name == "nullable" else "{}"
    texts = {
        "json": '{"name": "clock", "arguments": {"a": true, "b": %s}}',
        "glm45": "<tool_call>clock\n<arg_key>a</arg_key>\n<arg_value>true</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
        "qwen3_coder": "<tool_call>\n<function=clock>\n<parameter=a>\ntrue\n</parameter>\n"
        "<parameter=b>\n%s\n</parameter>\n</function>\n</tool_call>",
    }
    text = texts[family] % (json.dumps(value) if family == "json" and name == "nullable" else value)
    assert model.accepts(family, forced, text)
    assert not model.accepts(family, forced, text.replace("true", "3"))
    assert not model.accepts(family, forced, EMPTY_CALL[family])


def test_a_schema_beyond_the_library_is_enforced_in_part_unless_the_tool_is_strict(model: Model) -> None:
    schema = {"type": "object", "properties": {"when": {"type": "string", "format": "moon-phase"}}}
    forced = ForcedCalls(tools=[ToolDefinition("clock", schema)])
    assert model.accepts("json", forced, '{"name": "clock", "arguments": {"when": "full"}}')
    assert not model.accepts("json", forced, '{"name": "clock", "arguments": {"when": 5}}')
    strict = ToolDefinition("clock", schema, is_strict=True)
    with pytest.raises(UnenforceableSchema, match=r"moon-phase \(at #/properties/when\)") as caught:
        call_grammar(TOOL_FORMATS["json"], ForcedCalls(tools=[CLOCK, strict]))
    assert caught.value.tool == 1
    pattern = ToolDefinition("a", {"properties": {"b": {**STRING, "pattern": "x"}}}, is_strict=True)
    with pytest.raises(UnenforceableSchema, match="'pattern' of 'b'"):
        call_grammar(TOOL_FORMATS["glm45"], ForcedCalls(tools=[pattern]))


def nested_not(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"not": schema, "title": "x" * 16}
    return schema


@pytest.mark.parametrize(
    ("num_tools", "schema"),
    [
        (40, {"properties": {"a": {"type": "boolean"}, "b": nested_not(50)}, "required": ["a"]}),
        (
            1,
            {
                "description": "x" * 50_000,
                "not": {},
                "properties": {"a": {}},
                **{f"k{n}": n for n in range(200)},
            },
        ),
    ],
)
def test_the_search_for_what_can_be_enforced_has_a_limit_for_all_tools_of_a_request(
    num_tools: int, schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    validated: list[int] = []
    validate = LLMatcher.validate_grammar

    class Counting:
        grammar_from_json_schema = LLMatcher.grammar_from_json_schema

        @staticmethod
        def validate_grammar(grammar: str, tokenizer: Any) -> str:
            validated.append(len(grammar) + 2048)
            return validate(grammar, tokenizer)

    monkeypatch.setattr(json_schema, "LLMatcher", Counting)
    tools = [ToolDefinition(f"t{number}", schema) for number in range(num_tools)]
    grammar = call_grammar(TOOL_FORMATS["json"], ForcedCalls(tools=tools))
    whole = 2 * num_tools * len(json.dumps(schema))
    assert sum(validated) < whole + 3 * num_tools * 2048 + (1 << 20)
    assert grammar.count('"properties": {"a": ') == num_tools


def test_tools_that_come_after_the_limit_are_enforced_if_they_can_be(model: Model) -> None:
    hard = {"properties": {"b": nested_not(50)}}
    tools = [ToolDefinition(f"t{number}", hard) for number in range(20)]
    easy = ToolDefinition("clock", {"properties": {"a": {"type": "boolean"}}, "required": ["a"]})
    forced = ForcedCalls(tools=[*tools, easy])
    assert model.accepts("json", forced, '{"name": "clock", "arguments": {"a": true}}')
    assert not model.accepts("json", forced, '{"name": "clock", "arguments": {"a": 3}}')
    assert model.accepts("json", forced, '{"name": "t19", "arguments": {"b": 3}}')


def test_schemas_that_have_no_room_in_a_grammar_together_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json_schema, "LLMatcher", None)
    tools = [ToolDefinition(f"t{number}", {"title": "x" * 50_000}) for number in range(3)]
    with pytest.raises(OversizedTools, match=r"have 150\d\d\d bytes, the limit is 131072 .* fewer tools"):
        call_grammar(TOOL_FORMATS["json"], ForcedCalls(tools=tools))


def test_schemas_with_definitions_and_without_a_type_are_enforced(model: Model) -> None:
    schema = {
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        "properties": {"at": {"$ref": "#/$defs/point"}},
        "required": ["at"],
    }
    forced = ForcedCalls(tools=[ToolDefinition("clock", schema, is_strict=True)])
    for at, is_valid in (({"x": 1}, True), ({"x": "1"}, False)):
        text = '{"name": "clock", "arguments": ' + json.dumps({"at": at}) + "}"
        assert model.accepts("json", forced, text) is is_valid
    bare = ForcedCalls(tools=[ToolDefinition("clock")])
    assert not model.accepts("json", bare, '{"name": "clock", "arguments": {"a": 1}}')


def test_only_special_tokens_have_special_ids(tmp_path: Path) -> None:
    codec = Model(tmp_path, ("[TOOL_CALLS]",)).codec
    ids = special_marker_ids(("[TOOL_CALLS]", "<tool>", "<think>"), codec)
    assert list(ids) == ["[TOOL_CALLS]"]
    assert codec.piece(ids["[TOOL_CALLS]"]) == "[TOOL_CALLS]"
