"""Small tokenizers of the two kinds, trained on the spot, and checkpoint directories that hold them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from text.tokenizer import TextCodec, load_text_codec

SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]
CORPUS = [
    "Once upon a time, a little fox found a red apple under the old tree.",
    "The fox said: hello, who are you?  I am   a hungry fox!",
    "naïve café, 你好世界, 😀😀 👩‍👩‍👧 done.",
    "def f(x):\n    return x + 1\n",
] * 4
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{{ '<s>' + m.role + ':' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)


@cache
def byte_level() -> str:
    """tokenizer.json of a byte-level BPE (as GPT-2's and Llama 3's) that puts <s> in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str()


@cache
def sentencepiece_like() -> str:
    """tokenizer.json like Llama 2: leading spaces as U+2581, byte fallback for unknown text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    spaces = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence(
        [spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.train_from_iterator(
        [line for line in CORPUS if line.isascii()],
        trainers.BpeTrainer(vocab_size=150, special_tokens=SPECIAL, show_progress=False),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _with_byte_fallback(tokenizer)


def _with_byte_fallback(tokenizer: Tokenizer) -> str:
    described = json.loads(tokenizer.to_str())
    vocabulary = described["model"]["vocab"]
    vocabulary |= {f"<0x{byte:02X}>": len(vocabulary) + byte for byte in range(256)}
    described["model"]["byte_fallback"] = True
    return json.dumps(described)


def save_tokenizer(directory: Path, tokenizer_json: str, **config: object) -> Path:
    """Writes tokenizer.json and tokenizer_config.json."""
    (directory / "tokenizer.json").write_text(tokenizer_json)
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def load(directory: Path, tokenizer_json: str, **config: object) -> TextCodec:
    """The codec of a directory with this tokenizer."""
    codec = load_text_codec(save_tokenizer(directory, tokenizer_json, **config))
    assert codec is not None
    return codec
