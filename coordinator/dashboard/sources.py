"""What the dashboard shows, from whoever knows it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from coordinator.api.activity import ActivityReporter
from coordinator.api.status import StatusReporter
from coordinator.cluster.controller import Controller
from coordinator.observing.trace_reader import TraceReader
from coordinator.requests.engine import Engine

MetricsText: TypeAlias = Callable[[str], Awaitable[tuple[bytes, str]]]
"""From what a client accepts to the metrics and their content type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """`metrics` None: there are none to show."""

    status: StatusReporter
    activity: ActivityReporter
    engine: Engine
    controller: Controller
    traces: TraceReader
    metrics: MetricsText | None = None
