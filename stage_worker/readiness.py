"""Whether this worker is of use to its cluster, from the messages of its Join stream alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from stageline_rpc.internal.v1 import join_pb2
from wire.condition import Condition


class Usefulness(Enum):
    """A rolling restart goes on with the next worker when this one is in a ready state.

    Neither the process nor its Join stream is enough: its layers are not back yet. A worker without a stage
    is ready, or workers that start one by one would wait for each other. One that has served stays ready
    when an epoch ends because of another worker: only an assignment or a lost coordinator changes that.
    """

    CONNECTING = Condition("waiting for the coordinator")
    JOINING = Condition("joining")
    """The coordinator's decision about the new worker is on its way."""
    SPARE = Condition("joined without a stage", is_ready=True)
    LOADING = Condition("loading a stage")
    STARTING = Condition("waiting for the pipeline to serve")
    SERVING = Condition("serving a stage", is_ready=True)
    REJECTED = Condition("cannot serve its stage: see the log of this worker")
    LEAVING = Condition("draining", is_stopping=True)


_ALL = frozenset(Usefulness)
_EVENTS: Mapping[str, tuple[Collection[Usefulness], Usefulness]] = {
    "welcome": (_ALL, Usefulness.JOINING),
    # What the coordinator decided at the join was sent before its first answer to a heartbeat.
    "heartbeat_answer": ((Usefulness.JOINING,), Usefulness.SPARE),
    "assign": (_ALL, Usefulness.LOADING),
    "loaded": ((Usefulness.LOADING,), Usefulness.STARTING),
    "serving": ((Usefulness.STARTING,), Usefulness.SERVING),
    "load_failed": (_ALL, Usefulness.REJECTED),
    "weights_differ": (_ALL, Usefulness.REJECTED),
    "drain_requested": (_ALL, Usefulness.LEAVING),
    "leave": (_ALL, Usefulness.LEAVING),
}
"""By message: the states that it changes, and the new one."""


class Readiness:
    """Follows the messages of the Join stream. A worker that leaves stays in that state."""

    def __init__(self) -> None:
        self._state = Usefulness.CONNECTING

    def condition(self) -> Condition:
        """Called from any thread."""
        return self._state.value

    def observe(self, message: join_pb2.JoinRequest | join_pb2.JoinResponse) -> None:
        """A message was received, or is being sent."""
        name = message.WhichOneof("message") or ""
        if isinstance(message, join_pb2.JoinResponse) and not _is_positive(message):
            return
        before, after = _EVENTS.get(name, ((), self._state))
        if self._state in before and self._state is not Usefulness.LEAVING:
            self._state = after

    def disconnected(self) -> None:
        """The stream ended."""
        if self._state is not Usefulness.LEAVING:
            self._state = Usefulness.CONNECTING

    def leave(self) -> None:
        """The process was told to stop."""
        self._state = Usefulness.LEAVING


def _is_positive(message: join_pb2.JoinResponse) -> bool:
    """False for a pipeline that does not serve, and for a leave after which the worker joins again."""
    if message.HasField("serving"):
        return message.serving.is_serving
    return message.leave.exit_process if message.HasField("leave") else True
