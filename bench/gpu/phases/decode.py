"""Decode steps of the reference stage: times against their bytes, and what the GPU does meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu import raw_reads, targets
from bench.gpu.model import WEIGHTS_FILE
from bench.gpu.phase import Recorder, needs_cuda
from bench.gpu.rates import Rates
from bench.gpu.stage import BLOCK_SIZE, BenchStage, Sizes, loaded_stage, work_of
from bench.gpu.steps import BenchSequence
from bench.gpu.trace import DeviceUse, device_use
from bench.harness.figure import Better
from stage_worker.backends.contract import KernelChoice
from wire.ids import StageRole

NO_TIME = "no time left in its phase: give more --minutes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Batches by context, the most important context first; `num_steps` of a measurement.

    A cell takes up to `cell_s` at the first context, loading a stage again `load_s`.

    `plain_batches` are measured again with torch's operators, at the first context.
    """

    batches: dict[int, tuple[int, ...]]
    plain_batches: tuple[int, ...]
    num_steps: int
    num_traced: int
    sizes: Sizes
    cell_s: float
    load_s: float

    def seconds_of(self, context: int) -> float:
        """Time without which no further cell begins; long contexts take time to compute."""
        return self.cell_s * max(1.0, context / next(iter(self.batches)))


FULL = Plan(
    batches={2048: (1, 8, 32, 128), 128: (1, 8, 32, 128), 8192: (1, 8, 32)},
    plain_batches=(1, 32, 128),
    num_steps=48,
    num_traced=10,
    sizes=Sizes(
        max_step_tokens=8192, max_step_sequences=128, max_sequence_tokens=10240, kv_tokens=128 * 2700
    ),
    cell_s=8.0,
    load_s=15.0,
)
QUICK = Plan(
    batches={32: (1, 4)},
    plain_batches=(1,),
    num_steps=4,
    num_traced=3,
    sizes=Sizes(max_step_tokens=64, max_step_sequences=4, max_sequence_tokens=128, kv_tokens=1024),
    cell_s=0.5,
    load_s=0.5,
)


async def measure(recorder: Recorder) -> None:
    """All cells with the fastest kernels, then some with torch's operators."""
    plan = QUICK if recorder.order.is_quick else FULL
    async with loaded_stage(recorder.order, StageRole.MIDDLE, plan.sizes) as stage:
        _loading(recorder, stage)
        for context, batches in plan.batches.items():
            await _Cells(recorder, stage, plan, "auto").measure(context, batches)
    context = next(iter(plan.batches))
    if recorder.left_s < plan.load_s + plan.cell_s:
        for batch in plan.plain_batches:
            name = targets.decode_name(batch, context, "plain")
            recorder.not_measured(name, "ms", NO_TIME, better=Better.LOWER)
        return
    async with loaded_stage(
        recorder.order, StageRole.MIDDLE, plan.sizes, kernels=KernelChoice.PLAIN
    ) as stage:
        await _Cells(recorder, stage, plan, "plain").measure(context, plan.plain_batches)


def _loading(recorder: Recorder, stage: BenchStage) -> None:
    loaded = stage.loaded
    file = recorder.order.model / WEIGHTS_FILE
    recorder.figure(
        targets.LOADING_NAME,
        loaded.read_bytes / max(loaded.read_ms, 1) / 1e6,
        "GB/s",
        bound=raw_reads.bytes_per_s(file, loaded.read_bytes, stage.device) / 1e9,
        details={
            "read_ms": float(loaded.read_ms),
            "load_ms": float(loaded.load_ms),
            "warmup_ms": float(loaded.warmup_ms),
            "weight_bytes": float(loaded.weight_bytes),
            "kernels": loaded.kernels_detail,
        },
    )
    if (peak_bytes := loaded.largest_step_bytes) is None:
        recorder.not_measured(targets.PEAK_NAME, "share", needs_cuda(recorder.order))
        return
    recorder.figure(
        targets.PEAK_NAME,
        peak_bytes / stage.planned_bytes,
        "share",
        details={"peak_bytes": float(peak_bytes), "planned_bytes": float(stage.planned_bytes)},
    )


