"""What Python values a message's field can carry. Each function returns the value as protobuf takes it.

All raise InvalidRequest, which names the parameter, for what the field cannot carry; ranges within that are
for the server to judge.
"""

import json
import math
import re
from collections.abc import Collection, Mapping
from numbers import Integral, Real

from stageline.errors import InvalidRequest
from stageline.parameters import Detach, Priority
from stageline_rpc.v1 import inference_pb2

_UINT32 = range(2**32)
_UINT64 = range(2**64)
_FLOAT32_MAX = 3.4028234663852886e38


def uint32(name: str, value: object) -> int:
    """A count or a token id."""
    return _integer(name, value, _UINT32)


def uint64(name: str, value: object) -> int:
    """A seed."""
    return _integer(name, value, _UINT64)


def number(name: str, value: object) -> float:
    """Any number, NaN and infinities too; one beyond float32 would become an infinity, and is refused."""
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
    """A finite time, not negative; it goes into no message."""
    time_s = number(name, value)
    if not 0 <= time_s < math.inf:
        raise InvalidRequest(f"{name} is {time_s}, must be finite and at least 0")
    return time_s


def flag(name: str, value: object) -> bool:
    """True or False, and nothing that merely counts as such."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {_kind(value)}, must be True or False")
    return value


def text(name: str, value: object) -> str:
    """Text that UTF-8 can carry."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {_kind(value)}, must be text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name} has a lone surrogate at character {error.start}") from None
    return value


def texts(name: str, value: object) -> list[str]:
    """A list of texts; a single one is no list of its characters."""
    return [text(name, item) for item in _items(name, value, "texts")]


def text_or_texts(name: str, value: object) -> list[str]:
    """One text, or a list of them."""
    return [text(name, value)] if isinstance(value, str) else texts(name, value)


def token_ids(name: str, value: object) -> list[int]:
    """A list of token ids."""
    return [_integer(f"a token id of {name}", item, _UINT32) for item in _items(name, value, "token ids")]


def some_token_ids(name: str, value: object) -> list[int]:
    """A list of token ids where an empty one would say the opposite, and is refused."""
    ids = token_ids(name, value)
    if not ids:
        raise InvalidRequest(f"{name} is empty, which allows nothing; leave it out to allow every token")
    return ids


def token_sequences(name: str, value: object) -> list[inference_pb2.TokenIds]:
    """A list of lists of token ids."""
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
    """A JSON schema as JSON text, or as the dict that it describes."""
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
    """One of the words of Priority, as its number in the contract."""
    words = ", ".join(Priority)
    if value not in list(Priority):
        raise InvalidRequest(f"{name} is {value!r}, must be one of {words}")
    return inference_pb2.Priority.Value(f"PRIORITY_{str(value).upper()}")


def attach_secret(name: str, value: object) -> str:
    """What proves that a caller may have a request, as metadata carries it."""
    if not isinstance(value, str) or not re.fullmatch(r"[\x21-\x7e]{32,128}", value):
        raise InvalidRequest(f"{name} must be 32 to 128 characters of printable ASCII without spaces")
    return value


def on_disconnect(name: str, value: object) -> inference_pb2.OnDisconnect:
    """ "cancel", "detach", or a Detach that says how long to keep the output."""
    message = inference_pb2.OnDisconnect
    if isinstance(value, Detach):
        return message(action=message.DETACH, keep_s=number(f"keep_s of {name}", value.keep_s))
    if value not in ("cancel", "detach"):
        raise InvalidRequest(f"{name} is {value!r}, must be 'cancel', 'detach' or a Detach")
    return message(action=message.CANCEL if value == "cancel" else message.DETACH)


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
