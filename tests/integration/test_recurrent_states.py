"""A model with recurrent states, served by a cluster: prefix hits, counts, and lost workers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcache.state_store import StateStore
from kvcache.states import SlotChange
from stageline_rpc.v1 import cluster_pb2
from tests.families import make_family
from tests.integration.cluster import Cluster
from tests.integration.request_cases import SoloRuns, mixed_cases
from tests.integration.test_cluster_recovery import until_tokens
from tests.integration.test_self_check import is_decided

LAYERS = (2, 1, 2)
"""FIRST has recurrent layers and others, in Kimi Linear with pages of latents; MIDDLE has no recurrent layer
in Nemotron-H, and no attention. FIRST and LAST have n-grams in Qwen4-Exp.
"""


@pytest.fixture(
    scope="module",
    params=[
        "qwen4_exp_text",
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("qwen3_next", "granitemoehybrid", "nemotron_h", "kimi_linear", "falcon_h1")
        ),
    ],
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("recurrent") / "model", request.param)


@pytest.fixture(scope="module")
def solo(directory: Path) -> SoloRuns:
    return SoloRuns(directory, (5,))


def states_of(status: cluster_pb2.GetStatusResponse) -> list[tuple[int, int]]:
    """Live and saved states of each stage."""
    return [(worker.kv.states_live, worker.kv.states_saved) for worker in status.workers]


@pytest.mark.matrix(1, full=6)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_streams_continue_with_the_same_tokens_when_a_worker_is_lost(
    directory: Path, solo: SoloRuns, stage: int
) -> None:
    async with Cluster(directory, layers=LAYERS) as cluster:
        async with cluster.generating(mixed_cases(6, max_tokens=24)) as answers:
            await until_tokens(answers, 3)
            await cluster.workers[f"w{stage}"].stop()
            await cluster.start_worker(f"w{stage}")
        solo.check(answers)
        status = await cluster.wait_drained()
        assert [live for live, _ in states_of(status)] == [0, 0, 0]


async def test_a_repeated_prompt_continues_from_its_last_block_boundary(
    directory: Path, solo: SoloRuns
) -> None:
    async with Cluster(directory, layers=LAYERS, block_size=8) as cluster:
        (case,) = mixed_cases(1, prompt_lengths=(29,))
        solo.check([await cluster.generate(case)])
        again = await cluster.generate(case.again())
        solo.check([again])
        assert again.usage is not None and again.usage.cached_tokens == 24
        status = await cluster.wait_drained()
        assert states_of(status) == [(0, 1)] * 3
        assert status.num_states == sum(states_of(status)[0]) + status.workers[0].kv.states_free > 16


async def test_the_self_check_passes_and_leaves_nothing_out(directory: Path) -> None:
    async with Cluster(directory, layers=LAYERS, self_check=True) as cluster:
        check = (await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)).self_check
        assert check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED, check
        assert "not checked" not in check.detail


@pytest.mark.full
async def test_the_self_check_finds_states_that_are_not_restored(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = StateStore.change

    def only_zeros(store: StateStore, changes: Sequence[SlotChange]) -> None:
        change(store, [slot_change for slot_change in changes if slot_change.source is None])

    monkeypatch.setattr(StateStore, "change", only_zeros)
    async with Cluster(directory, layers=LAYERS, self_check=True, waits=False) as cluster:
        status = await cluster.wait_status(is_decided)
        assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_FAILED
        assert "differ from the reference" in status.self_check.detail
