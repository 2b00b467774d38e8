"""Converts the arguments of `Client.generate` to a request message.

Converters raise InvalidRequest, with the parameter's name, for values that the field cannot represent; the
server checks ranges.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, TypedDict

from google.protobuf.message import Message

from stageline.client.errors import InvalidRequest
from stageline_rpc.v1 import inference_pb2
from wire.channels import MAX_MESSAGE_BYTES
from wire.ids import id_text, new_request_id
from wire.sampling import SAMPLING_NUMBERS

_UINT32 = range(2**32)
_UINT64 = range(2**64)
_FLOAT32_MAX = 3.4028234663852886e38
_MAX_DURATION_S = 1e9
"""Durations beyond this do not fit a message; the server has a lower limit."""


def uint32(name: str, value: object) -> int:
    return _integer(name, value, _UINT32)


def uint64(name: str, value: object) -> int:
    return _integer(name, value, _UINT64)


def number(name: str, value: object) -> float:
    """Any number, including NaN and infinities; numbers beyond float32 are rejected."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"{name} is {_kind(value)}, must be a number")
    try:
        as_float = float(value)
    except OverflowError:
        raise _beyond_float32(name) from None
    if math.isfinite(as_float) and abs(as_float) > _FLOAT32_MAX:
        raise _beyond_float32(name)
    return as_float


def seconds(name: str, value: object) -> float:
    """A finite, non-negative time; not part of the message."""
    time_s = number(name, value)
    if not 0 <= time_s < math.inf:
        raise InvalidRequest(f"{name} is {time_s}, must be finite and at least 0")
    return time_s


def flag(name: str, value: object) -> bool:
    """A bool; other truthy values are rejected."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {_kind(value)}, must be True or False")
    return value


def text(name: str, value: object) -> str:
    """Text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {_kind(value)}, must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        # Python decodes other bytes of command lines and file names to these.
        what = (
            f"byte {code - 0xDC00:#04x} that is not UTF-8" if 0xDC80 <= code <= 0xDCFF else "lone surrogate"
        )
        raise InvalidRequest(f"{name} has a {what} at character {error.start}") from None
    return value


def texts(name: str, value: object) -> list[str]:
    """A list of texts; a single string is rejected."""
    return [text(name, item) for item in _items(name, value, "texts")]


def text_or_texts(name: str, value: object) -> list[str]:
    return [text(name, value)] if isinstance(value, str) else texts(name, value)


def token_ids(name: str, value: object) -> list[int]:
    return [_integer(f"a token id of {name}", item, _UINT32) for item in _items(name, value, "token ids")]


def some_token_ids(name: str, value: object) -> list[int]:
    """A non-empty list of token ids; an empty one would mean the opposite."""
    ids = token_ids(name, value)
    if not ids:
        raise InvalidRequest(f"{name} is empty, which allows nothing: omit it to allow every token")
    return ids


def token_sequences(name: str, value: object) -> list[inference_pb2.TokenIds]:
    items = _items(name, value, "lists of token ids")
    return [inference_pb2.TokenIds(ids=token_ids(name, item)) for item in items]


def biases(name: str, value: object) -> dict[int, float]:
    """Token id -> number."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is {_kind(value)}, must map token ids to numbers")
    return {
        _integer(f"a token id of {name}", token_id, _UINT32): number(f"{name}[{token_id}]", bias)
        for token_id, bias in value.items()
    }


def schema(name: str, value: object) -> str:
    """A JSON schema, as JSON text or as a dict."""
    if not isinstance(value, Mapping):
        return text(name, value)
    try:
        return text(name, json.dumps(dict(value), ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from None


def choices(name: str, value: object) -> inference_pb2.Choices:
    """A list of texts, as a message."""
    return inference_pb2.Choices(texts=texts(name, value))


def priority(name: str, value: object) -> int:
    """A `Priority` value, as its enum number in the message."""
    words = ", ".join(Priority)
    if value not in list(Priority):
        raise InvalidRequest(f"{name} is {value!r}, must be one of {words}")
    return inference_pb2.Priority.Value(f"PRIORITY_{str(value).upper()}")


def attach_secret(name: str, value: object) -> str:
    """A secret, as metadata can carry it."""
    if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]{32,128}", value):
        raise InvalidRequest(f"{name} must be 32 to 128 characters of printable ASCII without spaces")
    return value


def on_disconnect(name: str, value: object) -> inference_pb2.OnDisconnect:
    """ "cancel", "detach", or a Detach with a retention time."""
    message = inference_pb2.OnDisconnect
    if isinstance(value, Detach):
        return _detach(f"keep_s of {name}", value.keep_s)
    if value not in ("cancel", "detach"):
        raise InvalidRequest(f"{name} is {value!r}, must be 'cancel', 'detach' or a Detach")
    return message(action=message.ACTION_CANCEL if value == "cancel" else message.ACTION_DETACH)


def _detach(name: str, keep_s: object) -> inference_pb2.OnDisconnect:
    seconds = number(name, keep_s)
    if not abs(seconds) <= _MAX_DURATION_S:
        raise InvalidRequest(f"{name} is {seconds:g}, must be a number of seconds")
    detached = inference_pb2.OnDisconnect(action=inference_pb2.OnDisconnect.ACTION_DETACH)
    detached.keep_for.FromMicroseconds(round(seconds * 1e6))
    return detached


def _beyond_float32(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} is beyond what a 32-bit float holds ({_FLOAT32_MAX:.4g})")


def _integer(name: str, value: object, allowed: range) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidRequest(f"{name} is {_kind(value)}, must be an integer")
    integer = int(value)
    if integer not in allowed:
        raise InvalidRequest(f"{name} is {integer}, must be in [{allowed.start}, {allowed.stop - 1}]")
    return integer


def _items(name: str, value: object, what: str) -> Collection[object]:
    if not isinstance(value, Collection) or isinstance(value, str | bytes | Mapping):
        raise InvalidRequest(f"{name} is {_kind(value)}, must be a list of {what}")
    return value


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


class ChatMessage(TypedDict):
    """One message of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage]


