"""Tokenizer and chat template of a checkpoint: text to token ids and back.

tokenizer.json is loaded as it is, by the library tokenizers (text/tokenizer_json.py), for two reasons. It
needs neither transformers nor torch. And AutoTokenizer of transformers 5 uses only the vocabulary for some
classes (such as LlamaTokenizer) and applies the class's own rules, which gives other ids around leading
spaces and special tokens for tokenizers in Llama 2's format. Without tokenizer.json (a SentencePiece model,
or vocab.json and merges.txt), AutoTokenizer converts the files, but for tekken.json, see
checkpoint/mistral/tokenizer.py.
"""

from __future__ import annotations

import json
import re
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from sys import getsizeof
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from jinja2 import TemplateSyntaxError

from checkpoint.errors import BadConfig, CheckpointError
from checkpoint.files import check_directory, is_named, read_json_object, read_regular
from checkpoint.gguf.files import is_gguf
from checkpoint.gguf.model import gguf_tokenizer_files
from checkpoint.grammar_tokenizer import MAX_TOKENIZER_BYTES
from checkpoint.mistral.tokenizer import is_tekken, read_tekken
from text.chat_template import DEFAULT_OPTIONS, ChatTemplate, TemplateOptions
from text.jinja_template import compile_template
from text.tokenizer_json import (
    MORE_TEMPLATES,
    TEMPLATE_FILE,
    TOKENIZER_JSON,
    JsonTokenizer,
    load_tokenizer_json,
)
from wire.tenant_shares import TenantCache

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    AnyTokenizer: TypeAlias = JsonTokenizer | PreTrainedTokenizerBase

_OTHER_VOCABULARIES = ("tokenizer.model", "vocab.json", "tiktoken.model", "spiece.model")
_PROCESSOR_TEMPLATE = "chat_template.json"
"""A template in the form of processors, of models that were published with images in mind."""

MAX_CACHED_BYTES = 64 << 20
_ENTRY_BYTES = 256
"""What an entry takes beside its text and ids."""


class TokenizerError(ValueError):
    """Base of this module's errors."""


class UnreadableTokenizer(TokenizerError):
    """The checkpoint has tokenizer files that cannot be loaded."""


class UnknownToken(TokenizerError):
    """A token id outside the vocabulary."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message; `role` is "system", "user", "assistant" or another role of the template."""

    role: str
    content: str


