"""Removes secrets from texts: those that are known, and whatever looks like one. Pure."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping
from urllib.parse import quote

REDACTED = "[REDACTED]"
MIN_CHARACTERS = 12
"""Shorter known secrets would be found by chance."""
_NAMES = r"(?:[a-z0-9_.-]*(?:secret|token|password|passwd|api[_-]?key|credential|authorization|cookie))"
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (
        re.compile(
            r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL
        ),
        REDACTED,
    ),
    (re.compile(r"\b(sk-sl-[a-z0-9]{10})-[A-Za-z0-9_-]+"), rf"\1-{REDACTED}"),
    (re.compile(r"\bsl-join\.[0-9a-f]+\.([0-9a-f]{12})\.[A-Za-z0-9_-]+"), rf"sl-join.\1.{REDACTED}"),
    (re.compile(r"\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1 {REDACTED}"),
    (re.compile(r"(\w://)[^/\s:@]+:[^/\s@]+@"), rf"\1{REDACTED}@"),
    (re.compile(rf"(?<![\w/-])({_NAMES}[\"']?\s*[=:]\s*[\"']?)([^\s\"',;}}]{{8,}})", re.IGNORECASE), ""),
)
_SECRET_NAME = re.compile(r"secret|token|password|passwd|key|credential|auth|headers|cookie", re.IGNORECASE)
_PATH = re.compile(r"[~.]?/[\w./%@+-]*|\[REDACTED\].*", re.ASCII)
"""A value that is the path of a file with a secret, which helps and tells nothing."""


class Redactor:
    """Knows secrets of this host, in the forms in which programs write them."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        forms = {form for secret in known if len(secret) >= MIN_CHARACTERS for form in _forms(secret)}
        # Longer ones first, as one may be a part of another.
        texts = sorted(forms, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, texts))) if texts else None

    def redact(self, text: str) -> str:
        """The text without secrets."""
        if self._known is not None:
            text = self._known.sub(REDACTED, text)
        for pattern, replacement in _PATTERNS:
            text = pattern.sub(replacement or _without_value, text)
        return text


def is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable has the name of a secret, and not the path of a file as its value."""
    return bool(_SECRET_NAME.search(name)) and not _PATH.fullmatch(value)


def redact_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables without the values of secrets."""
    return {name: REDACTED if is_secret_variable(name, value) else value for name, value in variables.items()}


def _without_value(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    return match[0] if _PATH.fullmatch(value) else f"{name}{REDACTED}"


def _forms(secret: str) -> set[str]:
    """As it is, in hex, in URLs, and in base64 at each place within other data."""
    data = secret.encode()
    inner = {base64.b64encode(data[start:]).decode().rstrip("=")[4:-4] for start in range(3)}
    found = {secret, data.hex(), data.hex().upper(), quote(secret, safe="")}
    return found | {form for form in inner if len(form) >= MIN_CHARACTERS}
