"""What the engine accepts, and what it gives up."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.requests.engine import Engine
from coordinator.requests.output import OutputChannel
from coordinator.scheduling.kv_log import KvLog
from coordinator.scheduling.scheduler import SchedulerLimits
from coordinator.scheduling.sequence import Sequence
from wire.errors import ClusterUnavailable, Overloaded
from wire.ids import SequenceKey, new_request_id
from wire.steps import Step, StepSampling

LIMITS = SchedulerLimits(max_step_tokens=8, max_step_sequences=4, max_steps_in_flight=2)


def new_sequence(num_prompt_tokens: int, *, max_tokens: int, arrival: int = 0) -> Sequence:
    return Sequence(
        SequenceKey(new_request_id(), 0),
        tuple(range(num_prompt_tokens)),
        max_tokens=max_tokens,
        sampling=StepSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0),
        stop_token_ids=frozenset(),
        arrival=arrival,
    )


def start(engine: Engine, *, epoch: int, num_blocks: int) -> list[Step]:
    sent: list[Step] = []
    kv = KvLog(num_blocks=num_blocks, block_size=4)
    engine.start_epoch(epoch, kv, LIMITS, sent.append, max_sequence_tokens=4 * num_blocks)
    return sent


async def read(channel: OutputChannel) -> None:
    async with asyncio.timeout(5):
        await channel.read()


async def test_a_request_that_a_smaller_plan_can_never_hold_fails_and_holds_up_nobody() -> None:
    engine = Engine(queue_size=4)
    start(engine, epoch=1, num_blocks=8)
    large, small = new_sequence(20, max_tokens=12), new_sequence(3, max_tokens=5, arrival=1)
    large_output = engine.submit(large)
    engine.submit(small)
    engine.stop_epoch()
    sent = start(engine, epoch=2, num_blocks=4)
    assert [part.sequence for step in sent for part in step.slices] == [small.key]
    assert engine.live_sequences == [small]
    with pytest.raises(ClusterUnavailable, match="holds 16 tokens per request; this one may need 32"):
        await read(large_output)


async def test_what_fits_exactly_is_kept() -> None:
    engine = Engine(queue_size=4)
    start(engine, epoch=1, num_blocks=8)
    sequence = new_sequence(10, max_tokens=6)
    engine.submit(sequence)
    engine.stop_epoch()
    start(engine, epoch=2, num_blocks=4)
    assert engine.live_sequences == [sequence]


def test_requests_that_are_made_ready_count_towards_the_queue() -> None:
    engine = Engine(queue_size=2)
    engine.submit(new_sequence(3, max_tokens=1))
    with engine.preparing():
        assert engine.num_preparing == 1
        with pytest.raises(Overloaded, match="2 requests are waiting"), engine.preparing():
            pass
    assert engine.num_preparing == 0
    with engine.preparing():
        pass
