"""Who a process or user is, as a SPIFFE id: spiffe://DOMAIN/stageline/CLUSTER/ROLE/NAME."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

DEFAULT_TRUST_DOMAIN = "stageline.internal"
DEFAULT_CLUSTER = "default"
MAX_SEGMENT_CHARACTERS = 63
_SCHEME, _MARK = "spiffe://", "stageline"
_SEGMENT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_DOMAIN = re.compile(r"[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?", re.ASCII)


class Role(Enum):
    """What a certificate's holder is in a cluster."""

    COORDINATOR = "coordinator"
    WORKER = "worker"
    GATEWAY = "gateway"
    CLIENT = "client"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """One process or user of one cluster. Raises ValueError for names that an id cannot hold."""

    cluster: str
    role: Role
    name: str
    trust_domain: str = DEFAULT_TRUST_DOMAIN

    def __post_init__(self) -> None:
        _check("trust domain", self.trust_domain, _DOMAIN, 255, "lower-case letters")
        _check("cluster", self.cluster, _SEGMENT, MAX_SEGMENT_CHARACTERS, "letters")
        _check("name", self.name, _SEGMENT, MAX_SEGMENT_CHARACTERS, "letters")

    @property
    def uri(self) -> str:
        """The id as the URI of a certificate."""
        return f"{_SCHEME}{self.trust_domain}/{_MARK}/{self.cluster}/{self.role.value}/{self.name}"

    def __str__(self) -> str:
        return f"{self.role.value} {self.name}"


def parse_identity(uri: str) -> Identity:
    """Parse a URI of a certificate. Raises ValueError."""
    parts = uri.removeprefix(_SCHEME).split("/")
    if not uri.startswith(_SCHEME) or len(parts) != 5 or parts[1] != _MARK:
        raise ValueError(f"URI {uri[:200]!r} is not spiffe://DOMAIN/stageline/CLUSTER/ROLE/NAME")
    domain, _, cluster, role, name = parts
    return Identity(trust_domain=domain, cluster=cluster, role=parse_role(role), name=name)


def parse_role(text: str) -> Role:
    """Raises ValueError."""
    try:
        return Role(text)
    except ValueError:
        names = ", ".join(role.value for role in Role)
        raise ValueError(f"role {text[:64]!r} is unknown, must be one of {names}") from None


def _check(what: str, text: str, pattern: re.Pattern[str], limit: int, letters: str) -> None:
    if len(text) > limit:
        raise ValueError(f"{what} has {len(text)} characters, the limit is {limit}")
    if not pattern.fullmatch(text):
        raise ValueError(
            f"{what} {text!r} cannot be part of an identity: use {letters}, digits, '.', '_' and '-', with "
            "a letter or digit at both ends"
        )
