"""The connections into and out of one worker, through proxies that can misbehave."""

from __future__ import annotations

from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from tests.faults.byte_proxy import ByteProxy
from tests.faults.result_proxy import ResultProxy
from tests.integration.stream_proxy import HopProxy, StreamProxy
from tests.ports import unused_address

SEEN_IN_FRAMES = "8KiB"


class WorkerLines:
    """Frames reach the worker through `frames` and `into`, its messages to the coordinator pass through
    `results` and `out`. Without `has_frame_proxies` there are only the byte proxies, `into`, `out` and
    `payloads`, through which all hidden states pass; with them only large ones, which frame faults spare.

    Bit flips happen after the frame proxies, which decode the frames.
    """

    def __init__(self, *, seed: int, has_frame_proxies: bool) -> None:
        self.into = ByteProxy(seed=2 * seed)
        self.out = ByteProxy(seed=2 * seed + 1)
        self.payloads = ByteProxy(unused_address(), seed=2 * seed)
        self._frames = HopProxy() if has_frame_proxies else None
        self._results = ResultProxy() if has_frame_proxies else None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for line, proxy in ((self.into, self._frames), (self.out, self._results)):
            await self._stack.enter_async_context(line)
            if proxy is not None:
                await self._start(proxy, target=line.address)
        await self._stack.enter_async_context(self.payloads)
        return self

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    @property
    def frames(self) -> HopProxy:
        assert self._frames is not None, "this cluster has no frame proxies"
        return self._frames

    @property
    def results(self) -> ResultProxy:
        assert self._results is not None, "this cluster has no frame proxies"
        return self._results

    def worker_arguments(self) -> tuple[str, ...]:
        """Flags of a worker that follow those of the launcher."""
        advertised = self._frames or self.into
        coordinator = self._results or self.out
        addresses = ("--advertise", advertised.address, "--coordinator", coordinator.address)
        payloads = ("--payload-listen", self.payloads.target, "--payload-advertise", self.payloads.address)
        on_lines = ("--same-host", "off")
        return (
            *addresses,
            *payloads,
            *on_lines,
            "--payload-min",
            "1B" if self._frames is None else SEEN_IN_FRAMES,
        )

    @property
    def _lines(self) -> tuple[ByteProxy, ...]:
        return self.into, self.out, self.payloads

    def partition(self) -> None:
        """Partition the worker silently in both directions."""
        for line in self._lines:
            line.stall()

    def end_partition(self) -> None:
        for line in self._lines:
            line.flow()

    def heal(self) -> None:
        """Ends all faults of the connections."""
        for line in self._lines:
            line.delay(0)
            line.flow()
        if self._frames is not None:
            self._frames.injection = None
        if self._results is not None:
            self._results.injection = None

    async def _start(self, proxy: StreamProxy, *, target: str) -> None:
        proxy.target = target
        await proxy.start()
        self._stack.push_async_callback(proxy.stop)
