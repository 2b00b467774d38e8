"""Grammar masks allow only texts of the grammar and are computed ahead."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from checkpoint.grammar_tokenizer import GrammarMatcher, GrammarTokenizer
from stage_worker.sampling.grammar_masks import MASK_THREADS, GrammarMasks
from tests.properties import examples
from tests.unit.stage_worker.sampling.grammar_walks import (
    EOS,
    VOCAB_SIZE,
    HeldPool,
    InlinePool,
    Setting,
    Walk,
    walk_many,
)
from tests.unit.text.trained_tokenizers import byte_level, save_tokenizer, sentencepiece_like
from text.grammars import GrammarCompiler, GrammarKind
from wire.ids import SequenceKey, new_request_id
from wire.sampling import GrammarSpec, StepSampling
from wire.steps import StartRecord

KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece_like}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["fox", "bär", "你好"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 3},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
REGEXES = [
    r"\d{4}-[01]\d-[0-3]\d",
    r"(yes|no)( indeed){0,3}[.!?]",
    r"[你好世界é😀]{1,6}",
    r"[^\x00-\x7f]{1,3}x",
    r"a{0,5}b?",
]
NESTED = 'start: "x" | "(" start ")" | "[" start "]"'
CHOICES = ["yes", "yes, indeed", "no", "你好 😀", 'a "quoted" fox\n', "éé"]


@pytest.fixture(params=KINDS, scope="module")
def setting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Setting:
    directory = tmp_path_factory.mktemp("checkpoint")
    return Setting.of(save_tokenizer(directory, KINDS[request.param]()))


@pytest.fixture(scope="module")
def byte_setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return Setting.of(save_tokenizer(tmp_path_factory.mktemp("checkpoint"), byte_level()))


@pytest.fixture
def walk(byte_setting: Setting) -> Walk:
    """In the middle of a text in which every token constrains the next."""
    walk = Walk(
        byte_setting, byte_setting.masks(InlinePool()), byte_setting.spec(GrammarKind.GRAMMAR, NESTED)
    )
    assert walk.masks.start(walk.record()) is None
    for bracket in "([(":
        walk.feed(bracket)
    return walk


def is_person(value: object) -> bool:
    """Independent check of PERSON."""
    if (
        not isinstance(value, dict)
        or not {"name", "age", "kind"} <= value.keys() <= PERSON["properties"].keys()
    ):
        return False
    tags = value.get("tags", [])
    return (
        isinstance(value["name"], str)
        and len(value["name"]) <= 12
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and value["kind"] in ("fox", "bär", "你好")
        and isinstance(tags, list)
        and len(tags) <= 3
        and all(isinstance(tag, str) and len(tag) <= 3 for tag in tags)
    )


def is_nested(text: str) -> bool:
    """Independent check of NESTED."""
    core = len(text) // 2
    return text[core] == "x" and text[:core] == text[:core:-1].translate(str.maketrans(")]", "(["))


@pytest.mark.matrix(1)
@pytest.mark.parametrize("is_greedy", [True, False])
def test_every_text_under_a_schema_is_json_of_that_schema(setting: Setting, is_greedy: bool) -> None:
    spec = setting.spec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    texts = walk_many(setting, spec, range(12), is_greedy=is_greedy)
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert is_person(json.loads(text)), text


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize("regex", REGEXES)
def test_every_text_under_a_regex_matches_it_in_full(setting: Setting, regex: str, is_greedy: bool) -> None:
    texts = walk_many(setting, setting.spec(GrammarKind.REGEX, regex), range(10), is_greedy=is_greedy)
    assert len(set(texts)) > 3
    for text in texts:
        assert re.fullmatch(regex, text), text


@pytest.mark.matrix(1)
@pytest.mark.parametrize("is_greedy", [True, False])
def test_every_text_is_one_of_the_choices_and_each_is_reached(setting: Setting, is_greedy: bool) -> None:
    spec = setting.spec(GrammarKind.CHOICE, *CHOICES)
    assert set(walk_many(setting, spec, range(150), is_greedy=is_greedy)) == set(CHOICES)


def test_every_text_under_a_grammar_is_derived_from_it(setting: Setting) -> None:
    spec = setting.spec(GrammarKind.GRAMMAR, NESTED)
    for text in walk_many(setting, spec, range(20), is_greedy=False):
        assert is_nested(text), text


def test_the_built_in_model_is_served() -> None:
    checkpoint = Checkpoint.open(MODEL_DIRECTORY)
    vocab_size, eos = checkpoint.config.vocab_size, checkpoint.eos_token_ids
    compiler = GrammarCompiler(MODEL_DIRECTORY, vocab_size=vocab_size, eos_token_ids=eos)
    masks = GrammarMasks(MODEL_DIRECTORY, vocab_size=vocab_size, eos_token_ids=eos, wait_s=10.0)
    record = StartRecord(
        SequenceKey(new_request_id(), 0),
        1,
        1,
        (5,),
        StepSampling(grammar=compiler.compile(GrammarKind.REGEX, ["[0-9]"])),
    )
    assert masks.load() is None
    assert masks.start(record) is None
    logits = torch.zeros(1, vocab_size)
    assert not masks.late([record.sequence])
    assert masks.apply(logits, [(0, record.sequence)]) == {}
    assert int((logits == 0).sum()) == 10
    masks.close()


PIECES = st.sampled_from(["a", "b", "é", "你", "😀", "the", r"\d", "[x-z]", r"\."])


def repeated(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    counted = st.tuples(inner, st.sampled_from(["?", "{0,2}", "{2}", "{1,3}"])).map(
        lambda pair: f"(?:{pair[0]}){pair[1]}"
    )
    joined = st.lists(inner, min_size=2, max_size=3).map("".join)
    either = st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})")
    return counted | joined | either


@settings(max_examples=examples(0.3))
@given(
    regex=st.recursive(PIECES, repeated, max_leaves=6),
    seed=st.integers(0, 2**20),
    is_greedy=st.booleans(),
)
def test_any_small_regex_holds(setting: Setting, regex: str, seed: int, is_greedy: bool) -> None:
    [text] = walk_many(setting, setting.spec(GrammarKind.REGEX, regex), [seed], is_greedy=is_greedy)
    assert re.fullmatch(regex, text)


@pytest.mark.matrix(1)
@settings(max_examples=examples(0.3))
@given(
    choices=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), min_size=1, max_size=6
    ),
    seed=st.integers(0, 2**20),
    is_greedy=st.booleans(),
)
def test_any_choices_hold(setting: Setting, choices: list[str], seed: int, is_greedy: bool) -> None:
    [text] = walk_many(setting, setting.spec(GrammarKind.CHOICE, *choices), [seed], is_greedy=is_greedy)
    assert text in choices


def test_where_the_text_is_complete_only_end_of_sequence_tokens_are_allowed(setting: Setting) -> None:
    walk = Walk(setting, setting.masks(InlinePool()), setting.spec(GrammarKind.CHOICE, "fox"))
    assert walk.masks.start(walk.record()) is None
    while walk.text() != "fox":
        assert walk.step()
    assert walk.allowed() == list(EOS)


def test_ids_outside_the_tokenizer_are_never_allowed(setting: Setting) -> None:
    walk = Walk(setting, setting.masks(InlinePool()), setting.spec(GrammarKind.REGEX, r"(?s).{1,9}"))
    assert walk.masks.start(walk.record()) is None
    special = {0, 1, *EOS}
    for _ in range(4):
        allowed = walk.allowed()
        assert len(allowed) > 100
        assert max(allowed) < setting.codec.vocab_size < VOCAB_SIZE
        assert not special & set(allowed) - set(EOS)
        walk.step()


def test_a_model_with_fewer_ids_than_the_tokenizer_gets_a_mask_of_its_own_width(
    byte_setting: Setting,
) -> None:
    narrow = 301
    masks = GrammarMasks(byte_setting.directory, vocab_size=narrow, eos_token_ids=EOS, pool=InlinePool())
    walk = Walk(byte_setting, masks, byte_setting.spec(GrammarKind.REGEX, r"[a-z]{1,9}"))
    assert masks.start(walk.record()) is None
    logits = torch.zeros(1, narrow)
    assert masks.apply(logits, [(0, walk.key)]) == {}
    assert 26 <= int((logits == 0).sum()) < 100


@pytest.mark.matrix(2)
@pytest.mark.parametrize("seed", range(6))
def test_a_restarted_sequence_continues_its_grammar(setting: Setting, seed: int) -> None:
    """After a preemption the start record has the prompt and all generated tokens."""
    spec = setting.spec(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))
    walk = Walk(setting, setting.masks(InlinePool()), spec, seed=seed)
    assert walk.masks.start(walk.record()) is None
    for _ in range(60):
        before = walk.allowed()
        again = Walk(setting, setting.masks(InlinePool()), spec, tokens=list(walk.tokens))
        assert again.masks.start(again.record()) is None
        assert again.allowed() == before
        if not walk.step():
            break


def test_apply_finds_the_mask_that_precompute_made(walk: Walk) -> None:
    pool = InlinePool()
    fresh = Walk(walk.setting, walk.setting.masks(pool), walk.spec, tokens=list(walk.tokens))
    fresh.masks.start(fresh.record())
    token = fresh.sample()
    fresh.masks.precompute(fresh.key, token)
    fresh.masks.precompute(fresh.key, token)
    assert pool.num_pieces == 2
    fresh.masks.advance(fresh.key, token)
    fresh.tokens.append(token)
    assert fresh.allowed()
    assert pool.num_pieces == 2


def test_nothing_waits_for_a_mask_that_is_late(byte_setting: Setting) -> None:
    """All work is held here, so any call that needs it would fail."""
    pool = HeldPool()
    spec = byte_setting.spec(GrammarKind.GRAMMAR, NESTED)
    walk = Walk(byte_setting, byte_setting.masks(pool, wait_s=0.01), spec)
    walk.masks.start(walk.record())
    walk.masks.precompute(walk.key, walk.token("x"))
    walk.feed("x")
    assert walk.masks.late([walk.key]) == {walk.key}
    walk.masks.wait_for_any([walk.key])
    assert not walk.masks.is_ready(walk.key)
    pool.work()
    assert walk.masks.is_ready(walk.key)
    assert walk.allowed() == list(EOS)


def test_a_mask_that_is_ready_is_not_waited_for(byte_setting: Setting) -> None:
    pool = HeldPool()
    walk = Walk(
        byte_setting, byte_setting.masks(pool, wait_s=600.0), byte_setting.spec(GrammarKind.REGEX, "a")
    )
    walk.masks.start(walk.record())
    pool.work()
    other = Walk(byte_setting, walk.masks, walk.spec)
    walk.masks.start(other.record())
    walk.masks.wait_for_any([walk.key, other.key])


def test_a_slow_mask_of_one_client_does_not_delay_those_of_others(
    byte_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them there are."""
    released = threading.Event()
    quick, matcher = byte_setting.spec(GrammarKind.REGEX, "b"), GrammarTokenizer.matcher

    def slow(self: GrammarTokenizer, definition: str) -> GrammarMatcher:
        assert definition == quick.definition or released.wait(60)
        return matcher(self, definition)

    monkeypatch.setattr(GrammarTokenizer, "matcher", slow)
    masks = byte_setting.masks()
    spec = replace(quick, definition=f" {quick.definition}")
    flood = [Walk(byte_setting, masks, spec) for _ in range(8)]
    for walk in flood:
        masks.start(replace(walk.record(), client="flood"))
    other = Walk(byte_setting, masks, quick)
    masks.start(replace(other.record(), client="quiet"))
    assert other.allowed() == [other.token("b")]
    assert not any(masks.is_ready(walk.key) for walk in flood)
    released.set()
    assert flood[-1].allowed() == [other.token("b")]
    masks.close()


