"""Tokenizer and chat template of a GGUF file give what those of the checkpoint give."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from checkpoint.errors import UnusableTokenizer
from checkpoint.gguf.files import read_gguf_file
from checkpoint.gguf.tokenizer import GgufTokenizer, TokenType
from checkpoint.grammar_tokenizer import GrammarTokenizer
from tests.checkpoints import make_checkpoint
from tests.gguf_files import add_byte_level_tokenizer, close, write_gguf
from text.tokenizer import ChatMessage, TextCodec, UnreadableTokenizer, load_text_codec
from text.tokenizer_files import read_tokenizer_files

TEXTS = (
    "Once upon a time, there was a little dog.",
    "  two  spaces\n\n\tand a tab 12345 I'LL don't",
    "Zürich 東京 🙂 naïve",
    "<|user|>special<|end|> tokens <|endoftext|>",
    "",
    " ",
)
MESSAGES = [ChatMessage("system", "Be brief."), ChatMessage("user", "Who is there?")]


@pytest.fixture(scope="module")
def builtin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("builtin") / "tiny-stories.gguf", MODEL_DIRECTORY, pre="gpt-2")


def codec_of(path: Path) -> TextCodec:
    codec = load_text_codec(path)
    assert codec is not None
    return codec


def test_ids_texts_and_conversations_are_those_of_the_checkpoint(builtin: Path) -> None:
    found, expected = codec_of(builtin), codec_of(MODEL_DIRECTORY)
    assert found.vocab_size == expected.vocab_size
    assert found.chat_template == expected.chat_template
    for text in TEXTS:
        ids = expected.encode(text)
        assert found.encode(text) == ids
        assert found.decode(ids) == expected.decode(ids)
    assert found.encode_conversation(MESSAGES) == expected.encode_conversation(MESSAGES)
    assert found.special_tokens == expected.special_tokens


def test_the_model_ends_texts_where_the_checkpoint_does(builtin: Path) -> None:
    found, expected = Checkpoint.open(builtin), Checkpoint.open(MODEL_DIRECTORY)
    assert set(found.eos_token_ids) == set(expected.eos_token_ids)
    assert found.name == "tiny-stories"


def test_grammars_have_the_tokens_of_the_checkpoint(builtin: Path) -> None:
    masks = []
    for path in (builtin, MODEL_DIRECTORY):
        tokenizer = GrammarTokenizer.open(path, vocab_size=1536, eos_token_ids=[0])
        matcher = tokenizer.matcher("start: /[a-f]+/")
        masks.append(matcher.mask())
    assert masks[0] == masks[1]
    assert any(masks[0])


def test_gateways_get_the_files_of_a_tokenizer(builtin: Path, tmp_path: Path) -> None:
    files = read_tokenizer_files(builtin)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    found, expected = codec_of(tmp_path), codec_of(builtin)
    assert [found.encode(text) for text in TEXTS] == [expected.encode(text) for text in TEXTS]
    assert found.encode_conversation(MESSAGES) == expected.encode_conversation(MESSAGES)
    assert read_tokenizer_files(builtin) == files, "workers compare a checksum"


SAMPLE = "I'LL pay $12345 now\n\n  x_y"
PIECES = {
    "gpt-2": ["I", "'", "LL", " pay", " $", "12345", " now", "\n\n ", " x", "_", "y"],
    "smollm": ["I", "'", "LL", " pay", " $", *"12345", " now", "\n\n ", " x", "_", "y"],
    "llama-bpe": ["I", "'LL", " pay", " $", "123", "45", " now", "\n\n", " ", " x", "_y"],
    "glm4": ["I", "'LL", " pay", " $", "123", "45", " now", "\n\n", " ", " x", "_y"],
    "qwen2": ["I", "'LL", " pay", " $", *"12345", " now", "\n\n", " ", " x", "_y"],
    "qwen35": ["I", "'LL", " pay", " $", *"12345", " now", "\n\n", " ", " x", "_y"],
    "tekken": ["I", "'LL", " pay", " $", *"12345", " now", "\n\n", " ", " x", "_y"],
    "gpt-4o": ["I'LL", " pay", " $", "123", "45", " now", "\n\n", " ", " x", "_y"],
    "kimi-k2": ["I'LL", " pay", " $", "123", "45", " now", "\n\n", " ", " x", "_y"],
    "deepseek-v3": ["I", "'LL", " pay", " $", "123", "45", " now", "\n\n", " ", " x", "_y"],
}


PIECES |= dict.fromkeys(("dbrx", "pixtral", "falcon-h1"), PIECES["llama-bpe"])


def write_tokenizer(path: Path, pre: str | None = "gpt-2", **keys: Any) -> Path:
    """A file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    add_byte_level_tokenizer(writer, MODEL_DIRECTORY, pre or "")
    for name, value in keys.items():
        (writer.add_bool if isinstance(value, bool) else writer.add_uint32)(f"tokenizer.ggml.{name}", value)
    close(writer)
    return path


