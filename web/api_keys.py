"""API keys of HTTP servers: their form, and the file with their digests. A key itself is stored nowhere."""

from __future__ import annotations

import errno
import fcntl
import hmac
import logging
import os
import re
import secrets
import string
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import tomli_w

from certificates.private_files import read_private
from wire.audit import NO_AUDIT, AuditLog

log = logging.getLogger(__name__)

PREFIX = "sk-sl-"
ID_CHARACTERS = 10
SECRET_BYTES = 32
MAX_KEYS = 100_000
MAX_BYTES = 64 * 2**20
PRIORITIES = ("low", "normal", "high")
USER, VIEWER, OPERATOR = ROLES = ("user", "viewer", "operator")
_FORM = re.compile(rf"{PREFIX}([a-z0-9]{{{ID_CHARACTERS}}})-([A-Za-z0-9_-]{{43}})", re.ASCII)
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_ID = re.compile(rf"[a-z0-9]{{{ID_CHARACTERS}}}", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)


class KeysUnusable(OSError):
    """The file of keys cannot be read, is readable by others, or has an entry that is no key."""


class KeyRefused(Exception):
    """There is no key, or none that is known and in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One key; None is no limit. Raises ValueError.

    `sha256` is the digest of the whole key: its 256 random bits need no slower function. `max_concurrent`
    counts sequences of the tenant at the coordinator, the rates are of the key at one gateway. Viewers read
    metrics and the dashboard, which tell of all tenants, and make no requests; operators also act.
    """

    id: str
    sha256: str
    tenant: str
    role: str = USER
    models: tuple[str, ...] = ()
    max_priority: str = "high"
    max_concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    expires: datetime | None = None

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id) or not _DIGEST.fullmatch(self.sha256):
            raise ValueError(f"key {self.id[:40]!r} has no id or digest of a key")
        if not _TENANT.fullmatch(self.tenant):
            raise ValueError(
                f"tenant {self.tenant[:200]!r} is not 1 to 128 letters, digits, '.', '_', '/' and '-'"
            )
        for what, name, known in (
            ("role", self.role, ROLES),
            ("priority", self.max_priority, PRIORITIES),
        ):
            if name not in known:
                raise ValueError(f"{what} {name!r} is not one of {', '.join(known)}")
        for name in ("max_concurrent", "requests_per_minute", "tokens_per_minute"):
            if (limit := getattr(self, name)) is not None and not 1 <= limit < 2**31:
                raise ValueError(f"{name} is {limit}, must be in [1, 2147483647]")

    @property
    def holder(self) -> str:
        """Who has the key, in logs and audit records."""
        return f"key {self.id} of tenant {self.tenant}"

    @property
    def may_watch(self) -> bool:
        return self.role in (VIEWER, OPERATOR)

    def has_expired(self, now: datetime) -> bool:
        return self.expires is not None and now >= self.expires

    def matches(self, digest: str) -> bool:
        """Compare in constant time."""
        return hmac.compare_digest(self.sha256, digest)


class KeysFile:
    """The keys of a file, which is read again when it changes."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, audit: AuditLog = NO_AUDIT
    ) -> None:
        """Raises KeysUnusable."""
        self._path, self._clock, self._audit = path, clock, audit
        self._stamp = _stamp(path)
        self._keys: Mapping[str, ApiKey] = read_keys(path)

    def find(self, text: str) -> ApiKey:
        """Return the key with this text. Raises KeyRefused."""
        if not text:
            raise KeyRefused("no API key: send Authorization: Bearer KEY")
        self.refresh()
        key_id = id_of(text)
        key = None if key_id is None else self._keys.get(key_id)
        if key is None or not key.matches(digest_of(text)):
            raise KeyRefused("the API key is wrong, or was revoked")
        if key.has_expired(self._now()):
            assert key.expires is not None
            raise KeyRefused(f"the API key ended at {key.expires.isoformat(timespec='seconds')}")
        return key

    def current(self, key: ApiKey) -> ApiKey | None:
        """Return a key as it is in the file by now; None if it was revoked or has ended."""
        found = self._keys.get(key.id)
        if found is None or found.sha256 != key.sha256 or found.has_expired(self._now()):
            return None
        return found

    def has_changed(self) -> bool:
        """Whether `refresh` would read the file."""
        return _stamp(self._path) != self._stamp

    def refresh(self) -> None:
        """Read the file again if it has changed; if it cannot be used, the keys before stay in force."""
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_keys(self._path)
        except KeysUnusable as error:
            log.warning("%s; the keys before stay in force", error)
            self._audit.reloaded(str(self._path), str(error))
        else:
            log.info("%s was read again: %d keys", self._path, len(self._keys))
            self._audit.reloaded(str(self._path), None)

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock(), UTC)


def bearer_of(headers: Mapping[str, str]) -> str | None:
    """Return the credential in an Authorization header of scheme Bearer; None without one."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if scheme.lower() == "bearer" else None


