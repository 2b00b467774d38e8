"""Attributes failures to requests: retry, isolate, then fail."""

from collections.abc import Callable

from coordinator.engine.request import Request, RequestRegistry
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.scheduler import Scheduler
from wire.errors import RequestPoisoned, ServingError, StepFailed, StepFaultKind
from wire.steps import FaultReport


class FailureAttribution:
    """Counts failures per request.

    Methods must be called before the epoch is stopped, while the scheduler has the unfinished sequences.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        registry: RequestRegistry,
        fail: Callable[[Request, ServingError], None],
        *,
        policy: RecoveryPolicy,
    ) -> None:
        self._scheduler = scheduler
        self._isolation = scheduler.isolation
        self._registry = registry
        self._fail = fail
        self._policy = policy
        self._num_tokens = 0
        self._num_failures = 0

    def record_tokens(self, count: int) -> None:
        """Count tokens of a step, for any request."""
        self._num_tokens += count

    def record_fault(self, fault: FaultReport, *, is_worker_avoided: bool = False) -> None:
        """Record a refused step: its requests are retried, `max_step_retries` times without progress.

        These are the requests in the report and, if the reported step is in flight, in that step. The
        last retry is isolated, so that only the request that causes the fault fails. None fails if from now
        on plans avoid the worker, because the worker may have been the cause.
        """
        self._count_failure()
        in_step = (sequence.key.request_id for sequence in self._scheduler.sequences_in_step(fault.step_id))
        for request_id in dict.fromkeys((*in_step, *fault.request_ids)):
            request = self._registry.live_request(request_id)
            if request is not None:
                self._record_request_fault(request, fault, may_fail=not is_worker_avoided)

    def _record_request_fault(self, request: Request, fault: FaultReport, *, may_fail: bool) -> None:
        running = [sequence for sequence in request.live_sequences if not sequence.state.is_queued]
        if not running:
            return
        history, policy = request.failures, self._policy
        if request.num_generated_tokens >= history.num_tokens_at_fault + policy.forgiving_tokens:
            history.num_faults = 0
        history.num_faults += 1
        history.num_tokens_at_fault = request.num_generated_tokens
        if history.num_faults > policy.max_step_retries:
            if not may_fail:
                return
            text = f"all {history.num_faults} steps with this request were rejected; the last"
            self._fail(request, StepFailed(f"{text}: {fault}"))
        elif history.num_faults == policy.max_step_retries and not _needs_others(fault):
            self._isolation.suspect(running)

    def record_worker_loss(self, reason: str) -> None:
        """Record a lost worker: its unfinished sequences are isolated, first in groups, then one by one.

        A request that ran alone during two losses, without a token in between, fails. Each loss in between
        while the request was not running grants it another retry.
        """
        self._count_failure()
        request = self._isolated_request()
        if request is not None:
            self._record_loss_alone(request, reason)
        self._isolation.record_worker_loss(self._scheduler.unfinished)

    def _record_loss_alone(self, request: Request, reason: str) -> None:
        history, policy = request.failures, self._policy
        if not history.num_deaths_alone:
            history.num_unrelated_before_deaths = self._num_unrelated(request)
        history.num_deaths_alone += 1
        num_unrelated = self._num_unrelated(request) - history.num_unrelated_before_deaths
        num_granted = min(num_unrelated, policy.max_unrelated_deaths)
        if history.num_deaths_alone >= policy.max_deaths_alone + num_granted:
            text = f"{history.num_deaths_alone} workers were lost while this request alone ran; the last"
            self._fail(request, RequestPoisoned(f"{text}: {reason}"))

    def record_unrelated_loss(self) -> None:
        """Record the loss of a worker that computed nothing."""
        self._num_failures += 1

    def record_device_failure(self, reason: str, *, num_stages: int) -> None:
        """Record a failed device: the unfinished sequences are isolated as after a lost worker.

        The devices of all stages may fail one after another for the same reason. So a request that runs alone
        fails only after more device failures than there are stages, without a token in between.
        """
        self._count_failure()
        request = self._isolated_request()
        if request is not None:
            history = request.failures
            history.num_device_failures_alone += 1
            if history.num_device_failures_alone > num_stages:
                text = f"{history.num_device_failures_alone} devices failed while this request alone ran"
                self._fail(request, RequestPoisoned(f"{text}; the last: {reason}"))
        self._isolation.record_worker_loss(self._scheduler.unfinished)

    def record_break(self, reason: str, *, is_lasting: bool) -> None:
        """Record a stream that broke for an unknown reason.

        If breaks are `is_lasting`, isolate the unfinished sequences, and one more of the queue per break. A
        request that ran alone each time fails if other requests received tokens in between, because then
        the network works.
        """
        self._count_failure()
        request = self._isolated_request()
        if request is not None:
            self._record_break_alone(request, reason)
        if is_lasting:
            first_queued = self._isolation.others(self._scheduler.queue)[:1]
            self._isolation.suspect((*self._scheduler.unfinished, *first_queued))

    def _record_break_alone(self, request: Request, reason: str) -> None:
        history = request.failures
        if not history.num_breaks_alone:
            history.num_tokens_before_breaks = self._num_tokens
        history.num_breaks_alone += 1
        self._isolation.rotate(request.live_sequences)
        has_others = self._num_tokens > history.num_tokens_before_breaks
        if history.num_breaks_alone >= self._policy.max_breaks_alone and has_others:
            text = f"{history.num_breaks_alone} streams broke while this request alone ran; the last"
            self._fail(request, StepFailed(f"{text}: {reason}"))

    def _count_failure(self) -> None:
        self._num_failures += 1
        for request_id in {sequence.key.request_id for sequence in self._scheduler.unfinished}:
            if (request := self._registry.live_request(request_id)) is not None:
                request.failures.num_failures += 1

    def _num_unrelated(self, request: Request) -> int:
        """Failures without the request, plus a constant of the request."""
        return self._num_failures - request.failures.num_failures

    def _isolated_request(self) -> Request | None:
        sequence = self._scheduler.isolated_sequence
        return None if sequence is None else self._registry.live_request(sequence.key.request_id)


def _needs_others(fault: FaultReport) -> bool:
    """Whether only a step with other requests shows if the request or the worker is the cause.

    If the worker is, such a step is non-finite for all of them; if the request is, it alone fails.
    """
    return fault.kind is StepFaultKind.NON_FINITE and len(set(fault.request_ids)) == 1
