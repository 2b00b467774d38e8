"""Text is encoded as by transformers, without loading torch; unsupported tokenizers are rejected by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.unit.text.trained_tokenizers import (
    CHAT_TEMPLATE,
    byte_level,
    load,
    save_tokenizer,
    sentencepiece_like,
)
from text.chat_template import BadConversation, BadTemplateVariable, NoChatTemplate, TemplateOptions
from text.detokenizer import token_bytes
from text.tokenizer import (
    ChatMessage,
    TextCodec,
    TokenizerError,
    UnknownToken,
    UnreadableTokenizer,
    load_text_codec,
)

KINDS = {"byte level": byte_level, "sentencepiece": sentencepiece_like}
TEXTS = ["", " ", "Once upon a time", "  two  spaces ", "你好 😀!", "<|end|>hello<tool>", "a\n\tb"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return KINDS[request.param]()


def test_ids_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    codec = load(tmp_path, kind)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = codec.encode(text)
        assert ids == reference(text)["input_ids"]
        assert ids[0] == 1
        assert codec.decode(ids) == reference.decode(ids, skip_special_tokens=True)
        with_special = reference.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert codec.decode(ids, skip_special_tokens=False) == with_special


def test_a_file_without_post_processor_adds_no_bos(kind: str, tmp_path: Path) -> None:
    described = json.loads(kind)
    described["post_processor"] = None
    assert load(tmp_path, json.dumps(described), add_bos_token=True).encode("hello")[0] != 1


def test_the_tokenizer_file_overrides_the_configured_class(tmp_path: Path) -> None:
    """LlamaTokenizer's own rules merge the prefix with the first space and add none after <|end|>."""
    described = json.loads(sentencepiece_like())
    described["pre_tokenizer"] = None
    codec = load(tmp_path, json.dumps(described), tokenizer_class="LlamaTokenizer")
    ids = codec.encode(" Once<|end|>fox")
    assert ids == Tokenizer.from_str(json.dumps(described)).encode(" Once<|end|>fox").ids
    assert [codec.piece(token_id) for token_id in ids][1:3] == ["\u2581", "\u2581Once"]


def test_text_survives_encode_and_decode(kind: str, tmp_path: Path) -> None:
    codec = load(tmp_path, kind)
    for text in ("Once upon a time", "  two  spaces ", "你好 😀!", "naïve"):
        assert codec.decode(codec.encode(text)) == text


def test_truncation_in_the_file_does_not_cut_prompts(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(byte_level())
    tokenizer.enable_truncation(4)
    assert len(load(tmp_path, tokenizer.to_str()).encode("a long story " * 40)) > 100


def test_a_conversation_is_rendered_up_to_the_generation_prompt(kind: str, tmp_path: Path) -> None:
    codec = load(tmp_path, kind, chat_template=CHAT_TEMPLATE)
    ids = codec.encode_conversation([ChatMessage(role="user", content="hello")])
    assert ids.count(1) == 2
    assert codec.decode(ids).replace(" ", "") == "user:helloassistant:"
    assert codec.has_chat_template


def test_a_template_in_its_own_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    assert load(tmp_path, byte_level()).has_chat_template


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, {"default": CHAT_TEMPLATE, "tool_use": "T"}])
def test_a_template_in_the_file_of_a_processor_is_found(template: object, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level())
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    codec = load_text_codec(tmp_path)
    assert codec is not None and codec.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize("content", ["[]", "{}", '{"chat_template": 3}', '{"chat_template": {"a": []}}'])
def test_a_broken_file_of_a_processor_is_named(content: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level())
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": None}))
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(UnreadableTokenizer, match=r"chat_template\.json"):
        load_text_codec(tmp_path)


def test_the_end_token_of_the_files_ends_a_text_beside_configured_ones(tmp_path: Path) -> None:
    codec = load(tmp_path, byte_level())
    for token, expected in (("<|end|>", (7, 3)), ("absent", (7,)), (None, (7,))):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": token}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        codec = load_text_codec(tmp_path)
        assert codec is not None
        found = codec.end_token_ids((7,))
        assert tuple(token_id for token_id in found if token_id < 360) == expected


def test_a_conversation_without_template_is_rejected(tmp_path: Path) -> None:
    codec = load(tmp_path, byte_level())
    assert not codec.has_chat_template
    with pytest.raises(NoChatTemplate):
        codec.encode_conversation([ChatMessage(role="user", content="hello")])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (CHAT_TEMPLATE, "no role robot"),
        ("{{ messages[0].content.missing.more }}", "no attribute"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% for %}", "Expected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_errors_of_the_template_reach_the_caller(template: str, words: str, tmp_path: Path) -> None:
    codec = load(tmp_path, byte_level(), chat_template=template)
    with pytest.raises(BadConversation, match=words):
        codec.encode_conversation([ChatMessage(role="robot", content="hello")])


