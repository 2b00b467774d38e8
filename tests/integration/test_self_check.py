"""A plan with wrong logits never serves, for any fault of a stage; a good plan serves at once."""

from __future__ import annotations

import asyncio
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from checkpoint.directory import sampled_ranges
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.recovery.self_check import SelfCheck
from kvcache import Removed
from stage_worker.assignment import ReferenceRequest
from stage_worker.backends import torch_backend
from stage_worker.backends.torch_backend import TorchBackend
from stage_worker.loading import stage_loader
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.parts import PartsRead
from stage_worker.model.rope import Rope, Rotary
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.alterations import drop
from tests.integration.cluster import DEADLINE_S, TEST_POLICY, Cluster, RequestCase
from tests.integration.planted_faults import decode_attention_is_zero, keys_and_values_are_not_written
from wire.errors import Overloaded
from wire.ids import CHECK_REQUEST
from wire.reference import Reference
from wire.steps import StepResult

LAYERS = (2, 2, 2)
CASE = RequestCase(prompt=(1, 2, 3, 4, 5), max_tokens=4)

Fault = Callable[[DecoderStage], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checked") / "model", "llama", num_layers=sum(LAYERS))


def plant(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Plant `fault` into every loaded stage that begins with layer 2, but not into references."""

    class FaultyStage(DecoderStage):
        @torch.inference_mode()
        def load(self, checkpoint: Checkpoint, **options: Any) -> PartsRead:
            read = super().load(checkpoint, **options)
            if self.layers.start == LAYERS[0]:
                fault(self)
            return read

    monkeypatch.setattr(stage_loader, "DecoderStage", FaultyStage)


def skips_a_layer(stage: DecoderStage) -> None:
    class Skipped:
        num_memories = 1

        def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            return hidden

    first = stage._loaded().layers[0]
    stage._weights = replace(stage._loaded(), layers=(first, Skipped()))  # type: ignore[arg-type]


def runs_a_layer_twice(stage: DecoderStage) -> None:
    first, second = stage._loaded().layers

    class Twice:
        num_memories = 1

        def forward(self, hidden: torch.Tensor, *rest: Any) -> torch.Tensor:
            return second.forward(second.forward(hidden, *rest), *rest)

    stage._weights = replace(stage._loaded(), layers=(first, Twice()))  # type: ignore[arg-type]


def swaps_two_layers(stage: DecoderStage) -> None:
    stage._weights = replace(stage._loaded(), layers=stage._loaded().layers[::-1])


def has_another_rope_base(stage: DecoderStage) -> None:
    mixer = stage.config.layers[0].mixer
    assert mixer.rope is not None
    rope = replace(mixer.rope, theta=2 * mixer.rope.theta)
    stage._ropes[Rotary.of(mixer)] = Rope(rope, mixer.head_dim, stage.torch_dtype, stage.device)


def has_another_eps(stage: DecoderStage) -> None:
    for layer in stage._loaded().layers:
        for norm in (layer._mixer_norm, layer._ffn_norm):
            norm._eps *= 100  # type: ignore[attr-defined]


def zeroes(part: str) -> Fault:
    def fault(stage: DecoderStage) -> None:
        layer = stage._loaded().layers[1]
        owners = (layer, layer._mix, layer._feed_forward)
        holder = next(owner for owner in owners if hasattr(owner, part))
        getattr(holder, part).weight.zero_()

    fault.__name__ = f"zeroes{part}"
    return fault


def zeroes_a_norm(stage: DecoderStage) -> None:
    stage._loaded().layers[0]._ffn_norm._weight.zero_()  # type: ignore[attr-defined]


FAULTS = [
    skips_a_layer,
    runs_a_layer_twice,
    swaps_two_layers,
    has_another_rope_base,
    has_another_eps,
    zeroes_a_norm,
    *(zeroes(part) for part in ("_qkv", "_o", "_up", "_down")),
    decode_attention_is_zero,
    keys_and_values_are_not_written,
]


def is_decided(status: cluster_pb2.GetStatusResponse) -> bool:
    return status.state in (cluster_pb2.CLUSTER_STATE_SERVING, cluster_pb2.CLUSTER_STATE_BLOCKED)


@pytest.mark.matrix(1, full=4)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_a_plan_with_a_faulty_stage_never_serves(
    model: Path, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    plant(monkeypatch, fault)
    async with Cluster(model, layers=LAYERS, self_check=True, waits=False) as cluster:
        status = await cluster.wait_status(is_decided)
    assert status.state == cluster_pb2.CLUSTER_STATE_BLOCKED
    reason = "failed: the log-probabilities of 34 tokens in 7 steps differ from the reference of worker"
    assert f"the self-check of w0, w1, w2 {reason}" in status.detail
    check = status.self_check
    assert check.detail.startswith(reason)
    assert check.verdict == cluster_pb2.SELF_CHECK_VERDICT_FAILED
    assert (check.stage, check.deviation > check.allowed > 0, check.at.seconds > 0) == (1, True, True)
    assert "the hidden states of stage 1 (worker w1) differ by" in check.detail
    suspects = {worker.name for worker in status.workers if worker.state == cluster_pb2.WORKER_STATE_SUSPECT}
    assert suspects == {"w1"}


@pytest.mark.full
async def test_non_finite_logits_are_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda stage: stage._loaded().layers[0]._ffn_norm._weight.fill_(math.nan))
    async with Cluster(model, layers=LAYERS, self_check=True, waits=False) as cluster:
        status = await cluster.wait_status(is_decided)
    assert status.state == cluster_pb2.CLUSTER_STATE_BLOCKED
    assert "finite" in status.detail


async def test_a_good_plan_serves_in_the_epoch_after_its_check(model: Path) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True) as cluster:
        status = await cluster.client.status()
        assert cluster.epoch == 2
        assert status.self_check.detail.startswith(
            "passed: the log-probabilities of 34 tokens in 7 steps differ from the reference"
        )
        assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
        answer = await cluster.generate(CASE)
        await cluster.wait_drained()
    async with Cluster(model, layers=LAYERS) as cluster:
        assert (await cluster.client.status()).self_check.detail == "off"
        assert (await cluster.generate(CASE.again())).tokens == answer.tokens


@pytest.mark.matrix(1)
@pytest.mark.parametrize("method", ["reference", "run"])
async def test_a_check_that_fails_by_itself_is_repeated_in_a_new_epoch(
    model: Path, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = getattr(SelfCheck, method)

    async def fails_once(check: SelfCheck, *arguments: object) -> object:
        monkeypatch.setattr(SelfCheck, method, original)
        raise ZeroDivisionError("made up")

    monkeypatch.setattr(SelfCheck, method, fails_once)
    async with Cluster(model, layers=LAYERS, self_check=True) as cluster:
        status = await cluster.client.status()
        assert cluster.epoch == 3
        assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
        assert (await cluster.generate(CASE)).succeeded
    (record,) = [record for record in caplog.records if record.message == "controller task failed"]
    assert record.exc_info is not None and record.exc_info[0] is ZeroDivisionError
    assert "the self-check ended with an unexpected error" in caplog.text


@pytest.mark.full
async def test_a_repaired_worker_makes_a_rejected_plan_pass(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True, waits=False) as cluster:
        with monkeypatch.context() as ill:
            plant(ill, skips_a_layer)
            status = await cluster.wait_status(is_decided)
            assert status.state == cluster_pb2.CLUSTER_STATE_BLOCKED
        await cluster.workers["w1"].stop()
        await cluster.start_worker("w1")
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert (await cluster.generate(CASE)).succeeded


async def test_a_new_plan_is_checked_and_a_new_epoch_of_a_checked_plan_is_not(model: Path) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True) as cluster:
        controller = cluster.server.controller
        controller.fail_epoch(cluster.epoch, "for the test")
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert cluster.epoch == 3
        await cluster.workers["w2"].stop()
        await cluster.wait_status(lambda status: status.state != cluster_pb2.CLUSTER_STATE_SERVING)
        await cluster.start_worker("w2")
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert cluster.epoch == 5


async def test_a_reference_is_computed_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints: list[str] = []
    compute = torch_backend.compute_reference

    def counting(request: ReferenceRequest, *arguments: Path, **options: object) -> Reference:
        fingerprints.append(request.fingerprint)
        return compute(request, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torch_backend, "compute_reference", counting)
    async with Cluster(model, layers=LAYERS, self_check=True) as cluster:
        await cluster.workers["w2"].stop()
        await cluster.wait_status(lambda status: status.state != cluster_pb2.CLUSTER_STATE_SERVING)
        await cluster.start_worker("w2")
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
    assert len(fingerprints) == 1


async def test_without_a_reference_only_finiteness_is_checked_with_the_reason(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(backend: TorchBackend, request: ReferenceRequest, *, held_bytes: int) -> Reference:
        raise Overloaded("a reference takes 7 bytes of memory, and 5 are free")

    monkeypatch.setattr(TorchBackend, "reference", refuse)
    async with Cluster(model, layers=LAYERS, self_check=True) as cluster:
        check = (await cluster.client.status()).self_check
    assert check.verdict == cluster_pb2.SELF_CHECK_VERDICT_FINITE_ONLY
    assert check.detail.startswith("finite only: there is no reference: worker w")
    assert check.detail.count("a reference takes 7 bytes of memory, and 5 are free") == 3


async def test_a_step_of_fewer_tokens_checks_fewer(model: Path) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True, block_size=3, max_step_tokens=5) as cluster:
        detail = (await cluster.client.status()).self_check.detail
    assert detail.startswith("passed: the log-probabilities of ")


async def test_the_built_in_model_is_checked_against_its_recorded_reference() -> None:
    async with Cluster(None, layers=(4, 4, 4)) as cluster:
        assert "from the recorded reference" in (await cluster.client.status()).self_check.detail


def zeroed_copy_of_the_built_in_model(directory: Path) -> Path:
    """Its fingerprint is the same; every weight of its second layer that is not sampled is 0."""
    copy = shutil.copytree(MODEL_DIRECTORY, directory / "zeroed")
    (file,) = copy.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    for name, entry in Checkpoint.open(copy).tensors.items():
        if name.startswith("model.layers.1."):
            sampled = {begin: data[begin:end] for begin, end in sampled_ranges(name, entry)}
            data[entry.begin : entry.end] = bytes(entry.end - entry.begin)
            for begin, kept in sampled.items():
                data[begin : begin + len(kept)] = kept
    file.write_bytes(data)
    return copy


@pytest.mark.full
async def test_a_bad_worker_that_joins_does_not_stop_a_good_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Zeroed weights on one worker: it is quarantined, and the other workers serve again."""
    zeroed = zeroed_copy_of_the_built_in_model(tmp_path)
    async with Cluster(None, layers=(4, 4, 4), policy=replace(TEST_POLICY, rejoin_grace_s=0.05)) as cluster:
        answer = await cluster.generate(CASE)
        await cluster.workers["w0"].stop()
        await cluster.wait_status(lambda status: is_serving_with(status, 2))
        async with cluster.generating([replace(CASE.again(), max_tokens=200)]) as (running,):
            await cluster.start_worker("w0", model_directory=zeroed)
            status = await cluster.wait_status(
                lambda status: is_serving_with(status, 2) and quarantined(status) != {}
            )
        assert list(quarantined(status)) == ["w0"]
        assert "first, the hidden states of stage 0 (worker w0) differ by" in caplog.text
        status = await cluster.wait_status(lambda status: "its weights differ" in quarantined(status)["w0"])
        assert is_serving_with(status, 2)
        assert running.succeeded and running.tokens[: len(answer.tokens)] == answer.tokens
        await cluster.workers["w0"].stop()
        await cluster.start_worker("w0")
        await cluster.wait_status(lambda status: is_serving_with(status, 3))
        assert (await cluster.generate(CASE.again())).tokens == answer.tokens


def is_serving_with(status: cluster_pb2.GetStatusResponse, num_stages: int) -> bool:
    stages = [worker for worker in status.workers if worker.HasField("stage")]
    return status.state == cluster_pb2.CLUSTER_STATE_SERVING and len(stages) == num_stages


def quarantined(status: cluster_pb2.GetStatusResponse) -> dict[str, str]:
    state = cluster_pb2.WORKER_STATE_QUARANTINED
    return {worker.name: worker.detail for worker in status.workers if worker.state == state}


# A cluster that serves


async def test_an_idle_cluster_is_checked_again_and_keeps_epoch_and_cache(model: Path) -> None:
    case = RequestCase(prompt=tuple(range(20)), max_tokens=4)
    async with Cluster(model, layers=LAYERS, self_check=True, self_check_interval_s=0.05) as cluster:
        answer = await cluster.generate(case)
        for _ in range(2):
            await wait_checked(cluster)
        again = await cluster.generate(case.again())
        assert (again.tokens, cluster.epoch) == (answer.tokens, 2)
        assert again.usage is not None and again.usage.cached_tokens == 16
        # Heartbeats may report blocks of a check; after the last check there are none.
        checks = cluster.server.controller.checks
        assert checks is not None
        checks.check._interval_s = 0.0
        await cluster.wait_drained()


async def test_an_idle_check_counts_no_prefix_hits_and_announces_no_blocks(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is so small that a check evicts blocks of requests; subscribers receive these events."""
    async with Cluster(
        model, layers=LAYERS, self_check=True, self_check_interval_s=3600.0, max_kv_tokens=56
    ) as cluster:
        assert (await cluster.generate(RequestCase(prompt=tuple(range(48)), max_tokens=1))).succeeded
        checks, feed = cluster.server.controller.checks, cluster.server.engine.kv_events
        assert checks is not None
        before, counters = feed.subscribe(), hit_counters(cluster)
        subscriptions = [before]
        take = checks.check.take

        def subscribe_and_take(result: StepResult) -> None:
            subscriptions.append(feed.subscribe())
            take(result)

        monkeypatch.setattr(checks.check, "take", subscribe_and_take)
        checks.check._interval_s = 1e-6
        await wait_checked(cluster)
        checks.check._interval_s = 0.0
        cached = cached_names(cluster)
        assert cached < {block.sequence_hash for block in before.snapshot.blocks}, "something was evicted"
        assert len(subscriptions) > 5
        for subscription in subscriptions:
            known = {block.sequence_hash for block in subscription.snapshot.blocks}
            for event in (change.event for change in subscription._pending):
                assert isinstance(event, Removed) and known >= set(event.block_hashes)
                known -= set(event.block_hashes)
            assert known == cached
        assert hit_counters(cluster) == counters


def hit_counters(cluster: Cluster) -> list[tuple[int, int]]:
    """Current counts of queried and hit blocks."""
    stats = (worker.worker._stage.heartbeat().kv for worker in cluster.workers.values())
    return [(kv.blocks_wanted, kv.blocks_hit) for kv in stats]


def cached_names(cluster: Cluster) -> set[int]:
    kv = cluster.server.engine.scheduler.kv
    assert kv is not None
    return {block.sequence_hash for block in kv.cached_blocks()}


async def wait_checked(cluster: Cluster) -> None:
    """Wait until one more check has passed."""
    before = (await cluster.client.status()).self_check.at.ToMicroseconds()
    status = await cluster.wait_status(lambda status: status.self_check.at.ToMicroseconds() > before)
    assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED


@pytest.mark.full
async def test_requests_that_arrive_during_checks_are_served(model: Path) -> None:
    """A check is due whenever the cluster is idle."""
    async with Cluster(model, layers=LAYERS, self_check=True, self_check_interval_s=1e-6) as cluster:
        checks = cluster.server.controller.checks
        assert checks is not None
        answers = []
        for _ in range(20):
            checks.tick()
            assert checks._task is not None
            await asyncio.sleep(0)
            answers.append(await cluster.generate(CASE.again()))
        assert all(answer.succeeded and answer.tokens == answers[0].tokens for answer in answers)
        assert cluster.epoch == 2


@pytest.mark.full
async def test_a_frame_lost_in_an_idle_check_becomes_overdue(model: Path) -> None:
    """A request that arrives meanwhile is served long before the timeout of a first check."""
    async with Cluster(
        model,
        layers=LAYERS,
        self_check=True,
        self_check_interval_s=3600.0,
        hop_proxies=(1,),
        policy=replace(TEST_POLICY, min_step_timeout_s=DEFAULT_POLICY.min_step_timeout_s),
    ) as cluster:
        # The step timeout is estimated from these steps.
        for _ in range(8):
            answer = await cluster.generate(CASE.again())
        checks = cluster.server.controller.checks
        assert checks is not None
        await cluster.wait_drained()
        # All frames: a stage detects a gap at once.
        lost = cluster.proxy(1).inject(drop, when=lambda frame: frame.step.epoch == 2, times=1_000)
        checks.check._interval_s = 1e-6
        async with asyncio.timeout(DEADLINE_S):
            await lost.happened.wait()
        checks.check._interval_s = 0.0
        async with asyncio.timeout(DEFAULT_POLICY.check_answer_timeout_s / 2):
            again = await cluster.generate(CASE.again())
        assert again.tokens == answer.tokens
        assert cluster.epoch > 2
        assert {step_slice.sequence.request_id for step in lost.steps for step_slice in step.slices} == {
            CHECK_REQUEST
        }


async def test_no_request_waits_for_a_reference_to_be_written_to_disk(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True, self_check_interval_s=3600.0) as cluster:
        answer = await cluster.generate(CASE)
        checks, is_writing = cluster.server.controller.checks, asyncio.Event()
        assert checks is not None

        async def never_ends(question: object) -> None:
            is_writing.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(checks.check._references, "confirm", never_ends)
        checks.check._interval_s = 1e-6
        async with asyncio.timeout(DEADLINE_S):
            await is_writing.wait()
            assert (await cluster.generate(CASE.again())).tokens == answer.tokens


@pytest.mark.matrix(1)
@pytest.mark.parametrize("stage", [0, 1, 2])
async def test_a_stage_that_turns_faulty_while_serving_is_found_and_named(model: Path, stage: int) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True, self_check_interval_s=0.05) as cluster:
        assert (await cluster.generate(CASE)).succeeded
        untyped: Any = cluster.workers[f"w{stage}"].worker._stage.loaded
        decode_attention_is_zero(untyped.executor._compute._model)
        status = await cluster.wait_status(
            lambda status: (
                status.state == cluster_pb2.CLUSTER_STATE_BLOCKED or status.self_check.HasField("stage")
            )
        )
        assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_FAILED
        assert status.self_check.stage == stage


@pytest.mark.full
async def test_a_stored_reference_is_used_by_the_next_coordinator(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True, cache_directory=tmp_path) as cluster:
        assert "from the reference of worker" in (await cluster.client.status()).self_check.detail

    async def refuse(backend: TorchBackend, request: ReferenceRequest, *, held_bytes: int) -> Reference:
        raise AssertionError("the stored reference is computed again")

    monkeypatch.setattr(TorchBackend, "reference", refuse)
    async with Cluster(model, layers=LAYERS, self_check=True, cache_directory=tmp_path) as cluster:
        assert "from the kept reference" in (await cluster.client.status()).self_check.detail


@pytest.mark.matrix(1)
@pytest.mark.parametrize("wire_dtype", ["bf16", "int8", "fp8"])
async def test_the_check_passes_with_a_smaller_wire_dtype(model: Path, wire_dtype: str) -> None:
    async with Cluster(model, layers=LAYERS, self_check=True, wire_dtype=wire_dtype) as cluster:
        check = (await cluster.client.status()).self_check
    assert check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
