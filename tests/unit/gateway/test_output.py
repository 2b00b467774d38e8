"""Text of a choice: stop strings, offsets, ends."""

from __future__ import annotations

import pytest

from gateway.output import ChoiceOutput, Delta, OutputRules
from tests.unit.gateway.fake_upstream import builtin_codec, token_logprobs

TEXT = " a bird sang of the sea"


def output(*stops: str, min_tokens: int = 0, includes_stop: bool = False) -> ChoiceOutput:
    rules = OutputRules(
        builtin_codec(),
        stops=stops,
        stop_token_ids=frozenset({5}),
        min_tokens=min_tokens,
        includes_stop=includes_stop,
    )
    return ChoiceOutput(0, rules, ())


def pushed(choice: ChoiceOutput, text: str = TEXT, *, size: int = 1) -> list[Delta]:
    """Push the text's tokens, `size` at a time, until the choice stops."""
    ids = builtin_codec().encode(text)
    deltas = []
    for begin in range(0, len(ids), size):
        deltas.append(choice.push(ids[begin : begin + size], ()))
        if choice.is_stopped:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 2, 99])
def test_text_ends_before_a_stop_string_however_tokens_arrive(size: int) -> None:
    choice = output("of t", "zebra")
    deltas = pushed(choice, size=size)
    assert "".join(delta.text for delta in deltas) == " a bird sang "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "of t")
    kept = [token for delta in deltas for token in delta.token_ids]
    assert kept == builtin_codec().encode(TEXT)[: len(kept)]
    assert builtin_codec().decode(kept).startswith(" a bird sang of t")
    assert choice.num_generated == len(kept)


def test_the_stop_string_is_part_of_the_text_if_asked() -> None:
    deltas = pushed(output("of t", includes_stop=True))
    assert "".join(delta.text for delta in deltas) == " a bird sang of t"


def test_of_two_stop_strings_the_one_that_completes_first_is_reported() -> None:
    deltas = pushed(output("bird sang", "ird", "bird"))
    assert deltas[-1].stop_reason == "bird"
    assert "".join(delta.text for delta in deltas) == " a "


def test_a_stop_string_before_min_tokens_is_text() -> None:
    choice = output("bird", "sea", min_tokens=4)
    deltas = pushed(choice)
    assert deltas[-1].stop_reason == "sea"
    assert "".join(delta.text for delta in deltas) == " a bird sang of the "


def test_a_started_stop_string_is_released_at_the_end() -> None:
    choice = output("seaside")
    deltas = pushed(choice)
    assert "".join(delta.text for delta in deltas) == " a bird sang of the "
    last = choice.finish("length")
    assert (last.text, last.finish_reason, last.stop_reason) == ("sea", "length", None)


def test_a_stop_token_is_the_reason_and_an_end_of_sequence_is_none() -> None:
    for token, reason in ((5, 5), (0, None)):
        choice = output()
        choice.push([token], ())
        assert choice.finish("stop").stop_reason == reason


def test_offsets_are_where_the_text_of_each_token_begins() -> None:
    codec = builtin_codec()
    ids = codec.encode("naïve café ☃ bird")
    rows = [token_logprobs(token, -1.0) for token in ids]
    choice = ChoiceOutput(0, OutputRules(codec), (), echoes_prompt=True)
    echo = choice.echo(ids[:4], rows[:4])
    rest = choice.push(ids[4:], rows[4:])
    text = echo.text + rest.text
    assert text == "naïve café ☃ bird"
    offsets = [*echo.text_offsets, *rest.text_offsets]
    assert offsets == sorted(offsets)
    for index, offset in enumerate(offsets):
        whole = codec.decode(ids[:index])
        assert text[:offset] == whole.rstrip("\ufffd")


def test_without_a_tokenizer_there_are_tokens_without_text() -> None:
    choice = ChoiceOutput(1, OutputRules(None), (1, 2))
    delta = choice.push([7, 8], ())
    assert (delta.choice, delta.text, delta.token_ids) == (1, "", [7, 8])
    assert choice.finish("length").text == ""
