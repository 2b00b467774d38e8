"""Text to token ids and back, as the checkpoint's own tokenizer and chat template do it.

transformers is imported when a tokenizer is loaded and not before. A checkpoint with tokenizer.json is loaded
through PreTrainedTokenizerFast, which takes that file as it is, for two reasons. AutoTokenizer imports torch.
And for some classes (LlamaTokenizer among them) AutoTokenizer of transformers 5 takes the vocabulary only and
goes by the class's own rules, which for tokenizers in Llama 2's format gives other ids around leading spaces
and special tokens than the file does. Only a checkpoint without tokenizer.json (a SentencePiece model, or
vocab.json and merges.txt) goes through AutoTokenizer, which converts it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoint.files import check_directory, is_named
from checkpoint.grammar_tokenizer import MAX_TOKENIZER_BYTES

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

TOKENIZER_JSON = "tokenizer.json"
_MORE_TEMPLATES = "additional_chat_templates"
_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "spiece.model")


class TokenizerError(ValueError):
    """Base of everything this module raises."""


class UnreadableTokenizer(TokenizerError):
    """The checkpoint has tokenizer files that cannot be loaded."""


class NoChatTemplate(TokenizerError):
    """A conversation was sent to a checkpoint without a chat template."""


class BadConversation(TokenizerError):
    """The chat template refuses this conversation, or there is nothing in it."""


class UnknownToken(TokenizerError):
    """A token id outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. `role` is "system", "user", "assistant" or what else the template knows."""

    role: str
    content: str


class TextCodec:
    """The tokenizer of a checkpoint with its chat template. Immutable; safe to share between tasks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, model_vocab_size: int | None = None) -> None:
        """`model_vocab_size`: the width of the model's logits, often more than the tokenizer's ids."""
        self._tokenizer = tokenizer
        self._vocab_size = max(_num_ids(tokenizer), model_vocab_size or 0)

    @property
    def vocab_size(self) -> int:
        """All ids are below this. Ids that only the model knows (padding of its head) stand for no text."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_conversation` can work."""
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, with the special tokens (such as BOS) that the tokenizer's post-processor adds.

        Special tokens written out in `text` become those tokens, as in transformers. Nothing is truncated.
        """
        ids: list[int] = self._tokenizer(text, verbose=False)["input_ids"]
        return ids

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The ids of `word` as it is spelled at the beginning of a text and after a space.

        As transformers asks of those who ban words (`add_prefix_space`), and as vLLM does.
        """
        texts = (word, " " + word.lstrip())
        ids = (self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts)
        return tuple(dict.fromkeys(tuple(each) for each in ids if each))

    def encode_conversation(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Ids of the rendered chat template, ending where the assistant's answer begins.

        The template comes with the checkpoint and runs in Jinja's sandbox. Raises NoChatTemplate, and
        BadConversation with the template's own words when it refuses (say, two user messages in a row).
        """
        if not self.has_chat_template:
            raise NoChatTemplate("this model's tokenizer has no chat template; send text or token ids")
        if not messages:
            raise BadConversation("the conversation has no messages")
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            ids = self._tokenizer.apply_chat_template(
                conversation, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # the template is the checkpoint's code: it can fail in any way
            raise BadConversation(f"the chat template refuses the conversation: {error}") from error
        return list(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`, without special tokens or with them. Raises UnknownToken."""
        self.check(token_ids)
        return self.decode_checked(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_checked(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """`decode` for ids that have been checked."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def check(self, token_ids: Sequence[int]) -> None:
        """Raises UnknownToken, with the id, when one is outside the vocabulary."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise UnknownToken(f"token id {token_id} is outside the vocabulary of {self._vocab_size}")

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether decoding does not skip it: ids that the tokenizer does not know, and special tokens if so
        asked, stand for no text.
        """
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self.piece(token_id) is not None

    def piece(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, or None where the tokenizer has none."""
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        assert piece is None or isinstance(piece, str)
        return piece

    @cached_property
    def longest_token_bytes(self) -> int:
        """UTF-8 bytes of the longest token as the vocabulary spells it, which is never less than its text."""
        return max(len(piece.encode()) for piece in self._tokenizer.get_vocab())

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether each token is a string of bytes (GPT-2's scheme); put together they are the UTF-8 text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return False
        described = json.loads(decoder.__getstate__())
        return [part["type"] for part in described.get("decoders", [described])] == ["ByteLevel"]

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(special | set(self._tokenizer.all_special_ids))


def load_text_codec(directory: Path, *, model_vocab_size: int | None = None) -> TextCodec | None:
    """The codec of a checkpoint directory, or None when it has no tokenizer. Reads local files only.

    Code that comes with a checkpoint is never run. Raises UnreadableTokenizer, also for a FIFO or a device in
    the place of any file, which the libraries would open.
    """
    has_json = is_named(directory / TOKENIZER_JSON)
    if not has_json and not any(is_named(directory / name) for name in _OTHER_VOCABULARIES):
        return None
    try:
        _check_files(directory)
        tokenizer = _load_json(directory) if has_json else _load_other(directory)
    except Exception as error:  # the libraries raise anything, down to bare Exception from Rust
        raise UnreadableTokenizer(f"the tokenizer in {directory} cannot be loaded: {error}") from error
    return TextCodec(tokenizer, model_vocab_size=model_vocab_size)


def _check_files(directory: Path) -> None:
    for each in (directory, directory / _MORE_TEMPLATES):
        if each.is_dir():
            check_directory(each, max_bytes=MAX_TOKENIZER_BYTES)


def _load_json(directory: Path) -> PreTrainedTokenizerBase:
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(
        directory, local_files_only=True
    )
    return tokenizer


def _load_other(directory: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def _num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest id, which exceeds the number of tokens where ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
