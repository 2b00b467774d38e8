"""An engine with the coordinator's metrics, over a clock and results that a test drives."""

from collections import deque
from collections.abc import Callable

from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.engine import Engine
from coordinator.engine.observer import EndCause
from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.request import Choice, Request
from coordinator.observability.facts import FactRecorder
from coordinator.observability.metrics import PipelineMetrics, RequestMetrics
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.sequence import QueueOrder, Sequence
from telemetry.metrics.definitions import Metric
from telemetry.metrics.registry import Registry
from tests.metric_points import Buckets, Values, values_of
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import SliceResult, StageTime, Step, StepResult

LIMITS = SchedulerLimits(max_step_tokens=16, max_step_sequences=8, max_steps_in_flight=1)


class WatchedEngine:
    """Starts at 100 s; one step in flight at a time."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._soon = deque[Callable[[], None]]()
        self.registry = Registry(start_ns=0)
        self.requests = RequestMetrics(self.registry)
        self.pipeline = PipelineMetrics(self.registry)
        self.facts = FactRecorder((self.requests, self.pipeline))
        self.registry.read_with(lambda: self.pipeline.read(self.now_s))
        self.engine = Engine(
            AdmissionLimits(queue_size=64),
            policy=DEFAULT_POLICY,
            clock=lambda: self.now_s,
            call_soon=self._soon.append,
            observer=self.facts,
        )
        self.sent = deque[Step]()
        self.epoch = 0

    def start_epoch(self) -> None:
        self.epoch += 1
        kv = KvCacheManager(num_blocks=64, block_size=4)
        self.engine.start_epoch(self.epoch, kv, LIMITS, self.sent.append, max_sequence_tokens=128)
        self.engine.deliver()

    def stop_epoch(self, cause: EndCause | None = None) -> None:
        self.engine.stop_epoch(cause, "the test says so")
        self.sent.clear()

    def submit(self, *, num_prompt_tokens: int = 3, max_tokens: int = 4, num_choices: int = 1) -> Request:
        request_id = new_request_id()
        choices = [
            Choice(
                Sequence(
                    SequenceKey(request_id, choice),
                    tuple(range(num_prompt_tokens)),
                    max_tokens=max_tokens,
                    sampling=StepSampling(),
                    stop_token_ids=frozenset(),
                    order=QueueOrder(self.now_s, 0),
                ),
                OutputBuffer(None),
            )
            for choice in range(num_choices)
        ]
        request = Request(request_id, choices, client="test")
        self.engine.submit(request)
        self.engine.deliver()
        return request

    def answer(self, *times: StageTime, after_s: float) -> None:
        """The result of the oldest step arrives after this time."""
        self.now_s += after_s
        step = self.sent.popleft()
        results = tuple(
            SliceResult(part.sequence, part.restart_count, 7) for part in step.slices if part.is_answered
        )
        self.engine.complete(StepResult.of(step.epoch, step.step_id, results, times))
        self.engine.deliver()

    def value(self, metric: Metric, *labels: str) -> float:
        """Value of a series; 0 if it does not exist."""
        found = self._points(metric).get(labels, 0)
        assert not isinstance(found, Buckets)
        return found

    def times(self, metric: Metric, *labels: str) -> tuple[int, float]:
        """Count and sum of a histogram, to the microsecond."""
        found = self._points(metric).get(labels, Buckets())
        assert isinstance(found, Buckets)
        return found.count, round(found.sum, 6)

    def _points(self, metric: Metric) -> Values:
        return values_of(self.registry.snapshot(0), metric)
