"""Who may do what ends other people's requests or moves workers: callers with the operator token."""

import hmac
from typing import Any

import grpc

from coordinator.api.callers import metadata_value
from wire.calls import AUTHORIZATION_KEY
from wire.errors import TokenMismatch, TokenMissing


class Operators:
    """Compares tokens with the one of this coordinator."""

    def __init__(self, token: str | None) -> None:
        """Without a token nobody is an operator."""
        self._token = token

    def check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Raises TokenMissing or TokenMismatch for a caller that is no operator."""
        scheme, _, given = metadata_value(context, AUTHORIZATION_KEY).partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            raise TokenMissing("this call needs the operator token: pass --token-file")
        if self._token is None:
            raise TokenMismatch("this coordinator has no operator token: start it with --token-file")
        if not hmac.compare_digest(given.strip().encode(), self._token.encode()):
            raise TokenMismatch("the operator token is wrong")
