"""tokenizer.json and the files next to it, loaded by the library tokenizers, without transformers.

Ids, texts and special tokens equal those of transformers' PreTrainedTokenizerFast.
Source: transformers 5.23, tokenization_utils_base.py and tokenization_utils_tokenizers.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from checkpoint.files import CONFIG_FILE, is_named

TOKENIZER_JSON = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
_SETTINGS = "tokenizer_config.json"
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
"""Special tokens without a name, in transformers 5 and 4; an object names them."""

_MISTRAL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")
_MISTRAL_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MIN_MISTRAL_IDS = 100_000

Templates: TypeAlias = str | dict[str, str] | None
"""A chat template, several by name, or none."""
_Token: TypeAlias = str | AddedToken
_Settings: TypeAlias = dict[str, Any]


@dataclass(kw_only=True)
class JsonTokenizer:
    """A loaded tokenizer; its fields and methods have the names of transformers'.

    Attributes:
        special_tokens_map: Named special tokens, such as "eos_token".
        response_template: transformers' description of answers, as the settings have it.
    """

    backend_tokenizer: Tokenizer
    special_tokens_map: Mapping[str, str]
    extra_special_tokens: Sequence[str] = ()
    chat_template: Templates = None
    response_template: object = None
    split_special_tokens: bool = False
    _special_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        tokens = (*self.special_tokens_map.values(), *self.extra_special_tokens)
        ids = (self.backend_tokenizer.token_to_id(token) for token in tokens)
        self._special_ids = sorted({token_id for token_id in ids if token_id is not None})

    @property
    def all_special_ids(self) -> list[int]:
        return self._special_ids

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token_id)


def load_tokenizer_json(directory: Path) -> JsonTokenizer:
    """Load tokenizer.json of `directory`, with its settings, special tokens and chat templates.

    Raises whatever the library raises for a broken file, ValueError for broken settings.
    """
    settings = _read_object(directory / _SETTINGS) if is_named(directory / _SETTINGS) else {}
    described = _read_object(directory / TOKENIZER_JSON)
    backend = Tokenizer.from_file(str(directory / TOKENIZER_JSON))
    padding = backend.padding
    if padding is not None:
        settings.setdefault("pad_token", padding["pad_token"])
    backend.no_truncation()
    backend.no_padding()
    added = _added_tokens(directory, settings, described)
    named, extra = _special_tokens(settings, {token.content: token for token in added.values()})
    _add_tokens(backend, added, named, extra)
    _correct_mistral(backend, directory, settings)
    splits = settings.get("split_special_tokens") is True
    backend.encode_special_tokens = splits
    return JsonTokenizer(
        backend_tokenizer=backend,
        special_tokens_map={name: _content(token) for name, token in named.items()},
        extra_special_tokens=tuple(_content(token) for token in extra),
        chat_template=_read_templates(directory, settings),
        response_template=settings.get("response_template"),
        split_special_tokens=splits,
    )


def _read_object(path: Path) -> _Settings:
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is a JSON {type(value).__name__}, must be an object")
    return value


def _added_tokens(
    directory: Path, settings: _Settings, described: Mapping[str, Any]
) -> dict[int, AddedToken]:
    """Return the tokens beside the model's vocabulary, by id.

    The settings list them, or older files do: special_tokens_map.json (which changes `settings`),
    added_tokens.json, and tokenizer.json itself.
    """
    if (listed := settings.get("added_tokens_decoder")) is not None:
        return {int(token_id): AddedToken(**token) for token_id, token in listed.items()}
    if is_named(path := directory / "special_tokens_map.json"):
        before = list(settings.get(_EXTRA[0]) or ())
        settings.update({key: _special_value(value) for key, value in _read_object(path).items()})
        if isinstance(extra := settings.get(_EXTRA[0]), list):
            settings[_EXTRA[0]] = [*before, *(token for token in extra if token not in before)]
    added: dict[int, AddedToken] = {}
    if is_named(path := directory / "added_tokens.json"):
        special = {_content(token) for token in _special_contents(settings)}
        for content, token_id in _read_object(path).items():
            is_special = content in special
            added[token_id] = AddedToken(content, normalized=not is_special, special=is_special)
    for token in described.get("added_tokens") or ():
        fields = {name: value for name, value in token.items() if name != "id"}
        added[token["id"]] = AddedToken(**fields)
    return added


def _special_value(value: Any) -> Any:
    """A value of special_tokens_map.json: an object describes a token, and may say "special" wrongly."""
    if isinstance(value, list):
        return [_special_value(item) for item in value]
    return (
        AddedToken(**{**value, "special": True}) if isinstance(value, dict) and "content" in value else value
    )


def _special_contents(settings: Mapping[str, Any]) -> Iterator[_Token]:
    yield from (settings[name] for name in _NAMES if settings.get(name))
    yield from next((settings[name] for name in _EXTRA if settings.get(name)), ())


def _special_tokens(
    settings: Mapping[str, Any], added: Mapping[str, AddedToken]
) -> tuple[dict[str, _Token], list[_Token]]:
    """Return the named special tokens and the others; a token of `added` keeps its properties."""
    named: dict[str, _Token] = {}
    for name in _NAMES:
        if settings.get(name) is not None:
            token = _as_token(name, settings[name])
            named[name] = added.get(_content(token), token)
    for name, value in settings.items():  # a family's own, such as "image_token"
        is_token = isinstance(value, str | AddedToken) or (isinstance(value, dict) and "__type" in value)
        if name not in _NAMES and name.endswith("_token") and is_token:
            named[name] = _as_token(name, value)
    extra = next((settings[name] for name in _EXTRA if settings.get(name)), ())
    if isinstance(extra, dict):
        named |= {name: _as_token(name, value) for name, value in extra.items()}
        return named, []
    return named, [_as_token("extra_special_tokens", value) for value in extra]


def _as_token(name: str, value: Any) -> _Token:
    """Raises ValueError for a value that describes no token."""
    if isinstance(value, dict) and "content" in value:
        return AddedToken(**{key: item for key, item in value.items() if key != "__type"})
    if not isinstance(value, str | AddedToken):
        raise ValueError(f"{name} of {_SETTINGS} is {value!r:.80}, must be a token")
    return value


def _content(token: _Token) -> str:
    return token if isinstance(token, str) else token.content


def _add_tokens(
    backend: Tokenizer,
    added: Mapping[int, AddedToken],
    named: Mapping[str, _Token],
    extra: Sequence[_Token],
) -> None:
    """Add the listed tokens in the order of their ids, then special tokens that are not yet known.

    Tokens that the file has, too, get the properties of the list.
    """
    tokens: list[AddedToken] = [token for _, token in sorted(added.items())]
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    known |= {token.content for token in tokens}
    for token in (*named.values(), *extra):
        if _content(token) not in known:
            known.add(_content(token))
            tokens.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    special = {_content(token) for token in named.values()}
    for token in tokens:
        token.special = token.special or token.content in special
    if tokens:
        backend.add_tokens(tokens)


def _read_templates(directory: Path, settings: Mapping[str, Any]) -> Templates:
    """Files of templates come before the settings, which have a template, or a list of named ones."""
    templates: dict[str, str] = {}
    if is_named(path := directory / TEMPLATE_FILE):
        templates["default"] = path.read_text(encoding="utf-8")
    for path in sorted((directory / MORE_TEMPLATES).glob("*.jinja")):
        templates[path.name.removesuffix(".jinja")] = path.read_text(encoding="utf-8")
    if templates:
        return templates["default"] if templates.keys() == {"default"} else templates
    listed: Templates | list[Mapping[str, str]] = settings.get("chat_template")
    if isinstance(listed, list):
        return {template["name"]: template["template"] for template in listed}
    return listed


def _correct_mistral(backend: Tokenizer, directory: Path, settings: Mapping[str, Any]) -> None:
    """Replace a wrong pattern, which older files of Mistral have, if the settings ask for it."""
    is_asked = settings.get("fix_mistral_regex") is True and is_named(directory / CONFIG_FILE)
    splitter = backend.pre_tokenizer
    if not is_asked or splitter is None or backend.get_vocab_size() <= _MIN_MISTRAL_IDS:
        return
    config = _read_object(directory / CONFIG_FILE)
    version = str(config.get("transformers_version") or "0").partition(".")[0]
    if (version.isdigit() and int(version) >= 5) or config.get("model_type") not in (None, *_MISTRAL_TYPES):
        return
    split = pre_tokenizers.Split(pattern=Regex(_MISTRAL_PATTERN), behavior="isolated")
    if isinstance(splitter, pre_tokenizers.Sequence):
        splitter[0] = split
        return
    if isinstance(splitter, pre_tokenizers.Metaspace):
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, splitter])
