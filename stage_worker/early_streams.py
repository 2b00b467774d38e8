"""Streams whose epoch has not begun here yet: how many may wait for it, by host of the peer and in all."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from wire.errors import Overloaded
from wire.forward_call import HELLO_RETRY_S
from wire.peer_secrets import RefusedPeers

MAX_PER_HOST = 4
"""The previous stage has one stream per epoch; those of a few epochs that failed at once may still wait."""
MAX_WAITING = 16
"""Only one of them can be the previous stage. Each costs a connection for up to `EPOCH_WAIT_S`."""


class EarlyStreams:
    """Admits streams that wait. The previous stage retries if refused; in its epoch it needs no place."""

    def __init__(self, refused: RefusedPeers) -> None:
        self._refused = refused
        self._num_waiting = Counter[str]()

    @contextmanager
    def waiting(self, host: str) -> Iterator[None]:
        """One place of `host` while the block runs. Raises Overloaded, with the numbers, if there is none."""
        self._check(host)
        self._num_waiting[host] += 1
        try:
            yield
        finally:
            self._num_waiting[host] -= 1
            if not self._num_waiting[host]:
                del self._num_waiting[host]

    def _check(self, host: str) -> None:
        if self._num_waiting[host] >= MAX_PER_HOST:
            whose, limit = "streams of this host", MAX_PER_HOST
        elif self._num_waiting.total() >= MAX_WAITING:
            whose, limit = "streams", MAX_WAITING
        else:
            return
        problem = f"{limit} {whose} wait for epochs that have not begun on this stage, the limit is {limit}"
        self._refused.note("a stream", problem, host=host)
        raise Overloaded(f"{problem}: retry when the epoch has begun", retry_after_s=HELLO_RETRY_S)
