"""The tokenizer of a GGUF file as the files of a Hugging Face checkpoint: tokenizer.json and its config.

"gpt2" is byte-level BPE with merges; `tokenizer.ggml.pre` only names the rule that splits texts, see
`_SPLITS`. "llama" is SentencePiece's BPE, whose merges follow from the scores. Sources: llama-vocab.cpp of
llama.cpp, transformers' convert_slow_tokenizer.py, and tokenizer.json of the models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from checkpoint.errors import UnusableTokenizer
from checkpoint.gguf.files import GgufFile

MAX_CHARACTERS = 1 << 24
"""Of all tokens together; the largest vocabularies have 2 million."""
MAX_TOKEN_CHARACTERS = 1024
_PREFIX = "tokenizer.ggml."
_END_TEXTS = frozenset(
    {
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<|return|>", "<|call|>", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
        *("<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    }
)
"""Tokens that end an answer, whatever type and metadata say; gpt-oss's <|end|> only ends a part of it.

As in llama.cpp, which makes them control tokens: converted finetunes often have them as normal ones.
"""
_CALL, _PART_END = "<|call|>", "<|end|>"


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`; 5 is unused, 6 a byte."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_START = r"[^\r\n\p{L}\p{N}]?"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_CASED = rf"{_START}{_UPPER}*{_LOWER}+%s|{_START}{_UPPER}+{_LOWER}*%s"
_KIMI = (
    r"\p{Han}+|"
    + _CASED.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?")
    + rf"|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",
)
"""Han beside letters with case, as in the tokenizer's code of Kimi K2."""
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """A rule: expressions that split one after the other, and then GPT-2's if `is_gpt2`."""

    patterns: tuple[str, ...] = ()
    is_gpt2: bool = False
    has_nfc: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


