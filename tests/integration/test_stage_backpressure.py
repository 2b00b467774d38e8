"""A stage accepts no more frames than it can forward."""

import asyncio
from pathlib import Path

import pytest

from tests.frame_messages import encode_frame
from tests.integration.scenario import ScriptedLog
from tests.integration.stage_bench import new_assignment, stage_bench
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.step_codec import encode_step
from wire.steps import StartRecord, Step

NUM_FRAMES = 400
FRAME_BYTES = 256 * 1024
SENDER_WAIT_S = 2.0
"""A sender without backpressure finishes in a fraction of this."""


@pytest.mark.full
async def test_a_next_stage_that_does_not_read_blocks_the_sender(tiny_llama: Path) -> None:
    """100 MiB exceed all queues and windows between. Once the next stage reads, nothing is missing."""
    async with stage_bench(new_assignment(tiny_llama, stage=0)) as bench:
        bench.next_stage.may_read.clear()
        epoch = await bench.begin_epoch()
        predecessor = await bench.predecessor()
        first, hidden = ScriptedLog(bench.assignment, epoch).next_frame()
        padding = "x" * FRAME_BYTES
        starts = [
            StartRecord(SequenceKey(new_request_id(), 0), 0, 1, (1,), StepSampling(), padding)
            for _ in range(1, NUM_FRAMES)
        ]
        steps = [first] + [
            Step(epoch=epoch, step_id=number, digest=first.digest, starts=(start,))
            for number, start in enumerate(starts, 1)
        ]

        async def send_all() -> None:
            for step in steps:
                await predecessor.send(encode_frame(encode_step(step), step.step_id, hidden, to_first=True))

        sending = asyncio.create_task(send_all())
        done, _ = await asyncio.wait({sending}, timeout=SENDER_WAIT_S)
        assert not done, "the stage accepted everything although the next stage does not read"
        bench.next_stage.may_read.set()
        received = [(await bench.next_stage.frame()).step.step_id for _ in steps]
        assert received == list(range(NUM_FRAMES))
        await sending
