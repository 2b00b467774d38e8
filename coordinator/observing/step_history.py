"""The steps of the last seconds: when each was handed out, computed by each stage, and answered. Pure.

All times are in seconds of the coordinator's monotonic clock. When a stage computes is put together from what
stages measure: from when a step is handed out, each adds the hop to it, receiving, waiting and computing.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from wire.steps import Prefill, StageTime, Step, StepResult

KEPT_S = 10.0
MAX_STEPS = 4096
MAX_STAGE_TIMES = 32768
"""Of all steps together: with 64 stages, 512 steps are kept."""


class StepKind(StrEnum):
    """What a step computes."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    EMPTY = "empty"


@dataclass(slots=True)
class SentStep:
    """A step that is not answered yet. `sent_s`: when it was handed out."""

    epoch: int
    step_id: int
    sent_s: float
    num_decodes: int
    num_chunks: int
    num_chunk_tokens: int

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_chunks

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_chunk_tokens

    @property
    def kind(self) -> StepKind:
        if self.num_chunks:
            return StepKind.MIXED if self.num_decodes else StepKind.PREFILL
        return StepKind.DECODE if self.num_decodes else StepKind.EMPTY


@dataclass(slots=True)
class AnsweredStep:
    """`number` counts the answered steps of this process, from 1 on.

    `stage_times` are those of FIRST to LAST, or none.
    """

    number: int
    sent: SentStep
    answered_s: float
    stage_times: tuple[StageTime, ...]

    def computed(self) -> Iterator[tuple[float, float]]:
        """For each stage, when its computation began and when it ended."""
        time_s = self.sent.sent_s
        for stage in self.stage_times:
            begin_s = time_s + (stage.hop_us + stage.receive_us + stage.wait_us) / 1e6
            time_s = begin_s + stage.compute_us / 1e6
            yield begin_s, time_s


class StepHistory:
    """Steps in flight, and those that were answered within the last `KEPT_S`."""

    def __init__(self) -> None:
        self._in_flight = deque[SentStep]()
        self._answered = deque[AnsweredStep]()
        self._num_stage_times = 0
        self.num_answered = 0

    def send(self, step: Step, now_s: float) -> None:
        """A step is handed out."""
        num_chunks = num_chunk_tokens = 0
        for part in reversed(step.slices):  # chunks follow the decodes
            inference_step = part.inference_step
            if not isinstance(inference_step, Prefill):
                break
            num_chunks += 1
            num_chunk_tokens += inference_step.num_tokens
        num_decodes = len(step.slices) - num_chunks
        self._in_flight.append(
            SentStep(step.epoch, step.step_id, now_s, num_decodes, num_chunks, num_chunk_tokens)
        )

    def answer(self, result: StepResult, now_s: float) -> SentStep | None:
        """The oldest step is answered; returns it. None where it was handed out before anybody watched."""
        if not self._in_flight:
            return None
        sent = self._in_flight.popleft()
        self.num_answered += 1
        self._answered.append(AnsweredStep(self.num_answered, sent, now_s, result.stage_times))
        self._num_stage_times += len(result.stage_times)
        self._forget(now_s)
        return sent

    def void(self) -> None:
        """What is in flight will not be answered."""
        self._in_flight.clear()

    def in_flight(self) -> tuple[SentStep, ...]:
        """Oldest first."""
        return tuple(self._in_flight)

    def answered(self, now_s: float) -> tuple[AnsweredStep, ...]:
        """Those that are kept, oldest first."""
        self._forget(now_s)
        return tuple(self._answered)

    def _forget(self, now_s: float) -> None:
        steps = self._answered
        while steps and (
            steps[0].answered_s < now_s - KEPT_S
            or len(steps) > MAX_STEPS
            or self._num_stage_times > MAX_STAGE_TIMES
        ):
            self._num_stage_times -= len(steps.popleft().stage_times)
