"""CPU time of one stage for a step of decodes, without its compute, for this checkout or an older one.

PYTHON bench/harness/stage_step.py

Question: {"decodes": 64, "blocks": 12}. Answer: {"stage_us": CPU time of the stage per step}, from the
frame's message to the messages of the next stage, so receive, execute and send: the median, over blocks, of
the mean of a block's steps, in which every sequence begins a block once. The stage is MIDDLE of three, and
its compute passes the hidden states on. Their width is small, so that work per sequence counts and not copies
and checksums.

The file imports nothing from `bench` and tries former names of modules, so that the same code measures an
older checkout. A scheduler makes the steps and a mock of LAST the results, so it needs no detail of either.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from importlib import import_module
from typing import Any

HIDDEN_SIZE, VOCAB_SIZE = 64, 32_000
BLOCK_SIZE = 16
PROMPT_TOKENS = 128
STOP = (2,)
"""Never sampled by mocks, which know it as the end of a sequence."""
MOST_STEPS_BEFORE = 2000
NUM_STEADY = 20
"""Steps with nothing but one token of every sequence, after which all of them decode."""


def moved(name: str, *modules: str) -> Any:
    """`name` from the first of `modules` that has it: its present and its former ones."""
    for module in modules:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            continue
    raise ImportError(f"{name} is in none of {', '.join(modules)}")


Assignment = moved("Assignment", "stage_worker.assignment")
ModelShape = moved("ModelShape", "stage_worker.assignment")
StageRole = moved("StageRole", "wire.ids", "wire.roles")
StageCompute = moved("StageCompute", "stage_worker.backends.contract", "stage_worker.stage_compute")
MockCompute = moved("MockCompute", "stage_worker.backends.mock_compute", "stage_worker.mock.compute")
StepExecutor = moved("StepExecutor", "stage_worker.executor")
StepSampling = moved("StepSampling", "wire.sampling", "wire.steps")
DType = moved("DType", "checkpoint")
WireTensor = moved("TensorView", "wire.tensors")
SequenceKey = moved("SequenceKey", "wire.ids")
new_request_id = moved("new_request_id", "wire.ids")
FrameAssembler = moved("FrameAssembler", "wire.frames")
encode_step = moved("encode_step", "wire.step_codec")
frames = import_module("wire.frames")
ENCODE_FRAME = getattr(frames, "encode_frame", None)
"""Of checkouts in which a step and its hidden states were one message."""
NAMED = getattr(import_module("checkpoint"), "BoundaryTensor", None)
"""None in checkouts in which hidden states are one tensor."""


def messages_of(step: Any, hidden: Any) -> list[bytes]:
    """Messages of a frame from the stage before."""
    if ENCODE_FRAME is not None:
        return list(ENCODE_FRAME(encode_step(step), step.step_id, hidden, ()))
    checksum = frames.step_frame_checksum(encode_step(step), 0)
    message = frames.encode_step_frame(encode_step(step))
    return [message, *frames.encode_hidden_states(step.step_id, checksum, hidden, ())]


class NullCompute(StageCompute):  # type: ignore[misc, valid-type]
    """Passes hidden states on."""

    hidden_size, vocab_size = HIDDEN_SIZE, VOCAB_SIZE
    boundary = NAMED and (NAMED(name="hidden_states", width=HIDDEN_SIZE),)

    def begin_epoch(self, *, stage: int) -> None:
        """Nothing to drop."""

    def start(self, record: Any) -> None:
        """Nothing to start."""

    def end(self, sequence: Any) -> None:
        """Nothing to end."""

    def prepare(self, step: Any, layouts: Any) -> None:
        """No pages, as in a mock."""

    def compute(self, frame: Any, layouts: Any) -> Any:
        return frame.hidden


class Stage:
    """Stage 1 of three with the null compute, or LAST with a mock's; frames come from the stage before."""

    def __init__(self, stage: int, num_decodes: int) -> None:
        assignment = Assignment(
            plan_id=1,
            stage=stage,
            num_stages=3,
            role=StageRole.of_stage(stage, 3),
            layer_begin=stage,
            layer_end=stage + 1,
            model_directory="",
            fingerprint="",
            dtype=DType.BF16,
            block_size=BLOCK_SIZE,
            num_blocks=1 << 16,
            max_step_tokens=2 * num_decodes,
            max_step_sequences=num_decodes,
            max_sequence_tokens=1 << 20,
            model_shape=ModelShape(hidden_size=HIDDEN_SIZE, vocab_size=VOCAB_SIZE, eos_token_ids=STOP),
        )
        compute = NullCompute() if stage == 1 else MockCompute(assignment)
        self._executor = StepExecutor(assignment, compute)
        self._executor.begin_epoch(1, stage=stage)
        self._assembler = FrameAssembler(max_payload_bytes=1 << 30, num_stages_before=0)

    def run(self, messages: list[bytes]) -> Any:
        """The output for one frame."""
        for message in messages:
            frame = self._assembler.add(message)
        return self._executor.run(frame if ENCODE_FRAME is not None else frame[0])

    def forward(self, messages: list[bytes]) -> list[bytes]:
        """The frame's messages to the next stage."""
        output = self.run(messages)
        if ENCODE_FRAME is not None:
            return list(ENCODE_FRAME(output.step_bytes, output.step_id, output.hidden, ()))
        hidden = frames.encode_hidden_states(output.step_id, output.step_checksum, output.hidden, ())
        return [messages[0], *hidden]


