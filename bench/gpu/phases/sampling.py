"""What sampling adds to a decode step: LAST takes longer than MIDDLE, beyond the reading of its output head.

The time to read the head is its bytes over the rate of the device's memory, so all of the final norm and of
the head's product above that bound counts as sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu import targets
from bench.gpu.phase import Recorder
from bench.gpu.phases.decode import NO_TIME
from bench.gpu.rates import Rates
from bench.gpu.stage import BLOCK_SIZE, BenchStage, Sizes, loaded_stage, work_of
from bench.harness.figure import Better
from wire.ids import StageRole
from wire.sampling import StepSampling

NO_RATES = "the rate of the device's memory was not measured"
KINDS = {
    "greedy": StepSampling(temperature=0.0),
    "top-p 0.95": StepSampling(temperature=0.8, top_p=0.95, seed=1),
    "temperature": StepSampling(temperature=0.8, seed=1),
    "top-k 50, top-p 0.95": StepSampling(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "penalties": StepSampling(temperature=0.8, repetition_penalty=1.1, presence_penalty=0.5, seed=1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Batches, the most important first; all sequences have `context` tokens."""

    batches: tuple[int, ...]
    context: int
    num_steps: int
    sizes: Sizes
    cell_s: float


FULL = Plan(
    batches=(128, 1, 32),
    context=128,
    num_steps=32,
    sizes=Sizes(max_step_tokens=4096, max_step_sequences=128, max_sequence_tokens=2048, kv_tokens=128 * 256),
    cell_s=2.0,
)
QUICK = Plan(
    batches=(4,),
    context=32,
    num_steps=4,
    sizes=Sizes(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=128, kv_tokens=1024),
    cell_s=0.5,
)


async def measure(recorder: Recorder) -> None:
    """MIDDLE and LAST, which have as many layers, in turns."""
    plan = QUICK if recorder.order.is_quick else FULL
    order = recorder.order
    async with (
        loaded_stage(order, StageRole.MIDDLE, plan.sizes) as middle,
        loaded_stage(order, StageRole.LAST, plan.sizes) as last,
    ):
        for batch in plan.batches:
            middle_s = await _period_s(middle, plan, batch, KINDS["greedy"])
            for kind, sampling in KINDS.items():
                name = targets.sampling_name(kind, batch)
                if recorder.left_s < plan.cell_s:
                    recorder.not_measured(name, "ms", NO_TIME, better=Better.LOWER)
                    continue
                last_s = await _period_s(last, plan, batch, sampling)
                _record(recorder, last, name, middle_s, last_s)


async def _period_s(stage: BenchStage, plan: Plan, batch: int, sampling: StepSampling) -> float:
    maker = stage.maker
    sequences = [maker.sequence(plan.context - index % BLOCK_SIZE, sampling) for index in range(batch)]
    await stage.run([*maker.prompts(sequences), maker.decodes(sequences)])
    period_s = await stage.period_s([maker.decodes(sequences) for _ in range(plan.num_steps)])
    maker.end(sequences)
    return period_s


def _record(recorder: Recorder, last: BenchStage, name: str, middle_s: float, last_s: float) -> None:
    """An absolute limit has the target. Without the memory's rate nothing can be told."""
    details: dict[str, float | str] = {"middle_ms": middle_s * 1e3, "last_ms": last_s * 1e3}
    rates = Rates.of(recorder.order.rates)
    if rates is None:
        recorder.not_measured(name, "ms", NO_RATES, better=Better.LOWER)
        return
    head_ms = 1e3 * work_of(recorder.order, last).head_bytes / rates.memory
    details["reading_head_ms"] = head_ms
    added_ms = (last_s - middle_s) * 1e3 - head_ms
    recorder.figure(name, added_ms, "ms", better=Better.LOWER, details=details)