def set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Set the message's prompt. Raises InvalidRequest for values that it cannot represent."""
    if isinstance(prompt, str):
        request.text = text("the prompt", prompt)
    elif len(prompt) == 0:
        raise InvalidRequest("the prompt is an empty list: it needs at least one token id or chat message")
    elif isinstance(prompt[0], dict):
        request.conversation.messages.extend(_chat_message(message) for message in prompt)
    else:
        request.token_ids.ids.extend(token_ids("the prompt", prompt))


def tokenize_request(prompt: str | Sequence[ChatMessage]) -> inference_pb2.TokenizeRequest:
    """Build the message. Raises InvalidRequest for values that it cannot represent."""
    request = inference_pb2.TokenizeRequest()
    if isinstance(prompt, str):
        request.text = text("the prompt", prompt)
    else:
        messages = [_chat_message(message) for message in _items("the prompt", prompt, "chat messages")]
        if not messages:
            raise InvalidRequest("the prompt is an empty list: it needs at least one chat message")
        request.conversation.messages.extend(messages)
    _check_size(request)
    return request


def detokenize_request(ids: Sequence[int], *, skip_special_tokens: bool) -> inference_pb2.DetokenizeRequest:
    """Build the message. Raises InvalidRequest for values that it cannot represent."""
    request = inference_pb2.DetokenizeRequest(
        token_ids=token_ids("token_ids", ids),
        skip_special_tokens=flag("skip_special_tokens", skip_special_tokens),
    )
    _check_size(request)
    return request


def _chat_message(message: object) -> inference_pb2.ChatMessage:
    if not isinstance(message, dict) or set(message) != {"role", "content"}:
        raise InvalidRequest(f"a chat message has exactly 'role' and 'content', this one is {message!r}")
    return inference_pb2.ChatMessage(
        role=text("a message's role", message["role"]),
        content=text("a message's content", message["content"]),
    )


