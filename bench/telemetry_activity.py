"""Cost of the step history for dashboard and `stageline top` on the event loop, in microseconds.

python -m bench.telemetry_activity [--steps 3000]

"step" is `FactRecorder.step_sent` and `.step_completed` with an `ActivityRecorder`, for a step of decodes
that all get a token, in a pipeline of 8 stages with 4 steps in flight. "poll" is one poll of a dashboard: on
the event loop, and on its thread.
"""

from __future__ import annotations

import argparse
import statistics
import time

from coordinator.dashboard.routes import activity_json
from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.request import Choice, Request
from coordinator.observability.activity import ActivityRecorder
from coordinator.observability.facts import FactRecorder
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import QueueOrder, Sequence
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import Decode, StageTime, Step, StepResult, StepSlice

NUM_STAGES = 8
NUM_IN_FLIGHT = 4
STEP_S = 0.005


class Pipeline:
    """Steps of `num_sequences` on a simulated clock."""

    def __init__(self, num_sequences: int) -> None:
        self.now_s = 1000.0
        self.recorder = ActivityRecorder(self.now_s)
        self.facts = FactRecorder((self.recorder,))
        self._cohorts = [[self._new_sequence() for _ in range(num_sequences)] for _ in range(NUM_IN_FLIGHT)]
        self._num_steps = 0
        self._times = (StageTime(150, 5000, 120, 40),) * NUM_STAGES

    def _new_sequence(self) -> Sequence:
        sequence = Sequence(
            SequenceKey(new_request_id(), 0),
            (1, 2, 3),
            max_tokens=1000,
            sampling=StepSampling(),
            stop_token_ids=frozenset(),
            order=QueueOrder(0.0, 0),
        )
        request = Request(sequence.key.request_id, [Choice(sequence, OutputBuffer(None))], client="bench")
        self.facts.accepted(request, self.now_s)
        return sequence

    def step_us(self) -> float:
        """CPU time of one step."""
        cohort = self._cohorts[self._num_steps % NUM_IN_FLIGHT]
        slices = tuple(StepSlice(sequence.key, 0, (1,), Decode(9)) for sequence in cohort)
        step = Step.of(slices, epoch=1, step_id=self._num_steps)
        result = StepResult.of(1, self._num_steps, (), self._times)
        progress = [SequenceUpdate(sequence, token=5) for sequence in cohort]
        self._num_steps += 1
        self.now_s += STEP_S
        started_s = time.thread_time_ns()
        self.facts.step_sent(step, self.now_s)
        self.facts.step_completed(result, progress, self.now_s, self.now_s + 0.03)
        return (time.thread_time_ns() - started_s) / 1000


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=3000)
    num_steps = parser.parse_args().steps
    print(f"{'sequences':>9}  {'a step':>8}  {'mean':>8}  {'a poll: loop':>13}  {'thread':>8}")
    for num_sequences in (1, 4, 16, 64, 256):
        pipeline = Pipeline(num_sequences)
        times_us = [pipeline.step_us() for _ in range(num_steps)]
        started_s = time.thread_time()
        snapshot = pipeline.recorder.snapshot(pipeline.now_s, now_unix_s=0.0)
        between_s = time.thread_time()
        activity_json(snapshot, after_step=num_steps - 200, since_us=int((pipeline.now_s - 2) * 1e6))
        look_us = ((between_s - started_s) * 1e6, (time.thread_time() - between_s) * 1e6)
        print(
            f"{num_sequences:>9}  {statistics.median(times_us):>5.1f} us"
            f"  {statistics.mean(times_us):>5.1f} us"
            f"  {look_us[0]:>10.0f} us  {look_us[1]:>5.0f} us"
        )


if __name__ == "__main__":
    main()
