"""Recent pipeline activity and requests as read-only snapshots, and the bottleneck stage.

Recording takes a few microseconds per step; the rest is computed per snapshot. All buffers are bounded.
"""

from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice

from coordinator.engine.observer import EndCause
from coordinator.observability.facts import FactObserver, Outcome, RequestRecord, SentStep, StepRecord
from coordinator.observability.rates import PastSecond, PerSecond, Rates
from coordinator.observability.steps import KEPT_S, StageLoad, StepHistory, stage_loads
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import SequenceState
from telemetry.trace_view.explain import ratio_to_median, stands_out
from wire.ids import RequestId
from wire.interceptors import sent_reason
from wire.steps import Step


class RequestPhase(StrEnum):
    """Current phase of an active request, or how it ended."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    RECOVERING = "recovering"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_live(self) -> bool:
        return self not in (RequestPhase.FINISHED, RequestPhase.CANCELLED, RequestPhase.FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestActivity:
    """A request at one moment: tokens over all choices, times as in `RequestRecord`."""

    request_id: RequestId
    phase: RequestPhase
    num_choices: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    max_tokens: int
    num_restarts: int
    arrived_s: float
    started_s: float | None
    first_token_s: float | None
    ended_s: float | None
    error: str
    reason: str


class RequestHistory(FactObserver):
    """Active requests, and the last ones that ended."""

    def __init__(self) -> None:
        self._active = dict[RequestId, RequestRecord]()
        self._ended = deque[RequestActivity](maxlen=MAX_ENDED)

    def request_accepted(self, record: RequestRecord) -> None:
        self._active[record.request.id] = record

    def request_ended(self, record: RequestRecord) -> None:
        del self._active[record.request.id]
        self._ended.append(_activity(record))

    def live(self, most: int) -> tuple[RequestActivity, ...]:
        """The oldest active requests."""
        return tuple([_activity(record) for record in islice(self._active.values(), most)])

    def ended(self, most: int) -> tuple[RequestActivity, ...]:
        """The requests that ended last, latest first."""
        return tuple(self._ended)[: -most - 1 : -1]


def _phase(record: RequestRecord) -> RequestPhase:
    """The phase of the most advanced choice. A queued choice that was not preempted is recovering."""
    if record.outcome is not None:
        return RequestPhase(record.outcome.value)
    states = {sequence.key: sequence.state for sequence in record.request.live_sequences}
    for state in (SequenceState.DECODE, SequenceState.PREFILL):
        if state in states.values():
            return RequestPhase[state.name]
    if not states:
        return RequestPhase.FINISHED
    requeued = {key for key, state in states.items() if state is SequenceState.PREEMPTED}
    if not requeued:
        return RequestPhase.WAITING
    return RequestPhase.PREEMPTED if requeued <= record.preempted else RequestPhase.RECOVERING


def _activity(record: RequestRecord) -> RequestActivity:
    request = record.request
    sequences = [choice.sequence for choice in request.choices]
    return RequestActivity(
        request_id=request.id,
        phase=_phase(record),
        num_choices=len(sequences),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=max(sequence.num_cached_tokens for sequence in sequences),
        num_generated_tokens=sum(sequence.num_generated_tokens for sequence in sequences),
        max_tokens=sum(sequence.max_tokens for sequence in sequences),
        num_restarts=sum(sequence.num_restarts for sequence in sequences),
        arrived_s=record.arrived_s,
        started_s=record.started_s,
        first_token_s=record.first_token_s,
        ended_s=record.ended_s,
        # Not the exception: its traceback would keep the call and its request.
        error="" if record.error is None else str(record.error),
        reason="" if record.error is None else sent_reason(record.error),
    )


_FEW_STEPS = 3
LEAST_BUSY_SHARE = 0.1
"""No stage limits a pipeline whose stages compute for less than this share of the time."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage with the longest compute time per step, `ratio` times the median of the others."""

    stage: int
    ratio: float
    busy_share: float

    @property
    def has_load(self) -> bool:
        return self.busy_share >= LEAST_BUSY_SHARE

    @property
    def is_notable(self) -> bool:
        return self.has_load and stands_out(self.ratio)