def test_work_for_an_ended_sequence_is_dropped(
    byte_setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, made = HeldPool(), list[str]()
    walk = Walk(byte_setting, byte_setting.masks(pool), byte_setting.spec(GrammarKind.REGEX, "a{9}"))
    monkeypatch.setattr(GrammarTokenizer, "matcher", lambda self, definition: made.append(definition))
    walk.masks.start(walk.record())
    walk.masks.precompute(walk.key, 5)
    walk.masks.end(walk.key)
    pool.work()
    assert made == []
    walk.masks.end(walk.key)


def test_a_token_that_was_not_the_sampled_one_decides(walk: Walk) -> None:
    """The state is a function of the tokens received as input."""
    for bracket, sampled in ("[(", "([", "(x"):
        walk.masks.precompute(walk.key, walk.token(sampled))
        walk.feed(bracket)
    while walk.step():
        pass
    assert walk.text().startswith("([([((")
    assert is_nested(walk.text())


def test_a_guess_changes_nothing_before_it_is_confirmed(walk: Walk) -> None:
    before = walk.allowed()
    for guess in "x[x(":
        walk.masks.precompute(walk.key, walk.token(guess))
        assert walk.allowed() == before
    walk.feed("(")
    walk.feed("x")
    while walk.step():
        pass
    assert walk.text() == "([((x))])"


def test_a_guess_rejected_by_the_grammar_is_harmless(walk: Walk) -> None:
    walk.masks.precompute(walk.key, EOS[0])
    walk.feed("x")
    while walk.step():
        pass
    assert walk.text() == "([(x)])"


def test_an_input_rejected_by_the_grammar_fails_its_row_alone(walk: Walk) -> None:
    other = Walk(walk.setting, walk.masks, walk.spec)
    walk.masks.start(other.record())
    walk.masks.advance(walk.key, EOS[0])
    logits = torch.zeros(3, VOCAB_SIZE)
    problems = walk.masks.apply(logits, [(0, walk.key), (2, other.key)])
    assert problems.keys() == {0}
    assert "doesn't satisfy the grammar" in problems[0]
    assert "\n" not in problems[0]
    assert not logits[:2].any()
    assert torch.isinf(logits[2]).any()
    walk.masks.advance(walk.key, 5)
    assert walk.masks.apply(logits, [(0, walk.key)]) == problems


def test_a_dead_end_is_a_problem_and_not_the_end_of_the_text(byte_setting: Setting) -> None:
    spec = byte_setting.spec(GrammarKind.GRAMMAR, 'start: "a" B\nB: /x/ & /y/')
    walk = Walk(byte_setting, byte_setting.masks(InlinePool()), spec)
    walk.masks.start(walk.record())
    walk.masks.advance(walk.key, walk.sample())
    problems = walk.masks.apply(torch.zeros(1, VOCAB_SIZE), [(0, walk.key)])
    assert problems == {0: "structured output: the grammar allows no token here"}


def test_rows_without_a_grammar_stay_as_they_are(walk: Walk) -> None:
    plain = SequenceKey(new_request_id(), 0)
    walk.masks.start(StartRecord(plain, 1, 1, (5,), StepSampling()))
    walk.masks.precompute(plain, 7)
    walk.masks.advance(plain, 7)
    logits = torch.zeros(2, VOCAB_SIZE)
    assert walk.masks.apply(logits, [(0, plain), (1, walk.key)]) == {}
    assert not logits[0].any()
    assert torch.nonzero(logits[1] == 0).flatten().tolist() == walk.allowed()


def test_rows_are_masked_alike_alone_and_in_any_batch(walk: Walk, byte_setting: Setting) -> None:
    walks = [walk]
    for regex in ("[0-9]{3}", "x?", "[a-f]{1,2}z"):
        walks.append(Walk(byte_setting, walk.masks, byte_setting.spec(GrammarKind.REGEX, regex)))
        walk.masks.start(walks[-1].record())
    alone = [walk.allowed() for walk in walks]
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0]):
        logits = torch.zeros(4, VOCAB_SIZE)
        rows = [(row, walks[index].key) for row, index in enumerate(order)][::-1]
        assert walk.masks.apply(logits, rows) == {}
        for row, index in enumerate(order):
            assert torch.nonzero(logits[row] == 0).flatten().tolist() == alone[index]