@pytest.mark.parametrize("pre", PIECES)
def test_texts_are_split_by_the_named_rule(pre: str, tmp_path: Path) -> None:
    files = GgufTokenizer(read_gguf_file(write_tokenizer(tmp_path / "a.gguf", pre))).files()
    rule = Tokenizer.from_str(files["tokenizer.json"].decode()).pre_tokenizer
    found = [SAMPLE[begin:end] for _, (begin, end) in rule.pre_tokenize_str(SAMPLE)]
    assert found == PIECES[pre]


@pytest.mark.parametrize(("pre", "pieces"), [("qwen2", ["नमस", "\u094dत", "\u0947"]), ("qwen35", ["नमस्ते"])])
def test_marks_belong_to_words_in_newer_rules(pre: str, pieces: list[str], tmp_path: Path) -> None:
    files = GgufTokenizer(read_gguf_file(write_tokenizer(tmp_path / "a.gguf", pre))).files()
    rule = Tokenizer.from_str(files["tokenizer.json"].decode()).pre_tokenizer
    word = "नमस्ते"
    assert [word[begin:end] for _, (begin, end) in rule.pre_tokenize_str(word)] == pieces


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("deepseek-v3", ["In", "東京カナ", "5", "x"]), ("kimi-k2", ["In", "東京", "カナ", "5", "x"])],
)
def test_han_and_kana_are_split_off(pre: str, pieces: list[str], tmp_path: Path) -> None:
    files = GgufTokenizer(read_gguf_file(write_tokenizer(tmp_path / "a.gguf", pre))).files()
    rule = Tokenizer.from_str(files["tokenizer.json"].decode()).pre_tokenizer
    text = "In東京カナ5x"
    assert [text[begin:end] for _, (begin, end) in rule.pre_tokenize_str(text)] == pieces


def test_an_unknown_rule_is_refused_by_name(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "a.gguf", "chameleon")
    with pytest.raises(
        UnreadableTokenizer, match=r"'tokenizer.ggml.pre' is 'chameleon', a rule that is not known"
    ):
        load_text_codec(path)


def test_special_tokens_are_added_as_the_file_says(tmp_path: Path) -> None:
    plain = codec_of(write_tokenizer(tmp_path / "a.gguf", bos_token_id=3))
    begun = codec_of(write_tokenizer(tmp_path / "b.gguf", bos_token_id=3, add_bos_token=True))
    both = codec_of(
        write_tokenizer(tmp_path / "c.gguf", bos_token_id=3, add_bos_token=True, add_eos_token=True)
    )
    of_rule = codec_of(write_tokenizer(tmp_path / "d.gguf", "llama-bpe", bos_token_id=3))
    ids = plain.encode("a dog")
    assert begun.encode("a dog") == [3, *ids]
    assert both.encode("a dog") == [3, *ids, 0]
    assert of_rule.encode("a dog")[0] == 3
    assert begun.encode("a dog", add_special_tokens=False) == ids


def test_ids_beyond_the_vocabulary_are_refused_with_both_numbers(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "a.gguf", bos_token_id=1536)
    with pytest.raises(UnusableTokenizer, match="bos_token_id' is 1536, the vocabulary has 1536 tokens"):
        GgufTokenizer(read_gguf_file(path)).files()