def find_bottleneck(loads: abc.Sequence[StageLoad]) -> Bottleneck | None:
    """None for a single stage, and before enough answered steps."""
    if len(loads) < 2 or loads[0].num_steps < _FEW_STEPS:
        return None
    stage = max(range(len(loads)), key=lambda index: loads[index].compute_s)
    others = [load.compute_s for index, load in enumerate(loads) if index != stage]
    ratio = ratio_to_median(loads[stage].compute_s, others)
    return None if ratio is None else Bottleneck(stage, ratio, loads[stage].busy_share)


def describe_pipeline(
    loads: abc.Sequence[StageLoad], workers: abc.Sequence[str], *, window_s: float, bubble_share: float | None
) -> str:
    """One sentence about the last `window_s` seconds; `workers` are the names of the stages' workers."""
    if not loads or not loads[0].num_steps:
        return f"Idle: no step in the last {window_s:.0f} s."
    found = find_bottleneck(loads)
    if found is None:
        return " ".join(f"{_name(stage, workers)} is {_busy(load)}." for stage, load in enumerate(loads))
    who, busy = _name(found.stage, workers), _busy(loads[found.stage])
    if not found.has_load:
        return f"Hardly any load: {who} takes longest, and is {busy}."
    if found.is_notable:
        return f"{who} is the slowest: {busy}, {found.ratio:.1f} x the median step time."
    text = (
        f"No stage stands out: {who} takes longest, {found.ratio:.2f} x the median step time, and is {busy}"
    )
    if bubble_share is None:
        return f"{text}."
    return f"{text}; {_percent(bubble_share)} of the stages' time is bubbles."


def _name(stage: int, workers: abc.Sequence[str]) -> str:
    worker = workers[stage] if stage < len(workers) else ""
    return f"Stage {stage} ({worker})" if worker else f"Stage {stage}"


def _busy(load: StageLoad) -> str:
    return f"{_percent(load.busy_share)} busy"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


MAX_STAGE_TIMES = 8000
"""Limit over all stages and steps of one response: about 100 kB."""