class TextCodec:
    """Tokenizer and chat template of a checkpoint; safe to share between tasks and threads."""

    def __init__(self, tokenizer: AnyTokenizer, *, model_vocab_size: int | None = None) -> None:
        """`model_vocab_size` is the width of the model's logits, often more than the tokenizer's ids."""
        self._tokenizer = tokenizer
        self._vocab_size = max(_num_ids(tokenizer), model_vocab_size or 0)
        self._pieces: dict[int, str | None] = {}
        self._whole_texts: dict[bool, dict[int, str]] = {True: {}, False: {}}

    @property
    def vocab_size(self) -> int:
        """All ids are below this. Ids that only the model has (padding of its head) have no text."""
        return self._vocab_size

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The model's default template."""
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How transformers parses answers of the model."""
        template = self._tokenizer.response_template
        return template if isinstance(template, dict) else None

    @property
    def special_tokens(self) -> Mapping[str, str | None]:
        """The tokens that begin and end a text and that pad it, by transformers' names."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        known = self._tokenizer.special_tokens_map
        return {name: known.get(name) for name in names}

    def end_token_ids(self, configured: Sequence[int]) -> tuple[int, ...]:
        """Return the ids that end a text: `configured` ones, and the one that the tokenizer's files name."""
        token = self.special_tokens["eos_token"]
        token_id = None if token is None else self._tokenizer.get_vocab().get(token)
        return tuple(dict.fromkeys([*configured, *([] if token_id is None else [token_id])]))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`, with the special tokens (such as BOS) that the post-processor adds.

        Special tokens written in `text` become those tokens, as in transformers. Nothing is truncated.
        """
        return _ids_of(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def spellings(self, word: str) -> tuple[tuple[int, ...], ...]:
        """Return the ids of `word` at the start of a text and after a space.

        Banned words need both, as in transformers (`add_prefix_space`) and vLLM.
        """
        texts = (word, " " + word.lstrip())
        ids = (_ids_of(self._tokenizer, text, add_special_tokens=False) for text in texts)
        return tuple(dict.fromkeys(tuple(spelling) for spelling in ids if spelling))

    def encode_conversation(self, messages: Sequence[ChatMessage], *, tenant: str = "") -> list[int]:
        """Return the ids of the rendered chat template, up to where the assistant's message begins.

        Raises NoChatTemplate, and BadConversation with the template's message if it rejects the conversation
        (for example two user messages in a row).
        """
        return self.encode_messages(
            [{"role": message.role, "content": message.content} for message in messages], tenant=tenant
        )

    def encode_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        tenant: str = "",
    ) -> list[int]:
        """`encode_conversation` for messages as `ChatTemplate.render` takes them."""
        return self._prompt_tokens.encode(self._chat_template.render(messages, options), tenant)

    def check_template(self, template: str) -> None:
        """Raises TokenizerError with the line for a chat template that Jinja cannot parse."""
        try:
            compile_template(template)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"line {error.lineno}: {error.message}") from None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode `token_ids`. Raises UnknownToken."""
        self.check(token_ids)
        return self.decode_checked(token_ids, skip_special_tokens=skip_special_tokens)

    def decode_checked(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """`decode` without the check of the ids."""
        if self._plain_backend is not None:
            return self._plain_backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        assert not isinstance(self._tokenizer, JsonTokenizer)
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise UnknownToken, with the id, if an id is outside the vocabulary."""
        for token_id in token_ids:
            if token_id < 0 or token_id >= self._vocab_size:
                raise UnknownToken(f"token id {token_id} is outside the vocabulary of {self._vocab_size} ids")

    def has_text(self, token_id: int, *, skip_special_tokens: bool = True) -> bool:
        """Whether the token decodes to text: not for unknown ids, nor for skipped special tokens."""
        if skip_special_tokens and token_id in self._special_ids:
            return False
        return self.piece(token_id) is not None

    def piece(self, token_id: int) -> str | None:
        """Return the token as spelled in the vocabulary, or None for an unknown id."""
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
            assert piece is None or isinstance(piece, str)
            self._pieces[token_id] = piece
            return piece

    def whole_texts(self, *, skip_special_tokens: bool) -> dict[int, str]:
        """Texts of byte-level tokens that are whole characters; its users add those that they decode."""
        return self._whole_texts[skip_special_tokens]

    @cached_property
    def longest_token_bytes(self) -> int:
        """UTF-8 bytes of the longest token as spelled in the vocabulary; its text is never longer."""
        return max(len(piece.encode()) for piece in self._tokenizer.get_vocab())

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are byte strings (GPT-2's scheme) that concatenate to UTF-8 text."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        if decoder is None:
            return False
        described = json.loads(decoder.__getstate__())
        return [part["type"] for part in described.get("decoders", [described])] == ["ByteLevel"]

    @cached_property
    def _plain_backend(self) -> Tokenizer | None:
        """The Rust tokenizer, if the class decodes with it alone."""
        return _backend(self._tokenizer, "_decode")

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    @cached_property
    def _prompt_tokens(self) -> PromptTokens:
        return PromptTokens(self._tokenizer)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self._tokenizer.added_tokens_decoder
        special = {token_id for token_id, token in added.items() if token.special}
        return frozenset(special | set(self._tokenizer.all_special_ids))


_Key: TypeAlias = tuple[bool, str]
"""Whether it is the first part of a prompt, and its text."""


class PromptTokens:
    """Tokenizes prompts without adding special tokens, from cached ids; safe to share between threads.

    The next request of a conversation repeats all of its messages; only the new ones are tokenized.

    A tokenizer finds its added tokens first, in the raw text, and tokenizes each text between them
    separately, so the ids of these texts can be kept. Each tenant has its own: others' are not faster, and
    the tenant with the most makes room.
    """

    def __init__(self, tokenizer: AnyTokenizer, *, max_cached_bytes: int = MAX_CACHED_BYTES) -> None:
        self._tokenizer = tokenizer
        self._boundaries = find_boundaries(tokenizer)
        longest_first = sorted(self._boundaries, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest_first))})").split
        self._cache: TenantCache[_Key, array[int]] = TenantCache(max_bytes=max_cached_bytes)
        self._lock = Lock()

    def encode(self, text: str, tenant: str = "") -> list[int]:
        """Return the ids that the tokenizer gives for `text`."""
        if not self._boundaries:
            return self._tokenize(text)
        ids: list[int] = []
        for number, part in enumerate(self._split(text)):
            if number % 2:
                ids.append(self._boundaries[part])
            elif part:
                ids.extend(self._part(part, tenant, is_first=number == 0))
        return ids

    def _part(self, part: str, tenant: str, *, is_first: bool) -> array[int]:
        """Return the ids of a text between boundaries. Some tokenizers put a space before a first one."""
        key = (is_first, part)
        with self._lock:
            if (cached := self._cache.get(tenant, key)) is not None:
                return cached
        before = "" if is_first else next(iter(self._boundaries))
        ids = array("I", self._tokenize(before + part)[0 if is_first else 1 :])
        num_bytes = getsizeof(part) + len(ids) * ids.itemsize + _ENTRY_BYTES
        with self._lock:
            self._cache.add(tenant, key, ids, num_bytes=num_bytes)
        return ids

    def _tokenize(self, text: str) -> list[int]:
        return _ids_of(self._tokenizer, text, add_special_tokens=False)


def find_boundaries(tokenizer: AnyTokenizer) -> dict[str, int]:
    """Return the special tokens that split each text in which they are written, and their ids.

    Empty for tokenizers whose rules are unknown (those in Python) or random (dropout).
    """
    backend = _backend(tokenizer, "_encode_plus")
    if backend is None or getattr(backend.model, "dropout", None) or tokenizer.split_special_tokens:
        return {}
    added: dict[int, AddedToken] = tokenizer.added_tokens_decoder
    texts = [token.content for token in added.values()]
    return {
        token.content: token_id
        for token_id, token in added.items()
        if _is_exact(token) and not any(_collide(token.content, text) for text in texts)
    }


def _is_exact(token: AddedToken) -> bool:
    """The token is searched in the raw text, and takes no text beside it."""
    changes = token.normalized or token.lstrip or token.rstrip or token.single_word
    return token.special and not changes and bool(token.content) and token.content == token.content.strip()


def _collide(boundary: str, other: str) -> bool:
    """Whether another token can take a part of a text in which the boundary is written."""
    if boundary == other:
        return False
    overlaps = any(other.endswith(boundary[:length]) for length in range(1, len(boundary)))
    return overlaps or boundary in other


def _backend(tokenizer: AnyTokenizer, method: str) -> Tokenizer | None:
    """The Rust tokenizer, if `method` of a class of transformers does nothing else."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.backend_tokenizer
    defined = getattr(type(tokenizer), method, None)
    if getattr(defined, "__module__", "") != "transformers.tokenization_utils_tokenizers":
        return None
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


def _ids_of(tokenizer: AnyTokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Raises TokenizerError for files that contradict themselves, where Rust fails or panics."""
    ids: list[int]
    try:
        if isinstance(tokenizer, JsonTokenizer):  # a batch, which lets other threads run
            batch = tokenizer.backend_tokenizer.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            ids = batch[0].ids
        else:
            ids = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise TokenizerError(f"the model's tokenizer fails: {error}") from None
    return ids


def load_text_codec(path: Path, *, model_vocab_size: int | None = None) -> TextCodec | None:
    """Load the codec of a checkpoint directory or GGUF file; None if it has no tokenizer.

    Reads local files only.

    Never runs code of a checkpoint. Raises UnreadableTokenizer, also for a FIFO or device in place of a file,
    because the libraries would open it.
    """
    if not is_gguf(path) and not is_tekken(path):
        return _load_directory(path, model_vocab_size)
    try:
        files = gguf_tokenizer_files(path) if is_gguf(path) else _made_of_tekken(path)
    except CheckpointError as error:
        raise UnreadableTokenizer(str(error)) from error
    return _load_made(files, path, model_vocab_size)


def _made_of_tekken(directory: Path) -> dict[str, bytes]:
    """The tokenizer's files, and the chat template beside tekken.json."""
    _check_files(directory)
    files = read_tekken(directory, max_bytes=MAX_TOKENIZER_BYTES)
    for name in (TEMPLATE_FILE, _PROCESSOR_TEMPLATE):
        if is_named(template := directory / name):
            files[name] = read_regular(template, max_bytes=MAX_TOKENIZER_BYTES)
    return files


def _load_made(files: Mapping[str, bytes], path: Path, model_vocab_size: int | None) -> TextCodec | None:
    """Load a codec of files made of `path`."""
    with tempfile.TemporaryDirectory(prefix="stageline-tokenizer-") as made:
        for name, content in files.items():
            (Path(made) / name).write_bytes(content)
        try:
            return _load_directory(Path(made), model_vocab_size)
        except UnreadableTokenizer as error:
            raise UnreadableTokenizer(str(error).replace(made, str(path))) from error


def _load_directory(directory: Path, model_vocab_size: int | None) -> TextCodec | None:
    has_json = is_named(directory / TOKENIZER_JSON)
    if not has_json and not any(is_named(directory / name) for name in _OTHER_VOCABULARIES):
        return None
    try:
        _check_files(directory)
        if has_json:
            _check_merges(directory / TOKENIZER_JSON)
        tokenizer = load_tokenizer_json(directory) if has_json else _load_other(directory)
        if not tokenizer.chat_template and is_named(template := directory / _PROCESSOR_TEMPLATE):
            tokenizer.chat_template = _read_processor_template(template)
    except BaseException as error:  # the libraries raise anything, down to bare Exception from Rust
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise UnreadableTokenizer(f"tokenizer in {directory} cannot be loaded: {_problem(error)}") from error
    return TextCodec(tokenizer, model_vocab_size=model_vocab_size)


def _is_panic(error: BaseException) -> bool:
    """Whether Rust panicked, which is no Exception."""
    return type(error).__name__ == "PanicException"


def _check_merges(path: Path) -> None:
    """Refuse what ends the process in Rust: a prefix is cut off merges that do not have it."""
    model = json.loads(path.read_bytes()).get("model")
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    if not prefix or not isinstance(prefix, str):
        return
    for merge in model.get("merges") or ():
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not str(parts[-1]).startswith(prefix):
            raise ValueError(f"merge {parts!r:.100} lacks continuing_subword_prefix {prefix!r:.100}")


def _problem(error: BaseException) -> str:
    """One line, without transformers' advice to run code of the checkpoint."""
    if "trust_remote_code" in str(error):
        return "it needs code of the checkpoint, which is never run: convert it to tokenizer.json"
    return " ".join(str(error).split())


def _check_files(directory: Path) -> None:
    for folder in (directory, directory / MORE_TEMPLATES):
        if folder.is_dir():
            check_directory(folder, max_bytes=MAX_TOKENIZER_BYTES)


def _load_other(directory: Path) -> PreTrainedTokenizerBase:
    """Raises UnreadableTokenizer without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UnreadableTokenizer(
            "files other than tokenizer.json need transformers: run pip install transformers on this host, "
            "or make tokenizer.json on another one: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        ) from error
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    return tokenizer


def _read_processor_template(path: Path) -> str | dict[str, str]:
    """One template, or several by name. Raises CheckpointError."""
    found = read_json_object(path, max_bytes=MAX_TOKENIZER_BYTES).get("chat_template")
    if isinstance(found, str):
        return found
    named = found if isinstance(found, dict) else {}
    templates = {name: text for name, text in named.items() if isinstance(text, str)}
    if not templates or templates != named:
        raise BadConfig(
            f"{path}: field 'chat_template' is {found!r:.80}, expected a template or an object of templates"
        )
    return templates


def _num_ids(tokenizer: AnyTokenizer) -> int:
    """The largest id plus 1, which exceeds the number of tokens if ids have gaps."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
