"""How much telemetry each sender may export to the coordinator."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from wire.addresses import peer_host
from wire.errors import Overloaded
from wire.peer_identity import peer_identity

BYTES_PER_S = 8 * 1024 * 1024
"""A busy worker exports some 100 KB/s. Without certificates, all workers of a host are one sender."""
BURST_BYTES = 8 * BYTES_PER_S
MAX_SENDERS = 1024


@dataclass(slots=True)
class _Balance:
    left: float
    at_s: float


class Intake:
    """Refuses exports of a sender that has used up its bytes: others keep their traces, and their turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._balances: OrderedDict[str, _Balance] = OrderedDict()

    def take(self, size_bytes: int, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Count an export. Raises Overloaded, with the time after which it is accepted."""
        identity = peer_identity(context)
        sender, now = str(identity) if identity else f"host {peer_host(context)}", self._clock()
        balance = self._balances.setdefault(sender, _Balance(BURST_BYTES, now))
        self._balances.move_to_end(sender)
        if len(self._balances) > MAX_SENDERS:
            self._balances.popitem(last=False)
        balance.left = min(BURST_BYTES, balance.left + (now - balance.at_s) * BYTES_PER_S)
        balance.at_s = now
        if balance.left < size_bytes:
            raise Overloaded(
                f"{sender} exports more than {BYTES_PER_S} bytes of telemetry per second",
                retry_after_s=(size_bytes - balance.left) / BYTES_PER_S,
            )
        balance.left -= size_bytes
