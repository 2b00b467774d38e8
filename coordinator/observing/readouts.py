"""Metrics that are read off when somebody asks for them, and cost nothing before."""

from collections import Counter
from collections.abc import Callable

from coordinator.cluster.controller import Controller
from coordinator.cluster.membership import Members
from coordinator.requests.engine import Engine
from coordinator.requests.request import Request
from coordinator.scheduling.lifecycle import SequenceState
from telemetry.metrics import definitions
from telemetry.metrics.registry import Registry


class Readouts:
    """Reads; never changes anything but the metrics."""

    def __init__(
        self, registry: Registry, engine: Engine, controller: Controller, num_dropped_spans: Callable[[], int]
    ) -> None:
        self._engine = engine
        self._controller = controller
        self._num_dropped_spans = num_dropped_spans
        self._requests = registry.number(definitions.REQUESTS)
        self._ended = registry.number(definitions.REQUESTS_ENDED)
        self._num_prompt = registry.number(definitions.PROMPT_TOKENS).of()
        self._num_cached = registry.number(definitions.CACHED_TOKENS).of()
        self._num_preemptions = registry.number(definitions.PREEMPTIONS).of()
        self._num_in_flight = registry.number(definitions.STEPS_IN_FLIGHT).of()
        self._workers = registry.number(definitions.WORKERS)
        self._dropped_spans = registry.number(definitions.DROPPED_SPANS).of()
        self._journal_failing = registry.number(definitions.JOURNAL_FAILING).of()
        self._num_unwritten = registry.number(definitions.JOURNAL_UNWRITTEN).of()
        registry.read_with(self._read)

    def _read(self) -> None:
        states = Counter(map(request_state, self._engine.registry.live))
        states["preparing"] = self._engine.admission.num_preparing
        for state in definitions.REQUEST_STATE.values:
            self._requests.of(state).set(states[state])
        totals, counts = self._engine.totals, self._engine.scheduler.counts
        self._ended.of("finished").set(totals.finished)
        self._ended.of("cancelled").set(totals.cancelled)
        self._ended.of("failed").set(totals.failed)
        self._num_prompt.set(counts.num_prompt_tokens)
        self._num_cached.set(counts.num_cached_tokens)
        self._num_preemptions.set(counts.num_preemptions)
        self._num_in_flight.set(self._engine.scheduler.num_steps_in_flight)
        self._dropped_spans.set(self._num_dropped_spans())
        durability = self._engine.durability
        self._journal_failing.set(durability.failure is not None)
        self._num_unwritten.set(durability.num_unwritten)
        workers = worker_states(self._controller.state.workers)
        for state in definitions.WORKER_STATE.values:
            self._workers.of(state).set(workers[state])


def worker_states(members: Members) -> Counter[str]:
    """How many are in each state. Lost ones are those that are missed, not those that have left."""
    return Counter(record.shown_state.name.lower() for record in (*members, *members.lost))


def request_state(request: Request) -> str:
    """A request is as far as the choice that is least far."""
    states = [sequence.state for sequence in request.live_sequences]
    if any(state.is_queued for state in states):
        return "queued"
    return "prefill" if SequenceState.PREFILL in states else "decode"
