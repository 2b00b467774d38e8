"""tekken.json as the files of a Hugging Face tokenizer.

tekken is byte-level BPE without a list of merges: two tokens are joined if their bytes together are a token,
the one of the lowest rank first. Ids of special tokens come before all others. Source: mistral-common's
tekken.py.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from pathlib import Path

from checkpoint.errors import UnusableTokenizer
from checkpoint.files import TEKKEN_FILE, TOKENIZER_FILE, is_named, parse_json_object, read_regular

MAX_TOKENS = 1 << 20
MAX_TOKEN_BYTES = 1024
_FILLER = "<SPECIAL_{}>"
_OLD_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""Of files that list none."""
_BOS = "<s>"
_ROLES = {"bos_token": _BOS, "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
"""In tokenizer_config.json."""


def tekken_tokenizer_files(content: bytes, source: Path) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json of the file `source`, by name. Raises UnusableTokenizer.

    A file of 131,072 ids takes some seconds.
    """
    found = parse_json_object(content, str(source), UnusableTokenizer)
    config = found.get("config")
    if not isinstance(config, dict) or not isinstance(config.get("pattern"), str):
        raise UnusableTokenizer(f"{source} has no config with a pattern")
    specials = _specials(found, config, source)
    tokens = _tokens(found, config, len(specials), source)
    merges = _merges({token: rank for rank, token in enumerate(tokens)})
    texts = specials + [_text(token) for token in tokens]
    if len(set(texts)) != len(texts):
        raise UnusableTokenizer(f"{source} has a token twice")
    files = {
        TOKENIZER_FILE: _tokenizer_json(config["pattern"], specials, texts, merges),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{role: text for role, text in _ROLES.items() if text in specials},
        },
    }
    return {name: json.dumps(value, ensure_ascii=False).encode() for name, value in files.items()}


def _specials(found: Mapping[str, object], config: Mapping[str, object], source: Path) -> list[str]:
    """Special tokens in the order of ids, with fillers up to the number that is reserved."""
    listed = found.get("special_tokens")
    texts = list(_OLD_SPECIALS)
    if listed is not None:
        ranks: dict[object, object] = {}
        for one in listed if isinstance(listed, list) else [None]:
            if not isinstance(one, dict) or not isinstance(one.get("token_str"), str):
                raise UnusableTokenizer(f"{source} has the special token {one!r:.120}, which has no text")
            ranks[one.get("rank")] = one["token_str"]
        if sorted(ranks, key=str) != sorted(range(len(ranks)), key=str):
            raise UnusableTokenizer(f"{source} has special tokens of ranks that are not 0, 1, 2, ...")
        texts = [str(ranks[rank]) for rank in range(len(ranks))]
    reserved = _count(config, "default_num_special_tokens", len(texts), source)
    if reserved < len(texts):
        raise UnusableTokenizer(f"{source} has {len(texts)} special tokens, and reserves {reserved} ids")
    return texts + [_FILLER.format(number) for number in range(len(texts), reserved)]


def _tokens(
    found: Mapping[str, object], config: Mapping[str, object], num_specials: int, source: Path
) -> list[bytes]:
    """Other tokens in the order of ids. Files have more than are used."""
    listed = found.get("vocab")
    if not isinstance(listed, list):
        raise UnusableTokenizer(f"{source} has no list 'vocab'")
    size = _count(config, "default_vocab_size", num_specials + len(listed), source)
    listed = listed[: max(0, size - num_specials)]
    tokens: list[bytes] = []
    for one in listed:
        try:
            token = base64.b64decode(one["token_bytes"], validate=True)
        except (TypeError, KeyError, ValueError, binascii.Error) as error:
            raise UnusableTokenizer(f"{source} has the token {one!r:.120}, which has no bytes") from error
        if not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise UnusableTokenizer(
                f"{source} has a token of {len(token)} bytes, the limit is {MAX_TOKEN_BYTES}"
            )
        tokens.append(token)
    return tokens


def _count(config: Mapping[str, object], key: str, default: int, source: Path) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if type(value) is not int or not 0 < value <= MAX_TOKENS:
        raise UnusableTokenizer(f"{source}: {key} is {value!r:.80}, expected 1 to {MAX_TOKENS}")
    return value


def _merges(ranks: Mapping[bytes, int]) -> list[list[str]]:
    """Pairs of tokens in the order in which they are joined."""
    texts = {token: _text(token) for token in ranks}
    merges: list[list[str]] = []
    for token in ranks:
        splits = ((token[:place], token[place:]) for place in range(1, len(token)))
        pairs = [(left, right) for left, right in splits if left in ranks and right in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [[texts[left], texts[right]] for left, right in pairs]
    return merges


def _characters() -> dict[int, str]:
    """The character of each byte in tokenizer.json, as in GPT-2: printable ones stand for themselves."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + number) for number, byte in enumerate(others)
    }


_CHARACTERS = _characters()


def _text(token: bytes) -> str:
    return token.decode("latin-1").translate(_CHARACTERS)


def _tokenizer_json(
    pattern: str, specials: list[str], texts: list[str], merges: list[list[str]]
) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": text, **plain, "special": True} for number, text in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, {**byte_level, "use_regex": False}]},
        "post_processor": _beginning(specials),
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {text: number for number, text in enumerate(texts)},
            "merges": merges,
        },
    }


def _beginning(specials: list[str]) -> dict[str, object] | None:
    """Puts <s> before a text."""
    if _BOS not in specials:
        return None
    bos = {"SpecialToken": {"id": _BOS, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {_BOS: {"id": _BOS, "ids": [specials.index(_BOS)], "tokens": [_BOS]}},
    }


def is_tekken(directory: Path) -> bool:
    """Whether the tokenizer of a directory is in a tekken.json alone."""
    return is_named(directory / TEKKEN_FILE) and not is_named(directory / TOKENIZER_FILE)


def read_tekken(directory: Path, *, max_bytes: int) -> dict[str, bytes]:
    """`tekken_tokenizer_files` of a directory. Raises CheckpointError."""
    path = directory / TEKKEN_FILE
    return tekken_tokenizer_files(read_regular(path, max_bytes=max_bytes), path)
