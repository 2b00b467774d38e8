"""A readable tokenizer: token 0 is "a", token 1 "b", and so on; other tokens have no text."""

from __future__ import annotations

from collections.abc import Sequence

from text.chat_template import NoChatTemplate
from text.tokenizer import ChatMessage, UnknownToken

VOCAB_SIZE = 40
NUM_LETTERS = 26


class LettersCodec:
    """Stands in for a TextCodec; no template for conversations of more than one message."""

    is_byte_level = True
    longest_token_bytes = 1

    def __init__(self, special: frozenset[int] = frozenset()) -> None:
        self._special = special
        self._whole_texts: dict[bool, dict[int, str]] = {True: {}, False: {}}

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """z stands for a space."""
        return tuple(self.encode(word)), tuple(self.encode("z" + word))

    def encode_conversation(self, messages: Sequence[ChatMessage], *, tenant: str = "") -> list[int]:
        if len(messages) > 1:
            raise NoChatTemplate("no chat template")
        return self.encode(messages[0].content)

    def check(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < VOCAB_SIZE:
                raise UnknownToken(f"token id {token_id}")

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        return self.piece(token_id) is not None and not (skip_special_tokens and token_id in self._special)

    def whole_texts(self, *, skip_special_tokens: bool) -> dict[int, str]:
        return self._whole_texts[skip_special_tokens]

    def piece(self, token_id: int) -> str | None:
        return chr(ord("a") + token_id) if token_id < NUM_LETTERS else None


def letters(token_ids: Sequence[int]) -> str:
    """Text of the tokens, skipping none."""
    return "".join(chr(ord("a") + token_id) for token_id in token_ids)
