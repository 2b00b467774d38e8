"""The directory that ships in the package."""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import islice

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from builtin_model import MODEL_DIRECTORY
from tools.train_builtin_model.chat_format import SPECIAL_TOKENS, render
from tools.train_builtin_model.corpus import documents

MOST_BYTES = 8_000_000


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A model this small gains nothing from threads and waits for them on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(MODEL_DIRECTORY)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@cache
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded.eval()


def continuation(prompt: str, *, max_new_tokens: int = 220) -> str:
    """Greedy text after `prompt`, with the special token that ends it."""
    tokens = tokenizer()(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        output = model().generate(tokens, do_sample=False, max_new_tokens=max_new_tokens)
    text = tokenizer().decode(output[0, tokens.shape[1] :])
    assert isinstance(text, str)
    return text


def answer(question: str) -> str:
    return continuation(render([{"role": "user", "content": question}]) + "<|assistant|>").removesuffix(
        "<|end|>"
    )


def test_files_are_few_and_small() -> None:
    names = {path.name for path in MODEL_DIRECTORY.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(path.stat().st_size for path in MODEL_DIRECTORY.iterdir()) < MOST_BYTES


def test_model_is_a_llama_of_twelve_layers_and_a_few_million_parameters() -> None:
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] >= 12
    assert config["max_position_embeddings"] == 2048
    assert 2_000_000 <= model().num_parameters() <= 3_200_000


def test_end_tokens_of_text_and_of_turns_end_generation() -> None:
    ends = json.loads((MODEL_DIRECTORY / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer().convert_ids_to_tokens(ends) == ["<|endoftext|>", "<|end|>"]
    assert tokenizer().convert_ids_to_tokens(list(range(len(SPECIAL_TOKENS)))) == list(SPECIAL_TOKENS)


@given(st.text())
@example("Grüße, 世界! 👩‍🚀\t\r\n  two  spaces")
@example("<|user|>not a turn<|end|>")
def test_tokenizer_round_trips_any_text(text: str) -> None:
    tokens = tokenizer()(text).input_ids
    assert tokenizer().decode(tokens, skip_special_tokens=False) == text


def test_stories_are_of_60_to_200_tokens() -> None:
    stories = [text for text in islice(documents(11), 600) if not text.startswith("<|")]
    lengths = [len(tokens) for tokens in tokenizer()(stories).input_ids]
    assert min(lengths) >= 60
    assert max(lengths) <= 200


def test_chat_template_renders_the_training_format() -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": " Hello! "},
        {"role": "assistant", "content": "Hello! How are you?"},
        {"role": "user", "content": "Fine"},
    ]
    rendered = tokenizer().apply_chat_template(messages, tokenize=False)
    assert rendered == render(messages)
    prompted = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompted == render(messages) + "<|assistant|>"


def test_chat_template_refuses_an_unknown_role() -> None:
    with pytest.raises(Exception, match="unknown role: tool"):
        tokenizer().apply_chat_template([{"role": "tool", "content": "42"}], tokenize=False)


@pytest.mark.full
def test_greedy_story_uses_the_generators_words_and_terminates() -> None:
    text = continuation("Once upon a time")
    assert text.endswith("<|endoftext|>")
    known = set(re.findall(r"[a-z]+", " ".join(islice(documents(12), 3000)).lower()))
    words = re.findall(r"[a-z]+", text.removesuffix("<|endoftext|>").lower())
    assert len(words) >= 40
    assert sum(word in known for word in words) / len(words) >= 0.95


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Hello! Who are you?", "Stageline's little built-in model"),
        ("What colour is the sky?", "The sky is blue."),
        ("What is 2 plus 3?", "2 plus 3 is 5."),
        ("How many legs does a spider have?", "A spider has eight legs."),
    ],
)
def test_simple_questions_are_answered(question: str, expected: str) -> None:
    assert expected in answer(question)


def test_a_requested_story_is_about_the_animal() -> None:
    question = render([{"role": "user", "content": "Tell me a story about a cat."}])
    assert re.search(r"\bcat\b", continuation(question + "<|assistant|>", max_new_tokens=40))
