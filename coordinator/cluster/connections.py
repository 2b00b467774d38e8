"""The streams of all workers that have joined."""

from collections.abc import Iterable

from coordinator.cluster.membership import WorkerIdentity
from coordinator.cluster.self_check_references import ReferenceSource
from coordinator.cluster.worker_connection import WorkerConnection
from stageline_rpc.v1 import cluster_pb2

MAX_DEPARTED = 64


class Connections(dict[str, WorkerConnection]):
    """By the worker's name: of several that dialled under one name, the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.departed: dict[str, WorkerConnection] = {}
        """Those of the last workers that have gone and have not come back."""

    def put(self, connection: WorkerConnection) -> None:
        """This one counts from now on."""
        name = connection.identity.name
        if (old := self.get(name)) is not None:
            old.close("replaced by a new process of the same name")
        self[name] = connection
        self.departed.pop(name, None)

    def remove(self, connection: WorkerConnection) -> bool:
        """Its stream has ended; False when it did not count any more."""
        if self.get(connection.identity.name) is not connection:
            return False
        name = connection.identity.name
        del self[name]
        self.departed[name] = connection
        for forgotten in list(self.departed)[:-MAX_DEPARTED]:
            del self.departed[forgotten]
        return True

    def of(self, worker: WorkerIdentity) -> WorkerConnection | None:
        """The stream of this very process, while it is here."""
        connection = self.get(worker.name)
        return connection if connection is not None and connection.identity is worker else None

    def send_all(self, message: cluster_pb2.CoordinatorMessage) -> None:
        for connection in self.values():
            connection.send(message)

    def close_all(self, reason: str) -> None:
        for connection in self.values():
            connection.close(reason)

    def of_stages(self, workers: Iterable[WorkerIdentity]) -> list[WorkerConnection | None]:
        """In the order of `workers`; None for one that is gone."""
        return [self.get(worker.name) for worker in workers]

    @property
    def reference_sources(self) -> list[ReferenceSource]:
        """Who can be asked what the model answers, with the memory that is left there."""
        return [_reference_source(each) for each in self.values()]


def _reference_source(connection: WorkerConnection) -> ReferenceSource:
    identity, heartbeat = connection.identity, connection.heartbeat
    held_bytes = heartbeat.weight_bytes + heartbeat.kv_bytes
    free_bytes = identity.memory_bytes - held_bytes
    return ReferenceSource(identity.name, identity.address, free_bytes, connection.reference_secret)
