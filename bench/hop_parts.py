"""What the parts of a hop cost: processor time of one thread, no gRPC.

    python -m bench.hop_parts [--quick] [--json FILE]

The coordinator's scheduler makes real steps (decodes, or chunks of long prompts); frames of them go through
the executors of three mock stages without compute. Each part is timed alone: encoding a step, its frames into
the bytes of messages and back, the stage's checks and accounting, the result into bytes and back. Figures are
medians over steps of the same kind, in microseconds.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

from checkpoint import DType
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import QueueOrder, Sequence
from stage_worker.assignment import Assignment, ModelShape
from stage_worker.backends.mock_compute import MockCompute
from stage_worker.executor import StepExecutor
from stageline_rpc.v1 import stage_pb2
from wire.frames import Frame, FrameAssembler, encode_frame, frame_checksum
from wire.ids import SequenceKey, StageRole, new_request_id
from wire.step_codec import decode_result, encode_result, encode_step
from wire.steps import StageTime, Step, StepResult, StepSampling
from wire.tensors import TensorView

P = ParamSpec("P")
T = TypeVar("T")

NUM_STAGES = 3
NUM_BLOCKS, BLOCK_SIZE, MAX_TOKENS, VOCAB_SIZE = 1 << 15, 16, 1 << 14, 32000
PROMPT_TOKENS = 128
STEP_S = 0.02
EOS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """So many streams in decode, or whole chunks of `chunk` tokens of one prompt after another."""

    name: str
    hidden_size: int
    num_slices: int
    chunk: int = 0

    def fits(self, step: Step) -> bool:
        """The step is of this kind, and no other work is in it."""
        return len(step.slices) == self.num_slices and step.num_tokens == (self.chunk or self.num_slices)


CASES = (
    Case(name="1 decode, hidden 768", hidden_size=768, num_slices=1),
    Case(name="16 decodes, hidden 768", hidden_size=768, num_slices=16),
    Case(name="64 decodes, hidden 4096", hidden_size=4096, num_slices=64),
    Case(name="256 decodes, hidden 4096", hidden_size=4096, num_slices=256),
    Case(name="512-token chunk, hidden 1024", hidden_size=1024, num_slices=1, chunk=512),
    Case(name="512-token chunk, hidden 4096", hidden_size=4096, num_slices=1, chunk=512),
)


class Parts:
    """Times of each part, by name."""

    def __init__(self) -> None:
        self._us: dict[str, list[float]] = defaultdict(list)

    def timed(self, name: str, work: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        began_ns = time.thread_time_ns()
        made = work(*arguments, **named)
        self._us[name].append((time.thread_time_ns() - began_ns) / 1e3)
        return made

    def add(self, other: "Parts") -> None:
        for name, times in other._us.items():
            self._us[name] += times

    def medians(self) -> dict[str, float]:
        return {name: round(statistics.median(times), 1) for name, times in self._us.items()}


class Ring:
    """The executors of all stages, and what a frame goes through between them."""

    def __init__(self, hidden_size: int) -> None:
        self._executors = [_executor(stage, hidden_size) for stage in range(NUM_STAGES)]
        for stage, executor in enumerate(self._executors):
            executor.begin_epoch(1, stage=stage)

    def lap(self, step: Step, parts: Parts) -> StepResult:
        data = parts.timed("encode step", encode_step, step)
        messages = parts.timed("send to FIRST", _messages, data, step.step_id, None, ())
        for stage, executor in enumerate(self._executors):
            place = StageRole.of_stage(stage, NUM_STAGES).value
            frame = parts.timed(f"receive on {place}", _received, messages, stage)
            output = parts.timed(f"execute on {place}", executor.run, frame)
            if isinstance(output, StepResult):
                break
            times = (StageTime(40, 20_000),) * (stage + 1)
            messages = parts.timed(
                f"send from {place}", _messages, output.step_bytes, output.step_id, output.hidden, times
            )
            if output.hidden is not None:
                data, payload = output.step_bytes, output.hidden.data
                parts.timed("of which checksum", frame_checksum, data, b"", b"", memoryview(payload))
        assert isinstance(output, StepResult), "LAST answers"
        answer = parts.timed("encode result", _result_bytes, output)
        return parts.timed("decode result", _result, answer)


def _messages(
    data: bytes, step_id: int, hidden: TensorView | None, times: tuple[StageTime, ...]
) -> list[bytes]:
    return list(encode_frame(data, step_id, hidden, times))


def _received(messages: list[bytes], stage: int) -> Frame:
    assembler = FrameAssembler(max_payload_bytes=1 << 30, num_stages_before=stage)
    frame = None
    for message in messages:
        frame = assembler.add(message)
    assert frame is not None
    return frame


def _result_bytes(result: StepResult) -> bytes:
    return encode_result(result).SerializeToString()


def _result(data: bytes) -> StepResult:
    return decode_result(stage_pb2.StepResult.FromString(data))


def _executor(stage: int, hidden_size: int) -> StepExecutor:
    assignment = Assignment(
        plan_id=1,
        stage=stage,
        num_stages=NUM_STAGES,
        role=StageRole.of_stage(stage, NUM_STAGES),
        layer_begin=stage,
        layer_end=stage + 1,
        model_directory="",
        fingerprint="",
        dtype=DType.BF16,
        block_size=BLOCK_SIZE,
        num_blocks=NUM_BLOCKS,
        max_step_tokens=512,
        max_step_sequences=256,
        max_sequence_tokens=MAX_TOKENS,
        model_shape=ModelShape(hidden_size=hidden_size, vocab_size=VOCAB_SIZE, eos_token_ids=(EOS,)),
    )
    return StepExecutor(assignment, MockCompute(assignment))


def _sequence(index: int, prompt_tokens: int) -> Sequence:
    prompt = tuple((index * 7919 + place) % VOCAB_SIZE for place in range(prompt_tokens))
    return Sequence(
        SequenceKey(new_request_id(), 0),
        prompt,
        max_tokens=1 if prompt_tokens > 512 else MAX_TOKENS - prompt_tokens,
        sampling=StepSampling(),
        stop_token_ids=frozenset((EOS,)),
        order=QueueOrder(float(index), 0),
    )


def measure(case: Case, num_steps: int) -> dict[str, float]:
    """Medians by part, of `num_steps` steps."""
    scheduler, ring, parts, now_s = Scheduler(DEFAULT_POLICY), Ring(case.hidden_size), Parts(), 0.0
    limits = SchedulerLimits(max_step_tokens=512, max_step_sequences=256, max_steps_in_flight=1)
    scheduler.begin_epoch(1, KvCacheManager(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), limits)
    counted = num_added = 0
    while counted < num_steps:
        while (step := scheduler.next_step(now_s)) is None:
            for _ in range(case.num_slices):
                prompt_tokens = 8 * case.chunk if case.chunk else PROMPT_TOKENS + num_added % BLOCK_SIZE
                scheduler.add(_sequence(num_added, prompt_tokens))
                num_added += 1
        now_s += STEP_S
        lap = Parts()
        scheduler.complete(ring.lap(step, lap), now_s)
        if case.fits(step):
            parts.add(lap)
            counted += 1
    return parts.medians()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    figures = {case.name: measure(case, 24 if arguments.quick else 160) for case in CASES}
    names = list(next(iter(figures.values())))
    print(f"{'us':28s}" + "".join(f"{case.name.replace(', ', ' '):>30s}" for case in CASES))
    for name in names:
        print(f"{name:28s}" + "".join(f"{figures[case.name][name]:30.1f}" for case in CASES))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
