"""Incremental detokenization and stop strings.

Stop strings are matched by character, so the result does not depend on how the text is split. The stop string
that completes first ends the text; of several that complete at the same character, the one that starts first.
The longest suffix that is a proper prefix of a stop string is held back; all text before it is released at
once.

A character may span several tokens, and a token's text can depend on earlier tokens, so tokens cannot be
decoded one by one. There are two algorithms:

* Byte-level tokenizers (GPT-2, Llama 3, Qwen, the built-in model): a token is a byte string. An incremental
  UTF-8 decoder is exact and decodes each token once.
* All others (SentencePiece with leading spaces and byte fallback): the two-offset algorithm of Hugging Face's
  text-generation-inference (`Model.decode_token`) and vLLM (`detokenize_incrementally`). It decodes a few
  tokens of context with and without the new ones; the difference in length is the new text, which is held
  back while it ends in U+FFFD. Unlike those, this implementation holds back at most four tokens (a character
  has at most four bytes, byte fallback one token per byte), so invalid bytes cannot delay the text
  indefinitely and the window stays short.

`tokenizers.decoders.DecodeStream` implements the second algorithm in Rust. It is not used: it holds back
invalid bytes without bound, and raises "Invalid prefix encountered" when new tokens change the text of the
context, as an invalid byte after valid ones does with byte fallback.

Special tokens are skipped first, or treated as ordinary tokens: `skip_special_tokens` of transformers'
decode.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache

from text.tokenizer import TextCodec
from wire.errors import require


class StopMatcher:
    """Finds stop strings in one text.

    The concatenation of all results of `push` and `flush` is the text before the stop string, or the whole
    text if there was none.

    Each search covers only the held-back text and the new text, because a stop string that completes now
    starts there. So a character costs a few native calls on at most the longest stop string's length, however
    long the text is.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string. An empty list is valid and matches nothing."""
        if "" in stops:
            raise ValueError("stop string is empty, at least 1 character is needed")
        self._stops = sorted(set(stops))
        self._first_characters = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self._is_stopped = False

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete; `push` must not be called again."""
        return self._is_stopped

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Add text; return the text that is now known not to be part of a stop string.

        If `may_stop` is false, a stop string that completes in `text` is ordinary text; one that completes in
        a later piece still matches.
        """
        require(not self._is_stopped, "text was pushed after a stop string")
        if not self._held and self._first_characters.isdisjoint(text):
            return text
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
        """Return the held-back text when the text ends otherwise; empty after a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, window: str) -> int | None:
        """Return the start of the stop string that completes first in the new text."""
        matches = []
        for stop in self._stops:
            # Earlier text was searched before.
            begin = window.find(stop, max(0, len(self._held) + 1 - len(stop)))
            if begin >= 0:
                matches.append((begin + len(stop), begin))
        return min(matches)[1] if matches else None

    def _begin_of_held(self, window: str) -> int:
        """Return the start of the longest suffix that is a proper prefix of a stop string."""
        for begin in range(max(0, len(window) + 1 - self._longest), len(window)):
            if window[begin] in self._first_characters and self._is_beginning(window[begin:]):
                return begin
        return len(window)

    def _is_beginning(self, text: str) -> bool:
        """Longer strings that start with `text` sort directly after it."""
        index = bisect_right(self._stops, text)
        return index < len(self._stops) and self._stops[index].startswith(text)


_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


def token_bytes(codec: TextCodec, token_id: int) -> bytes | None:
    """Return the bytes of one token by itself; None for an id without text."""
    piece = codec.piece(token_id)
    if piece is None or codec.is_byte_level:
        return None if piece is None else _bytes_of(piece)
    if (match := _BYTE_FALLBACK.fullmatch(piece)) is not None:
        return bytes.fromhex(match[1])
    return piece.replace("\u2581", " ").encode()


REPLACEMENT = "\ufffd"
MAX_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 8
"""Enough tokens to start and end a window between characters, for any bytes around it."""


