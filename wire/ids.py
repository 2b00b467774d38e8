"""Ids of requests, sequences and processes (UUIDv7), and stage roles."""

from enum import Enum
from typing import NamedTuple, NewType
from uuid import UUID

import uuid6


class StageRole(Enum):
    """Position of a stage in the pipeline."""

    FIRST = "FIRST"
    MIDDLE = "MIDDLE"
    LAST = "LAST"
    ONLY = "ONLY"

    @property
    def has_embeddings(self) -> bool:
        """The stage receives tokens; its frames carry no hidden states."""
        return self in (StageRole.FIRST, StageRole.ONLY)

    @property
    def has_head(self) -> bool:
        """The stage runs final norm, output head and sampling, and returns the results."""
        return self in (StageRole.LAST, StageRole.ONLY)

    @classmethod
    def of_stage(cls, stage: int, num_stages: int) -> "StageRole":
        """Return the role of stage `stage` of `num_stages`. Raises ValueError for an index out of range."""
        if not 0 <= stage < num_stages:
            raise ValueError(f"stage {stage} is not in 0..{num_stages - 1}")
        if num_stages == 1:
            return cls.ONLY
        if stage == 0:
            return cls.FIRST
        return cls.LAST if stage == num_stages - 1 else cls.MIDDLE


RequestId = NewType("RequestId", bytes)
Incarnation = NewType("Incarnation", bytes)

CHECK_REQUEST = RequestId(bytes(16))
"""Request id of self-checks. No client can use it, because it is not a UUIDv7."""


class SequenceKey(NamedTuple):
    """Identity of a sequence: one choice of a request."""

    request_id: RequestId
    choice: int

    def __str__(self) -> str:
        return f"{UUID(bytes=self.request_id)}/{self.choice}"


def new_request_id() -> RequestId:
    return RequestId(uuid6.uuid7().bytes)


def new_incarnation() -> Incarnation:
    return Incarnation(uuid6.uuid7().bytes)


def parse_request_id(text: str) -> RequestId:
    """Parse a UUIDv7. Raises ValueError for other text and for other UUID versions."""
    try:
        parsed = UUID(text)
    except ValueError:
        raise ValueError(f"request_id {text!r} is not a UUID") from None
    if parsed.version != 7:
        raise ValueError(f"request_id {text!r} is a UUID of version {parsed.version}, expected version 7")
    return RequestId(parsed.bytes)


def id_text(identity: bytes) -> str:
    """Format a 16-byte id as a UUID; malformed ids are shown in hexadecimal, for error messages."""
    text = identity.hex()
    if len(identity) != 16:
        return text or "(none)"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