def new_key(**limits: Any) -> tuple[str, ApiKey]:
    """Make a key of 256 random bits; return its text, which cannot be recovered, and its entry."""
    letters = string.ascii_lowercase + string.digits
    key_id = "".join(secrets.choice(letters) for _ in range(ID_CHARACTERS))
    text = f"{PREFIX}{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
    return text, ApiKey(id=key_id, sha256=digest_of(text), **limits)


def digest_of(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def id_of(text: str) -> str | None:
    """The id in a key; None for a text of another form."""
    match = _FORM.fullmatch(text)
    return None if match is None else match[1]


def read_keys(path: Path) -> dict[str, ApiKey]:
    """Read the keys of a file by their id. Raises KeysUnusable."""
    try:
        text = read_private(path, max_bytes=MAX_BYTES).decode()
        entries = tomllib.loads(text).get("keys", [])
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise KeysUnusable(f"{path} is not TOML: {error}") from None
    except OSError as error:
        advice = ": `stageline keys create` makes it" if error.errno == errno.ENOENT else ""
        problem = f"{path}: {error.strerror.lower()}" if error.strerror else str(error)
        raise KeysUnusable(f"{problem}{advice}") from None
    if not isinstance(entries, list) or len(entries) > MAX_KEYS:
        raise KeysUnusable(f"{path} has no list of at most {MAX_KEYS} [[keys]]")
    keys = {key.id: key for number, entry in enumerate(entries) for key in [_parse(path, number, entry)]}
    if len(keys) != len(entries):
        raise KeysUnusable(f"{path} has two keys of one id")
    return keys


def write_keys(path: Path, keys: Iterable[ApiKey]) -> None:
    """Replace the file, with mode 0600. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    text = tomli_w.dumps({"keys": [_entry(key) for key in keys]})
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        fresh.rename(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


@contextmanager
def changed_keys(path: Path) -> Iterator[dict[str, ApiKey]]:
    """Read the keys, let the block change them, and write them; one process at a time. Raises OSError."""
    descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        keys = read_keys(path) if path.exists() else {}
        yield keys
        write_keys(path, keys.values())
    finally:
        os.close(descriptor)


def _parse(path: Path, number: int, entry: Any) -> ApiKey:
    known = {field.name for field in fields(ApiKey)}
    where = f"{path}, key {number + 1}"
    if not isinstance(entry, dict) or (unknown := sorted(entry.keys() - known)):
        raise KeysUnusable(f"{where}: unknown field {unknown[0]!r}" if isinstance(entry, dict) else where)
    models: Sequence[str] = entry.pop("models", ())
    expires = entry.pop("expires", None)
    if expires is not None and (not isinstance(expires, datetime) or expires.tzinfo is None):
        raise KeysUnusable(f"{where}: expires is not a time with its zone, such as 2027-01-01T00:00:00Z")
    try:
        return ApiKey(**entry, models=tuple(models), expires=expires)
    except (TypeError, ValueError) as error:
        raise KeysUnusable(f"{where}: {error}") from None


def _entry(key: ApiKey) -> dict[str, Any]:
    entry = {field.name: getattr(key, field.name) for field in fields(key)}
    entry["models"] = list(key.models)
    if key.expires is not None:
        entry["expires"] = key.expires.astimezone(UTC)
    return {name: value for name, value in entry.items() if value not in (None, [])}


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
