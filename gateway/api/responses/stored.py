"""Ids of responses, and what the coordinator keeps of one, so that any gateway can write it again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, ConfigDict

from gateway.api.errors import ApiError, http_error, invalid
from gateway.api.responses.fields import ResponseRequest
from wire.ids import RequestId, id_text

MAX_STATE_BYTES = 256 * 1024
"""The coordinator's limit of `client_state`."""
_PREFIX = "resp_"
_ID = re.compile(rf"{_PREFIX}([0-9a-f]{{32}})([A-Za-z0-9_-]{{32,128}})")
_ITEM_ID = re.compile(r"[a-z]{2,3}_([0-9a-f]{32})([A-Za-z0-9_-]{32,128})_[0-9]{1,6}")
INPUT_ITEM = "in"
"""Kind of items whose client gave them no id."""
LABELS = ("user", "safety_identifier", "prompt_cache_key")


@dataclass(frozen=True, slots=True)
class ResponseId:
    """The id of a response that any gateway finds: the id of its request, and the secret to attach to it."""

    request_id: RequestId
    secret: str = field(repr=False)

    def __str__(self) -> str:
        return f"{_PREFIX}{self.request_id.hex()}{self.secret}"

    @property
    def request(self) -> str:
        return id_text(self.request_id)


def is_response_id(text: str) -> bool:
    """Whether a text has the form of an id of a response."""
    return _ID.fullmatch(text) is not None


def parse_response_id(text: str) -> ResponseId:
    """Raises ApiError, the same one as for an unknown id."""
    if (found := _ID.fullmatch(text)) is None:
        raise not_found()
    return ResponseId(RequestId(bytes.fromhex(found[1])), found[2])


def item_id(kind: str, response_id: str, index: int) -> str:
    """Return the id of an item.

    It has the secret of its response, so that whoever has it may read, cancel and delete the response. Items
    of responses that are not stored have none.
    """
    return f"{kind}_{response_id.removeprefix(_PREFIX)}_{index}"


def response_of_item(text: str) -> ResponseId | None:
    """Return the id of the response that an item is of; None for an id of another form."""
    found = _ITEM_ID.fullmatch(text)
    return None if found is None else ResponseId(RequestId(bytes.fromhex(found[1])), found[2])


def not_found() -> ApiError:
    """One error for ids that are unknown, forged, deleted or too old, so that no id can be guessed."""
    return http_error(
        404,
        "response not found: its id is wrong, or it was deleted, or the time to keep it (--response-keep) "
        "has passed, or its coordinator was restarted without a journal",
    )


class StoredResponse(BaseModel):
    """What a response is written from, beside its tokens.

    Attributes:
        created: Unix time of the request.
        model: Name of the model in the response.
        prompt_tail: The last tokens of the prompt, which the first tokens of the output continue.
        temperature: As applied, like `top_p`.
        request: The fields of the request; its input is missing where it has no room.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    version: Literal[1] = 1
    created: int
    model: str
    prompt_tail: list[int]
    temperature: float
    top_p: float
    request: ResponseRequest

    @property
    def labels(self) -> dict[str, str | None]:
        """Fields without effect that a response repeats."""
        given = self.request.model_extra or {}
        return {name: given[name] if isinstance(given.get(name), str) else None for name in LABELS}

    def encode(self) -> bytes:
        """Encode within the limit, without the input if there is no room for it. Raises ApiError."""
        data = self._dump()
        if len(data) > MAX_STATE_BYTES:
            data = self.model_copy(
                update={"request": self.request.model_copy(update={"input": None})}
            )._dump()
        if len(data) > MAX_STATE_BYTES:
            raise invalid(
                f"the fields of a stored response have {len(data)} bytes, the limit is {MAX_STATE_BYTES}: "
                "shorten instructions, tools or metadata, or set store = false",
                param="store",
            )
        return data

    def _dump(self) -> bytes:
        unknown = set(self.request.model_extra or {}) - {*LABELS}
        exclude = {"request": unknown} if unknown else None
        return self.model_dump_json(exclude_none=True, by_alias=True, exclude=exclude).encode()


def decode_stored(data: bytes) -> StoredResponse:
    """Raises ValueError for the state of a request that is no response."""
    return StoredResponse.model_validate_json(data)