def test_a_conversation_has_the_form_of_its_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
        "{% endif %}{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
    )
    codec = load(tmp_path, byte_level(), chat_template=template)
    roles = ("user", "system", "developer")
    ids = codec.encode_conversation([ChatMessage(role=role, content=f"the {role}") for role in roles])
    assert codec.decode(ids) == "the system\n\nthe developer|the user|"


def test_messages_are_rendered_with_options(kind: str, tmp_path: Path) -> None:
    codec = load(tmp_path, kind, chat_template=CHAT_TEMPLATE)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
    closed = codec.encode_messages(messages, TemplateOptions(add_generation_prompt=False))
    continued = codec.encode_messages(
        messages, TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    )
    assert continued == closed[: len(continued)]
    assert codec.decode(continued).endswith("well")
    options = TemplateOptions(template="{{ messages[0].name }}{{ extra }}", variables={"extra": "more"})
    assert codec.decode(codec.encode_messages([{"role": "user", "name": "Ann"}], options)) == "Annmore"
    with pytest.raises(BadTemplateVariable, match="'tokenize' cannot be a variable"):
        codec.encode_messages(messages, TemplateOptions(variables={"tokenize": False}))


def test_a_template_that_cannot_be_parsed_is_refused_with_its_line(kind: str, tmp_path: Path) -> None:
    codec = load(tmp_path, kind)
    codec.check_template("{{ messages[0].role }}")
    with pytest.raises(TokenizerError, match=r"^line 2: "):
        codec.check_template("{% for message in messages %}\n{% endif %}")


def test_a_text_without_the_special_tokens_of_the_post_processor(kind: str, tmp_path: Path) -> None:
    codec = load(tmp_path, kind)
    assert codec.encode("hello") == [1, *codec.encode("hello", add_special_tokens=False)]


def test_the_bytes_of_single_tokens_are_those_of_the_text(kind: str, tmp_path: Path) -> None:
    codec = load(tmp_path, kind)
    for text in ("Once upon a time", "\u4f60\u597d \U0001f600!", "a\n\tb"):
        ids = codec.encode(text, add_special_tokens=False)
        found = b"".join(token_bytes(codec, token_id) or b"" for token_id in ids)
        assert found.decode().removeprefix(" ") == text
    assert token_bytes(codec, codec.vocab_size + 5) is None


def test_an_empty_conversation_is_rejected(tmp_path: Path) -> None:
    codec = load(tmp_path, byte_level(), chat_template=CHAT_TEMPLATE)
    with pytest.raises(BadConversation, match="no messages"):
        codec.encode_conversation([])


def test_ids_unknown_to_the_tokenizer_have_no_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, byte_level())
    codec = load_text_codec(tmp_path, model_vocab_size=512)
    assert codec is not None
    assert codec.vocab_size == 512
    assert codec.decode([*codec.encode("hello"), 511]) == "hello"
    for outside in (512, -1):
        with pytest.raises(UnknownToken, match=f"token id {outside} is outside the vocabulary of 512"):
            codec.decode([outside])


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    codec = load(tmp_path, byte_level())
    assert codec.vocab_size == codec.encode("<tool>")[-1] + 1


def test_a_checkpoint_without_tokenizer_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_text_codec(tmp_path) is None


def test_a_broken_tokenizer_is_rejected_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(UnreadableTokenizer, match=str(tmp_path)):
        load_text_codec(tmp_path)


def test_a_checkpoint_with_vocabulary_and_merges_only_is_converted(tmp_path: Path) -> None:
    model = json.loads(byte_level())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(merge) for merge in model["merges"]))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    codec = load_text_codec(tmp_path)
    assert codec is not None
    assert codec.decode(codec.encode("Once upon a 😀")) == "Once upon a 😀"


def test_other_files_than_tokenizer_json_name_transformers_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(UnreadableTokenizer, match=r"need transformers: run pip install transformers on this"):
        load_text_codec(tmp_path)


LOAD_AND_USE = """
import sys
from pathlib import Path
import text.tokenizer, text.detokenizer
assert "transformers" not in sys.modules
codec = text.tokenizer.load_text_codec(Path(sys.argv[1]))
ids = codec.encode_conversation([text.tokenizer.ChatMessage(role="user", content="hello")])
stream = text.detokenizer.IncrementalDetokenizer(codec, [])
assert "hello" in stream.push(ids) + stream.flush()
assert not {"torch", "transformers"} & sys.modules.keys()
"""


@pytest.mark.matrix(1)
def test_no_torch_is_loaded_for_a_tokenizer(kind: str, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, kind, chat_template=CHAT_TEMPLATE)
    command = [sys.executable, "-c", LOAD_AND_USE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_a_codec_reports_its_kind(tmp_path: Path) -> None:
    codecs: list[TextCodec] = []
    for name, make in KINDS.items():
        (tmp_path / name).mkdir()
        codecs.append(load(tmp_path / name, make()))
    assert [codec.is_byte_level for codec in codecs] == [True, False]