def test_a_stage_without_the_tokenizer_reports_it(byte_setting: Setting, tmp_path: Path) -> None:
    spec = byte_setting.spec(GrammarKind.REGEX, "a")
    for directory in (None, tmp_path):
        masks = GrammarMasks(directory, vocab_size=VOCAB_SIZE, eos_token_ids=EOS, pool=InlinePool())
        walk = Walk(byte_setting, masks, spec)
        assert masks.start(walk.record()) == "structured output: the checkpoint has no tokenizer.json"
        assert masks.load() == "the checkpoint has no tokenizer.json"
        problems = masks.apply(torch.zeros(1, VOCAB_SIZE), [(0, walk.key)])
        assert problems == {0: "structured output: the checkpoint has no tokenizer.json"}


def test_a_stage_with_another_tokenizer_reports_it(byte_setting: Setting, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, sentencepiece_like())
    masks = Setting.of(tmp_path).masks(InlinePool())
    spec = byte_setting.spec(GrammarKind.REGEX, "a")
    walk = Walk(byte_setting, masks, spec)
    assert masks.start(walk.record()) is None
    problems = masks.apply(torch.zeros(1, VOCAB_SIZE), [(0, walk.key)])
    assert f"{spec.tokenizer_checksum:016x}" in problems[0]


