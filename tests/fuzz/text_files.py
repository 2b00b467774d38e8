"""Surfaces of texts: tokenizer files, chat templates, grammars of requests, and files of keys and tokens."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from certificates.identity import Role, parse_identity
from certificates.join_tokens import JoinTokenStore, parse_join_token
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.mutations import any_json, json_bytes, mutate_bytes, mutate_json, mutate_text
from tests.unit.text.trained_tokenizers import CHAT_TEMPLATE, byte_level, sentencepiece_like
from text.chat_template import ConversationError, TemplateOptions
from text.grammars import GrammarCompiler, GrammarKind, UnusableGrammar
from text.tokenizer import TextCodec, TokenizerError, load_text_codec
from web.api_keys import KeysUnusable, changed_keys, new_key, read_keys

_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
_CONVERSATION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello 🙂"}]
_TEMPLATES = (
    CHAT_TEMPLATE,
    "{%- set ns = namespace(last=0) %}{% for m in messages %}{% set ns.last = loop.index %}"
    "{{ m['content'] | trim | tojson }}{% endfor %}{{ ns.last }}",
    "{% macro show(x) %}[{{ x.role | upper }}]{% endmacro %}"
    "{{ messages | map(attribute='role') | join(',') }}{{ show(messages[0]) }}"
    "{{ raise_exception('no') if tools else strftime_now('%Y') }}",
    "{{ messages.__class__.__mro__ }}{{ ''.format.__globals__ }}{{ cycler.__init__.__globals__.os }}",
    "{{ '%s' % messages }}{{ 'a' * 9 }}{{ range(3) | list }}{{ messages[:1] }}{{ dict(a=1).items() | list }}",
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 1},
        "b": {"enum": ["x", "y"]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 3},
    },
    "required": ["a"],
    "$defs": {"d": {"anyOf": [{"type": "string", "pattern": "^a+$", "maxLength": 9}, {"const": None}]}},
}
_LARK = 'start: item ("," item)*\nitem: NAME | "(" start ")"\nNAME: /[a-z]+/\n%ignore /\\s/'
_GRAMMARS = (
    (GrammarKind.JSON_SCHEMA, json.dumps(_SCHEMA)),
    (GrammarKind.REGEX, r"(?i)([a-z]{2,5}|\d+)(,\s[^\n]*)?"),
    (GrammarKind.GRAMMAR, _LARK),
)


# Tokenizers


def make_tokenizer(random: Random) -> bytes:
    """tokenizer.json, or tokenizer_config.json, after its name."""
    if random.random() < 0.3:
        return b"tokenizer_config.json\n" + json_bytes(mutate_json(_CONFIG, random), random)
    whole = json.loads(random.choice((byte_level, sentencepiece_like))())
    part = random.choice([key for key in whole if key != "model"] + ["model"] * 3)
    changed = (
        {**whole, part: mutate_json(whole[part], random)}
        if random.random() < 0.8
        else mutate_json(whole, random)
    )
    return b"tokenizer.json\n" + json_bytes(changed, random)


@contextmanager
def opened_tokenizer() -> Iterator[Opened]:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        directory = Path(made)

        def examine(data: bytes) -> str:
            name, _, content = data.partition(b"\n")
            files = {
                "tokenizer.json": byte_level().encode(),
                "tokenizer_config.json": json.dumps(_CONFIG).encode(),
            }
            for file, body in {**files, name.decode(): content}.items():
                (directory / file).write_bytes(body)
            return _outcome(lambda: _use_codec(directory), ConversationError, TokenizerError)

        def check() -> None:
            valid = examine(b"tokenizer.json\n" + byte_level().encode())
            if valid != "ok":
                raise Broken(f"a valid tokenizer: {valid}")

        yield Opened(examine, check, (os.getpid(),))


def _use_codec(directory: Path) -> None:
    """What a coordinator and a gateway do with a tokenizer."""
    codec = load_text_codec(directory)
    assert codec is not None
    ids = codec.encode("Once upon a time 🙂")
    if ids:
        codec.decode(ids)
    _ = codec.is_byte_level, codec.has_chat_template
    if codec.has_chat_template:
        codec.encode_messages(_CONVERSATION)


# Templates


def make_template(random: Random) -> bytes:
    text = random.choice(_TEMPLATES)
    for _ in range(random.randint(1, 3)):
        text = mutate_text(text, random)
    return text.encode(errors="replace")


@contextmanager
def opened_template() -> Iterator[Opened]:
    codec = _codec()

    def examine(data: bytes) -> str:
        template = data.decode(errors="replace")

        def work() -> None:
            codec.check_template(template)
            codec.encode_messages(_CONVERSATION, TemplateOptions(template=template))

        return _outcome(work, ConversationError, TokenizerError)

    yield Opened(examine, lambda: None, (os.getpid(),))


@cache
def _codec() -> TextCodec:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        (Path(made) / "tokenizer.json").write_text(byte_level())
        (Path(made) / "tokenizer_config.json").write_text(json.dumps(_CONFIG))
        codec = load_text_codec(Path(made))
    assert codec is not None
    return codec


# Grammars


def make_grammar(random: Random) -> bytes:
    kind, text = random.choice(_GRAMMARS)
    if kind is GrammarKind.JSON_SCHEMA and random.random() < 0.8:
        data = json_bytes(mutate_json(json.loads(text), random), random)
    else:
        data = mutate_text(mutate_text(text, random), random).encode(errors="replace")
    return kind.value.encode() + b"\n" + data


@contextmanager
def opened_grammar() -> Iterator[Opened]:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        (Path(made) / "tokenizer.json").write_text(byte_level())
        compiler = GrammarCompiler(Path(made), vocab_size=400, eos_token_ids=(2,))
        assert compiler.load() is None

        def examine(data: bytes) -> str:
            kind, _, text = data.partition(b"\n")
            grammar = text.decode(errors="replace")
            return _outcome(lambda: compiler.compile(GrammarKind(kind.decode()), [grammar]), UnusableGrammar)

        def check() -> None:
            for kind, text in _GRAMMARS:
                if examine(f"{kind.value}\n{text}".encode()) != "ok":
                    raise Broken(f"a valid grammar is refused: {kind}")

        yield Opened(examine, check, (os.getpid(),))


# Keys and tokens


def make_access(random: Random) -> bytes:
    kind = random.choice(("keys", "tokens", "join", "identity"))
    return kind.encode() + b"\n" + _MAKERS[kind](random)


def _make_keys(random: Random) -> bytes:
    value: Any = tomllib.loads(_keys_text())
    key = random.choice(value["keys"])
    name = random.choice([*key, "added"])
    if random.random() < 0.5:
        text = _keys_text().replace(f"{name} = ", f"{name} = {json.dumps(any_json(random))} #", 1)
        return text.encode(errors="surrogatepass")
    return mutate_bytes(_keys_text().encode(), random)


def _make_tokens(random: Random) -> bytes:
    return json_bytes(mutate_json(json.loads(_tokens_text()), random), random)


_MAKERS: dict[str, Callable[[Random], bytes]] = {
    "keys": _make_keys,
    "tokens": _make_tokens,
    "join": lambda random: mutate_bytes(b"stageline-" + b"a" * 64 + b"-abcdef123456-" + b"s" * 43, random),
    "identity": lambda random: mutate_text(
        "spiffe://stageline.internal/stageline/default/worker/w0", random
    ).encode(errors="replace"),
}


@cache
def _keys_text() -> str:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        path = Path(made) / "keys.toml"
        with changed_keys(path) as known:
            for tenant in ("ann", "bob"):
                _, key = new_key(tenant=tenant, models=("m",), requests_per_minute=5, max_priority="low")
                known[key.id] = key
        return path.read_text()


@cache
def _tokens_text() -> str:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        path = Path(made) / "tokens.json"
        JoinTokenStore(path).create("a" * 64, Role.WORKER, life=timedelta(hours=1), uses=2)
        return path.read_text()


@contextmanager
def opened_access() -> Iterator[Opened]:
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        path = Path(made) / "file"
        path.touch(0o600)

        def examine(data: bytes) -> str:
            kind, _, content = data.partition(b"\n")
            path.write_bytes(content)
            text = content.decode(errors="replace")
            works: dict[bytes, tuple[Callable[[], object], type[Exception]]] = {
                b"keys": (lambda: read_keys(path), KeysUnusable),
                b"tokens": (lambda: JoinTokenStore(path).records(), OSError),
                b"join": (lambda: parse_join_token(text), ValueError),
                b"identity": (lambda: parse_identity(text), ValueError),
            }
            return _outcome(*works[kind])

        def check() -> None:
            for kind, text in ((b"keys", _keys_text()), (b"tokens", _tokens_text())):
                if examine(kind + b"\n" + text.encode()) != "ok":
                    raise Broken(f"a valid file of {kind!r} is refused")

        yield Opened(examine, check, (os.getpid(),))


def _outcome(work: Callable[[], object], *expected: type[Exception]) -> str:
    try:
        work()
    except expected as error:
        if len(str(error)) > 20_000:
            raise Broken(f"an error of {len(str(error))} characters") from None
        return type(error).__name__
    return "ok"


SURFACES = (
    Surface(name="tokenizer", share=4, make=make_tokenizer, opened=opened_tokenizer),
    Surface(name="template", share=8, make=make_template, opened=opened_template),
    Surface(name="grammar", share=6, make=make_grammar, opened=opened_grammar),
    Surface(name="access", share=10, make=make_access, opened=opened_access),
)
