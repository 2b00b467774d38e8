"""Identities of requests, sequences and processes (UUIDv7), and stage roles."""

from enum import Enum
from typing import NamedTuple, NewType
from uuid import UUID

import uuid6


class StageRole(Enum):
    """What a stage does besides running its layers."""

    FIRST = "FIRST"
    MIDDLE = "MIDDLE"
    LAST = "LAST"
    ONLY = "ONLY"

    @property
    def has_embeddings(self) -> bool:
        """Tokens enter here; there are no hidden states in its frames."""
        return self in (StageRole.FIRST, StageRole.ONLY)

    @property
    def has_head(self) -> bool:
        """Final norm, output head and sampling are here; it answers every frame."""
        return self in (StageRole.LAST, StageRole.ONLY)

    @classmethod
    def of_stage(cls, stage: int, num_stages: int) -> "StageRole":
        """The role of stage `stage` of `num_stages`. Raises ValueError when there is no such stage."""
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage {stage} of a plan with {num_stages} stages")
        if num_stages == 1:
            return cls.ONLY
        if stage == 0:
            return cls.FIRST
        return cls.LAST if stage == num_stages - 1 else cls.MIDDLE


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