class Priority(StrEnum):
    """First come, first served within a class; waiting raises priority. Equal to its text."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


@dataclass(frozen=True, kw_only=True, slots=True)
class Detach:
    """Continue the request without its call; keep its output for `keep_s` seconds after it ends."""

    keep_s: float = 60.0


class GenerateOptions(TypedDict, total=False):
    """Keywords of `Client.generate`. Omitted ones, and None, have the server's default.

    Ranges and meaning are as in `GenerateRequest` and `SamplingParameters` of
    proto/stageline_rpc/v1/inference.proto; the server checks them.
    """

    max_tokens: int | None
    """Maximum new tokens (default: 256, or what fits); 0 only scores the prompt."""
    min_tokens: int | None
    """No end before this number of tokens (default 0)."""
    n: int | None
    """Number of choices, 1 (default) to 64; their outputs are interleaved, see `GenerateOutput.choice`."""
    echo: bool | None
    """Begin the output with the prompt (default: False)."""
    skip_special_tokens: bool | None
    """Omit special tokens from the text (default: True)."""

    temperature: float | None
    """0 (default) is greedy; in [0, 100]."""
    top_k: int | None
    """Sample among the k most likely tokens; 0 (default): all."""
    top_p: float | None
    """Sample among the smallest set that reaches this probability; in (0, 1], default 1."""
    min_p: float | None
    """Minimum probability as a share of the most likely token's; in [0, 1], default 0."""
    typical_p: float | None
    """Locally typical sampling; in (0, 1], default 1."""
    repetition_penalty: float | None
    """Divides positive, multiplies negative logits of used tokens; in (0, 100], default 1."""
    frequency_penalty: float | None
    """Subtracted from a token's logit per occurrence in the output; in [-2, 2], default 0."""
    presence_penalty: float | None
    """Subtracted once from the logit of a token in the output; in [-2, 2], default 0."""
    seed: int | None
    """Seed of all random draws (default: random, see `Usage.seed`)."""
    logit_bias: Mapping[int, float] | None
    """Token id -> addend of its logit, in [-100, 100]."""
    allowed_token_ids: Collection[int] | None
    """Only these tokens may be generated (default: all)."""
    bad_words: Collection[str] | None
    """Texts that are never generated."""
    bad_word_ids: Collection[Collection[int]] | None
    """Token sequences that are never generated."""

    stop: str | Collection[str] | None
    """The output ends before the first of these texts."""
    stop_token_ids: Collection[int] | None
    """The output ends after the first of these tokens."""
    ignore_eos: bool | None
    """Do not end at an end-of-sequence id (default: False)."""

    logprobs: int | None
    """Log-probabilities of each generated token, and of the N most likely ones; 0 to 20."""
    prompt_logprobs: int | None
    """The same for the tokens of the prompt."""

    json_schema: str | Mapping[str, Any] | None
    """JSON schema of the output. At most one of json_schema, regex, choice and grammar."""
    regex: str | None
    """Regular expression of the whole output."""
    choice: Collection[str] | None
    """The output is one of these texts."""
    grammar: str | None
    """Context-free grammar of the output, in Lark syntax."""

    cache_salt: str | None
    """Only requests with the same salt share cached prefixes, which isolates tenants."""
    prefix_cache: bool | None
    """Share cached blocks with other requests (default: True)."""
    priority: Priority | Literal["low", "normal", "high"] | None
    """Class in the queue (default: normal)."""
    on_disconnect: Detach | Literal["cancel", "detach"] | None
    """What happens when the call ends before the request (default: cancel)."""
    request_id: str | None
    """UUIDv7 as text (default: created by the client)."""
    attach_secret: str | None
    """Secret for `attach` and `cancel` in other clients (default: created and kept by the client)."""
    timeout_s: float | None
    """Bounds the whole generation, including reattaching."""


_Encode = Callable[[str, object], Any]

_OF_REQUEST: dict[str, _Encode] = {
    "request_id": text,
    "max_tokens": uint32,
    "cache_salt": text,
    "on_disconnect": on_disconnect,
    "prefix_cache": flag,
    "priority": priority,
}
_OF_SAMPLING: dict[str, _Encode] = {
    **{row.name: number for row in SAMPLING_NUMBERS},
    **dict.fromkeys(("top_k", "min_tokens", "logprobs", "prompt_logprobs", "n"), uint32),
    **dict.fromkeys(("ignore_eos", "echo", "skip_special_tokens"), flag),
    "seed": uint64,
    "logit_bias": biases,
    "allowed_token_ids": some_token_ids,
    "stop_token_ids": token_ids,
    "bad_words": texts,
    "bad_word_ids": token_sequences,
    "stop": text_or_texts,
    "json_schema": schema,
    "regex": text,
    "choice": choices,
    "grammar": text,
}
_STRUCTURED_OUTPUT = ("json_schema", "regex", "choice", "grammar")


def build_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """Build the message; None leaves a field unset, so that the server's default applies.

    Creates an id if none is given. Raises TypeError for an unknown option, and InvalidRequest, with the
    option's name, for values that the message cannot represent.
    """
    unknown = sorted(options.keys() - GenerateOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
    given = {name: value for name, value in options.items() if value is not None}
    if "attach_secret" in given:
        attach_secret("attach_secret", given["attach_secret"])
    _check_structured_output(given)
    request = inference_pb2.GenerateRequest(
        sampling=inference_pb2.SamplingParameters(**_encode(_OF_SAMPLING, given)),
        **{"request_id": id_text(new_request_id()), **_encode(_OF_REQUEST, given)},
    )
    set_prompt(request, prompt)
    _check_size(request)
    return request


def _encode(encoders: Mapping[str, _Encode], given: Mapping[str, object]) -> dict[str, Any]:
    return {name: encode(name, given[name]) for name, encode in encoders.items() if name in given}


def _check_structured_output(given: Iterable[str]) -> None:
    names = [name for name in _STRUCTURED_OUTPUT if name in given]
    if len(names) > 1:
        raise InvalidRequest(f"{' and '.join(names)} exclude each other: choose one")


def _check_size(request: Message) -> None:
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequest(
            f"the request has {size_bytes} bytes with its prompt, a message has at most {MAX_MESSAGE_BYTES}"
        )
