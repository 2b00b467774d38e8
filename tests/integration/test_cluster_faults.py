"""Whatever breaks between stages: the requests concerned fail at once, all others end as if nothing had
happened, and the cluster serves on.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from stage_worker.loading import load_stage
from tests.integration.alterations import FRAME_FAULTS, FrameFault, cut, delay
from tests.integration.asks import SoloRuns, mixed_asks
from tests.integration.cluster import Answer, Cluster
from wire.frames import Frame
from wire.steps import Decode, Prefill

LAYERS = (1, 1, 1)
NUM_STREAMS = 6
FAIL_WITHIN_S = 2.0
"""Two seconds are promised; a busy machine gets more before a test says that it hangs."""

QUICK = ("dropped", "repeated", "without-hidden-states", "slice-of-nobody", "flipped-byte")
"""Faults that the default tests put into every stage; the others go into MIDDLE only."""

FAULTS_OF_STAGES = [
    pytest.param(
        fault,
        stage,
        id=f"{fault}-stage{stage}",
        marks=() if stage == 1 or fault.name in QUICK else (pytest.mark.slow,),
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
    """Counts how often any worker of this process loads weights."""
    with mock.patch("stage_worker.torch_backend.load_stage", side_effect=load_stage) as spy:
        yield spy


def is_decode(frame: Frame) -> bool:
    """All slices are decodes, some way into the answer."""
    parts = frame.step.slices
    steps = [part.inference_step for part in parts]
    return bool(steps) and frame.step.step_id > 12 and all(isinstance(step, Decode) for step in steps)


def is_chunk(frame: Frame) -> bool:
    """Part of a prompt, but not its beginning."""
    steps = [part.inference_step for part in frame.step.slices]
    return any(isinstance(step, Prefill) and step.start > 0 for step in steps)


def blamed(answers: list[Answer]) -> tuple[int, int]:
    """The one stage and step that all the failed answers name."""
    places = set()
    for answer in answers:
        assert answer.error is not None
        assert answer.error.code == "ABORTED", answer.error
        match = re.search(r"stage (\d+), step (\d+): ", answer.error.message)
        assert match is not None, answer.error.message
        places.add((int(match[1]), int(match[2])))
    (place,) = places
    return place


@pytest.mark.parametrize(("fault", "stage"), FAULTS_OF_STAGES)
async def test_requests_of_a_faulty_step_fail_and_all_others_end_undisturbed(
    varied_llama: Path, solo: SoloRuns, num_loads: mock.Mock, fault: FrameFault, stage: int
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[stage]) as cluster:
        epoch, incarnations = cluster.epoch, cluster.incarnations()
        injection = cluster.proxy(stage).inject(fault.alter, when=is_decode)
        answers = await cluster.generate_all(mixed_asks(NUM_STREAMS))
        failed = [answer for answer in answers if not answer.succeeded]
        assert injection.happened.is_set()

        refused = injection.steps[0].step_id + (1 if fault.blames_next else 0)
        in_refused = cluster.proxy(stage).steps[epoch, refused].request_ids
        assert {answer.ask.request_id for answer in failed} == set(in_refused)
        assert blamed(failed)[0] == stage
        assert all(fault.kind.name in str(answer.error) for answer in failed)
        slowest_s = max(answer.ended_s for answer in failed) - injection.at_s
        print(f"{fault} into stage {stage}: {len(failed)} requests failed after {slowest_s * 1000:.0f} ms")
        assert slowest_s < FAIL_WITHIN_S
        solo.check([answer for answer in answers if answer not in failed])

        assert cluster.epoch == epoch + 1
        assert cluster.incarnations() == incarnations
        assert num_loads.call_count == len(LAYERS)
        solo.check(await cluster.generate_all(mixed_asks(2, seed=1)))
        await cluster.wait_drained()


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_faulty_prompt_chunk_fails_that_request_alone(
    varied_llama: Path, solo: SoloRuns, stage: int
) -> None:
    fault = next(each for each in FRAME_FAULTS if each.name == "flipped-byte")
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[stage], max_step_tokens=16) as cluster:
        injection = cluster.proxy(stage).inject(fault.alter, when=is_chunk)
        answers = await cluster.generate_all(mixed_asks(NUM_STREAMS))
        failed = [answer for answer in answers if not answer.succeeded]
        assert {answer.ask.request_id for answer in failed} == set(injection.steps[0].request_ids)
        solo.check([answer for answer in answers if answer not in failed])
        await cluster.wait_drained()


@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_stream_that_breaks_fails_nobody(
    varied_llama: Path, solo: SoloRuns, num_loads: mock.Mock, stage: int
) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[stage]) as cluster:
        epoch = cluster.epoch
        injection = cluster.proxy(stage).inject(cut, when=is_decode)
        solo.check(await cluster.generate_all(mixed_asks(NUM_STREAMS)))
        assert injection.happened.is_set()
        assert cluster.epoch == epoch + 1
        assert num_loads.call_count == len(LAYERS)
        await cluster.wait_drained()


async def test_a_late_frame_disturbs_nobody(varied_llama: Path, solo: SoloRuns) -> None:
    async with Cluster(varied_llama, layers=LAYERS, hop_proxies=[1]) as cluster:
        epoch = cluster.epoch
        injection = cluster.proxy(1).inject(delay(0.3), when=is_decode)
        solo.check(await cluster.generate_all(mixed_asks(NUM_STREAMS)))
        assert injection.happened.is_set()
        assert cluster.epoch == epoch