class Steps:
    """A scheduler with sequences that decode without end, one step in flight."""

    def __init__(self, num_decodes: int) -> None:
        limits = moved("SchedulerLimits", "coordinator.scheduler.policy", "coordinator.scheduling.pace")
        self._scheduler, ledger = _scheduler(), _ledger()
        sizes = {"max_step_tokens": 2 * num_decodes, "max_step_sequences": num_decodes}
        self._scheduler.begin_epoch(1, ledger, limits(**sizes, max_steps_in_flight=1))
        self._now_s = 0.0
        for index in range(num_decodes):
            self._scheduler.add(_sequence(index))

    def next_step(self) -> Any:
        return self._scheduler.next_step(now_s=self._now_s)

    def complete(self, result: Any) -> None:
        self._now_s += 0.02
        self._scheduler.complete(result, now_s=self._now_s)


def _scheduler() -> Any:
    scheduler = moved("Scheduler", "coordinator.scheduler.scheduler", "coordinator.scheduling.scheduler")
    try:
        return scheduler(moved("DEFAULT_POLICY", "coordinator.recovery.policy"))
    except (ImportError, TypeError):
        return scheduler()


def _ledger() -> Any:
    try:
        ledger = moved("KvCacheManager", "coordinator.scheduler.kv_manager")
    except ImportError:
        ledger = moved("KvLog", "coordinator.scheduling.kv_log")
    return ledger(num_blocks=1 << 16, block_size=BLOCK_SIZE)


def _sequence(index: int) -> Any:
    """Prompt lengths differ by up to a block."""
    order = moved("QueueOrder", "coordinator.scheduler.sequence", "coordinator.scheduling.order")
    sequence = moved("Sequence", "coordinator.scheduler.sequence", "coordinator.scheduling.sequence")
    num_tokens = PROMPT_TOKENS + index % BLOCK_SIZE
    return sequence(
        SequenceKey(new_request_id(), 0),
        tuple((index * 7919 + place) % VOCAB_SIZE for place in range(num_tokens)),
        max_tokens=1 << 19,
        sampling=StepSampling(),
        stop_token_ids=frozenset(STOP),
        order=order(float(index), 0),
    )


def measure(num_decodes: int, num_blocks: int) -> dict[str, float]:
    """CPU time of steps in which all sequences decode. When blocks begin differs between schedulers, and a
    step without one costs less, so only means over a whole block can be compared.
    """
    num_steps = num_blocks * BLOCK_SIZE
    steps, middle, last = Steps(num_decodes), Stage(1, num_decodes), Stage(2, num_decodes)
    payload = bytes(2 * num_decodes * HIDDEN_SIZE * 2)
    num_steady, times_us = 0, list[float]()
    gc.collect()
    for _ in range(num_steps + MOST_STEPS_BEFORE):
        if len(times_us) == num_steps:
            blocks = [times_us[begin : begin + BLOCK_SIZE] for begin in range(0, num_steps, BLOCK_SIZE)]
            return {"stage_us": statistics.median(map(statistics.mean, blocks))}
        step = steps.next_step()
        size_bytes = step.num_tokens * HIDDEN_SIZE * 2
        hidden = WireTensor(DType.BF16, (step.num_tokens, HIDDEN_SIZE), payload[:size_bytes])
        messages = messages_of(step, (hidden,) if NAMED else hidden)
        began_ns = time.thread_time_ns()
        forwarded = middle.forward(messages)
        took_us = (time.thread_time_ns() - began_ns) / 1e3
        result = last.run(forwarded)
        steps.complete(result)
        # As many tokens as answers: a step of chunks may have as many tokens, but fewer answers.
        is_steady = step.num_tokens == len(result.results) == num_decodes
        num_steady = num_steady + 1 if is_steady else 0
        if num_steady > NUM_STEADY:
            times_us.append(took_us)
    raise RuntimeError(f"{len(times_us)} steps of {num_decodes} decodes alone, needed are {num_steps}")


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(measure(asked["decodes"], asked["blocks"])), flush=True)


if __name__ == "__main__":
    main()
