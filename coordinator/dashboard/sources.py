"""What the dashboard shows, from whoever knows it."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from coordinator.api.activity import ActivityReporter
from coordinator.api.status import StatusReporter
from coordinator.cluster.controller import Controller
from coordinator.requests.engine import Engine

MetricsText: TypeAlias = Callable[[str], Awaitable[tuple[bytes, str]]]
"""From what a client accepts to the metrics and their content type."""


class TraceReader(Protocol):
    """The traces that are kept. What it returns can be written as JSON."""

    async def list(self) -> Sequence[Mapping[str, Any]]:
        """For each its `request_id` and what else there is to say in a line, newest first."""

    async def get(self, request_id: str) -> Mapping[str, Any] | None:
        """`telemetry.trace_view.facts.trace_facts` of a request, by its id or the beginning of it."""


class NoTraces:
    """Where none are kept."""

    async def list(self) -> Sequence[Mapping[str, Any]]:
        return ()

    async def get(self, request_id: str) -> Mapping[str, Any] | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """`metrics` None: there are none to show."""

    status: StatusReporter
    activity: ActivityReporter
    engine: Engine
    controller: Controller
    traces: TraceReader
    metrics: MetricsText | None = None