def test_an_invalid_grammar_fails_its_row_alone(walk: Walk) -> None:
    bad = GrammarSpec(definition='{"grammars": []}', tokenizer_checksum=walk.spec.tokenizer_checksum)
    broken = Walk(walk.setting, walk.masks, bad)
    assert walk.masks.start(broken.record()) is None
    problems = walk.masks.apply(torch.zeros(2, VOCAB_SIZE), [(0, broken.key), (1, walk.key)])
    assert problems.keys() == {0}


def test_clear_forgets_sequences_and_keeps_tables(byte_setting: Setting) -> None:
    pool = InlinePool()
    masks = byte_setting.masks(pool)
    walk = Walk(byte_setting, masks, byte_setting.spec(GrammarKind.REGEX, "a"))
    masks.start(walk.record())
    masks.clear()
    logits = torch.zeros(1, VOCAB_SIZE)
    assert masks.apply(logits, [(0, walk.key)]) == {}
    assert not logits.any()
    assert walk.run() == "a"


def test_the_work_is_done_on_threads_that_close_ends(byte_setting: Setting) -> None:
    def grammar_threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("grammar")]

    before = len(grammar_threads())
    masks = byte_setting.masks()
    walks = [Walk(byte_setting, masks, byte_setting.spec(GrammarKind.REGEX, r"\d{3}")) for _ in range(4)]
    for walk in walks:
        assert re.fullmatch(r"\d{3}", walk.run())
    ours = grammar_threads()[before:]
    assert 1 <= len(ours) <= MASK_THREADS
    masks.close()
    for thread in ours:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_workers_load_neither_transformers_nor_tokenizers() -> None:
    """llguidance brings a tokenizer of its own, and imports the other two in unused modules."""
    script = (
        "import sys, stage_worker.sampling.grammar_masks;"
        "print([name for name in ('transformers', 'tokenizers') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
