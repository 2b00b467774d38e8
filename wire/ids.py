"""Identities: requests, sequences, processes. UUIDv7 in 16 bytes inside, in text form at the edges."""

from typing import NamedTuple, NewType
from uuid import UUID

import uuid6

RequestId = NewType("RequestId", bytes)
Incarnation = NewType("Incarnation", bytes)

CHECK_REQUEST = RequestId(bytes(16))
"""Request id of self-checks. Reserved: no client's request has it, because it is no UUIDv7."""


class SequenceKey(NamedTuple):
    """One choice of a request: the identity of a sequence everywhere."""

    request_id: RequestId
    choice: int

    def __str__(self) -> str:
        return f"{UUID(bytes=self.request_id)}/{self.choice}"


def new_request_id() -> RequestId:
    """A fresh UUIDv7."""
    return RequestId(uuid6.uuid7().bytes)


def new_incarnation() -> Incarnation:
    """A fresh UUIDv7 for a process that starts now."""
    return Incarnation(uuid6.uuid7().bytes)


def parse_request_id(text: str) -> RequestId:
    """The id behind the UUIDv7 `text`. Raises ValueError for anything else, other UUID versions included."""
    try:
        parsed = UUID(text)
    except ValueError:
        raise ValueError(f"request_id {text!r} is not a UUID") from None
    if parsed.version != 7:
        raise ValueError(f"request_id {text!r} is a UUID of version {parsed.version}; version 7 is needed")
    return RequestId(parsed.bytes)


def id_text(identity: bytes) -> str:
    """The usual text form of a 16-byte id; tolerates other lengths, for messages about malformed ones."""
    return str(UUID(bytes=identity)) if len(identity) == 16 else identity.hex() or "(none)"
