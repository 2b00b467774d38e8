"""Pieces add up to the same output for any cuts and any attach position."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.engine.output_buffer import OutputBuffer, TokenNotGenerated
from coordinator.scheduler.sequence import FinishReason
from tests.properties import examples
from tests.unit.coordinator.engine.buffer_scripts import (
    ALL,
    EOS,
    WORDS,
    Script,
    expected_text,
    logprobs_of,
    prompt_logprobs,
    put_together,
    read_to_the_end,
    scripts,
)
from tests.unit.text.trained_tokenizers import byte_level, load, sentencepiece_like
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import TextCodec
from wire.errors import InvariantBroken

Codecs = dict[str, TextCodec]
KINDS = ["byte level", "sentencepiece"]


@pytest.fixture(scope="module")
def codecs(tmp_path_factory: pytest.TempPathFactory) -> Codecs:
    made = {"byte level": byte_level(), "sentencepiece": sentencepiece_like()}
    return {kind: load(tmp_path_factory.mktemp("tokenizer"), text) for kind, text in made.items()}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), seed=st.integers(0, 99))
def test_incremental_reads_add_up_to_the_whole_output(
    codecs: Codecs, kind: str, data: st.DataObject, seed: int
) -> None:
    script = data.draw(scripts(codecs[kind]))
    draw, buffer = random.Random(seed), script.begin(codecs[kind])
    pieces = [buffer.read(0, max_tokens=ALL)]
    for index in range(len(script.generated)):
        is_finished = script.append(buffer, index)
        while draw.random() < 0.6 and not pieces[-1].is_last:
            from_token = pieces[-1].first_token_index + len(pieces[-1].tokens)
            pieces.append(buffer.read(from_token, max_tokens=draw.randint(1, 3)))
        if is_finished:
            break
    if not pieces[-1].is_last:
        pieces.append(read_to_the_end(buffer, pieces[-1].first_token_index + len(pieces[-1].tokens), seed))
    whole = put_together(pieces)
    assert whole == script.run(codecs[kind]).read(0, max_tokens=ALL)
    assert whole.text == expected_text(codecs[kind], script)
    assert whole.tokens == (script.echoed + script.generated)[: buffer.num_tokens]
    assert len(whole.logprobs) == (len(whole.tokens) if script.has_logprobs else 0)
    assert all(entry is None or entry.token == whole.tokens[i] for i, entry in enumerate(whole.logprobs))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(0.75))
@given(data=st.data(), seed=st.integers(0, 99))
def test_attaching_at_any_token_repeats_nothing_and_misses_nothing(
    codecs: Codecs, kind: str, data: st.DataObject, seed: int
) -> None:
    script = data.draw(scripts(codecs[kind]))
    live, ended = script.begin(codecs[kind]), script.run(codecs[kind])
    whole = ended.read(0, max_tokens=ALL)
    for index in range(len(script.generated)):
        before = live.read(0, max_tokens=ALL)
        attached = read_to_the_end(script.run(codecs[kind]), live.num_tokens, seed)
        assert put_together([before, attached]) == whole
        assert put_together([before, ended.read(live.num_tokens, max_tokens=ALL)]) == whole
        if script.append(live, index):
            break
    assert ended.read(ended.num_tokens, max_tokens=1).is_last


@pytest.mark.parametrize("kind", KINDS)
@given(words=st.lists(st.sampled_from(WORDS), min_size=2), cut=st.integers(1, 30))
def test_the_text_of_an_echo_equals_all_tokens_decoded_together(
    codecs: Codecs, kind: str, words: list[str], cut: int
) -> None:
    codec = codecs[kind]
    tokens = tuple(codec.encode("".join(words)))
    cut = min(cut, len(tokens) - 1)
    whole = Script(tokens[:cut], tokens[cut:], is_echo=True).run(codec).read(0, max_tokens=ALL)
    assert (whole.tokens, whole.text) == (tokens, codec.decode(tokens))


@pytest.mark.parametrize("kind", KINDS)
def test_text_ends_before_the_stop_string_and_tokens_with_it(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    tokens = codec.encode("Once upon a fox!")
    buffer = Script((), (*tokens, *tokens), stops=("on a f",)).run(codec)
    piece = buffer.read(0, max_tokens=ALL)
    assert buffer.finish_reason is FinishReason.STOP
    assert piece.text == "Once up"
    assert "on a f" in codec.decode(piece.tokens)
    assert "on a f" not in codec.decode(piece.tokens[:-1])


@pytest.mark.parametrize("kind", KINDS)
def test_held_back_text_is_delivered_with_the_last_piece_at_the_length_limit(
    codecs: Codecs, kind: str
) -> None:
    codec = codecs[kind]
    buffer = OutputBuffer(IncrementalDetokenizer(codec, ()), stops=["fox!!"])
    tokens = codec.encode("a fox")
    assert not any(buffer.append(token) for token in tokens)
    live = buffer.read(0, max_tokens=ALL)
    assert (live.text, live.is_last) == ("a ", False)
    buffer.finish(FinishReason.LENGTH)
    last = buffer.read(len(tokens), max_tokens=ALL)
    assert (last.tokens, last.text, last.text_offset, last.is_last) == ((), "fox", 2, True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_that_only_the_end_completes_is_not_delivered(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    tokens = codec.encode("fox ☃")
    buffer = Script((), tuple(tokens[:-1]), stops=(" \ufffd",)).run(codec)
    assert buffer.read(0, max_tokens=ALL).text == "fox"


@pytest.mark.parametrize("kind", KINDS)
def test_completed_and_held_back_text_keep_their_order(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    tokens = codec.encode("fox ☃")[:-1]
    buffer = Script((), tuple(tokens), stops=("fox !", "\ufffd!")).run(codec)
    assert buffer.read(0, max_tokens=ALL).text == codec.decode(tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_no_stop_string_ends_it_before_min_tokens(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    tokens = tuple(codec.encode("fox fox fox"))
    ends = [len(codec.encode(text)) for text in ("fox", "fox fox", "fox fox fox")]
    for min_tokens, end in ((0, ends[0]), (ends[0], ends[0]), (ends[0] + 1, ends[1]), (ends[2], ends[2])):
        script = Script((1, 1, 1), tokens, stops=("fox",), min_tokens=min_tokens, is_echo=True)
        assert script.run(codec).num_tokens == 3 + end


@pytest.mark.parametrize("kind", KINDS)
def test_stop_strings_in_an_echoed_prompt_are_text(codecs: Codecs, kind: str) -> None:
    codec = codecs[kind]
    prompt = codec.encode("a fox")
    generated = codec.encode("a fox, a fox")[len(prompt) :]
    script = Script(tuple(prompt), tuple(generated), stops=("fox", "x,"), is_echo=True)
    assert script.run(codec).read(0, max_tokens=ALL).text == "a fox, a "


def test_an_echo_with_logprobs_waits_for_prompt_logprobs(codecs: Codecs) -> None:
    codec = codecs["byte level"]
    prompt = tuple(codec.encode("Once upon a"))
    buffer = OutputBuffer(IncrementalDetokenizer(codec, ()), prompt=prompt, has_logprobs=True)
    buffer.append(EOS, logprobs_of(EOS, 0))
    for from_token in (0, 2, len(prompt) + 1):
        waiting = buffer.read(from_token, max_tokens=ALL)
        assert (waiting.tokens, waiting.text, waiting.logprobs, waiting.is_last) == ((), "", (), False)
    assert buffer.num_readable_tokens == 0
    buffer.set_prompt_logprobs(prompt_logprobs(prompt))
    assert not buffer.is_waiting_for_prompt_logprobs
    piece = buffer.read(0, max_tokens=ALL)
    assert (piece.tokens, piece.text) == ((*prompt, EOS), "Once upon a")
    assert piece.logprobs == (*prompt_logprobs(prompt), logprobs_of(EOS, 0))


def test_scoring_generates_nothing_and_reads_the_prompt(codecs: Codecs) -> None:
    codec = codecs["byte level"]
    prompt = codec.encode("fox ☃")[:-1]
    buffer = OutputBuffer(IncrementalDetokenizer(codec, ()), prompt=prompt, stops=["fox"], min_tokens=0)
    assert not buffer.read(0, max_tokens=ALL).is_last
    buffer.finish(FinishReason.LENGTH)
    assert buffer.read(0, max_tokens=ALL).text == "fox \ufffd"


def test_without_a_tokenizer_output_has_tokens_only() -> None:
    buffer = OutputBuffer(None, prompt=(7, 8), has_logprobs=False)
    buffer.append(9)
    buffer.finish(FinishReason.LENGTH)
    pieces = [buffer.read(from_token, max_tokens=2) for from_token in (0, 2, 3)]
    assert [piece.tokens for piece in pieces] == [(7, 8), (9,), ()]
    assert [piece.is_last for piece in pieces] == [False, True, True]
    assert {(piece.text, piece.text_offset) for piece in pieces} == {("", 0)}


@pytest.mark.parametrize("from_token", [-1, 3])
def test_reading_past_the_generated_tokens_is_rejected(from_token: int) -> None:
    buffer = OutputBuffer(None, prompt=(7,))
    buffer.append(8)
    with pytest.raises(TokenNotGenerated, match=f"from_token is {from_token}, the output has 2 tokens"):
        buffer.read(from_token, max_tokens=1)


def test_a_buffer_accepts_no_token_after_its_end(codecs: Codecs) -> None:
    buffer = OutputBuffer(IncrementalDetokenizer(codecs["byte level"], ()), stops=["fox"])
    assert [buffer.append(token) for token in codecs["byte level"].encode("fox")][-1]
    with pytest.raises(InvariantBroken):
        buffer.append(EOS)
    buffer.finish(FinishReason.STOP)
    for again in (lambda: buffer.append(EOS), lambda: buffer.finish(FinishReason.LENGTH)):
        with pytest.raises(InvariantBroken):
            again()


def test_text_is_made_in_portions_and_no_more_than_is_read(codecs: Codecs) -> None:
    codec = codecs["byte level"]
    pushed: list[int] = []

    class Counting(IncrementalDetokenizer):
        def push(self, token_ids: Sequence[int]) -> str:
            pushed.extend(token_ids)
            return super().push(token_ids)

    tokens = codec.encode("Once upon a time")
    buffer = OutputBuffer(Counting(codec, ()), prompt=tokens)
    assert not pushed
    buffer.read(0, max_tokens=2)
    buffer.read(0, max_tokens=2)
    assert pushed == tokens[:2]
    assert buffer.detokenize(2, max_new=1)
    assert pushed == tokens[:2]
    assert not buffer.detokenize(len(tokens), max_new=1)
    assert pushed == tokens[:3]
    assert buffer.detokenize(len(tokens) + 1, max_new=len(tokens))
    assert pushed == tokens
