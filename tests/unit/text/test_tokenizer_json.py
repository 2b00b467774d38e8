"""tokenizer.json is read as transformers' PreTrainedTokenizerFast reads it, with all files next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.unit.text.trained_tokenizers import CHAT_TEMPLATE, byte_level, save_tokenizer, sentencepiece_like
from text.tokenizer import TextCodec
from text.tokenizer_json import JsonTokenizer, load_tokenizer_json

TEXTS = [
    "", " ", "Once upon a time", "  two  spaces ", "<|end|>hello<tool> <image>", "a<mask> b", "x<new>y",
    "<first><second>", " <|end|> hello", "</s><s>", "你好 😀!",
]  # fmt: skip
ADDED = {
    "3": {"content": "<|end|>", "special": True, "normalized": False, "lstrip": True},
    "900": {"content": "<new>", "special": False, "normalized": True, "rstrip": True},
    "700": {"content": "<image>", "special": False, "normalized": False},
}
MASK = {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "no settings": {},
    "tokens of the settings": {"added_tokens_decoder": ADDED},
    "a named token that is new": {"mask_token": MASK, "pad_token": "<new>"},
    "a family's own token": {"image_token": "<image>", "added_tokens_decoder": ADDED},
    "extra tokens": {"extra_special_tokens": ["<first>", "<second>"]},
    "extra tokens of transformers 4": {"additional_special_tokens": ["<first>", "<tool>"]},
    "named extra tokens": {"extra_special_tokens": {"image_token": "<image>"}},
    "special tokens as text": {"split_special_tokens": True},
    "flags of other classes": {"add_bos_token": True, "add_eos_token": True, "add_prefix_space": False},
    "a template": {"chat_template": CHAT_TEMPLATE},
    "templates": {"chat_template": [{"name": "default", "template": "A"}, {"name": "b", "template": "B"}]},
    "a response template": {"response_template": {"fields": {}}},
    "nothing set": {"bos_token": None, "eos_token": None, "unk_token": None},
}
FILES: dict[str, dict[str, Any]] = {
    "special_tokens_map.json": {
        "pad_token": {"content": "<new>", "lstrip": True, "rstrip": False, "normalized": False},
        "additional_special_tokens": ["<first>", "<second>"],
        "eos_token": "<|end|>",
    },
    "added_tokens.json": {"<new>": 700, "</s>": 2},
}


def assert_equal(directory: Path) -> JsonTokenizer:
    ours = load_tokenizer_json(directory)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert set(ours.all_special_ids) == set(theirs.all_special_ids)
    assert _described(ours.added_tokens_decoder) == _described(theirs.added_tokens_decoder)
    assert ours.chat_template == theirs.chat_template
    assert ours.response_template == theirs.response_template
    codec, reference = TextCodec(ours), TextCodec(theirs)
    assert codec.end_token_ids((7,)) == reference.end_token_ids((7,))
    for text in TEXTS:
        for with_special in (True, False):
            ids = codec.encode(text, add_special_tokens=with_special)
            assert ids == reference.encode(text, add_special_tokens=with_special), text
            kept = codec.decode(ids, skip_special_tokens=with_special)
            assert kept == reference.decode(ids, skip_special_tokens=with_special)
    return ours


def _described(tokens: dict[int, AddedToken]) -> dict[int, str]:
    return {token_id: repr(token) for token_id, token in tokens.items()}


@pytest.mark.parametrize("kind", [byte_level, sentencepiece_like], ids=["byte level", "sentencepiece"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_what_they_mean_to_transformers(name: str, kind: Any, tmp_path: Path) -> None:
    assert_equal(save_tokenizer(tmp_path, kind(), **SETTINGS[name]))


@pytest.mark.parametrize("names", [list(FILES)[:1], list(FILES)[1:], list(FILES)], ids=str)
def test_older_files_are_read(names: list[str], tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level(), extra_special_tokens=["<mask>"])
    for name in names:
        (tmp_path / name).write_text(json.dumps(FILES[name]))
    assert_equal(tmp_path)


def test_the_settings_list_tokens_in_place_of_older_files(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level(), added_tokens_decoder=ADDED)
    for name, content in FILES.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert assert_equal(tmp_path).special_tokens_map["eos_token"] == "</s>"


def test_a_file_without_settings_is_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level())
    assert assert_equal(tmp_path).special_tokens_map == {}


def test_the_padding_of_the_file_names_the_token_and_pads_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level())
    tokenizer.enable_padding(length=400, pad_id=3, pad_token="<|end|>")
    tokenizer.enable_truncation(2)
    assert (
        assert_equal(save_tokenizer(tmp_path, tokenizer.to_str())).special_tokens_map["pad_token"]
        == "<|end|>"
    )


def test_files_of_templates_come_before_the_settings(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level(), chat_template="old")
    (tmp_path / "chat_template.jinja").write_text("new")
    assert assert_equal(tmp_path).chat_template == "new"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert assert_equal(tmp_path).chat_template == {"default": "new", "tool_use": "tools"}


@pytest.mark.parametrize(
    ("splitter", "version"),
    [(None, "4.57.1"), ("metaspace", "4.57.1"), ("sequence", None), ("sequence", "5.1.0")],
)
def test_a_wrong_pattern_of_mistral_is_replaced_on_request(
    splitter: str | None, version: str | None, tmp_path: Path
) -> None:
    vocabulary = {character: index for index, character in enumerate(map(chr, range(0x10000, 0x29000)))}
    words = [*pre_tokenizers.ByteLevel.alphabet(), "\u2581"]
    for word in words:
        vocabulary.setdefault(word, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    if splitter is not None:
        byte_splitter, spaces = pre_tokenizers.ByteLevel(use_regex=False), pre_tokenizers.Metaspace()
        split = pre_tokenizers.Split("a", "isolated")
        chosen = {"metaspace": spaces, "sequence": pre_tokenizers.Sequence([split, byte_splitter])}
        tokenizer.pre_tokenizer = chosen[splitter]
    save_tokenizer(tmp_path, tokenizer.to_str(), fix_mistral_regex=True)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mistral", **({"transformers_version": version} if version else {})})
    )
    ours = assert_equal(tmp_path).backend_tokenizer.pre_tokenizer
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).backend_tokenizer.pre_tokenizer
    assert (ours and ours.__getstate__()) == (theirs and theirs.__getstate__())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"eos_token": 3}, r"eos_token of tokenizer_config\.json is 3, must be a token"),
        ({"extra_special_tokens": [["<a>"]]}, r"extra_special_tokens of .*must be a token"),
    ],
)
def test_settings_that_are_no_tokens_are_refused(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        load_tokenizer_json(save_tokenizer(tmp_path, byte_level(), **settings))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is a JSON list, must be an object"):
        load_tokenizer_json(tmp_path)
