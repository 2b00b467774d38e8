"""Coordinator side of `MembershipService.Join` streams, and the kernels that stages report."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from coordinator.cluster.membership import WorkerIdentity
from coordinator.recovery.failure_detector import StageProgress
from coordinator.recovery.self_check import ReferenceSource
from stageline_rpc.internal.v1 import join_pb2
from wire.clock import wall_clock_us
from wire.kernels import StageKernels
from wire.tensors import WIRE_DTYPE_FROM_MESSAGE, WireDType


class WorkerConnection:
    """A joined worker: its outbox and its last heartbeat."""

    def __init__(
        self,
        identity: WorkerIdentity,
        *,
        now_s: float,
        reference_secret: bytes = b"",
        rejoin_secret: bytes = b"",
    ) -> None:
        """Create the connection of a worker that joined at `now_s`, on the event loop's clock.

        `reference_secret` authorizes requests for references to the worker. `rejoin_secret` authenticates the
        worker process when it rejoins.
        """
        self.identity = identity
        self.reference_secret = reference_secret
        self.rejoin_secret = rejoin_secret
        self.heartbeat = join_pb2.Heartbeat()
        self.held_weights = join_pb2.HeldWeights()
        self.prefetch = b""
        """The last order to prefetch weights, as it was sent."""
        self.last_message_s = now_s
        self.is_silent = False
        self.loads_tokenizer = False
        """The worker loads the tokenizer, which may block its interpreter for seconds."""
        self.warmup_ms = 0
        self.kernels = self.kernels_detail = ""
        self.wire_dtype: WireDType | None = None
        self.close_reason = ""
        self._is_closed = asyncio.Event()
        self._outbox: asyncio.Queue[join_pb2.JoinResponse | None] = asyncio.Queue()

    def send(self, message: join_pb2.JoinResponse) -> None:
        """Queue a message; unbounded, since there are few per epoch and one per heartbeat."""
        self._outbox.put_nowait(message)

    def beat(self, heartbeat: join_pb2.Heartbeat) -> None:
        """Store a heartbeat, and send the time of this clock if requested."""
        self.heartbeat = heartbeat
        if heartbeat.sent_at_us:
            now_us = wall_clock_us()
            answer = join_pb2.HeartbeatAnswer(
                sent_at_us=heartbeat.sent_at_us, received_at_us=now_us, answered_at_us=now_us
            )
            self.send(join_pb2.JoinResponse(heartbeat_answer=answer))

    def stage_loaded(self, loaded: join_pb2.StageLoaded) -> None:
        """Store the worker's report on its loaded stage."""
        self.loads_tokenizer = False
        self.warmup_ms = loaded.warmup_ms
        self.kernels, self.kernels_detail = loaded.kernels, loaded.kernels_detail
        self.wire_dtype = WIRE_DTYPE_FROM_MESSAGE.get(loaded.wire_dtype)
        # Status may be read before the next heartbeat, which has the same values.
        self.heartbeat.weight_bytes = loaded.weight_bytes
        self.heartbeat.kv_bytes = loaded.kv_bytes
        self.heartbeat.weights = loaded.weights

    def close(self, reason: str) -> None:
        """End the stream after the queued messages."""
        self.close_reason = self.close_reason or reason
        self._is_closed.set()
        self._outbox.put_nowait(None)

    async def wait_closed(self) -> None:
        """Wait for `close`."""
        await self._is_closed.wait()

    async def messages(self) -> AsyncIterator[join_pb2.JoinResponse]:
        """Yield messages to send, until `close`."""
        while (message := await self._outbox.get()) is not None:
            yield message


MAX_DISCONNECTED = 64


class Connections(dict[str, WorkerConnection]):
    """The latest connection per worker name."""

    def __init__(self) -> None:
        super().__init__()
        self.disconnected: dict[str, WorkerConnection] = {}
        """Last connections of workers that have not rejoined, the latest last."""

    def put(self, connection: WorkerConnection) -> None:
        """Add a connection and close the one of the same name, if any."""
        name = connection.identity.name
        if (old := self.get(name)) is not None:
            old.close("replaced by a new process of the same name")
        self[name] = connection
        self.disconnected.pop(name, None)

    def remove(self, connection: WorkerConnection) -> bool:
        """Remove a connection; False if it was replaced or removed before."""
        if self.get(connection.identity.name) is not connection:
            return False
        name = connection.identity.name
        del self[name]
        self.disconnected[name] = connection
        for forgotten in list(self.disconnected)[:-MAX_DISCONNECTED]:
            del self.disconnected[forgotten]
        return True

    def last_of(self, name: str) -> WorkerConnection | None:
        """The last connection of a worker that has not rejoined."""
        return self.disconnected.get(name)

    def of(self, worker: WorkerIdentity) -> WorkerConnection | None:
        """The connection of this worker process; None if it is not connected."""
        connection = self.get(worker.name)
        return connection if connection is not None and connection.identity is worker else None

    def send_all(self, message: join_pb2.JoinResponse) -> None:
        for connection in self.values():
            connection.send(message)

    def close_all(self, reason: str) -> None:
        for connection in self.values():
            connection.close(reason)

    def of_stages(self, workers: Iterable[WorkerIdentity]) -> list[WorkerConnection | None]:
        """In the order of `workers`; None for a lost worker."""
        return [self.get(worker.name) for worker in workers]

    def progress_of(self, workers: Iterable[WorkerIdentity]) -> list[StageProgress | None]:
        """In the order of `workers`; None for a lost worker."""
        return [
            None
            if connection is None
            else StageProgress(connection.warmup_ms / 1000, connection.heartbeat.num_steps)
            for connection in self.of_stages(workers)
        ]

    @property
    def reference_sources(self) -> list[ReferenceSource]:
        """Workers that can compute references, with their free memory."""
        return [_reference_source(connection) for connection in self.values()]


def _reference_source(connection: WorkerConnection) -> ReferenceSource:
    identity, heartbeat = connection.identity, connection.heartbeat
    held_bytes = heartbeat.weight_bytes + heartbeat.kv_bytes
    free_bytes = identity.memory_bytes - held_bytes
    return ReferenceSource(identity.name, identity.address, free_bytes, connection.reference_secret)


def stage_kernels(connection: WorkerConnection | None) -> StageKernels | None:
    """Kernels of the worker's stage; None for a lost worker."""
    if connection is None:
        return None
    return StageKernels(connection.identity.device, connection.kernels)