def test_a_file_without_tokenizer_serves_token_ids(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", make_checkpoint(tmp_path / "m", "llama", num_layers=1))
    assert load_text_codec(path) is None
    assert Checkpoint.open(path).eos_token_ids == ()


CORPUS = "the cat sat on the mat and the other cats sat there with a hat in the heat of that street " * 3


def sentence_piece_vocabulary() -> dict[str, float]:
    """Pieces with scores as SentencePiece's BPE trainer gives them: the first merge has the best score."""
    words = Counter(f"▁{word}" for word in CORPUS.split())
    split = {word: list(word) for word in words}
    letters = sorted({letter for word in words for letter in word})
    merges: list[str] = []
    while len(merges) < 60:
        pairs: Counter[str] = Counter()
        for word, parts in split.items():
            for left, right in itertools.pairwise(parts):
                pairs[f"{left} {right}"] += words[word]
        if not pairs:
            break
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        left, right = best.split(" ")
        merges.append(left + right)
        split = {word: _joined(parts, left, right) for word, parts in split.items()}
    pieces = [*dict.fromkeys(merges), *letters]
    return {piece: -float(place) for place, piece in enumerate(pieces)}


def _joined(parts: list[str], left: str, right: str) -> list[str]:
    found: list[str] = []
    for part in parts:
        if found and found[-1] == left and part == right:
            found[-1] = left + right
        else:
            found.append(part)
    return found


def sentence_piece_ids(text: str, scores: Mapping[str, float], ids: Mapping[str, int]) -> list[int]:
    """llama.cpp's algorithm: join the neighbours whose piece scores best, the first of equals."""
    parts = list(text.replace(" ", "▁"))
    while True:
        joins = [
            (-scores[left + right], place)
            for place, (left, right) in enumerate(itertools.pairwise(parts))
            if left + right in scores
        ]
        if not joins:
            break
        _, place = min(joins)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return [
        number
        for part in parts
        for number in ([ids[part]] if part in ids else [ids[f"<0x{octet:02X}>"] for octet in part.encode()])
    ]


def write_sentence_piece(path: Path, *, has_prefix: bool) -> tuple[Path, dict[str, float], dict[str, int]]:
    scores = sentence_piece_vocabulary()
    kinds = gguf.TokenType
    octets = [f"<0x{octet:02X}>" for octet in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *octets, "<turn>", *scores]
    types = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.BYTE] * 256, kinds.USER_DEFINED]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 260 + list(scores.values()))
    writer.add_token_types([*types, *[kinds.NORMAL] * len(scores)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(has_prefix)
    writer.add_chat_template("{{ bos_token }}{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}")
    close(writer)
    return path, scores, {token: number for number, token in enumerate(tokens)}


@pytest.mark.parametrize("has_prefix", [True, False])
def test_pieces_are_joined_as_sentence_piece_joins_them(has_prefix: bool, tmp_path: Path) -> None:
    path, scores, ids = write_sentence_piece(tmp_path / "a.gguf", has_prefix=has_prefix)
    codec = codec_of(path)
    seen: set[int] = set()
    words = CORPUS.split()
    texts = [" ".join(words[first::step]) for first in range(4) for step in (1, 2, 3, 5)]
    for text in (*texts, "  the  cat", "a Zürich 🙂 hat", "theatre"):
        expected = sentence_piece_ids(f" {text}" if has_prefix else text, scores, ids)
        assert codec.encode(text) == [1, *expected]
        assert codec.decode(expected) == text
        seen.update(expected)
    assert len(seen & {ids[piece] for piece in scores if len(piece) > 1}) > 10
    prefix = " " if has_prefix else ""
    rendered = [1, ids["<turn>"], *sentence_piece_ids(f"{prefix}the cat", scores, ids)]
    assert codec.encode_conversation([ChatMessage("user", "the cat")]) == rendered


@pytest.mark.parametrize(
    "kind",
    [None, gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.USER_DEFINED],
    ids=str,
)
def test_tokens_that_end_answers_are_found_by_their_text(kind: gguf.TokenType | None, tmp_path: Path) -> None:
    """<|end|> ends a message of gpt-oss but not its answer, if there is <|call|>."""
    for texts, expected in (
        (["<|endoftext|>", "<|im_end|>", "x"], [0, 1]),
        (["<|return|>", "<|end|>", "<|call|>"], [0, 2]),
        (["</s>", "<|end|>", "x"], [0, 1]),
    ):
        writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(texts)
        if kind is not None:
            writer.add_token_types([gguf.TokenType.NORMAL if text == "x" else kind for text in texts])
        writer.add_eos_token_id(0)
        close(writer)
        found = GgufTokenizer(read_gguf_file(tmp_path / "a.gguf"))
        assert found.generation_config() == {"eos_token_id": expected, "bos_token_id": None}
        special = [kind is TokenType.CONTROL for kind in found.types]
        assert [number for number in expected if not special[number]] in ([], [0])


def test_named_templates_are_kept(builtin: Path, tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", MODEL_DIRECTORY, pre="gpt-2", metadata={"tokenizer.chat_template.tool_use": "T"}
    )
    config = json.loads(read_tokenizer_files(path)["tokenizer_config.json"])
    assert [template["name"] for template in config["chat_template"]] == ["default", "tool_use"]
    assert codec_of(path).chat_template == codec_of(builtin).chat_template
    assert re.search("tool_use", str(config))
