"""Prompts have the ids that the tokenizer gives for the whole text, and only new messages are tokenized."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.unit.text.trained_tokenizers import (
    CHAT_TEMPLATE,
    CORPUS,
    SPECIAL,
    byte_level,
    load,
    save_tokenizer,
    sentencepiece_like,
)
from text.tokenizer import PromptTokens, find_boundaries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ODD_TOKENS = [
    AddedToken("<|strips|>", special=True, normalized=False, lstrip=True, rstrip=True),
    AddedToken("<|word|>", special=True, normalized=False, single_word=True),
    AddedToken("<|normal|>", special=True, normalized=True),
    AddedToken("<|a|>", special=True, normalized=False),
    AddedToken("<|a|>b", special=True, normalized=False),
    AddedToken("x<|e", normalized=False),
    AddedToken("<|aa|>", special=True, normalized=False),
    AddedToken("ab<|cut|>", special=True, normalized=False),
    AddedToken("z ab", normalized=False),
    AddedToken(" lead|>", special=True, normalized=False),
]
PIECES = [
    *SPECIAL, *(token.content for token in ODD_TOKENS), "<tool>", " ", "  ", "\n", "<", "|", ">", "x", "b",
    "a", "<|", "|>", "<|end", "end|>", "Once upon", "hello", "é", "e\u0301", "ﬁ", "你", "😀", "▁", "\x00",
    "\uff1cs\uff1e",
]  # fmt: skip


def _metaspace() -> str:
    """A tokenizer that puts a space before the first text only, after normalizing it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def _odd(tokenizer_json: str) -> str:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.add_tokens(ODD_TOKENS)
    return tokenizer.to_str()


KINDS = {
    "byte level": byte_level,
    "sentencepiece": sentencepiece_like,
    "metaspace": _metaspace,
    "odd byte level": lambda: _odd(byte_level()),
    "odd sentencepiece": lambda: _odd(sentencepiece_like()),
    "odd metaspace": lambda: _odd(_metaspace()),
}


@cache
def _tokenizer(kind: str) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    with TemporaryDirectory() as directory:
        save_tokenizer(Path(directory), KINDS[kind]())
        return PreTrainedTokenizerFast.from_pretrained(directory)


@cache
def _prompt_tokens(kind: str, max_cached_bytes: int) -> PromptTokens:
    """The same one for all examples: later ones find what earlier ones left."""
    return PromptTokens(_tokenizer(kind), max_cached_bytes=max_cached_bytes)


@pytest.mark.matrix(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_cached_bytes", [0, 4_000, 1 << 20])
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=24))
def test_ids_equal_those_of_the_whole_text(kind: str, max_cached_bytes: int, pieces: Sequence[str]) -> None:
    text = "".join(pieces)
    tokens = _prompt_tokens(kind, max_cached_bytes)
    expected = _tokenizer(kind)(text, add_special_tokens=False)["input_ids"]
    assert tokens.encode(text) == expected
    assert tokens.encode(text) == expected  # now cached
    assert tokens._cache.num_bytes <= max_cached_bytes


@pytest.mark.parametrize("kind", ["byte level", "sentencepiece", "metaspace"])
def test_special_tokens_are_boundaries(kind: str) -> None:
    assert find_boundaries(_tokenizer(kind)).keys() == set(SPECIAL)


def test_tokens_with_rules_of_their_own_and_those_that_collide_are_no_boundaries() -> None:
    boundaries = find_boundaries(_tokenizer("odd byte level")).keys()
    assert boundaries == {"<unk>", "<s>", "</s>", "<|aa|>"}  # "x<|e" can take the start of <|end|>


def test_a_tokenizer_with_dropout_has_no_boundaries(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    described = json.loads(byte_level())
    described["model"]["dropout"] = 0.5
    save_tokenizer(tmp_path, json.dumps(described))
    assert find_boundaries(PreTrainedTokenizerFast.from_pretrained(tmp_path)) == {}


def test_only_new_messages_are_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = load(tmp_path, byte_level(), chat_template=CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "who are you"}]
    codec.encode_messages(messages)
    tokenized: list[str] = []
    tokenize = PromptTokens._tokenize

    def observe(tokens: PromptTokens, text: str) -> list[int]:
        tokenized.append(text)
        return tokenize(tokens, text)

    monkeypatch.setattr(PromptTokens, "_tokenize", observe)
    ids = codec.encode_messages([*messages, {"role": "user", "content": "a fox"}])
    assert [text.removeprefix("<unk>") for text in tokenized] == ["user:a fox"]
    assert codec.decode(ids, skip_special_tokens=False).endswith("<s>user:a fox<|end|><s>assistant:")


def test_texts_of_a_tenant_stay_cached_while_another_one_floods(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = PromptTokens(_tokenizer("byte level"), max_cached_bytes=20_000)
    tokens.encode("a fox", "quiet")
    for number in range(200):
        tokens.encode(f"a fox {number}", "flood")
    tokenized: list[str] = []
    monkeypatch.setattr(PromptTokens, "_tokenize", lambda _, text: tokenized.append(text))
    assert len(tokens.encode("a fox", "quiet")) > 0
    assert tokenized == []
