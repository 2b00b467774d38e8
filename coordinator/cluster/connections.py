"""Coordinator side of `MembershipService.Join` streams, and the kernels that stages report."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

from coordinator.cluster.membership import WorkerIdentity
from coordinator.recovery.failure_detector import StageProgress
from coordinator.recovery.self_check import ReferenceSource
from stageline_rpc.internal.v1 import join_pb2
from wire.clock import wall_clock_us
from wire.tensors import WireDType


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
        """`now_s` is on the event loop's clock. The worker computes references only for callers that present
        `reference_secret`; who presents `rejoin_secret` is the process at the other end.
        """
        self.identity = identity
        self.reference_secret = reference_secret
        self.rejoin_secret = rejoin_secret
        self.heartbeat = join_pb2.Heartbeat()
        self.heard_at_s = now_s
        self.is_silent = False
        self.loads_tokenizer = False
        """Loading may block its interpreter for seconds."""
        self.warmup_ms = 0
        self.kernels = self.kernels_detail = ""
        self.wire_dtype: WireDType | None = None
        self.close_reason = ""
        self._is_closed = asyncio.Event()
        self._outbox: asyncio.Queue[join_pb2.JoinResponse | None] = asyncio.Queue()

    def send(self, message: join_pb2.JoinResponse) -> None:
        """Queues a message. There are a handful per epoch, and one per heartbeat: no bound is needed."""
        self._outbox.put_nowait(message)

    def beat(self, heartbeat: join_pb2.Heartbeat) -> None:
        """Takes a heartbeat, and answers it with the time of this clock if that is wanted."""
        self.heartbeat = heartbeat
        if heartbeat.sent_at_us:
            now_us = wall_clock_us()
            answer = join_pb2.HeartbeatAnswer(
                sent_at_us=heartbeat.sent_at_us, received_at_us=now_us, answered_at_us=now_us
            )
            self.send(join_pb2.JoinResponse(heartbeat_answer=answer))

    def close(self, reason: str) -> None:
        """Ends the stream once the messages before are out."""
        self.close_reason = self.close_reason or reason
        self._is_closed.set()
        self._outbox.put_nowait(None)

    async def wait_closed(self) -> None:
        """Returns after `close`."""
        await self._is_closed.wait()

    async def messages(self) -> AsyncIterator[join_pb2.JoinResponse]:
        """Messages to send, until `close`."""
        while (message := await self._outbox.get()) is not None:
            yield message


MAX_DEPARTED = 64


class Connections(dict[str, WorkerConnection]):
    """The latest connection per worker name."""

    def __init__(self) -> None:
        super().__init__()
        self.departed: dict[str, WorkerConnection] = {}
        """Connections of the latest workers that have left and not rejoined."""

    def put(self, connection: WorkerConnection) -> None:
        """Replaces the connection of the same name."""
        name = connection.identity.name
        if (old := self.get(name)) is not None:
            old.close("replaced by a new process of the same name")
        self[name] = connection
        self.departed.pop(name, None)

    def remove(self, connection: WorkerConnection) -> bool:
        """Removes a connection whose stream has ended; False if it was replaced or removed before."""
        if self.get(connection.identity.name) is not connection:
            return False
        name = connection.identity.name
        del self[name]
        self.departed[name] = connection
        for forgotten in list(self.departed)[:-MAX_DEPARTED]:
            del self.departed[forgotten]
        return True

    def of(self, worker: WorkerIdentity) -> WorkerConnection | None:
        """The connection of this process; None once it has left."""
        connection = self.get(worker.name)
        return connection if connection is not None and connection.identity is worker else None

    def send_all(self, message: join_pb2.JoinResponse) -> None:
        for connection in self.values():
            connection.send(message)

    def close_all(self, reason: str) -> None:
        for connection in self.values():
            connection.close(reason)

    def of_stages(self, workers: Iterable[WorkerIdentity]) -> list[WorkerConnection | None]:
        """In the order of `workers`; None for a worker that is gone."""
        return [self.get(worker.name) for worker in workers]

    def progress_of(self, workers: Iterable[WorkerIdentity]) -> list[StageProgress | None]:
        """In the order of `workers`; None for a worker that is gone."""
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


@dataclass(frozen=True, slots=True)
class StageKernels:
    """`device` is "cpu", "cuda:1" or "mock"; `kernels` is "compiled", "plain", or empty where unknown."""

    device: str
    kernels: str

    @property
    def kind(self) -> str:
        """What must be equal for stages to round alike and to be about as fast."""
        device = self.device.partition(":")[0]
        return f"{self.kernels} on {device}"


def stage_kernels(connection: WorkerConnection | None) -> StageKernels | None:
    """How this worker's stage computes; None for a worker that is gone."""
    if connection is None:
        return None
    return StageKernels(connection.identity.device, connection.kernels)


def differing_kernels(stages: Sequence[StageKernels | None]) -> str:
    """What differs between stages, which are in order; empty where nothing does."""
    by_kind: dict[str, list[str]] = {}
    for index, stage in enumerate(stages):
        if stage is not None and stage.kernels:
            by_kind.setdefault(stage.kind, []).append(str(index))
    if len(by_kind) < 2:
        return ""
    each = (
        f"{'stage' if len(indexes) == 1 else 'stages'} {', '.join(indexes)}: {kind}"
        for kind, indexes in by_kind.items()
    )
    return f"stages compute differently: {'; '.join(each)}"