_LLAMA_3 = _Split(
    patterns=(rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}",),
    ignores_merges=True,
    adds_bos=True,
)
_QWEN_2 = _Split(patterns=(rf"{_CONTRACTIONS}|{_START}\p{{L}}+|\p{{N}}|{_MARKS}|{_SPACES}",), has_nfc=True)
_SPLITS: Mapping[str, _Split] = {
    "gpt-2": _Split(is_gpt2=True),
    "smollm": _Split(patterns=(r"\p{N}",), is_gpt2=True),
    "llama-bpe": _LLAMA_3,
    "llama3": _LLAMA_3,
    "llama-v3": _LLAMA_3,
    **dict.fromkeys(("pixtral", "falcon3", "falcon-h1"), _LLAMA_3),
    "dbrx": _Split(patterns=_LLAMA_3.patterns),
    "glm4": _Split(patterns=_LLAMA_3.patterns),
    "chatglm-bpe": _Split(patterns=_LLAMA_3.patterns),
    "qwen2": _QWEN_2,
    "deepseek-r1-qwen": _QWEN_2,
    "qwen35": _Split(
        patterns=(
            rf"{_CONTRACTIONS}|{_START}[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        ),
        has_nfc=True,
    ),
    "tekken": _Split(
        patterns=(_CASED % ("", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",),
        ignores_merges=True,
    ),
    "gpt-4o": _Split(
        patterns=(
            _CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?")
            + rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        )
    ),
    "deepseek-v3": _Split(patterns=_DEEPSEEK),
    "kimi-k2": _Split(patterns=_KIMI),
}
"""By the name in `tokenizer.ggml.pre`."""


class GgufTokenizer:
    """The vocabulary of a file. Raises UnusableTokenizer with the key, and BadHeader for a changed file."""

    def __init__(self, file: GgufFile) -> None:
        self._file, self._metadata = file, file.metadata

    @property
    def is_missing(self) -> bool:
        """Whether the file has no tokenizer, so that the model serves token ids only."""
        return f"{_PREFIX}model" not in self._metadata

    @cached_property
    def tokens(self) -> list[str]:
        """All tokens in the order of ids."""
        tokens = self._file.texts(f"{_PREFIX}tokens")
        if sum(map(len, tokens)) > MAX_CHARACTERS or max(map(len, tokens), default=0) > MAX_TOKEN_CHARACTERS:
            raise self._unusable(
                "tokens",
                f"has more than {MAX_CHARACTERS} characters, or a token of more than {MAX_TOKEN_CHARACTERS}",
            )
        return tokens

    @cached_property
    def types(self) -> list[int]:
        """The type of each token; CONTROL for every token of `_END_TEXTS`."""
        if f"{_PREFIX}token_type" in self._metadata:
            kinds = [int(kind) for kind in self._numbers("token_type")]
        else:
            kinds = [TokenType.NORMAL] * len(self.tokens)
        return [
            TokenType.CONTROL if text in _END_TEXTS else kind
            for text, kind in zip(self.tokens, kinds, strict=True)
        ]

    def special(self, name: str) -> int | None:
        """The id in key `{name}_token_id`; None without one."""
        value = self._metadata.get(f"{_PREFIX}{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < len(self.tokens)):
            raise self._unusable(
                f"{name}_token_id", f"is {value!r:.80}, the vocabulary has {len(self.tokens)} tokens"
            )
        return None if value is None else int(value)

    def generation_config(self) -> dict[str, object]:
        """The ids that begin and end a text, as in generation_config.json."""
        if self.is_missing:
            return {}
        found = [self.special(name) for name in ("eos", "eot", "eom")]
        ends = {text: number for number, text in enumerate(self.tokens) if text in _END_TEXTS}
        if _CALL in ends:
            ends.pop(_PART_END, None)
        ids = dict.fromkeys([*(number for number in found if number is not None), *ends.values()])
        return {"eos_token_id": list(ids), "bos_token_id": self.special("bos")}

    def files(self) -> dict[str, bytes]:
        """The files by name; empty without a tokenizer."""
        if self.is_missing:
            return {}
        files = {
            "tokenizer.json": self._tokenizer_json(),
            "tokenizer_config.json": self._tokenizer_config(),
            "generation_config.json": self.generation_config(),
        }
        return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}

    def _tokenizer_json(self) -> dict[str, Any]:
        if len(set(self.tokens)) != len(self.tokens):
            raise self._unusable("tokens", "has a token twice")
        match self._value("model"):
            case "gpt2":
                parts = self._byte_level()
            case "llama":
                parts = self._sentence_piece()
            case other:
                raise self._unusable(
                    "model", f"is {other!r:.80}, which is not supported (supported: gpt2, llama)"
                )
        return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": self._added(), **parts}

    def _added(self) -> list[dict[str, Any]]:
        """Tokens that are found in texts before any other."""
        is_special: dict[int, bool] = {
            TokenType.CONTROL: True,
            TokenType.UNKNOWN: True,
            TokenType.USER_DEFINED: False,
        }
        plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        return [
            {"id": number, "content": text, **plain, "special": is_special[kind]}
            for number, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in is_special and text
        ]

    def _byte_level(self) -> dict[str, Any]:
        name = self._value("pre")
        if (split := _SPLITS.get(str(name))) is None:
            legal = ", ".join(_SPLITS)
            raise self._unusable("pre", f"is {name!r:.80}, a rule that is not known (known: {legal})")
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in split.patterns
        ]
        steps.append({**byte_level, "use_regex": split.is_gpt2})
        merges = [merge.split(" ", 1) for merge in self._file.texts(f"{_PREFIX}merges")]
        return {
            "normalizer": {"type": "NFC"} if split.has_nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "post_processor": self._ends(adds_bos=split.adds_bos),
            "decoder": {**byte_level, "use_regex": True},
            "model": self._model(merges, unknown=None, has_bytes=False, ignores_merges=split.ignores_merges),
        }

    def _sentence_piece(self) -> dict[str, Any]:
        has_prefix = self._flag("add_space_prefix", default=True)
        unknown = self.special("unknown")
        if unknown is None:
            raise self._unusable("unknown_token_id", "is missing")
        spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        prefix = [{"type": "Prepend", "prepend": "▁"}] if has_prefix else []
        strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
        back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
        steps = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
            "pre_tokenizer": None,
            "post_processor": self._ends(adds_bos=True),
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": self._model(
                self._merges_of_scores(), unknown=self.tokens[unknown], has_bytes=True, ignores_merges=False
            ),
        }

    def _model(
        self, merges: list[list[str]], *, unknown: str | None, has_bytes: bool, ignores_merges: bool
    ) -> dict[str, Any]:
        return {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": has_bytes,
            "byte_fallback": has_bytes,
            "ignore_merges": ignores_merges,
            "vocab": {text: number for number, text in enumerate(self.tokens)},
            "merges": merges,
        }

    def _merges_of_scores(self) -> list[list[str]]:
        """Pairs of tokens in the order in which SentencePiece joins them: the best token first."""
        scores = self._numbers("scores")
        ids = {
            text: number
            for number, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind == TokenType.NORMAL
        }
        found: list[tuple[float, str, str]] = []
        for text, number in ids.items():
            splits = ((text[:place], text[place:]) for place in range(1, len(text)))
            pairs = [(left, right) for left, right in splits if left in ids and right in ids]
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            found += [(float(scores[number]), left, right) for left, right in pairs]
        found.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
        return [[left, right] for _, left, right in found]

    def _ends(self, *, adds_bos: bool) -> dict[str, Any] | None:
        """Adds the tokens that begin and end a text."""
        added = {
            "bos": self._flag("add_bos_token", default=adds_bos),
            "eos": self._flag("add_eos_token", default=False),
        }
        ids = {name: self.special(name) for name, is_added in added.items() if is_added}
        known = {name: number for name, number in ids.items() if number is not None}
        if not known:
            return None
        text = {"Sequence": {"id": "A", "type_id": 0}}
        ends = {
            name: [{"SpecialToken": {"id": self.tokens[number], "type_id": 0}}]
            for name, number in known.items()
        }
        single = [*ends.get("bos", []), text, *ends.get("eos", [])]
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                self.tokens[number]: {
                    "id": self.tokens[number],
                    "ids": [number],
                    "tokens": [self.tokens[number]],
                }
                for number in known.values()
            },
        }

    def _tokenizer_config(self) -> dict[str, object]:
        names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
        ids = {field: self.special(name) for field, name in names.items()}
        specials = {field: self.tokens[number] for field, number in ids.items() if number is not None}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **specials,
            **({} if (templates := self._templates()) is None else {"chat_template": templates}),
        }

    def _templates(self) -> str | list[dict[str, str]] | None:
        key = "tokenizer.chat_template"
        default = self._metadata.get(key)
        others = {
            name.removeprefix(f"{key}."): text
            for name, text in self._metadata.items()
            if name.startswith(f"{key}.") and isinstance(text, str)
        }
        if not others or not isinstance(default, str):
            return default if isinstance(default, str) else None
        return [{"name": name, "template": text} for name, text in {"default": default, **others}.items()]

    def _numbers(self, key: str) -> Sequence[float]:
        numbers = self._file.numbers(_PREFIX + key)
        if len(numbers) != len(self.tokens):
            raise self._unusable(
                key, f"has {len(numbers)} items, the vocabulary has {len(self.tokens)} tokens"
            )
        return numbers

    def _flag(self, key: str, *, default: bool) -> bool:
        value = self._metadata.get(_PREFIX + key, default)
        if not isinstance(value, bool):
            raise self._unusable(key, f"is {value!r:.80}, expected true or false")
        return value

    def _value(self, key: str) -> object:
        return self._metadata.get(_PREFIX + key)

    def _unusable(self, key: str, problem: str) -> UnusableTokenizer:
        return UnusableTokenizer(f"{self._file.path}: metadata key {_PREFIX + key!r} {problem}")
