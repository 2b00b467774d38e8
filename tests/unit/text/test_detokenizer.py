"""Stop strings over random splits of random texts, compared with the reference implementation."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.properties import examples
from tests.unit.text.stop_reference import Case, cut_one_by_one, num_held_one_by_one
from tests.unit.text.trained_tokenizers import byte_level, load, sentencepiece_like
from text.detokenizer import IncrementalDetokenizer, StopMatcher
from text.tokenizer import TextCodec, UnknownToken

ALPHABET = "ab é😀"
words = st.text(ALPHABET, min_size=1, max_size=6)


@st.composite
def cases(draw: st.DrawFn, *, may_always_stop: bool) -> Case:
    """Stop strings that overlap, repeat and share prefixes, and texts composed of their parts."""
    roots = draw(st.lists(words, min_size=1, max_size=3))
    repeated = st.builds(lambda word, times: word * times, st.sampled_from(roots), st.integers(1, 3))
    stops = draw(st.lists(st.one_of(words, repeated, st.builds(str.__add__, repeated, words)), max_size=4))
    parts = st.one_of(
        st.text(ALPHABET, max_size=3), repeated, *([st.sampled_from(stops).flatmap(beginnings)] * bool(stops))
    )
    text = "".join(draw(st.lists(parts, max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    ends = [*cuts, len(text)]
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)]
    flags = [may_always_stop or draw(st.booleans()) for _ in pieces]
    return Case(stops, list(zip(pieces, flags, strict=True)))


def beginnings(stop: str) -> st.SearchStrategy[str]:
    return st.integers(1, len(stop)).map(lambda length: stop[:length])


def deliver(case: Case) -> tuple[list[str], bool]:
    """Results of each `push` and of `flush`, and whether a stop string ended the text."""
    matcher = StopMatcher(case.stops)
    returned = []
    for text, may_stop in case.pieces:
        returned.append(matcher.push(text, may_stop=may_stop))
        if matcher.is_stopped:
            break
    return [*returned, matcher.flush()], matcher.is_stopped


@settings(max_examples=examples(5))
@given(case=st.booleans().flatmap(lambda always: cases(may_always_stop=always)))
def test_delivered_text_equals_a_character_by_character_reference(case: Case) -> None:
    expected, end = cut_one_by_one(case)
    returned, is_stopped = deliver(case)
    assert "".join(returned) == expected
    assert is_stopped == (end is not None)


@settings(max_examples=examples(2.5))
@given(case=cases(may_always_stop=True))
def test_no_part_of_a_stop_string_is_delivered(case: Case) -> None:
    expected, end = cut_one_by_one(case)
    delivered = ""
    for text in deliver(case)[0]:
        delivered += text
        assert not any(stop in delivered for stop in case.stops)
        assert end is None or expected.startswith(delivered)


@settings(max_examples=examples(2.5))
@given(case=st.booleans().flatmap(lambda always: cases(may_always_stop=always)))
def test_only_prefixes_of_stop_strings_are_held_back(case: Case) -> None:
    _, end = cut_one_by_one(case)
    matcher, seen, num_delivered = StopMatcher(case.stops), "", 0
    for text, may_stop in case.pieces:
        seen += text
        num_delivered += len(matcher.push(text, may_stop=may_stop))
        if end is not None and len(seen) >= end:
            break
        assert len(seen) - num_delivered == num_held_one_by_one(seen, case.stops)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["lo w", "world"], "hello world", "hel"),
        (["abc", "b"], "abc", "a"),
        (["bc", "abc"], "abc", ""),
        (["aab"], "aaab", "a"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["😀é"], "😀😀é", "😀"),
        ([], "abc", "abc"),
    ],
)
def test_the_first_completed_stop_string_wins_ties_by_start(
    stops: list[str], text: str, expected: str
) -> None:
    for pieces in ([text], list(text)):
        returned, _ = deliver(Case(stops, [(piece, True) for piece in pieces]))
        assert "".join(returned) == expected


def test_an_ignored_stop_string_is_text_and_an_overlapping_one_is_found() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", may_stop=False) == "a"
    assert matcher.push("a") == ""
    assert matcher.is_stopped
    assert matcher.flush() == ""


def test_an_ignored_stop_string_in_held_back_text_is_not_found_later() -> None:
    matcher = StopMatcher(["b", "abc"])
    assert matcher.push("ab", may_stop=False) == ""
    assert matcher.push("x") == "abx"
    assert not matcher.is_stopped


def test_an_empty_stop_string_is_rejected() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        StopMatcher(["a", ""])


@pytest.mark.parametrize("text", ["a", "ab"])
def test_cost_per_character_is_constant_in_held_and_past_text(text: str) -> None:
    """16 stop strings of 1,024 characters with many partial matches in the text."""
    stops = [text * (900 // len(text)) + "c" * number + "d" * (124 - number) for number in range(16)]
    matcher = StopMatcher(stops)
    started = time.process_time()
    for _ in range(20_000):
        matcher.push(text)
    for _ in range(20):
        matcher.push(stops[0][:-1])
        matcher.push("e")
    assert time.process_time() - started < 5


Codecs = dict[str, TextCodec]
KINDS = ["byte level", "sentencepiece"]
FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467"
ASCII = ["Once", " upon", " a", "  ", " ", "\n", "fox", "!"]
WORDS = [*ASCII, "é", " ñ", "\u0301", "你好", "世", "😀", FAMILY, "\u2581"]
EOS = 2

texts = st.lists(
    st.one_of(st.sampled_from(WORDS), st.characters(exclude_categories=["Cs"])), max_size=20
).map(lambda parts: "".join(parts).replace("\ufffd", "?"))


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Codecs:
    made = {"byte level": byte_level(), "sentencepiece": sentencepiece_like()}
    return {kind: load(tmp_path_factory.mktemp("tokenizer"), text) for kind, text in made.items()}


def stream(
    codec: TextCodec, prompt: list[int], generated: list[int], seed: int, *, skip: bool = True
) -> list[str]:
    """Results of `push` for pieces of random length, then of `flush`."""
    draw = random.Random(seed)
    detokenizer = IncrementalDetokenizer(codec, prompt, skip_special_tokens=skip)
    returned = []
    while generated:
        size = draw.randint(1, min(4, len(generated)))
        returned.append(detokenizer.push(generated[:size]))
        generated = generated[size:]
    return [*returned, detokenizer.flush()]


def complete_text(codec: TextCodec, token_ids: list[int], *, skip: bool = True) -> str:
    """Text of the tokens up to the last complete character."""
    if codec.is_byte_level:
        return codec.decode(token_ids, skip_special_tokens=skip).removesuffix("\ufffd")
    ends = range(len(token_ids), len(token_ids) - 4, -1)
    decoded = (codec.decode(token_ids[:end], skip_special_tokens=skip) for end in ends)
    return next(text for text in decoded if not text.endswith("\ufffd")) if token_ids else ""


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(1.5))
@given(text=texts, cut=st.integers(0, 60), seed=st.integers(0, 99), skip=st.booleans())
def test_pieces_add_up_to_the_whole_and_end_between_characters(
    codecs: Codecs, kind: str, text: str, cut: int, seed: int, skip: bool
) -> None:
    codec = codecs[kind]
    ids = codec.encode(text)
    prompt, generated = ids[:cut], ids[cut:]
    pieces = stream(codec, prompt, generated, seed, skip=skip)
    if generated:
        whole = codec.decode(ids, skip_special_tokens=skip)
        assert complete_text(codec, prompt, skip=skip) + "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces[:-1])


@settings(max_examples=examples(1.5))
@given(data=st.data(), cut=st.integers(0, 30), seed=st.integers(0, 99), skip=st.booleans())
def test_any_byte_tokens_stream_to_their_full_decoding(
    codecs: Codecs, data: st.DataObject, cut: int, seed: int, skip: bool
) -> None:
    codec = codecs["byte level"]
    ids = data.draw(st.lists(st.integers(0, codec.vocab_size - 1), min_size=1, max_size=40))
    prompt, generated = ids[:cut], ids[cut:] or ids
    streamed = "".join(stream(codec, prompt, generated, seed, skip=skip))
    before = codec.decode(prompt, skip_special_tokens=skip)
    whole = codec.decode(prompt + generated, skip_special_tokens=skip)
    # An incomplete character of the prompt belongs to the output: one U+FFFD, or two for half a surrogate
    # (ED A0), which Python's decoder waits for although no third byte makes it valid.
    held = len(before) - len(before.rstrip("\ufffd"))
    assert whole in [before[: len(before) - count] + streamed for count in range(min(held, 2) + 1)]


@settings(max_examples=examples(1.5))
@given(data=st.data(), seed=st.integers(0, 99), skip=st.booleans())
def test_any_tokens_of_valid_bytes_stream_to_their_full_decoding(
    codecs: Codecs, data: st.DataObject, seed: int, skip: bool
) -> None:
    codec = codecs["sentencepiece"]
    words = [token_id for token_id in range(codec.vocab_size) if "<0x" not in (codec.piece(token_id) or "")]
    smile = codec.encode("😀")[2:]
    assert len(smile) == 4
    one = st.sampled_from(words).map(lambda token_id: [token_id])
    parts = data.draw(st.lists(st.one_of(one, st.just(smile)), max_size=30))
    ids = [token_id for part in parts for token_id in part]
    streamed = "".join(stream(codec, [], ids, seed, skip=skip))
    assert streamed == codec.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_character_started_by_the_prompt_belongs_to_the_output(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    ids = codec.encode("fox 你世界")
    for cut in range(len(ids)):
        streamed = "".join(stream(codec, ids[:cut], ids[cut:], cut))
        assert complete_text(codec, ids[:cut]) + streamed == "fox 你世界"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_character_are_held_back_until_it_is_complete(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    detokenizer = IncrementalDetokenizer(codec, [])
    ids = codec.encode("fox ☃")
    assert "".join(detokenizer.push([token_id]) for token_id in ids[:-1]) == "fox "
    assert detokenizer.push(ids[-1:]) == "☃"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("kind", KINDS)
def test_an_incomplete_character_is_delivered_by_flush(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    detokenizer = IncrementalDetokenizer(codec, [])
    assert detokenizer.push(codec.encode("fox☃")[:-1]) == "fox"
    assert set(detokenizer.flush()) == {"\ufffd"}


@pytest.mark.parametrize("kind", KINDS)
def test_spaces_between_prompt_and_output_are_kept(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    answer = codec.encode("a fox")[len(codec.encode("a")) :]
    assert IncrementalDetokenizer(codec, codec.encode("a")).push(answer) == " fox"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_add_no_text_and_change_none(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    detokenizer = IncrementalDetokenizer(codec, [EOS, EOS])
    once, upon = codec.encode("Once")[1:], codec.encode("Once upon")[len(codec.encode("Once")) :]
    assert detokenizer.push([EOS, *once, EOS, EOS]) == "Once"
    assert detokenizer.push([EOS] * 9) == ""
    assert detokenizer.push(upon) == " upon"


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_are_text_where_they_are_not_skipped(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    for prompt in ([], [EOS], codec.encode("a")):
        detokenizer = IncrementalDetokenizer(codec, prompt, skip_special_tokens=False)
        upon = codec.encode("Once upon")[len(codec.encode("Once")) :]
        assert [detokenizer.push([token_id]) for token_id in (EOS, *upon, EOS)] == ["</s>", " upon", "</s>"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_special_token_ends_a_character_that_was_not_complete(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    detokenizer = IncrementalDetokenizer(codec, [], skip_special_tokens=False)
    incomplete = codec.encode("fox☃")[1:-1]
    assert detokenizer.push(incomplete) == "fox"
    text = detokenizer.push([EOS]) + detokenizer.flush()
    assert text.removesuffix("</s>") == codec.decode(incomplete).removeprefix("fox")


def test_broken_bytes_do_not_delay_the_words_after_them(codecs: Codecs) -> None:
    codec = codecs["sentencepiece"]
    smile = codec.encode("😀")[2:]
    word = codec.encode("a fox")[len(codec.encode("a")) :]
    detokenizer = IncrementalDetokenizer(codec, codec.encode("a"))
    assert len(detokenizer.push(smile[3:] * 40)) >= 36
    assert detokenizer.push(word).endswith(" fox")


@pytest.mark.parametrize("kind", KINDS)
def test_cost_per_token_is_constant_in_past_tokens(
    codecs: Codecs, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = codecs[kind]
    lengths: list[int] = []
    plain = codec.decode_checked

    def decode(ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        lengths.append(len(ids))
        return plain(ids, skip_special_tokens=skip_special_tokens)

    monkeypatch.setattr(codec, "decode_checked", decode)
    broken = codec.encode("😀")[-1]
    words, spaces = codec.encode("Once upon a time 😀 " * 50), codec.encode(" " * 500)
    many = [*words, *[broken] * 500, *[EOS] * 500, *spaces]
    stream(codec, many, many, 1)
    assert max(lengths, default=0) <= 10


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_outside_the_vocabulary_is_rejected_without_effect(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    detokenizer = IncrementalDetokenizer(codec, [])
    with pytest.raises(UnknownToken, match=str(codec.vocab_size)):
        detokenizer.push([*codec.encode("fox"), codec.vocab_size])
    assert detokenizer.push(codec.encode("fox")) == "fox"
    with pytest.raises(UnknownToken):
        IncrementalDetokenizer(codec, [codec.vocab_size])


def test_the_directory_of_a_codec_is_not_needed_after_loading(tmp_path: Path) -> None:
    codec = load(tmp_path, byte_level())
    for file in tmp_path.iterdir():
        file.unlink()
    assert codec.decode(codec.encode("fox")) == "fox"
