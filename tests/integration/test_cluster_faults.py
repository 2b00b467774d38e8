"""Faults between stages: every request ends like an undisturbed one, or, if its steps fail repeatedly, fails
at once and alone.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from stage_worker.loading.stage_loader import load_stage
from tests.integration.alterations import FRAME_FAULTS, FrameFault, cut, delay
from tests.integration.cluster import Cluster
from tests.integration.request_cases import SoloRuns, mixed_cases
from wire.frames import Frame
from wire.steps import Prefill

LAYERS = (1, 1, 1)
NUM_STREAMS = 6
FAIL_WITHIN_S = 2.0
"""The guarantee is two seconds; busy machines get more before the test fails."""

QUICK = ("dropped", "repeated", "without-hidden-states", "slice-of-unknown-sequence", "flipped-byte")
"""Faults that the default tests inject into every stage; the others go into MIDDLE only."""

FLIPPED = next(fault for fault in FRAME_FAULTS if fault.name == "flipped-byte")

FAULTS_OF_STAGES = [
    pytest.param(
        fault,
        stage,
        id=f"{fault}-stage{stage}",
        marks=() if stage == 1 or fault.name in QUICK else (pytest.mark.full,),
    )
    for stage in range(len(LAYERS))
    for fault in FRAME_FAULTS
    if stage > 0 or not fault.needs_hidden
]


@pytest.fixture(scope="module")
def solo(varied_llama: Path) -> SoloRuns:
    return SoloRuns(varied_llama)


@pytest.fixture
def num_loads() -> Iterator[mock.Mock]:
    """Count weight loads of all workers in this process."""
    with mock.patch("stage_worker.backends.torch_backend.load_stage", side_effect=load_stage) as spy:
        yield spy


def is_decode(frame: Frame) -> bool:
    """Whether all slices are decodes after the first few tokens."""
    step = frame.step
    return len(step.decodes) > 0 and step.step_id > 12 and not step.chunks


def is_chunk(frame: Frame) -> bool:
    """Whether the frame has a later chunk of a prompt."""
    steps = [step_slice.inference_step for step_slice in frame.step.slices]
    return any(isinstance(step, Prefill) and step.start > 0 for step in steps)


def reported_faults(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Stage and kind of every step fault reported to the coordinator."""
    found = re.findall(r"step fault: stage (\d+), step \d+: (\w+): ", caplog.text)
    return [(int(stage), kind) for stage, kind in found]


@pytest.mark.matrix(1, full=16)
@pytest.mark.parametrize(("fault", "stage"), FAULTS_OF_STAGES)
async def test_a_faulty_step_is_recomputed_and_changes_no_token(
    varied_llama: Path,
    solo: SoloRuns,
    num_loads: mock.Mock,
    caplog: pytest.LogCaptureFixture,
    fault: FrameFault,
    stage: int,
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[stage]) as cluster:
        epoch, incarnations = cluster.epoch, cluster.incarnations()
        injection = cluster.proxy(stage).inject(fault.alter, when=is_decode)
        solo.check(await cluster.generate_all(mixed_cases(NUM_STREAMS)))
        assert injection.happened.is_set()

        assert reported_faults(caplog) == [(stage, fault.kind.name)]
        assert cluster.epoch == epoch + 1
        assert cluster.incarnations() == incarnations
        assert num_loads.call_count == len(LAYERS)
        await cluster.wait_drained()


@pytest.mark.matrix(0)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_faulty_prompt_chunk_changes_no_token(varied_llama: Path, solo: SoloRuns, stage: int) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[stage], max_step_tokens=16) as cluster:
        injection = cluster.proxy(stage).inject(FLIPPED.alter, when=is_chunk)
        solo.check(await cluster.generate_all(mixed_cases(NUM_STREAMS)))
        assert injection.happened.is_set()
        await cluster.wait_drained()


async def test_a_request_with_three_faulty_steps_fails_alone(
    varied_llama: Path, solo: SoloRuns, caplog: pytest.LogCaptureFixture
) -> None:
    cases = mixed_cases(NUM_STREAMS)
    unlucky = cases[2].request_id

    def carries_it(frame: Frame) -> bool:
        slices = [step_slice for step_slice in frame.step.slices if step_slice.sequence.request_id == unlucky]
        return any(isinstance(step_slice.inference_step, Prefill) for step_slice in slices)

    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[1]) as cluster:
        epoch = cluster.epoch
        injection = cluster.proxy(1).inject(FLIPPED.alter, when=carries_it, times=100)
        answers = await cluster.generate_all(cases)
        (failed,) = (answer for answer in answers if not answer.succeeded)
        assert failed.case.request_id == unlucky
        assert failed.error is not None
        assert failed.error.code == "ABORTED"
        expected = "all 3 steps with this request were rejected; the last: stage 1, step "
        assert failed.error.message.startswith(expected)
        assert FLIPPED.kind.name in failed.error.message
        slowest_s = failed.ended_s - injection.at_s
        assert slowest_s < FAIL_WITHIN_S
        solo.check([answer for answer in answers if answer is not failed])
        assert cluster.epoch == epoch + 3
        assert reported_faults(caplog) == [(1, FLIPPED.kind.name)] * 3
        await cluster.wait_drained()


@pytest.mark.matrix(0)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_broken_stream_fails_no_request(
    varied_llama: Path, solo: SoloRuns, num_loads: mock.Mock, stage: int
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[stage]) as cluster:
        epoch = cluster.epoch
        injection = cluster.proxy(stage).inject(cut, when=is_decode)
        solo.check(await cluster.generate_all(mixed_cases(NUM_STREAMS)))
        assert injection.happened.is_set()
        assert cluster.epoch == epoch + 1
        assert num_loads.call_count == len(LAYERS)
        await cluster.wait_drained()


@pytest.mark.full
async def test_a_late_frame_affects_no_request(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[1]) as cluster:
        epoch = cluster.epoch
        injection = cluster.proxy(1).inject(delay(0.3), when=is_decode)
        solo.check(await cluster.generate_all(mixed_cases(NUM_STREAMS)))
        assert injection.happened.is_set()
        assert cluster.epoch == epoch
