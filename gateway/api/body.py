"""Bodies of requests: size, type and JSON."""

import asyncio
import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from gateway.api.body_budget import HeldBody, slow_body
from gateway.api.errors import ApiError, http_error, invalid

_TYPE_NAMES = frozenset({"bool", "dict", "float", "int", "list", "none", "str"})
_MAX_SHOWN = 60
INLINE_BYTES = 16 * 1024
"""Bodies up to this size are parsed and checked on the event loop, within a millisecond."""
MAX_STRINGS = 32_768
MAX_VALUES = 262_144
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class RequestBody(BaseModel):
    """Base of request bodies; `null` is the default of every field."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())

    known_extra: ClassVar[Collection[str]] = ()
    """Fields that the API checks beside the class's own."""
    own_names: ClassVar[Mapping[str, str]] = {}
    """The API's names for fields that other classes name."""
    model: str | None = None
    _num_bytes: int = 0

    @property
    def is_large(self) -> bool:
        """Whether work on the fields belongs on a thread, as reading them did."""
        return self._num_bytes > INLINE_BYTES

    def name_of(self, field: str) -> str:
        """Return the name that the client knows a field by, for errors."""
        return self.own_names.get(field, field)

    def without_effect(self) -> Sequence[str]:
        """Return what is given within honoured fields and not served."""
        return ()


_Body = TypeVar("_Body", bound=RequestBody)


async def read_body(request: Request, *, max_bytes: int, held: HeldBody) -> bytes:
    """Raises ApiError for a wrong content type, more than `max_bytes`, and more than `held` may have."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise http_error(415, f"content-type is {content_type[:_MAX_SHOWN]!r}, must be application/json")
    if int(request.headers.get("content-length") or 0) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(None) as patience:
            held.read_within(patience)
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise _too_large(max_bytes)
                held.add(len(part))
                body += part
    except ClientDisconnect:
        raise http_error(400, "the connection ended before the body") from None
    except TimeoutError:
        raise slow_body() from None
    held.read_within(None)
    return bytes(body)


def _too_large(max_bytes: int) -> ApiError:
    return http_error(413, f"the body is larger than {max_bytes} bytes (--max-body)")


def check_size(body: bytes, *, max_values: int) -> None:
    """Raise ApiError for JSON of more strings or values than any request needs.

    Reading it would hold the interpreter's lock for 0.1 s and more, during which nothing else answers. The
    number of strings includes the keys of objects; both numbers are exact but for escaped backslashes.
    """
    num_strings = (body.count(b'"') - body.count(b'\\"')) // 2
    if num_strings > MAX_STRINGS:
        raise http_error(413, f"the body has more than {MAX_STRINGS} strings and names of fields")
    if body.count(b",") > max_values and _STRING.sub(b"", body).count(b",") > max_values:
        raise http_error(413, f"the body has more than {max_values} values")


def parse_body(kind: type[_Body], body: bytes) -> _Body:
    """Raises ApiError with the field that is wrong; pydantic limits the depth of nested JSON to 200."""
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        raise _wrong(error) from None
    fields._num_bytes = len(body)
    return fields


def _wrong(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        return invalid(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    param = _path(first["loc"])
    text = first["msg"][0].lower() + first["msg"][1:]
    return invalid(f"{param or 'the body'} is {_shown(first['input'])}: {text}", param=param)


def _path(location: Sequence[int | str]) -> str | None:
    """The location as in messages[0].content; pydantic adds names of types to it."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in _TYPE_NAMES:
            path += f".{part}" if path else part
    return path or None


def _shown(value: object) -> str:
    """Return the beginning of a value, without reading all of it."""
    if isinstance(value, str):
        return repr(value) if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]!r}..."
    text = reprlib.repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
