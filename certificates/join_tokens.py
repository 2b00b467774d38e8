"""Join tokens, with which hosts get their first certificate, and the file with their hashes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from certificates import files
from certificates.identity import Role, parse_role

MAX_USES = 10_000
MAX_TOKENS = 1000
KEPT_AFTER_END = timedelta(days=7)
"""How long `list` shows a token that has ended."""
ROLES = (Role.WORKER,)
"""Roles that a token may give: never those that read other users' requests."""
_TOKEN = re.compile(r"sl-join\.([0-9a-f]{64})\.([0-9a-f]{12})\.([A-Za-z0-9_-]{43})", re.ASCII)


NEW_TOKEN = "make one with `stageline token create` on the coordinator's host"


class JoinTokenUnusable(ValueError):
    """A token that is unknown, has ended or is used up; the text tells more to holders of the secret only."""


@dataclass(frozen=True, slots=True)
class JoinToken:
    """What a host needs: the SHA-256 of the authority's certificate, and a secret that is stored hashed."""

    ca_sha256: str
    token_id: str
    secret: str = field(repr=False)

    @property
    def text(self) -> str:
        return f"sl-join.{self.ca_sha256}.{self.token_id}.{self.secret}"


def parse_join_token(text: str) -> JoinToken:
    """Raises ValueError, which does not repeat the text."""
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "it is not a join token: sl-join.HASH.ID.SECRET, as `stageline token create` prints it"
        )
    return JoinToken(*match.groups())


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRecord:
    """A token in the file. `keys` are hashes of the public keys that it certified, one per use."""

    token_id: str
    sha256: str
    role: Role
    expires_at: datetime
    uses: int
    keys: tuple[str, ...] = ()

    @property
    def uses_left(self) -> int:
        return self.uses - len(self.keys)


class JoinTokenStore:
    """Tokens in a file of mode 0600, which several processes may change: each change holds a lock."""

    def __init__(self, path: Path, *, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._path, self._clock = path, clock

    def create(self, ca_sha256: str, role: Role, *, life: timedelta, uses: int) -> JoinToken:
        """Add a token. Raises ValueError for limits, and OSError."""
        if not 1 <= uses <= MAX_USES:
            raise ValueError(f"{uses} uses are not in [1, {MAX_USES}]")
        if role not in ROLES:
            names = ", ".join(role.value for role in ROLES)
            raise ValueError(f"a join token cannot give the role {role.value}, only {names}")
        token, now = JoinToken(ca_sha256, secrets.token_hex(6), secrets.token_urlsafe(32)), self._clock()
        record = TokenRecord(
            token_id=token.token_id,
            sha256=_sha256(token.secret),
            role=role,
            expires_at=now + life,
            uses=uses,
        )
        with self._changing() as records:
            kept = [known for known in records.values() if known.expires_at + KEPT_AFTER_END > now]
            if len(kept) >= MAX_TOKENS:
                raise ValueError(
                    f"{self._path} has {len(kept)} tokens, the limit is {MAX_TOKENS}: revoke some"
                )
            records.clear()
            records |= {known.token_id: known for known in (*kept, record)}
        return token

    def records(self) -> Sequence[TokenRecord]:
        """All tokens, in the order of their creation. Raises OSError."""
        return [*self._read().values()]

    def revoke(self, token_id: str) -> bool:
        """Remove a token; False if there is none of this id. Raises OSError."""
        with self._changing() as records:
            return records.pop(token_id, None) is not None

    def redeem(self, token_id: str, secret: str, key_sha256: str) -> Role:
        """Use a token once for a public key, and return its role; a repeated request costs no further use.

        Raises JoinTokenUnusable and OSError.
        """
        with self._changing() as records:
            record = records.get(token_id)
            expected = "" if record is None else record.sha256
            if not hmac.compare_digest(_sha256(secret), expected) or record is None:
                raise JoinTokenUnusable(f"the join token is unknown: {NEW_TOKEN}")
            if self._clock() >= record.expires_at:
                raise JoinTokenUnusable(
                    f"join token {token_id} ended at {record.expires_at.isoformat(timespec='seconds')}: "
                    f"{NEW_TOKEN}"
                )
            if key_sha256 not in record.keys:
                if not record.uses_left:
                    problem = f"join token {token_id} was used {record.uses} times, the limit"
                    raise JoinTokenUnusable(f"{problem}: {NEW_TOKEN}")
                records[token_id] = replace(record, keys=(*record.keys, key_sha256))
        return record.role

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, TokenRecord]]:
        """Read the file and, unless the block fails, write what the block made of it."""
        folder = self._path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            records = self._read()
            before = dict(records)
            yield records
            if records != before:
                content = json.dumps({"tokens": [_encode(record) for record in records.values()]}, indent=1)
                files.replace(folder, {self._path.name: content.encode()}, is_secret=True)
        finally:
            os.close(lock)

    def _read(self) -> dict[str, TokenRecord]:
        """Raises UnusableTlsFiles, which is an OSError."""
        if not self._path.exists():
            return {}
        content = files.read_key_file(self._path)
        try:
            records = [_decode(entry) for entry in json.loads(content)["tokens"]]
        except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
            raise files.UnusableTlsFiles(f"{self._path} is not a file of join tokens, or damaged") from None
        return {record.token_id: record for record in records}


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def _encode(record: TokenRecord) -> dict[str, Any]:
    return {
        "id": record.token_id,
        "sha256": record.sha256,
        "role": record.role.value,
        "expires_at": record.expires_at.isoformat(),
        "uses": record.uses,
        "keys": list(record.keys),
    }


def _decode(entry: dict[str, Any]) -> TokenRecord:
    """Raises ValueError, KeyError and TypeError."""
    return TokenRecord(
        token_id=str(entry["id"]),
        sha256=str(entry["sha256"]),
        role=parse_role(entry["role"]),
        expires_at=datetime.fromisoformat(entry["expires_at"]).astimezone(UTC),
        uses=int(entry["uses"]),
        keys=tuple(map(str, entry["keys"])),
    )