@dataclass(frozen=True, slots=True)
class EpochSpan:
    """Epoch and its end; `stopped_s` is None while it serves."""

    epoch: int
    started_s: float
    stopped_s: float | None
    cause: EndCause | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Recorded activity since `began_s`, in seconds of the coordinator's monotonic clock.

    Attributes:
        now_s: time of the snapshot; `now_unix_s` is the same moment in Unix time.
        bubble_share: value of the metric `stageline.pipeline.bubble`, None without steps in flight.
        num_answered: number of all answered steps; `steps` has the steps of the last seconds, oldest first.
        workers: names of the stages' workers.
        seconds: oldest first.
        ended: requests, latest first.
    """

    now_s: float
    now_unix_s: float
    began_s: float
    bubble_share: float | None
    num_answered: int
    steps: tuple[StepRecord, ...]
    in_flight: tuple[SentStep, ...]
    epochs: tuple[EpochSpan, ...]
    workers: tuple[str, ...]
    rates: Rates
    seconds: tuple[PastSecond, ...]
    live: tuple[RequestActivity, ...]
    ended: tuple[RequestActivity, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoad:
    """Load of the stages over the last `window_s` seconds.

    `slowest` is the stage that limits the others, or None; `summary` is one sentence.
    """

    window_s: float
    stages: tuple[StageLoad, ...]
    bubble_share: float | None
    slowest: int | None
    summary: str


def pipeline_load(snapshot: Snapshot) -> PipelineLoad:
    """Takes some milliseconds for many steps."""
    window_s = min(KEPT_S, snapshot.now_s - snapshot.began_s)
    loads = stage_loads(
        snapshot.steps, snapshot.now_s, began_s=snapshot.began_s, is_idle=not snapshot.in_flight
    )
    found = find_bottleneck(loads)
    return PipelineLoad(
        window_s=window_s,
        stages=tuple(loads),
        bubble_share=snapshot.bubble_share,
        slowest=found.stage if found is not None and found.is_notable else None,
        summary=describe_pipeline(
            loads, snapshot.workers, window_s=window_s, bubble_share=snapshot.bubble_share
        ),
    )


def steps_after(steps: abc.Sequence[StepRecord], number: int) -> tuple[StepRecord, ...]:
    """Steps answered after step `number`; the latest if there are too many."""
    kept, num_times = list[StepRecord](), 0
    for step in reversed(steps):
        num_times += len(step.stage_times)
        if step.number <= number or num_times > MAX_STAGE_TIMES:
            break
        kept.append(step)
    return tuple(reversed(kept))


MAX_LIVE = 100
MAX_ENDED = 100
"""Maximum number of requests per snapshot."""
_KEPT_EPOCHS = 32


class ActivityRecorder(FactObserver):
    """Records from `began_s` on, on the engine's clock."""

    def __init__(
        self, began_s: float, *, bubble_share: Callable[[float], float | None] = lambda now_s: None
    ) -> None:
        """`bubble_share` returns the bubble share of the last seconds."""
        self._bubble_share = bubble_share
        self._began_s = began_s
        self._steps = StepHistory()
        self._seconds = PerSecond(began_s)
        self._requests = RequestHistory()
        self._epochs = deque[EpochSpan](maxlen=_KEPT_EPOCHS)

    def request_accepted(self, record: RequestRecord) -> None:
        self._requests.request_accepted(record)
        self._seconds.at(record.accepted_s).num_accepted += 1

    def request_ended(self, record: RequestRecord) -> None:
        self._requests.request_ended(record)
        assert record.ended_s is not None
        second = self._seconds.at(record.ended_s)
        if record.outcome is Outcome.FINISHED:
            second.num_finished += 1
        else:
            second.num_unfinished += 1

    def step_sent(self, sent: SentStep, step: Step) -> None:
        self._steps.step_sent(sent, step)

    def step_completed(self, record: StepRecord, updates: abc.Sequence[SequenceUpdate]) -> None:
        self._steps.step_completed(record, updates)
        second = self._seconds.at(record.answered_s)
        second.num_steps += 1
        second.num_prefill_tokens += record.sent.num_chunk_tokens
        second.num_generated_tokens += record.num_tokens_generated
        for wait_s, count in record.inter_token:
            second.inter_token.add(wait_s, count)
        for token in record.first_tokens:
            second.first_token.add(token.since_arrival_s)

    def epoch_started(self, epoch: int, now_s: float) -> None:
        self._epochs.append(EpochSpan(epoch, now_s, None))

    def epoch_stopped(self, cause: EndCause | None, reason: str, now_s: float) -> None:
        self._steps.epoch_stopped(cause, reason, now_s)
        if self._epochs and self._epochs[-1].stopped_s is None:
            self._epochs[-1] = replace(self._epochs[-1], stopped_s=now_s, cause=cause, reason=reason)

    def snapshot(self, now_s: float, *, now_unix_s: float, workers: tuple[str, ...] = ()) -> Snapshot:
        """Takes a millisecond at most. The result may be read on another thread."""
        return Snapshot(
            now_s=now_s,
            now_unix_s=now_unix_s,
            began_s=self._began_s,
            bubble_share=self._bubble_share(now_s),
            num_answered=self._steps.num_answered,
            steps=self._steps.answered(now_s),
            in_flight=self._steps.in_flight(),
            epochs=tuple(self._epochs),
            workers=workers,
            rates=self._seconds.rates(now_s),
            seconds=self._seconds.kept(now_s),
            live=self._requests.live(MAX_LIVE),
            ended=self._requests.ended(MAX_ENDED),
        )
