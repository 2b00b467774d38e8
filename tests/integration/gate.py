"""Stops the pipeline between two steps, so that a test can act there."""

import asyncio
import sys
from collections.abc import Callable

from tests.integration.alterations import unchanged
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.stream_proxy import HopStream, Messages
from wire.frames import Frame
from wire.ids import parse_request_id


class Gate:
    """A gate in the hop proxy of FIRST; open until it is closed.

    While it is closed, no step that matches `stops` passes, and none after it.
    """

    def __init__(self, cluster: Cluster, *, stops: Callable[[Frame], bool] = lambda frame: True) -> None:
        self._cluster = cluster
        self._proxy = cluster.proxy(0)
        self._stops = stops
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._held: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Hold from the next step on."""
        self._held = asyncio.get_running_loop().create_future()
        self._is_open.clear()
        self._proxy.inject(self._hold, when=self._stops, times=sys.maxsize)

    def open(self) -> None:
        """Let held and later steps pass."""
        self._proxy.injection = None
        self._is_open.set()

    async def wait_quiet(self) -> int:
        """Wait until a step is held and all earlier ones are answered and delivered; return its id."""
        async with asyncio.timeout(DEADLINE_S):
            step_id = await asyncio.shield(self._held)
        in_step = self._cluster.server.engine.scheduler.sequences_in_step
        await until(lambda: not any(in_step(earlier) for earlier in range(step_id)))
        self._cluster.server.engine.deliver()
        return step_id

    async def _hold(self, frame: Frame, stream: HopStream) -> Messages:
        if not self._held.done():
            self._held.set_result(frame.step.step_id)
        await self._is_open.wait()
        return unchanged(frame, stream)


def num_generated(cluster: Cluster, request_id: str) -> list[int]:
    """Number of generated tokens per choice of a live request."""
    request = cluster.server.engine.registry.live_request(parse_request_id(request_id))
    assert request is not None, "the request has ended"
    return [choice.buffer.num_tokens for choice in request.choices]
