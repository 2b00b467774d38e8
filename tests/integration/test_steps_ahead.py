"""A step travels ahead of its hidden states: a stage passes it on and accounts for it when it arrives."""

import asyncio
from pathlib import Path

import pytest

from tests.frame_messages import encode_frame
from tests.integration.doubles import DEADLINE_S
from tests.integration.scenario import (
    NUM_STEPS,
    Comparable,
    ScriptedLog,
    assert_same,
    comparable_of,
    expected_outputs,
)
from tests.integration.stage_bench import StageBench, new_assignment, stage_bench
from wire.errors import StepFaultKind
from wire.step_codec import encode_step
from wire.steps import Step
from wire.tensors import HiddenStates

FIRST, MIDDLE, LAST = 0, 1, 2


async def test_a_step_is_passed_on_before_its_hidden_states_arrive(tiny_llama: Path) -> None:
    async with stage_bench(new_assignment(tiny_llama, stage=MIDDLE)) as bench:
        log = ScriptedLog(bench.assignment, await bench.begin_epoch())
        predecessor = await bench.predecessor()
        frames = [
            list(encode_frame(encode_step(step), step.step_id, hidden)) for step, hidden in _frames(log)
        ]
        await predecessor.send(ahead for ahead, _ in frames)
        for ahead, _ in frames:
            assert (await bench.next_stage.step()).message == ahead.SerializeToString()
        async with asyncio.timeout(DEADLINE_S):
            while (await bench.link.next_heartbeat()).kv.blocks_active == 0:
                """The compute thread accounts for the steps."""
        assert not bench.has_output
        await predecessor.send(hidden for _, hidden in frames)
        assert_same(await _outputs(bench), expected_outputs(bench.assignment))
        await predecessor.close()


async def test_first_passes_a_step_on_before_it_computes_it(tiny_llama: Path) -> None:
    async with stage_bench(new_assignment(tiny_llama, stage=FIRST)) as bench:
        log = ScriptedLog(bench.assignment, await bench.begin_epoch())
        predecessor = await bench.predecessor()
        for step, hidden in _frames(log):
            await predecessor.send(encode_frame(encode_step(step), step.step_id, hidden, to_first=True))
        steps = [(await bench.next_stage.step()).step.step_id for _ in range(NUM_STEPS)]
        assert steps == list(range(NUM_STEPS))
        assert_same(await _outputs(bench), expected_outputs(bench.assignment))
        await predecessor.close()


@pytest.mark.parametrize("stage", [MIDDLE, LAST])
async def test_a_step_refused_ahead_is_reported_after_the_steps_before_it(
    stage: int, tiny_llama: Path
) -> None:
    """The stage before would report it first: a fault comes from the first stage that it reaches."""
    assignment = new_assignment(tiny_llama, stage=stage)
    async with stage_bench(assignment) as bench:
        log = ScriptedLog(assignment, await bench.begin_epoch())
        predecessor = await bench.predecessor()
        (good, good_hidden), (bad, bad_hidden) = [
            list(encode_frame(encode_step(step), step.step_id, hidden)) for step, hidden in _frames(log)[:2]
        ]
        bad.steps[0].checksum ^= 1
        await predecessor.send([good])
        assert await _is_quiet(bench)
        await predecessor.send([good_hidden, bad, bad_hidden])
        await bench.output()
        report = await bench.link.fault()
        assert (report.kind, report.step_id) == (StepFaultKind.CHECKSUM, 1)
        await predecessor.close()


def _frames(log: ScriptedLog) -> list[tuple[Step, HiddenStates]]:
    return [log.next_frame() for _ in range(NUM_STEPS)]


async def _outputs(bench: StageBench) -> list[Comparable]:
    return [comparable_of(await bench.output()) for _ in range(NUM_STEPS)]


async def _is_quiet(bench: StageBench) -> bool:
    await bench.link.next_heartbeat()
    return bench.link.answers.empty() and not bench.has_output
