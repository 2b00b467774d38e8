"""Incremental detokenization and stop strings.

The rule is about characters, so how the text is cut into pieces changes nothing: the stop string that is
complete first ends the text, and among those that are complete with the same character the one that begins
first. What may still become a stop string, the longest end of the text that some stop string begins with and
is longer than, is held back; everything before it is let go at once.

Token boundaries are not character boundaries, and a token's text can depend on the tokens before it, so
pieces cannot be decoded one by one. Two kinds of tokenizers need two ways:

* Byte-level ones (GPT-2, Llama 3, Qwen, the built-in model): a token is a string of bytes. An incremental
  UTF-8 decoder is exact and needs no decoding of earlier tokens.
* All others (SentencePiece with its leading spaces and byte fallback): the two-offset algorithm of Hugging
  Face's text-generation-inference (`Model.decode_token`) and vLLM (`detokenize_incrementally`): decode a few
  tokens of context with and without the new ones; the difference in length is the new text, held back while
  it ends in U+FFFD. Unlike there, it is held back for at most four tokens (a character has at most four
  bytes, and the fallback one token per byte), so that bytes that are no UTF-8 delay nothing for ever and the
  window stays short.

`tokenizers.decoders.DecodeStream` is that second algorithm in Rust. It is not used: it holds invalid bytes
back without bound, and raises "Invalid prefix encountered" in the middle of a stream when new tokens
change the text of the context before them, as an invalid byte after valid ones does with byte fallback.

Special tokens are skipped before anything else, or are tokens like all others: `skip_special_tokens` of
transformers' decode.
"""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

from text.tokenizer import TextCodec
from wire.errors import require


class StopMatcher:
    """Looks for stop strings in one text.

    What `push` returned and what `flush` returns, put together, is the text before the stop string, or the
    whole text when there was none.

    Only what is held back and the new text are looked at: a stop string that is completed now began in what
    is held back or after it. Searches end inside the new text, and each place where it turns out that nothing
    is to be held back from makes that part a character shorter. So a character costs a few native calls, none
    about more text than the longest stop string has, however much text came before.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for a stop string without characters. None at all is legal and finds nothing."""
        if "" in stops:
            raise ValueError("a stop string needs at least one character")
        self._stops = sorted(set(stops))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete; nothing is pushed any more."""
        return self._is_stopped

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Takes the next text; returns what is certain now, and was not before, to be in no stop string.

        With `may_stop` False a stop string that is completed in `text` is ordinary text; one that only begins
        there and is completed in a later piece is not.
        """
        require(not self._is_stopped, "text after a stop string")
        window = self._held + text
        begin = self._find(window) if may_stop else None
        self._is_stopped = begin is not None
        if begin is None:
            begin = self._begin_of_held(window)
            self._held = window[begin:]
        else:
            self._held = ""
        return window[:begin]

    def flush(self) -> str:
        """What is held back, when the text ends otherwise; nothing after a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str) -> int | None:
        """Where the stop string begins that is completed first in the new text."""
        found = []
        for stop in self._stops:
            # What was complete before this text was let pass.
            begin = window.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        return min(found)[1] if found else None

    def _begin_of_held(self, window: str) -> int:
        """Where the longest end of `window` begins that a stop string begins with and is longer than."""
        for begin in range(max(0, len(window) + 1 - self._longest), len(window)):
            if window[begin] in self._first_characters and self._is_beginning(window[begin:]):
                return begin
        return len(window)

    def _is_beginning(self, text: str) -> bool:
        """Strings that begin with `text` and are longer sort right behind it."""
        index = bisect_right(self._stops, text)
        return index < len(self._stops) and self._stops[index].startswith(text)


REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 8
"""Enough to begin and end a window of some tokens between characters, whatever bytes are at both sides."""


class IncrementalDetokenizer:
    """The text of one sequence, piece by piece.

    What `push` and then `flush` return, put together, is what decoding prompt and generated tokens at once
    adds to the prompt's text, however the tokens are split over calls. (A character that the prompt's last
    tokens begin and the generated ones complete belongs to the generated text.) One exception:
    SentencePiece's byte fallback decodes a whole run of bytes as invalid when one of them is; characters of
    that run that were returned already stay as they are.

    The cost of a token does not depend on how many came before.
    """

    def __init__(
        self, codec: TextCodec, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        """Raises UnknownToken for an id in the end of the prompt that is outside the vocabulary."""
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        context = self._last_with_text(prompt_ids, _CONTEXT_TOKENS)
        self._stream = (
            _ByteStream(codec, context)
            if codec.is_byte_level
            else _TextWindow(codec, context, skip_special_tokens=skip_special_tokens)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain now and was not before; often empty. Raises UnknownToken, taking none."""
        self._codec.check(token_ids)
        return "".join(self._stream.push(token_id) for token_id in token_ids if self._has_text(token_id))

    def flush(self) -> str:
        """The rest, with U+FFFD for a character that was never completed. Nothing is pushed after it."""
        return self._stream.flush()

    def _has_text(self, token_id: int) -> bool:
        return self._codec.has_text(token_id, skip_special_tokens=self._skip_special_tokens)

    def _last_with_text(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The last `count` tokens that stand for text, in order."""
        found: list[int] = []
        for token_id in reversed(token_ids):
            self._codec.check((token_id,))
            if self._has_text(token_id):
                found.append(token_id)
            if len(found) == count:
                break
        return found[::-1]


class _ByteStream:
    """For byte-level tokenizers. The context only matters for a character that it leaves incomplete."""

    def __init__(self, codec: TextCodec, context: Sequence[int]) -> None:
        self._codec = codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        piece = self._codec.piece(token_id)
        assert piece is not None
        return self._utf8.decode(_bytes_of(piece))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TextWindow:
    """The two-offset algorithm.

    `_window` is context and then pending tokens, `_known` the length of the context's text.
    """

    def __init__(self, codec: TextCodec, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        begin, self._num_pending = self._between_characters(context)
        self._window = list(context[begin:])
        self._known = len(self._decode(self._window[: len(self._window) - self._num_pending]))

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        self._num_pending += 1
        new = self._decode(self._window)[self._known :]
        if self._num_pending <= MAX_CHARACTER_BYTES and (not new or new.endswith(REPLACEMENT)):
            return ""
        del self._window[: -self._num_pending]
        self._num_pending = 0
        self._known = len(self._decode(self._window))
        return new

    def flush(self) -> str:
        return self._decode(self._window)[self._known :]

    def _between_characters(self, context: Sequence[int]) -> tuple[int, int]:
        """Where in the context a window may begin, and how many tokens at its end begin a character only."""
        for pending in range(min(MAX_CHARACTER_BYTES, len(context))):
            for begin in range(min(MAX_CHARACTER_BYTES, len(context) - pending)):
                text = self._decode(context[begin : len(context) - pending])
                if not text.startswith(REPLACEMENT) and not text.endswith(REPLACEMENT):
                    return begin, pending
        return 0, 0

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode_checked(token_ids, skip_special_tokens=self._skip_special_tokens)


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's spelling of bytes as printable characters, reversed (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    spelled = dict(zip(map(chr, printable), printable, strict=True))
    return spelled | {chr(256 + i): byte for i, byte in enumerate(others)}


def _bytes_of(piece: str) -> bytes:
    """The bytes that a byte-level token spells; a token that is not spelled so (an added one) is its own
    text.
    """
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in piece])
    except KeyError:
        return piece.encode()
