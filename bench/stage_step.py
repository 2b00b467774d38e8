"""How long a stage takes for one step: in its executor alone, and from frame to result over real gRPC.

    python -m bench.stage_step [MODEL_DIRECTORY] [--context 256] [--steps 100]

One stage with the role ONLY runs the whole model (default: the built-in one) in float32 on one thread.
"executor" is `StepExecutor.run`; "round trip" adds both streams, the codecs and the hand-over to the compute
thread and back, with one step in flight; "in flight" is the time per step when four steps are.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from kvcache import ActiveSequence, BlockPool
from stage_worker.assignment import Assignment
from stage_worker.loading.stage_loader import WorkerResources, load_stage
from tests.frame_messages import encode_frame
from tests.integration.stage_bench import StageBench, new_assignment, stage_bench
from wire.frames import Frame
from wire.ids import SequenceKey, new_request_id
from wire.step_codec import encode_step
from wire.steps import Decode, Prefill, SequenceSignal, StartRecord, Step, StepSampling, StepSlice

BATCH_SIZES = (1, 4, 16)
IN_FLIGHT = 4
GREEDY = StepSampling(temperature=0.0)


class Script:
    """Steps that need no answer: prompts of `context` tokens, then decodes of a fixed token."""

    def __init__(self, assignment: Assignment, *, epoch: int, batch: int, context: int) -> None:
        self._epoch, self._context, self._num_steps = epoch, context, 0
        self._block_size = assignment.block_size
        self._pool = BlockPool(assignment.num_blocks)
        self._keys = [SequenceKey(new_request_id(), 0) for _ in range(batch)]
        ids = iter(range(1, 1 << 62))
        self._sequences = [
            ActiveSequence(
                [1 + index] * context,
                block_size=assignment.block_size,
                max_output_tokens=1 << 20,
                prefix_caching=False,
                new_id=ids.__next__,
            )
            for index in range(batch)
        ]

    def prefills(self) -> Iterator[Step]:
        """One step for each prompt."""
        for key, sequence in zip(self._keys, self._sequences, strict=True):
            use = sequence.prepare(self._context)
            assert use is not None
            sequence.commit(self._context)
            tokens = tuple(sequence.tokens)
            part = StepSlice(key, 0, tokens, Prefill(0, len(tokens), len(tokens)))
            start = StartRecord(key, 0, len(tokens), tokens, GREEDY)
            yield self._step((part,), (start,), [SequenceSignal(key, use)])

    def decode(self) -> Step:
        """One token for every sequence."""
        signals = [
            SequenceSignal(key, signal)
            for key, sequence in zip(self._keys, self._sequences, strict=True)
            for signal in sequence.push(7)
        ]
        position = len(self._sequences[0]) - 1
        return self._step(tuple(StepSlice(key, 0, (7,), Decode(position)) for key in self._keys), (), signals)

    def _step(
        self, slices: tuple[StepSlice, ...], starts: tuple[StartRecord, ...], signals: list[SequenceSignal]
    ) -> Step:
        for entry in signals:
            self._pool.apply(entry.signal)
        step = Step(
            epoch=self._epoch,
            step_id=self._num_steps,
            slices=slices,
            starts=starts,
            signals=tuple(signals),
            digest=self._pool.digest,
        )
        self._num_steps += 1
        return step


def executor_times(assignment: Assignment, *, batch: int, context: int, num_steps: int) -> list[float]:
    """Seconds of each decode step in the executor alone."""
    resources = WorkerResources(device=torch.device("cpu"), memory_bytes=1 << 34, model_directory=None)
    executor = load_stage(assignment, resources).executor
    executor.begin_epoch(1, stage=0)
    script = Script(assignment, epoch=1, batch=batch, context=context)
    for step in script.prefills():
        executor.run(Frame(step, encode_step(step), None))
    times = []
    for _ in range(num_steps):
        step = script.decode()
        frame = Frame(step, encode_step(step), None)
        started = time.perf_counter()
        executor.run(frame)
        times.append(time.perf_counter() - started)
    return times


async def stream_times(
    bench: StageBench, *, batch: int, context: int, num_steps: int
) -> tuple[list[float], float]:
    """Seconds from frame to result with one step in flight, and per step with several."""
    script = Script(bench.assignment, epoch=await bench.begin_epoch(), batch=batch, context=context)
    predecessor = await bench.predecessor()

    async def send(step: Step) -> None:
        await predecessor.send(encode_frame(encode_step(step), step.step_id, None))

    for step in script.prefills():
        await send(step)
        await bench.output()
    alone = []
    for _ in range(num_steps):
        step = script.decode()
        started = time.perf_counter()
        await send(step)
        await bench.output()
        alone.append(time.perf_counter() - started)
    for _ in range(IN_FLIGHT):
        await send(script.decode())
    started = time.perf_counter()
    for _ in range(num_steps):
        await bench.output()
        await send(script.decode())
    together = (time.perf_counter() - started) / num_steps
    for _ in range(IN_FLIGHT):
        await bench.output()
    await predecessor.close()
    return alone, together


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("directory", nargs="?", type=Path, default=MODEL_DIRECTORY)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    num_layers = Checkpoint.open(options.directory).config.num_layers
    assignment = replace(
        new_assignment(options.directory, stage=0, num_stages=1, num_layers=num_layers),
        block_size=16,
        num_blocks=2048,
        max_step_tokens=1024,
        max_step_sequences=max(BATCH_SIZES),
        max_sequence_tokens=2048,
    )
    torch.set_num_threads(1)
    print(f"{options.directory.name}: {num_layers} layers, context {options.context}, milliseconds per step")
    print(f"{'batch':>5} {'executor':>9} {'round trip':>11} {'in flight':>10}")
    for batch in BATCH_SIZES:
        work = {"batch": batch, "context": options.context, "num_steps": options.steps}
        inside = statistics.median(executor_times(assignment, **work))
        async with stage_bench(assignment) as bench:
            alone, together = await stream_times(bench, **work)
        print(
            f"{batch:>5} {inside * 1e3:>9.2f} {statistics.median(alone) * 1e3:>11.2f} {together * 1e3:>10.2f}"
        )


if __name__ == "__main__":
    asyncio.run(main())
