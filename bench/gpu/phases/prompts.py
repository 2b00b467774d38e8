"""Prompt steps of the reference stage, at the beginning of prompts and behind many tokens."""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu import targets
from bench.gpu.phase import Recorder
from bench.gpu.phases.decode import NO_TIME
from bench.gpu.rates import Rates
from bench.gpu.stage import BenchStage, Sizes, loaded_stage, work_of
from bench.harness.figure import Better
from wire.ids import StageRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Chunks and the tokens before them, the most important first; steps of each, and limits."""

    cells: tuple[tuple[int, int], ...]
    num_steps: int
    sizes: Sizes
    cell_s: float


FULL = Plan(
    cells=((2048, 0), (2048, 30720), (2048, 2048), (512, 0), (8192, 0), (512, 30720), (8192, 30720)),
    num_steps=6,
    sizes=Sizes(max_step_tokens=8192, max_step_sequences=16, max_sequence_tokens=65536, kv_tokens=160 * 1024),
    cell_s=6.0,
)
QUICK = Plan(
    cells=((32, 0), (32, 64)),
    num_steps=4,
    sizes=Sizes(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=256, kv_tokens=2048),
    cell_s=0.5,
)


async def measure(recorder: Recorder) -> None:
    """All cells until the time is over."""
    plan = QUICK if recorder.order.is_quick else FULL
    async with loaded_stage(recorder.order, StageRole.MIDDLE, plan.sizes) as stage:
        for num_tokens, start in plan.cells:
            name = targets.prompt_name(num_tokens, start)
            if recorder.left_s < plan.cell_s:
                recorder.not_measured(name, "ms", NO_TIME, better=Better.LOWER)
                continue
            await _cell(recorder, stage, plan, num_tokens, start)


async def _cell(recorder: Recorder, stage: BenchStage, plan: Plan, num_tokens: int, start: int) -> None:
    """Steps of as many sequences at one place, or of one sequence one after another."""
    maker, num_steps = stage.maker, plan.num_steps
    if start == 0:
        sequences = [maker.sequence(num_tokens) for _ in range(num_steps)]
        places = [0] * num_steps
        steps = [maker.chunks([(sequence, num_tokens)]) for sequence in sequences]
    else:
        num_fitting = min(num_steps, (plan.sizes.max_sequence_tokens - start) // num_tokens)
        sequences = [maker.sequence(start + num_fitting * num_tokens)]
        (sequence,) = sequences
        largest = plan.sizes.max_step_tokens
        before = [min(largest, start - begin) for begin in range(0, start, largest)]
        await stage.run([maker.chunks([(sequence, size)]) for size in before])
        places = [start + index * num_tokens for index in range(num_fitting)]
        steps = [maker.chunks([(sequence, num_tokens)]) for _ in places]
    period_s = await stage.period_s(steps)
    maker.end(sequences)
    _record(recorder, stage, num_tokens, places, period_s)


def _record(
    recorder: Recorder, stage: BenchStage, num_tokens: int, places: list[int], period_s: float
) -> None:
    """The period covers all steps but the first two; so does the bound."""
    rates, work = Rates.of(recorder.order.rates), work_of(recorder.order, stage)
    timed = places[2:]
    bound_ms = None
    if rates is not None:
        bound_ms = sum(rates.prompt_ms(work, num_tokens, place) for place in timed) / len(timed)
    flops = sum(work.prompt_flops(num_tokens, place) for place in timed) / len(timed)
    recorder.figure(
        targets.prompt_name(num_tokens, places[0]),
        period_s * 1e3,
        "ms",
        bound=bound_ms,
        better=Better.LOWER,
        details={"tflops_per_s": flops / period_s / 1e12, "tokens_per_s": num_tokens / period_s},
    )
