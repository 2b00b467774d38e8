"""CPU time of the coordinator for a step of 256 sequences: scheduling alone, and with frames and results.

Figures are medians of CPU time against fixed limits. Prompt lengths differ by up to one block, so in every
step one sequence in `BLOCK_SIZE` begins a block, as in a steady load.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from inspect import signature
from typing import Any

from bench.harness.figure import Better, Figure
from bench.harness.group import Setting
from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.engine import Engine
from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.request import Choice, Request
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.policy import SchedulerLimits
from coordinator.scheduler.scheduler import Scheduler
from coordinator.scheduler.sequence import QueueOrder, Sequence
from stageline_rpc.internal.v1 import step_pb2
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.step_codec import decode_result, encode_result, encode_step
from wire.steps import SliceResult, StageTime, Step, StepResult

NUM_SEQUENCES = 256
BLOCK_SIZE = 16
PROMPT_TOKENS = 128
NUM_STAGES = 4
SCHEDULING_LIMIT_US = 300
ALL_LIMIT_US = 1500
STAGE_TIMES = (StageTime(100, 20_000),) * NUM_STAGES

Times = list[float]


async def measure(setting: Setting) -> list[Figure]:
    """Measure with all 256 in one step, and spread over four steps."""
    num_steps = 100 if setting.is_quick else 600
    gc.collect()
    together, spread = _scheduling(1, num_steps), _scheduling(NUM_STAGES, num_steps)
    everything = _everything(num_steps)
    return [
        _figure("scheduling 256 sequences in one step", together, SCHEDULING_LIMIT_US, HOW_SCHEDULING),
        _figure(
            "scheduling 256 sequences in four steps, one step", spread, SCHEDULING_LIMIT_US, HOW_SCHEDULING
        ),
        _figure("a step of 256 sequences with frame and result", everything, ALL_LIMIT_US, HOW_EVERYTHING),
    ]


HOW_SCHEDULING = "CPU time of Scheduler.complete and next_step : the limit"
HOW_EVERYTHING = (
    "CPU time of decode_result, Engine.complete (scheduling included) and encode_step : the limit"
)


def _figure(name: str, times_us: Times, limit_us: float, how: str) -> Figure:
    return Figure(
        name=f"{name} : {limit_us:g} us",
        measured=statistics.median(times_us),
        bound=limit_us,
        unit="us",
        better=Better.LOWER,
        target=1.0,
        noise=0.15,
        how=how,
        details={"mean_us": statistics.mean(times_us), "max_us": max(times_us)},
    )


def _scheduling(num_steps_in_flight: int, num_steps: int) -> Times:
    scheduler = Scheduler(DEFAULT_POLICY)
    scheduler.begin_epoch(1, _kv_log(), _limits(num_steps_in_flight))
    for index in range(NUM_SEQUENCES):
        scheduler.add(_sequence(index))
    next_step, complete = _with_time(scheduler.next_step), _with_time(scheduler.complete)
    now_s = 0.0
    in_flight: list[Step] = []

    def pump() -> None:
        while (step := next_step(now_s)) is not None:
            in_flight.append(step)

    pump()
    times_us: Times = []
    while len(times_us) < num_steps:
        oldest = in_flight.pop(0)
        result, now_s = _answer(oldest), now_s + 0.02
        began = time.thread_time_ns()
        complete(now_s, result)
        pump()
        took_us = (time.thread_time_ns() - began) / 1e3
        if _is_steady(oldest, num_steps_in_flight):
            times_us.append(took_us)
    return times_us


def _everything(num_steps: int) -> Times:
    """The engine without stream readers, which other figures measure."""
    engine = Engine(
        AdmissionLimits(queue_size=2 * NUM_SEQUENCES, max_unread_tokens=1 << 30), policy=DEFAULT_POLICY
    )
    sent: list[Step] = []
    frames: list[bytes] = []

    def send(step: Step) -> None:
        sent.append(step)
        frames.append(encode_step(step))

    engine.start_epoch(1, _kv_log(), _limits(1), send, max_sequence_tokens=1 << 20)
    for index in range(NUM_SEQUENCES):
        engine.submit(_request(index))
    times_us: Times = []
    while len(times_us) < num_steps:
        oldest = sent.pop(0)
        data = encode_result(_answer(oldest)).SerializeToString()
        frames.clear()
        began = time.thread_time_ns()
        engine.complete(decode_result(step_pb2.StepResult.FromString(data)))
        took_us = (time.thread_time_ns() - began) / 1e3
        if _is_steady(oldest, 1):
            times_us.append(took_us)
    return times_us


def _with_time(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it takes the time as its first argument."""
    if "now_s" in signature(method).parameters:
        return lambda now_s, *arguments: method(*arguments, now_s=now_s)
    return lambda now_s, *arguments: method(*arguments)


def _is_steady(step: Step, num_steps_in_flight: int) -> bool:
    """Whether all sequences decode and the step has only its share of them."""
    return not step.chunks and len(step.decodes) == NUM_SEQUENCES // num_steps_in_flight


def _kv_log() -> KvCacheManager:
    return KvCacheManager(num_blocks=1 << 16, block_size=BLOCK_SIZE)


def _limits(num_steps_in_flight: int) -> SchedulerLimits:
    return SchedulerLimits(
        max_step_tokens=NUM_SEQUENCES * 2,
        max_step_sequences=NUM_SEQUENCES,
        max_steps_in_flight=num_steps_in_flight,
    )


def _sequence(index: int) -> Sequence:
    prompt = tuple((index * 7919 + place) % 32000 for place in range(PROMPT_TOKENS + index % BLOCK_SIZE))
    return Sequence(
        SequenceKey(new_request_id(), 0),
        prompt,
        max_tokens=1 << 19,
        sampling=StepSampling(),
        stop_token_ids=frozenset((2,)),
        order=QueueOrder(float(index), 0),
    )


def _request(index: int) -> Request:
    sequence = _sequence(index)
    return Request(sequence.key.request_id, [Choice(sequence, OutputBuffer(None))], client="bench")


def _answer(step: Step) -> StepResult:
    results = tuple(
        SliceResult(part.sequence, part.restart_count, 7) for part in step.slices if part.is_answered
    )
    return StepResult.of(step.epoch, step.step_id, results, STAGE_TIMES)
