"""tekken.json gives the ids that transformers' conversion of it gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

from checkpoint.errors import UnusableTokenizer
from checkpoint.grammar_tokenizer import GrammarTokenizer, tokenizer_source
from tests.mistral_files import tekken
from text.chat_template import NoChatTemplate
from text.tokenizer import ChatMessage, TextCodec, UnreadableTokenizer, load_text_codec
from text.tokenizer_files import read_tokenizer_files

TOKENS = [
    *(b"he", b"ll", b"hell", b"hello", b"lo", b" w", b"or", b"ld", b"orld", b" world", b"wor", b"  "),
    *("é".encode(), "東".encode()[:2], "東".encode(), b"in", b"ing", b" the", b"th"),
]
TEXTS = (
    "hello world",
    "  two  spaces\n\tin the 12345 world's",
    "Zürich 東京 🙂 naïve",
    "<s>[INST]hello[/INST] <SPECIAL_6>x</s>",
    "",
    " ",
    "hell\x00o",
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST]{{ m.content }}[/INST]{% endfor %}"


def write(directory: Path, content: dict[str, Any], template: str | None = TEMPLATE) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tekken.json").write_text(json.dumps(content))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def codec_of(directory: Path) -> TextCodec:
    codec = load_text_codec(directory)
    assert codec is not None
    return codec


def test_ids_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    directory = write(tmp_path, tekken(TOKENS))
    codec, reference = codec_of(directory), convert_tekken_tokenizer(str(directory / "tekken.json"))
    assert codec.vocab_size == len(reference) == 256 + len(TOKENS) + 8
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False)
        assert codec.encode(text, add_special_tokens=False) == ids
        assert codec.encode(text) == [1, *ids], "mistral-common begins a text with <s>"
        for skips in (False, True):
            assert codec.decode(ids, skip_special_tokens=skips) == reference.decode(
                ids, skip_special_tokens=skips
            )
    assert len(codec.encode("hello world", add_special_tokens=False)) == 2
    assert codec.special_tokens["eos_token"] == "</s>"
    assert codec.is_byte_level


def test_a_chat_template_beside_the_file_is_used(tmp_path: Path) -> None:
    codec = codec_of(write(tmp_path / "a", tekken(TOKENS)))
    hello = codec.encode("hello", add_special_tokens=False)
    assert codec.encode_conversation([ChatMessage("user", "hello")]) == [1, 3, *hello, 4]
    without = codec_of(write(tmp_path / "b", tekken(TOKENS), template=None))
    with pytest.raises(NoChatTemplate):
        without.encode_conversation([ChatMessage("user", "hello")])


def test_a_chat_template_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    directory = write(tmp_path, tekken(TOKENS))
    template = directory / "chat_template.jinja"
    template.unlink()
    template.symlink_to("missing.jinja")
    with pytest.raises(UnreadableTokenizer) as caught:
        load_text_codec(directory)
    assert (
        str(caught.value)
        == f"{template} cannot be read: No such file or directory (it is a link to missing.jinja)"
    )


def test_files_for_a_gateway_give_the_same_ids(tmp_path: Path) -> None:
    directory = write(tmp_path / "a", tekken(TOKENS))
    (copy := tmp_path / "b").mkdir()
    for name, content in read_tokenizer_files(directory).items():
        (copy / name).write_bytes(content)
    assert codec_of(copy).encode("hello world") == codec_of(directory).encode("hello world")
    assert codec_of(copy).has_chat_template


def test_files_without_special_tokens_have_the_old_ones(tmp_path: Path) -> None:
    content = tekken(TOKENS, reserved=30)
    del content["special_tokens"]
    codec = codec_of(write(tmp_path, content))
    assert [codec.piece(number) for number in (2, 3, 11, 19, 20)] == [
        *("</s>", "[INST]", "<pad>", "[TOOL_CONTENT]", "<SPECIAL_20>"),
    ]


def test_a_tokenizer_json_takes_precedence(tmp_path: Path) -> None:
    directory = write(tmp_path, tekken(TOKENS))
    assert tokenizer_source(directory).name == "tekken.json"
    (directory / "tokenizer.json").write_text("{}")
    assert tokenizer_source(directory).name == "tokenizer.json"
    with pytest.raises(UnreadableTokenizer):
        load_text_codec(directory)


def test_grammars_have_the_same_ids(tmp_path: Path) -> None:
    directory = write(tmp_path, tekken(TOKENS))
    codec = codec_of(directory)
    tables = GrammarTokenizer.open(directory, vocab_size=codec.vocab_size, eos_token_ids=[2])
    matcher = tables.matcher(json.dumps({"grammars": [{"lark_grammar": 'start: "hello world"'}]}))
    matcher.consume(codec.encode("hello world", add_special_tokens=False))
    assert matcher.is_accepting
    mask = matcher.mask()
    assert [number for number in range(8 * len(mask)) if mask[number // 8] >> number % 8 & 1] == [2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"config": {}}, "has no config with a pattern"),
        ({"vocab": 3}, "has no list 'vocab'"),
        ({"vocab": [{"rank": 0}]}, "which has no bytes"),
        ({"vocab": [{"token_bytes": "!"}]}, "which has no bytes"),
        ({"vocab": [{"token_bytes": ""}]}, "has a token of 0 bytes, the limit is 1024"),
        ({"vocab": [{"token_bytes": "aGU="}] * 2}, "has a token twice"),
        ({"special_tokens": [{"rank": 0}]}, "which has no text"),
        ({"special_tokens": [{"rank": 1, "token_str": "<s>"}]}, "ranks that are not 0, 1, 2"),
        (
            {"special_tokens": [{"rank": rank, "token_str": str(rank)} for rank in range(9)]},
            "has 9 special tokens, and reserves 8 ids",
        ),
        ({"config": {"pattern": ".", "default_vocab_size": "many"}}, "default_vocab_size is 'many'"),
    ],
)
def test_other_files_are_refused_by_name(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    directory = write(tmp_path, tekken(TOKENS) | change)
    with pytest.raises(UnreadableTokenizer, match=named):
        load_text_codec(directory)
    with pytest.raises(UnusableTokenizer, match=named):
        GrammarTokenizer.open(directory, vocab_size=300, eos_token_ids=[2])
