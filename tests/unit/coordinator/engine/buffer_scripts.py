"""Scripts of generated tokens, run through an output buffer, and their expected output."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from coordinator.engine.output_buffer import OutputBuffer, Piece
from coordinator.scheduler.sequence import FinishReason
from tests.unit.text.stop_reference import Case, cut_one_by_one
from text.detokenizer import IncrementalDetokenizer
from text.tokenizer import TextCodec
from wire.steps import TokenLogprobs

WORDS = ["Once", " upon", " a", "  ", "\r\n", "\n", "fox", "é", "你好", "😀", "☃"]
EOS = 2
ALL = 1 << 20
"""More tokens than any output here has."""


@dataclass(frozen=True)
class Script:
    """Generated tokens of one choice, with its prompt and parameters."""

    prompt: tuple[int, ...]
    generated: tuple[int, ...]
    stops: tuple[str, ...] = ()
    min_tokens: int = 0
    is_echo: bool = False
    has_logprobs: bool = False
    skip_special_tokens: bool = True

    @property
    def echoed(self) -> tuple[int, ...]:
        return self.prompt if self.is_echo else ()

    def detokenizer(self, codec: TextCodec) -> IncrementalDetokenizer:
        context = () if self.is_echo else self.prompt
        return IncrementalDetokenizer(codec, context, skip_special_tokens=self.skip_special_tokens)

    def begin(self, codec: TextCodec) -> OutputBuffer:
        """The buffer before the first generated token."""
        buffer = OutputBuffer(
            self.detokenizer(codec),
            stops=self.stops,
            min_tokens=self.min_tokens,
            prompt=self.echoed,
            has_logprobs=self.has_logprobs,
        )
        if buffer.is_waiting_for_prompt_logprobs:
            buffer.set_prompt_logprobs(prompt_logprobs(self.prompt))
        return buffer

    def append(self, buffer: OutputBuffer, index: int) -> bool:
        """Generates token `index`, and finishes after a stop string or the last one. True: it is finished."""
        token = self.generated[index]
        is_stopped = buffer.append(token, logprobs_of(token, index) if self.has_logprobs else None)
        if is_stopped:
            buffer.finish(FinishReason.STOP)
        elif index + 1 == len(self.generated):
            buffer.finish(FinishReason.LENGTH)
        return buffer.is_finished

    def run(self, codec: TextCodec) -> OutputBuffer:
        """Generates all tokens."""
        buffer = self.begin(codec)
        any(self.append(buffer, index) for index in range(len(self.generated)))
        return buffer


def logprobs_of(token: int, index: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5 * index, 1 + index)


def prompt_logprobs(prompt: Sequence[int]) -> list[TokenLogprobs | None]:
    return [None, *(logprobs_of(token, 1000 + index) for index, token in enumerate(prompt[1:]))]


@st.composite
def scripts(draw: st.DrawFn, codec: TextCodec) -> Script:
    """Words, special tokens and any other ids, broken characters among them; stop strings out of these."""
    words = st.sampled_from(WORDS).map(lambda word: codec.encode(word)[1:])
    others = st.integers(0, codec.vocab_size - 1).map(lambda token: [token])
    parts = draw(st.lists(st.one_of(words, words, st.just([EOS]), others), min_size=1, max_size=12))
    tokens = [token for part in parts for token in part]
    cut = draw(st.integers(0, len(tokens) - 1))
    text = codec.decode(tokens[cut:]) or "x"
    begins = st.integers(0, len(text) - 1)
    parts_of_text = st.builds(lambda begin, size: text[begin : begin + size], begins, st.integers(1, 8))
    stops = draw(st.lists(st.one_of(parts_of_text, st.sampled_from(["fo", " upo", "你", "\n"])), max_size=3))
    return Script(
        prompt=(1, *tokens[:cut]),
        generated=tuple(tokens[cut:]),
        stops=tuple(stops),
        min_tokens=draw(st.integers(0, 4)),
        is_echo=draw(st.booleans()),
        has_logprobs=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
    )


def expected_text(codec: TextCodec, script: Script) -> str:
    """Expected text, from the detokenizer's pieces and the reference stop search."""
    detokenizer = script.detokenizer(codec)
    before = "".join(detokenizer.push([token]) for token in script.echoed)
    flags = [number >= script.min_tokens for number in range(1, len(script.generated) + 1)]
    texts = [detokenizer.push([token]) for token in script.generated]
    pieces = list(zip([*texts, detokenizer.flush()], [*flags, flags[-1]], strict=True))
    return before + cut_one_by_one(Case(list(script.stops), pieces))[0]


def put_together(pieces: Sequence[Piece]) -> Piece:
    """Joins consecutive pieces, which must have no gap or overlap."""
    whole = pieces[0]
    for piece in pieces[1:]:
        assert not whole.is_last
        assert piece.first_token_index == whole.first_token_index + len(whole.tokens)
        assert piece.text_offset == whole.text_offset + len(whole.text)
        whole = replace(
            whole,
            tokens=whole.tokens + piece.tokens,
            text=whole.text + piece.text,
            logprobs=whole.logprobs + piece.logprobs,
            is_last=piece.is_last,
        )
    return whole


def read_to_the_end(buffer: OutputBuffer, from_token: int, seed: int) -> Piece:
    """Reads a finished buffer in random cuts."""
    draw, pieces = random.Random(seed), list[Piece]()
    while not pieces or not pieces[-1].is_last:
        pieces.append(buffer.read(from_token, max_tokens=draw.randint(1, 4)))
        from_token += len(pieces[-1].tokens)
    return put_together(pieces)
