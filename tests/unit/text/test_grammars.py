"""Output constraints of a client become a grammar or are rejected with field and reason."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import xxhash
from tokenizers import Tokenizer

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from checkpoint.grammar_tokenizer import GrammarError, GrammarTokenizer
from coordinator.recovery.policy import DEFAULT_POLICY
from stage_worker.policy import WORKER_POLICY
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer, sentencepiece_like
from text.grammars import MAX_DEFINITION_BYTES, GrammarCompiler, GrammarKind, UnusableGrammar
from text.json_text import MAX_JSON_DEPTH

VOCAB_SIZE = 400
EOS = (2, 3)
KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece_like}
DRAFT_04 = "http://json-schema.org/draft-04/schema#"

MOST_COMPILE_S = 1.5
"""Of processor time, for the worst grammars."""


@pytest.fixture(params=KINDS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_tokenizer(tmp_path, KINDS[request.param]())


@pytest.fixture
def compiler(tmp_path: Path) -> GrammarCompiler:
    return new_compiler(save_tokenizer(tmp_path, byte_level()))


def new_compiler(directory: Path, eos: Sequence[int] = EOS, vocab_size: int = VOCAB_SIZE) -> GrammarCompiler:
    return GrammarCompiler(directory, vocab_size=vocab_size, eos_token_ids=eos)


def accepts(directory: Path, kind: GrammarKind, texts: Sequence[str], output: str) -> bool:
    """Whether `output`, as its own tokenizer splits it, is a complete text of the grammar."""
    spec = new_compiler(directory).compile(kind, texts)
    tokens = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(output, add_special_tokens=False)
    matcher = GrammarTokenizer.open(directory, vocab_size=VOCAB_SIZE, eos_token_ids=EOS).matcher(
        spec.definition
    )
    try:
        matcher.consume(tokens.ids)
    except GrammarError:
        return False
    return matcher.is_accepting


def test_an_exploding_regular_expression_is_rejected_immediately() -> None:
    checkpoint = Checkpoint.open(MODEL_DIRECTORY)
    compiler = new_compiler(
        MODEL_DIRECTORY, checkpoint.eos_token_ids, vocab_size=checkpoint.config.vocab_size
    )
    compiler.compile(GrammarKind.REGEX, ["a"])  # builds the token tables
    began_s = time.process_time()
    with pytest.raises(UnusableGrammar, match="too many expressions"):
        compiler.compile(GrammarKind.REGEX, ["(a{1000}){1000}"])
    assert time.process_time() - began_s < MOST_COMPILE_S


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#"),
        ({"$id": "http://a/b", "$ref": "http://a/b"}, "#"),
        ({"allOf": [{"$ref": "#"}]}, "#"),
        ({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}, "#"),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "#"),
        ({"type": ["array"], "items": {"$ref": "#"}, "minItems": 1}, "#"),
        ({"type": "array", "prefixItems": [True, {"$ref": "#/prefixItems/1"}]}, "#/prefixItems/1"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b~1%63"}}, "$defs": {"b/c": {"$ref": "#/$defs/b~1c"}}},
            "#/p",
        ),
    ],
)
def test_a_schema_that_refers_to_itself_without_end_is_rejected(
    compiler: GrammarCompiler, schema: object, place: str
) -> None:
    with pytest.raises(UnusableGrammar) as refused:
        compiler.compile(GrammarKind.JSON_SCHEMA, [json.dumps(schema)])
    assert str(refused.value).startswith(f"json_schema: the schema at {place}")
    assert "refers to itself without end: no finite JSON satisfies it" in str(refused.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}},
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
        {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "null", "$defs": {"unused": {"$ref": "#/$defs/unused"}}},
    ],
)
def test_a_schema_that_refers_to_itself_and_can_end_is_accepted(
    compiler: GrammarCompiler, schema: object
) -> None:
    assert compiler.compile(GrammarKind.JSON_SCHEMA, [json.dumps(schema)])


@pytest.mark.parametrize(
    ("grammar", "rule"),
    [
        ("start: start", "start"),
        ('start: "a" start', "start"),
        ("start: /[a-z]{8}/ start", "start"),
        ("start: /a+/ start", "start"),
        ('start: "x" | "y" bad\nbad: /a+/ bad', "bad"),
        ('start: ("x" | bad)\n  | "y"\n?bad: (bad bad)+ // "end"\n%ignore /[ ]/', "bad"),
        ('start: "x" | bad{2,3}\nbad: "a" worse -> alias\nworse: "b" bad | bad', "bad"),
    ],
)
def test_a_grammar_with_an_endless_rule_is_rejected(
    compiler: GrammarCompiler, grammar: str, rule: str
) -> None:
    with pytest.raises(UnusableGrammar, match=f"^grammar: rule '{rule}' goes on without end: no finite text"):
        compiler.compile(GrammarKind.GRAMMAR, [grammar])


@pytest.mark.parametrize(
    "grammar",
    [
        'start: start start | "a"',
        'start: "(" start? ")"',
        'start: "(" start* ")"',
        'start: "(" start{0,3} ")"',
        'start: "(" [start] ")"',
        'start: "(" (start | inner) ")"\ninner: "x"',
        'start: value\nvalue: "[" value ("," value)* "]"\n     | NUMBER\nNUMBER: /[0-9]+/\n%ignore /[ ]+/',
        'start: %json {"type": "object"} "x" // start: start',
        'start: "a"\nunused: unused',
    ],
)
def test_a_grammar_with_a_rule_that_refers_to_itself_and_can_end_is_accepted(
    compiler: GrammarCompiler, grammar: str
) -> None:
    assert compiler.compile(GrammarKind.GRAMMAR, [grammar])


def test_an_endless_rule_beside_an_empty_terminal_compiles_fast(
    compiler: GrammarCompiler,
) -> None:
    began_s = time.process_time()
    compiler.compile(GrammarKind.GRAMMAR, ["start: /a+/ start | NONE\nNONE: /x/ & /y/"])
    assert time.process_time() - began_s < MOST_COMPILE_S


def test_a_step_times_out_long_after_its_wait_for_masks() -> None:
    assert DEFAULT_POLICY.min_step_timeout_s > WORKER_POLICY.mask_wait_s


def test_a_grammar_without_a_first_token_is_rejected(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, byte_level())
    compiler = new_compiler(directory)
    first = (
        Tokenizer.from_file(str(directory / "tokenizer.json")).encode("7", add_special_tokens=False).ids[0]
    )
    kind, texts = GrammarKind.REGEX, ["7"]
    assert compiler.compile(kind, texts, allowed={first, *EOS})
    for wanted in ({"allowed": set(EOS)}, {"forbidden": {first}}, {"allowed": {first}, "forbidden": {first}}):
        with pytest.raises(
            UnusableGrammar, match=r"^regex: allowed_token_ids, bad_words and min_tokens exclude"
        ):
            compiler.compile(kind, texts, **wanted)
    with pytest.raises(UnusableGrammar, match=r"^regex: no token of the vocabulary can begin the text"):
        new_compiler(directory, vocab_size=first).compile(kind, texts)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (GrammarKind.REGEX, r"\d{2}:\d{2}", "12:34", "1234"),
        (GrammarKind.REGEX, r"a/b|[^/]\\", "a/b", "a/"),
        (GrammarKind.REGEX, r"[\d.]+", "1.2", "\u0661"),
        (GrammarKind.REGEX, "^(你好|😀)+$", "你好😀", "你"),
        (GrammarKind.GRAMMAR, 'start: "<" word ">"\nword: /[a-z]+/ | "(" word ")"', "<((x))>", "<((x)>"),
        (GrammarKind.JSON_SCHEMA, '{"enum": ["a", 3]}', "3", "4"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "integer"}}', "[1,\n    2]", "[1, 2"),
        (GrammarKind.JSON_SCHEMA, "true", '{"a": [null]}', "nil"),
    ],
)
def test_a_grammar_accepts_its_language(
    kind: GrammarKind, text: str, good: str, bad: str, tmp_path: Path
) -> None:
    directory = save_tokenizer(tmp_path, byte_level())
    assert accepts(directory, kind, [text], good)
    assert not accepts(directory, kind, [text], bad)


def test_choices_are_matched_literally(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, byte_level())
    choices = ["y", "yes", "no", 'a "quoted"\n\\n', "a|b", "/x/", "你好 😀", "\x7f", "y"]
    for text in choices:
        assert accepts(directory, GrammarKind.CHOICE, choices, text)
        assert not accepts(directory, GrammarKind.CHOICE, choices, text + "!")


def test_white_space_between_json_tokens_is_bounded_by_default(tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, byte_level())
    narrow = '{"type": "array", "x-guidance": {"whitespace_flexible": false}}'
    wide = '{"type": "array"}'
    assert accepts(directory, GrammarKind.JSON_SCHEMA, [wide], "[" + " " * 64 + "]")
    assert not accepts(directory, GrammarKind.JSON_SCHEMA, [wide], "[" + " " * 65 + "]")
    assert not accepts(directory, GrammarKind.JSON_SCHEMA, [narrow], "[ ]")
    assert accepts(directory, GrammarKind.JSON_SCHEMA, [narrow], "[]")


def test_the_definition_carries_the_checksum_of_the_tokenizer(directory: Path) -> None:
    spec = new_compiler(directory).compile(GrammarKind.REGEX, ["a"])
    content = (directory / "tokenizer.json").read_bytes()
    assert spec.tokenizer_checksum == xxhash.xxh3_64_intdigest(content)


def test_the_built_in_model_serves_structured_output() -> None:
    checkpoint = Checkpoint.open(MODEL_DIRECTORY)
    compiler = new_compiler(MODEL_DIRECTORY, checkpoint.eos_token_ids, checkpoint.config.vocab_size)
    assert compiler.load() is None
    assert compiler.compile(GrammarKind.JSON_SCHEMA, ['{"type": "object"}']).definition


@pytest.mark.parametrize(
    ("kind", "texts", "words"),
    [
        (GrammarKind.JSON_SCHEMA, [""], "is empty"),
        (GrammarKind.JSON_SCHEMA, ["{"], "is not JSON: Expecting property name"),
        (GrammarKind.JSON_SCHEMA, ["[" * 100_000], "nested too deeply"),
        (
            GrammarKind.JSON_SCHEMA,
            [f'{{"minimum": {"1" * 4301}}}'],
            "has a number of 4301 digits, the limit is 4300",
        ),
        (GrammarKind.JSON_SCHEMA, ['{"type": "string", "type": "null"}'], 'has the key "type" twice'),
        (GrammarKind.JSON_SCHEMA, ["3"], "must be an object, or true"),
        (GrammarKind.JSON_SCHEMA, ["false"], "must be an object, or true"),
        (GrammarKind.JSON_SCHEMA, ['{"type": "strange"}'], "Invalid type: strange"),
        (GrammarKind.JSON_SCHEMA, ['{"type": "string", "format": "strange"}'], "Unknown format: strange"),
        (GrammarKind.JSON_SCHEMA, ['{"not": {}}'], 'Unimplemented keys: ["not"]'),
        (GrammarKind.JSON_SCHEMA, ['{"$ref": "http://example.org/"}'], "example.org"),
        (GrammarKind.JSON_SCHEMA, ['{"maximum": NaN}'], "NaN is not JSON"),
        (GrammarKind.JSON_SCHEMA, ['{"x-guidance": {"strange": 1}}'], "unknown field `strange`"),
        (GrammarKind.JSON_SCHEMA, ['{"x-guidance": 1}'], '"x-guidance" would have no effect'),
        (GrammarKind.REGEX, [""], "is empty"),
        (GrammarKind.REGEX, ["a("], "unclosed group"),
        (GrammarKind.REGEX, ["(?=a)b"], "look-ahead"),
        (GrammarKind.REGEX, ["a\\"], "backslash"),
        (GrammarKind.REGEX, ["(?x)a # b\nc"], "one line"),
        (GrammarKind.REGEX, ["[^\\x00-\\x{10FFFF}]"], "allows no token"),
        (GrammarKind.CHOICE, [], "at least 1 is needed"),
        (GrammarKind.CHOICE, ["a", ""], "text 1 is empty"),
        (GrammarKind.GRAMMAR, [" \n"], "is empty"),
        (GrammarKind.GRAMMAR, ["start: a"], 'unknown name: "a"'),
        (GrammarKind.GRAMMAR, ['x: "a"'], "no start rule"),
        (GrammarKind.GRAMMAR, ['{"grammars": [{"json_schema": {}}]}'], "expecting rule"),
        (GrammarKind.GRAMMAR, ["start: start"], "goes on without end"),
        (GrammarKind.GRAMMAR, ["start: /[^\\x00-\\x{10FFFF}]/"], "allows no token"),
        (GrammarKind.GRAMMAR, [f"start: <[{VOCAB_SIZE - 1}]>"], "too large"),
        (GrammarKind.GRAMMAR, ['start: %json {"if": {}}'], 'Unimplemented keys: ["if"]'),
    ],
)
def test_an_invalid_grammar_is_rejected_in_one_line_with_the_field(
    kind: GrammarKind, texts: list[str], words: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(UnusableGrammar) as refused:
        compiler.compile(kind, texts)
    message = str(refused.value)
    assert message.startswith(f"{kind.value}: ")
    assert words in message
    assert "\n" not in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"nullable": True, "type": "string"}, "nullable"),
        ({"type": "object", "properties": {"a": {"nullable": True}}}, "nullable"),
        ({"type": "array", "items": [{"disallow": "string"}]}, "disallow"),
        ({"$ref": "#/mine/a", "mine": {"a": {"divisibleBy": 3}}}, "divisibleBy"),
        ({"type": "object", "properties": {"a": {"type": "string", "required": True}}}, "required"),
        ({"$schema": DRAFT_04, "const": 3}, "const"),
        ({"$schema": DRAFT_04, "anyOf": [{"if": {}, "then": False}]}, "if"),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]}, "prefixItems"),
    ],
)
def test_a_keyword_that_would_be_ignored_is_rejected(
    schema: dict[str, object], keyword: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(UnusableGrammar, match=f'^json_schema: keyword "{keyword}" would have no effect: '):
        compiler.compile(GrammarKind.JSON_SCHEMA, [json.dumps(schema)])


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"nullable": {"type": "string"}, "const": {}}, "$schema": DRAFT_04},
        {"enum": [{"nullable": True}], "title": "t", "examples": [{"disallow": 1}], "default": {}},
        {"const": 3},
    ],
)
def test_names_and_values_are_not_taken_for_keywords(
    schema: dict[str, object], compiler: GrammarCompiler
) -> None:
    assert compiler.compile(GrammarKind.JSON_SCHEMA, [json.dumps(schema)])


NEUTRAL: dict[str, tuple[dict[str, object], object]] = {
    "uniqueItems": ({"type": "array", "uniqueItems": False}, [1, 1]),
    "propertyNames": ({"type": "object", "propertyNames": {"type": "string"}}, {"x": 1}),
    "propertyNames of strings and others": (
        {"propertyNames": {"type": ["string", "null"], "minLength": 0}},
        {},
    ),
    "propertyNames with a title": ({"propertyNames": {"title": "names"}}, {"x": 1}),
    "propertyNames true": ({"propertyNames": True}, {"x": 1}),
    "anyOf": ({"type": "integer", "anyOf": []}, 3),
    "oneOf": ({"type": "integer", "oneOf": []}, 3),
    "nullable": ({"type": "string", "nullable": False}, "x"),
    "required of draft 3": ({"required": False}, 3),
    "not": ({"not": False}, 3),
    "if alone": ({"if": {"type": "string"}}, 3),
    "if with branches": ({"if": {"type": "string"}, "then": {}, "else": True}, 3),
    "then alone": ({"then": {"type": "string"}}, 3),
    "contains": ({"contains": {"type": "string"}, "minContains": 0}, [3]),
    "minContains alone": ({"minContains": 2, "maxContains": 3}, [3]),
    "dependentRequired": ({"dependentRequired": {"a": []}}, {"a": 3}),
    "dependentSchemas": ({"dependentSchemas": {"a": {}}}, {"a": 3}),
    "dependencies": ({"dependencies": {"a": []}}, {"a": 3}),
    "unevaluatedProperties": ({"unevaluatedProperties": True}, {"a": 3}),
    "unevaluatedItems": ({"unevaluatedItems": {}}, [3]),
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_value_that_demands_nothing_is_accepted(name: str, tmp_path: Path) -> None:
    directory = save_tokenizer(tmp_path, byte_level())
    inner, value = NEUTRAL[name]
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "integer"}}, "required": ["b"]}
    text = json.dumps(schema)
    assert accepts(directory, GrammarKind.JSON_SCHEMA, [text], json.dumps({"a": value, "b": 4}))
    assert not accepts(directory, GrammarKind.JSON_SCHEMA, [text], json.dumps({"a": value, "b": "x"}))


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": False},
        {"propertyNames": {"minLength": 1}},
        {"not": {}},
        {"if": {"type": "string"}, "then": False},
        {"contains": {}, "minContains": 1},
        {"contains": {}, "minContains": 0, "maxContains": 1},
        {"dependentRequired": {"a": ["b"]}},
        {"unevaluatedProperties": False},
        {"anyOf": None},
        {"nullable": True},
        {"type": None},
    ],
)
@pytest.mark.parametrize("place", ["#", "#/properties/a~1b", "#/$defs/c/items/anyOf/1"])
def test_a_refusal_says_where_in_the_schema(
    schema: dict[str, object], place: str, compiler: GrammarCompiler
) -> None:
    whole: dict[str, object] = {
        "#": schema,
        "#/properties/a~1b": {"properties": {"z": {}, "a/b": schema, "y": False}},
        "#/$defs/c/items/anyOf/1": {
            "$ref": "#/$defs/c",
            "$defs": {"c": {"items": {"anyOf": [{"const": 1}, schema]}}, "d": {}},
        },
    }[place]
    with pytest.raises(UnusableGrammar) as refused:
        compiler.compile(GrammarKind.JSON_SCHEMA, [json.dumps(whole)])
    assert str(refused.value).endswith(f" (at {place})")


@pytest.mark.parametrize("step", ['{"properties":{"a":', '{"items":', '{"anyOf":[', "["])
@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 600, 3000])
def test_a_schema_nested_too_deeply_is_refused_with_the_limit(
    step: str, depth: int, compiler: GrammarCompiler
) -> None:
    closes = "".join({"{": "}", "[": "]"}[char] for char in reversed(step) if char in "{[")
    text = step * depth + "{}" + closes * depth
    with pytest.raises(UnusableGrammar) as refused:
        compiler.compile(GrammarKind.JSON_SCHEMA, [text])
    assert f"is nested too deeply: more than {MAX_JSON_DEPTH} levels" in str(refused.value)


def test_a_schema_of_the_deepest_nesting_is_served(compiler: GrammarCompiler) -> None:
    num_levels = (MAX_JSON_DEPTH - 1) // 2
    text = '{"properties":{"[[[{{{":' * num_levels + "{}" + "}}" * num_levels
    assert compiler.compile(GrammarKind.JSON_SCHEMA, [text])


def test_a_lenient_schema_with_ignored_parts_is_rejected(compiler: GrammarCompiler) -> None:
    lenient: dict[str, object] = {"x-guidance": {"lenient": True}, "type": "string"}
    assert compiler.compile(GrammarKind.JSON_SCHEMA, [json.dumps(lenient)])
    for kind, prefix in ((GrammarKind.JSON_SCHEMA, ""), (GrammarKind.GRAMMAR, "start: %json ")):
        with pytest.raises(UnusableGrammar, match="would be enforced only in part: Unimplemented keys"):
            compiler.compile(kind, [prefix + json.dumps(lenient | {"not": {}})])


@pytest.mark.parametrize("kind", list(GrammarKind))
def test_oversized_grammars_are_rejected_with_the_numbers(
    kind: GrammarKind, compiler: GrammarCompiler
) -> None:
    with pytest.raises(UnusableGrammar, match=f"has {MAX_DEFINITION_BYTES + 1} bytes, the limit is"):
        compiler.compile(kind, ["x" * (MAX_DEFINITION_BYTES + 1)])
    with pytest.raises(UnusableGrammar, match="bytes as a grammar, the limit is"):
        compiler.compile(GrammarKind.CHOICE, [f"choice {index}" for index in range(20_000)])


@pytest.mark.parametrize(
    ("content", "eos", "words"),
    [
        (None, EOS, "the checkpoint has no tokenizer.json"),
        (byte_level(), (), "has no end-of-sequence id"),
        (byte_level(), (VOCAB_SIZE + 7,), "has no end-of-sequence id"),
        (byte_level(), (VOCAB_SIZE - 1,), "out of range"),
        ("{}", EOS, "tokenizer.json: error loading tokenizer"),
        ("tokenizer.model", EOS, "tokenizer.json: is not a JSON object"),
    ],
)
def test_a_checkpoint_without_grammar_support_reports_the_reason(
    content: str | None, eos: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    compiler = new_compiler(tmp_path, eos)
    assert words in str(compiler.load())
    with pytest.raises(UnusableGrammar, match=f"^regex: .*{words}"):
        compiler.compile(GrammarKind.REGEX, ["a"])


def test_many_threads_share_one_set_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    open_once = GrammarTokenizer.open
    is_everyone_here = threading.Event()

    def counted(directory: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarTokenizer:
        opened.append(vocab_size)
        is_everyone_here.wait(timeout=30)
        return open_once(directory, vocab_size=vocab_size, eos_token_ids=eos_token_ids)

    monkeypatch.setattr(GrammarTokenizer, "open", counted)
    compiler = new_compiler(save_tokenizer(tmp_path, byte_level()))
    assert not opened
    threads = [
        threading.Thread(target=compiler.compile, args=(GrammarKind.REGEX, [f"a{{{index + 1}}}"]))
        for index in range(8)
    ]
    for thread in threads:
        thread.start()
    is_everyone_here.set()
    for thread in threads:
        thread.join(timeout=30)
    assert opened == [VOCAB_SIZE]
