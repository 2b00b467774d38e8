"""The way of a request's tokens from the engine to whoever streams them to the client."""

import asyncio
from dataclasses import dataclass

from coordinator.scheduling.sequence import FinishReason
from wire.errors import ServingError


@dataclass(frozen=True, slots=True)
class OutputBatch:
    """Tokens since the batch before; the last batch of a request has a finish reason."""

    tokens: tuple[int, ...]
    finish_reason: FinishReason | None


class OutputChannel:
    """Tokens coalesce here until they are read, so a slow reader holds nobody up; max_tokens bounds them."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._error: ServingError | None = None
        self._changed = asyncio.Event()

    def put(self, token: int, finish_reason: FinishReason | None) -> None:
        """Adds a token, the last one if there is a reason."""
        self._tokens.append(token)
        self._finish_reason = finish_reason
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        """Ends the channel; what was put before is still delivered."""
        self._error = error
        self._changed.set()

    async def read(self) -> OutputBatch:
        """Waits for news; the caller's deadline bounds it. Raises the error once everything before it is
        read.
        """
        await self._changed.wait()
        self._changed.clear()
        if self._error is not None and not self._tokens:
            raise self._error
        if self._error is not None:
            self._changed.set()
        tokens, self._tokens = tuple(self._tokens), []
        return OutputBatch(tokens, self._finish_reason)
