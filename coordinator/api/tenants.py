"""Whose request it is: tenants, their salts of the prefix cache, and prompts that all tenants share."""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import takewhile
from pathlib import Path

from certificates.identity import Identity, Role
from coordinator.model import ServedModel
from wire.errors import AccessDenied, InvalidRequest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}", re.ASCII)
_SPEAKERS = frozenset({Role.GATEWAY, Role.OPERATOR})


def tenant_of(caller: Identity | None, named: str) -> str:
    """The tenant of a request that names a tenant, or none.

    A gateway or an operator may name any tenant, as may everyone where nobody has a certificate. A client is
    its own tenant. Raises AccessDenied and InvalidRequest.
    """
    if named and not _NAME.fullmatch(named):
        raise InvalidRequest(
            f"tenant {named[:200]!r} is not 1 to 128 letters, digits, '.', '_', '/' and '-'", field="tenant"
        )
    if caller is None or caller.role in _SPEAKERS:
        return named
    own = f"{caller.role.value}/{caller.name}"
    if named not in ("", own):
        raise AccessDenied(f"{caller} may not act for tenant {named}")
    return own


def tenant_salt(secret: bytes, tenant: str, cache_salt: str) -> str:
    """The salt of a tenant's request: nobody without `secret` can name another's.

    Without a tenant it is the caller's own, as the routers of a cluster without tenants expect.
    """
    if not tenant:
        return cache_salt
    name = tenant.encode()
    message = len(name).to_bytes(4, "big") + name + cache_salt.encode()
    return hmac.digest(secret, message, sha256).hex()


class PublicPrefixes:
    """Prompts of the operator whose blocks are shared by all tenants."""

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        """`prompts` are token ids."""
        self._prompts = tuple(tuple(prompt) for prompt in prompts)

    def num_in(self, prompt: Sequence[int]) -> int:
        """Leading tokens of `prompt` that are the beginning of one of the operator's prompts."""
        return max((_num_common(known, prompt) for known in self._prompts), default=0)


def read_public_prefixes(paths: Iterable[Path], model: ServedModel) -> PublicPrefixes:
    """Read texts, as UTF-8, and token ids, as JSON. Raises ValueError and OSError with the file's name."""
    return PublicPrefixes([_read_prefix(path, model) for path in paths])


def _read_prefix(path: Path, model: ServedModel) -> Sequence[int]:
    try:
        text = path.read_text(encoding="utf-8")
        ids = json.loads(text) if path.suffix == ".json" else None
    except ValueError as error:
        raise ValueError(f"--public-prefix {path} is neither UTF-8 text nor JSON: {error}") from None
    if ids is None:
        if model.text is None:
            raise ValueError(f"--public-prefix {path} is a text, and the model has no tokenizer: use .json")
        return model.text.encode(text)
    limit = model.config.vocab_size
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < limit for token in ids):
        raise ValueError(f"--public-prefix {path} is no list of token ids in [0, {limit - 1}]")
    return ids


NO_PUBLIC_PREFIXES = PublicPrefixes(())


def _num_common(known: Sequence[int], prompt: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(known, prompt, strict=False)))