class _Cells:
    """Decode steps of one stage at several batches of one context."""

    def __init__(self, recorder: Recorder, stage: BenchStage, plan: Plan, kernels: str) -> None:
        self._recorder = recorder
        self._stage = stage
        self._plan = plan
        self._kernels = kernels
        self._work = work_of(recorder.order, stage)
        self._rates = Rates.of(recorder.order.rates)

    async def measure(self, context: int, batches: tuple[int, ...]) -> None:
        """Compute the prompts once; a smaller batch decodes the first of the sequences."""
        maker = self._stage.maker
        sequences: list[BenchSequence] = []
        for batch in sorted(batches):
            name = targets.decode_name(batch, context, self._kernels)
            if self._recorder.left_s < self._plan.seconds_of(context):
                self._recorder.not_measured(name, "ms", NO_TIME, better=Better.LOWER)
                continue
            # Blocks begin in different steps, as blocks of requests do.
            new = [maker.sequence(context - index % BLOCK_SIZE) for index in range(len(sequences), batch)]
            sequences += new
            await self._stage.run(maker.prompts(new))
            await self._cell(name, context, sequences)
        maker.end(sequences)

    async def _cell(self, name: str, context: int, sequences: list[BenchSequence]) -> None:
        stage, maker, plan = self._stage, self._stage.maker, self._plan
        await stage.run([maker.decodes(sequences) for _ in range(2)])
        contexts = [len(sequence.active) + plan.num_steps // 2 for sequence in sequences]
        period_s = await stage.period_s([maker.decodes(sequences) for _ in range(plan.num_steps)])
        host_s = stage.host_s([maker.decodes(sequences) for _ in range(plan.num_traced)])
        details: dict[str, float | str] = {"host_ms": host_s * 1e3, "kernels": stage.loaded.kernels_detail}
        if self._recorder.order.is_cuda:
            details |= self._on_device(sequences, period_s, context)
        else:
            self._without_profile(len(sequences), context, needs_cuda(self._recorder.order))
        self._recorder.figure(
            name,
            period_s * 1e3,
            "ms",
            bound=None if self._rates is None else self._rates.decode_ms(self._work, contexts),
            better=Better.LOWER,
            details=details,
        )

    def _on_device(
        self, sequences: list[BenchSequence], period_s: float, context: int
    ) -> dict[str, float | str]:
        """Figures of the profiler, and further numbers of the step's row."""
        stage, maker, plan = self._stage, self._stage.maker, self._plan
        waits = stage.num_waits([maker.decodes(sequences) for _ in range(plan.num_traced)])
        contexts = [len(sequence.active) for sequence in sequences]
        traced = stage.traced(
            [maker.decodes(sequences) for _ in range(plan.num_traced)], self._recorder.order.work
        )
        details: dict[str, float | str] = {
            "waits_of_host": waits,
            "peak_bytes": float(torch.cuda.max_memory_allocated(stage.device)),
        }
        try:
            use = device_use(traced)
        except ValueError as error:
            # A driver may not let the profiler see kernels; times of steps do not need it.
            self._without_profile(len(sequences), context, f"profile: {error}")
            return details
        if self._kernels == "auto":
            self._device_figures(use, len(sequences), context, period_s, contexts)
        return details | {
            "kernels_per_step": use.num_kernels,
            "launches_per_step": use.num_launches,
            "copies_up": use.num_up,
            "copies_down": use.num_down,
            "busy_ms": use.busy_us / 1e3,
            "slowest": use.slowest,
        }

    def _device_figures(
        self, use: DeviceUse, batch: int, context: int, period_s: float, contexts: list[int]
    ) -> None:
        recorder = self._recorder
        recorder.figure(targets.busy_name(batch, context), use.busy_us / (period_s * 1e6), "share")
        recorder.figure(targets.gap_name(batch, context), use.gap_us, "us", better=Better.LOWER)
        attention = targets.attention_name(batch, context)
        if not use.attention_us:
            reason = "no Triton kernel of attention in the profile"
            recorder.not_measured(attention, "ms", reason, better=Better.LOWER)
            return
        bound_ms = None
        if self._rates is not None:
            bound_ms = 1e3 * self._work.attention_bytes(contexts) / self._rates.memory
        recorder.figure(attention, use.attention_us / 1e3, "ms", bound=bound_ms, better=Better.LOWER)

    def _without_profile(self, batch: int, context: int, reason: str) -> None:
        if self._kernels != "auto":
            return
        self._recorder.not_measured(targets.busy_name(batch, context), "share", reason)
        for name, unit in ((targets.gap_name, "us"), (targets.attention_name, "ms")):
            self._recorder.not_measured(name(batch, context), unit, reason, better=Better.LOWER)