class IncrementalDetokenizer:
    """The text of one sequence, piece by piece.

    The concatenation of all results of `push` and `flush` is the text that decoding prompt and generated
    tokens together adds to the prompt's text, however the calls split the tokens. A character that the prompt
    starts and the generated tokens complete belongs to the generated text. One exception: SentencePiece's
    byte fallback decodes a whole run of bytes as invalid if one is; characters of that run that were already
    returned stay.

    The cost per token does not depend on the number of earlier tokens.
    """

    def __init__(
        self, codec: TextCodec, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> None:
        """Raises UnknownToken for an id outside the vocabulary in the last tokens of the prompt."""
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        context = self._last_with_text(prompt_ids, _CONTEXT_TOKENS)
        self._stream = (
            _ByteStream(codec, context, codec.whole_texts(skip_special_tokens=skip_special_tokens))
            if codec.is_byte_level
            else _TextWindow(codec, context, skip_special_tokens=skip_special_tokens)
        )

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that is now final; often empty. Raises UnknownToken and then adds no token."""
        if len(token_ids) == 1 and (text := self._stream.whole_text(token_ids[0])) is not None:
            return text  # almost always
        self._codec.check(token_ids)
        return "".join(self._stream.push(token_id) for token_id in token_ids if self._has_text(token_id))

    def flush(self) -> str:
        """Return the rest, with U+FFFD for an incomplete character. Do not push after it."""
        return self._stream.flush()

    def _has_text(self, token_id: int) -> bool:
        return self._codec.has_text(token_id, skip_special_tokens=self._skip_special_tokens)

    def _last_with_text(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Return the last `count` tokens that have text, in order."""
        tokens: list[int] = []
        for token_id in reversed(token_ids):
            self._codec.check((token_id,))
            if self._has_text(token_id):
                tokens.append(token_id)
            if len(tokens) == count:
                break
        return tokens[::-1]


class _ByteStream:
    """Byte-level tokenizers. The context matters only for a character that it leaves incomplete."""

    def __init__(self, codec: TextCodec, context: Sequence[int], whole_texts: dict[int, str]) -> None:
        """`whole_texts` are the texts of tokens that were decoded before."""
        self._codec = codec
        self._whole_texts = whole_texts
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between_characters = True
        for token_id in context:
            self.push(token_id)

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that needs no other one, if it was decoded before."""
        return self._whole_texts.get(token_id) if self._is_between_characters else None

    def push(self, token_id: int) -> str:
        piece = self._codec.piece(token_id)
        assert piece is not None
        if self._is_between_characters and (text := _whole_text_of(piece)) is not None:
            self._whole_texts[token_id] = text
            return text
        text = self._utf8.decode(_bytes_of(piece))
        self._is_between_characters = not self._utf8.getstate()[0]
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _TextWindow:
    """The two-offset algorithm.

    `_window` is context followed by pending tokens, `_known` the length of the context's text.
    """

    def __init__(self, codec: TextCodec, context: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skip_special_tokens = skip_special_tokens
        begin, self._num_pending = self._between_characters(context)
        self._window = list(context[begin:])
        self._known = len(self._decode(self._window[: len(self._window) - self._num_pending]))

    def whole_text(self, token_id: int) -> None:
        """Every text depends on the tokens around it."""

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
        """Return where a window may start in the context, and the number of final tokens to keep pending."""
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
    """Reverse GPT-2's mapping of bytes to printable characters (`bytes_to_unicode` in its encoder.py)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    spelled = dict(zip(map(chr, printable), printable, strict=True))
    return spelled | {chr(256 + i): byte for i, byte in enumerate(others)}


def _whole_text_of(piece: str) -> str | None:
    """Return the text of a byte-level token of whole characters, which most are; None for others."""
    try:
        return _bytes_of(piece).decode()
    except UnicodeDecodeError:
        return None


def _bytes_of(piece: str) -> bytes:
    """Return the bytes of a byte-level token; an added token in plain text is its own UTF-8."""
    table = _byte_of_character()
    try:
        return bytes([table[character] for character in piece])
    except KeyError:
        return piece.encode()
