"""Attributes failures to requests: retry, isolate, then fail."""

from collections.abc import Callable

from coordinator.engine.request import Registry, Request
from coordinator.recovery.policy import RecoveryPolicy
from coordinator.scheduler.scheduler import Scheduler
from wire.errors import RequestPoisoned, ServingError, StepFailed
from wire.steps import FaultReport


class FailureAttribution:
    """All of it is to be called before the epoch is stopped, while it is known what was unfinished."""

    def __init__(
        self,
        scheduler: Scheduler,
        registry: Registry,
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
        self._num_setbacks = 0

    def note_tokens(self, count: int) -> None:
        """A step has brought so many tokens, for anybody."""
        self._num_tokens += count

    def note_fault(self, fault: FaultReport) -> None:
        """A step was refused. Its requests are tried again, twice at most without progress in between.

        They are those that the report names. Where the frame was too broken to tell, they are those of the
        step that the stage expected; where its step id was wrong, no such step may be in flight. The last try
        is alone: one of them may be the cause, and they must not fail together.
        """
        self._count_setback()
        in_step = (sequence.key.request_id for sequence in self._scheduler.sequences_in_step(fault.step_id))
        for request_id in dict.fromkeys((*in_step, *fault.request_ids)):
            request = self._registry.live_request(request_id)
            running = [] if request is None else [x for x in request.live_sequences if not x.state.is_queued]
            if request is None or not running:
                continue
            if request.num_generated_tokens >= request.num_tokens_at_fault + self._policy.forgiving_tokens:
                request.num_faults = 0
            request.num_faults += 1
            request.num_tokens_at_fault = request.num_generated_tokens
            if request.num_faults > self._policy.max_step_retries:
                text = f"all {request.num_faults} steps that computed this request were refused; the last"
                self._fail(request, StepFailed(f"{text}: {fault}"))
            elif request.num_faults == self._policy.max_step_retries:
                self._isolation.suspect(running)

    def note_death(self, reason: str) -> None:
        """A worker has died. What it left unfinished runs apart from everything else next, in groups at
        first; what is unfinished when a worker dies then, alone.

        A request that ran alone when a worker died, and again when the next one did, without a token in
        between, fails. Losses without it in between speak for chance, and it gets another try for each.
        """
        self._count_setback()
        request = self._lone_suspect()
        if request is not None:
            if not request.num_deaths_alone:
                request.num_unrelated_before_deaths = self._num_unrelated(request)
            request.num_deaths_alone += 1
            num_unrelated = self._num_unrelated(request) - request.num_unrelated_before_deaths
            num_granted = min(num_unrelated, self._policy.max_unrelated_deaths)
            if request.num_deaths_alone >= self._policy.max_deaths_alone + num_granted:
                text = f"{request.num_deaths_alone} workers were lost while this request alone ran; the last"
                self._fail(request, RequestPoisoned(f"{text}: {reason}"))
        self._isolation.note_death(self._scheduler.unfinished)

    def note_unrelated_death(self) -> None:
        """A worker has died that computed nothing."""
        self._num_setbacks += 1

    def note_device_failure(self, reason: str, *, num_stages: int) -> None:
        """A worker's device has failed. What it left unfinished runs apart next, as after a death.

        Devices that fail one after another, such as those of all stages after the same steps, say nothing of
        the request that runs alone meanwhile: it fails when more of them failed under it, without a token in
        between, than there are stages.
        """
        self._count_setback()
        request = self._lone_suspect()
        if request is not None:
            request.num_device_failures_alone += 1
            if request.num_device_failures_alone > num_stages:
                text = f"{request.num_device_failures_alone} devices failed while this request alone ran"
                self._fail(request, RequestPoisoned(f"{text}; the last: {reason}"))
        self._isolation.note_death(self._scheduler.unfinished)

    def note_break(self, reason: str, *, is_lasting: bool) -> None:
        """A stream has broken, and nobody knows why. Where that `is_lasting`, what was unfinished runs alone
        next, in turn with one more of the queue each time.

        A request that ran alone each time fails, if others had tokens meanwhile: it is not the network.
        """
        self._count_setback()
        request = self._lone_suspect()
        if request is not None:
            if not request.num_breaks_alone:
                request.num_tokens_before_breaks = self._num_tokens
            request.num_breaks_alone += 1
            self._isolation.give_way(request.live_sequences)
            has_others = self._num_tokens > request.num_tokens_before_breaks
            if request.num_breaks_alone >= self._policy.max_breaks_alone and has_others:
                text = f"{request.num_breaks_alone} streams broke while this request alone ran; the last"
                self._fail(request, StepFailed(f"{text}: {reason}"))
        if is_lasting:
            next_one = self._isolation.others(self._scheduler.queue)[:1]
            self._isolation.suspect((*self._scheduler.unfinished, *next_one))

    def _count_setback(self) -> None:
        self._num_setbacks += 1
        for request_id in {sequence.key.request_id for sequence in self._scheduler.unfinished}:
            if (request := self._registry.live_request(request_id)) is not None:
                request.num_setbacks += 1

    def _num_unrelated(self, request: Request) -> int:
        """Setbacks without it, and a number that stays the same for this request."""
        return self._num_setbacks - request.num_setbacks

    def _lone_suspect(self) -> Request | None:
        alone = self._scheduler.lone_suspect
        return None if alone is None else self._registry.live_request(alone.key.request_id)
