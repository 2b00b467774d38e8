"""The coordinator's side of one `Cluster.Join` stream."""

import asyncio
from collections.abc import AsyncIterator

from coordinator.cluster.membership import WorkerIdentity
from stageline_rpc.v1 import cluster_pb2
from wire.clock import wall_clock_us
from wire.wire_dtypes import WireDType


class WorkerConnection:
    """A joined worker: messages to it, and the last heartbeat from it."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        now_s: float,
        reference_secret: bytes = b"",
        rejoin_secret: bytes = b"",
    ) -> None:
        """`now_s` is on the event loop's clock. The worker computes references only for callers that present
        `reference_secret`; who presents `rejoin_secret` is the process at the other end.
        """
        self.identity = identity
        self.reference_secret = reference_secret
        self.rejoin_secret = rejoin_secret
        self.heartbeat = cluster_pb2.Heartbeat()
        self.heard_at_s = now_s
        self.is_silent = False
        self.loads_tokenizer = False
        """Its interpreter may be held up for seconds."""
        self.warmup_ms = 0
        self.kernels = self.kernels_detail = ""
        self.wire_dtype: WireDType | None = None
        self.close_reason = ""
        self._is_closed = asyncio.Event()
        self._outbox: asyncio.Queue[cluster_pb2.CoordinatorMessage | None] = asyncio.Queue()

    def send(self, message: cluster_pb2.CoordinatorMessage) -> None:
        """Queues a message. There are a handful per epoch, and one per heartbeat: no bound is needed."""
        self._outbox.put_nowait(message)

    def beat(self, heartbeat: cluster_pb2.Heartbeat) -> None:
        """Takes a heartbeat, and answers it with the time of this clock if that is wanted."""
        self.heartbeat = heartbeat
        if heartbeat.sent_at_us:
            now_us = wall_clock_us()
            answer = cluster_pb2.HeartbeatAnswer(
                sent_at_us=heartbeat.sent_at_us, received_at_us=now_us, answered_at_us=now_us
            )
            self.send(cluster_pb2.CoordinatorMessage(heartbeat_answer=answer))

    def close(self, reason: str) -> None:
        """Ends the stream once the messages before are out."""
        self.close_reason = self.close_reason or reason
        self._is_closed.set()
        self._outbox.put_nowait(None)

    async def wait_closed(self) -> None:
        """Until somebody has called `close`."""
        await self._is_closed.wait()

    async def messages(self) -> AsyncIterator[cluster_pb2.CoordinatorMessage]:
        """What to send, until `close`."""
        while (message := await self._outbox.get()) is not None:
            yield message
