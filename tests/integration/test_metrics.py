"""Metrics of a cluster after known requests."""

import asyncio

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import stage_worker.metrics
from stageline.client.errors import Cancelled
from tests.integration.cluster import RequestCase
from tests.integration.metrics_cluster import HIDDEN, MetricsCluster, Scraped, stages
from tests.integration.request_cases import mixed_cases

RESIDENT, FAILED = "stageline_process_resident_memory_bytes", "stageline_metrics_exports_failed_total"
NUM_STAGES = 3
NUM_REQUESTS, MAX_TOKENS, NUM_PROMPT_TOKENS = 8, 20, 2 * (1 + 8 + 23 + 50)


def steps_everywhere(scraped: Scraped, num_steps: float) -> bool:
    """Whether every worker has exported all answered steps."""
    return all(
        scraped.get("stageline_stage_step_duration_seconds_count", stage=stage) == num_steps
        for stage in stages(NUM_STAGES)
    )


async def test_metrics_count_tokens_steps_and_blocks_of_known_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No export fails, but on a busy machine one may take longer than a second.
    monkeypatch.setattr(stage_worker.metrics, "DEADLINE_S", 30.0)
    async with MetricsCluster("step=1ms", num_stages=NUM_STAGES) as cluster:
        # The coordinator rejects the first exports of a worker that takes long to join.
        joined = await cluster.scrape_until(
            lambda scraped: all(scraped.has(RESIDENT, worker=f"w{stage}") for stage in stages(NUM_STAGES))
        )
        answers = await cluster.generate_all(mixed_cases(NUM_REQUESTS, max_tokens=MAX_TOKENS))
        assert all(answer.succeeded for answer in answers)
        assert not (await cluster.generate(RequestCase(prompt=(1,), max_tokens=1_000_000))).succeeded
        await cluster.wait_drained()
        scraped = await cluster.scrape()
        num_steps = scraped.get("stageline_step_duration_seconds_count")
        scraped = await cluster.scrape_until(lambda scraped: steps_everywhere(scraped, num_steps))

        assert scraped.get("stageline_request_ended_total", outcome="finished") == NUM_REQUESTS
        assert scraped.get("stageline_request_ended_total") == NUM_REQUESTS
        assert scraped.get("stageline_request_refused_total", reason="invalid") == 1
        assert scraped.get("stageline_request_refused_total") == 1
        assert scraped.get("stageline_request_active") == 0
        assert scraped.get("stageline_cluster_serving_ratio") == 1
        assert scraped.get("stageline_prompt_tokens_total") == NUM_PROMPT_TOKENS
        assert scraped.get("stageline_prompt_cached_tokens_total") == 0
        assert scraped.get("stageline_generated_tokens_total") == NUM_REQUESTS * MAX_TOKENS
        for name, count in (
            ("queue_duration", NUM_REQUESTS),
            ("time_to_first_token", NUM_REQUESTS),
            ("duration", NUM_REQUESTS),
            ("inter_token_latency", NUM_REQUESTS * (MAX_TOKENS - 1)),
        ):
            assert scraped.get(f"stageline_request_{name}_seconds_count") == count, name
        assert num_steps == scraped.get("stageline_scheduler_duration_seconds_count")
        assert scraped.get("stageline_steps_in_flight") == 0
        assert (
            scraped.get("stageline_workers", state="ready") == NUM_STAGES == scraped.get("stageline_workers")
        )
        assert 0 < scraped.get("stageline_pipeline_bubble_ratio") < 1

        num_blocks = cluster.server.controller.state.plan.num_blocks
        for stage in stages(NUM_STAGES):
            worker = f"w{stage}"
            at = {"stage": stage, "worker": worker}
            assert scraped.get("stageline_kv_blocks", state="active", **at) == 0
            assert scraped.get("stageline_kv_blocks", **at) == num_blocks
            assert scraped.get("stageline_stage_frames_total", direction="receive", **at) == num_steps
            assert scraped.get("stageline_stage_frames_total", direction="transmit", **at) == num_steps
            assert scraped.get(RESIDENT, worker=worker) > 1e7
            assert scraped.has("stageline_stage_load_duration_seconds", phase="load", **at)
            assert scraped.get(FAILED, worker=worker) == joined.get(FAILED, worker=worker)
        assert scraped.get("stageline_metrics_overflows_total") == 0


async def test_hidden_states_are_counted_per_hop() -> None:
    async with MetricsCluster("step=1ms", num_stages=NUM_STAGES) as cluster:
        await cluster.generate(RequestCase(prompt=(1, 2, 3), max_tokens=5))
        await cluster.wait_drained()
        # The prompt and the first four tokens were computed, in bfloat16; LAST sends tokens.
        num_bytes = (3 + 4) * HIDDEN * 2
        expected = {("0", "transmit"), ("1", "receive"), ("1", "transmit"), ("2", "receive")}
        name = "stageline_stage_activation_io_bytes_total"
        scraped = await cluster.scrape_until(lambda scraped: scraped.get(name) == num_bytes * len(expected))
        for stage in stages(NUM_STAGES):
            for direction in ("receive", "transmit"):
                found = scraped.get(name, stage=stage, direction=direction)
                assert found == num_bytes * ((stage, direction) in expected)


@pytest.mark.full
async def test_a_stage_that_takes_twice_as_long_has_twice_the_busy_time() -> None:
    async with MetricsCluster("step=2ms", "step=4ms", "step=2ms", num_stages=NUM_STAGES) as cluster:
        before = await cluster.scrape_until(
            lambda scraped: all(
                scraped.has("stageline_stage_serving_time_seconds_total", stage=stage)
                for stage in stages(NUM_STAGES)
            )
        )
        await cluster.generate_all(mixed_cases(NUM_REQUESTS, max_tokens=40))
        num_steps = (await cluster.scrape()).get("stageline_step_duration_seconds_count")
        after = await cluster.scrape_until(
            lambda scraped: all(
                scraped.get("stageline_stage_step_duration_seconds_count", stage=stage) >= num_steps
                for stage in stages(NUM_STAGES)
            )
        )

    def spent(what: str, stage: str) -> float:
        name = f"stageline_stage_{what}_time_seconds_total"
        return after.get(name, stage=stage) - before.get(name, stage=stage)

    busy = [spent("busy", stage) / spent("serving", stage) for stage in stages(NUM_STAGES)]
    waiting = [spent("wait", stage) / spent("serving", stage) for stage in stages(NUM_STAGES)]
    assert busy.index(max(busy)) == 1
    assert waiting.index(min(waiting)) == 1
    steps = [spent("busy", stage) for stage in stages(NUM_STAGES)]
    # Mock stages take exactly their configured time.
    assert abs(steps[1] / steps[0] - 2) < 0.1
    assert abs(steps[1] / steps[2] - 2) < 0.1
    for stage in stages(NUM_STAGES):
        assert spent("busy", stage) + spent("wait", stage) <= spent("serving", stage) * 1.001
    # The coordinator measures the same without the workers.
    name = "stageline_step_part_time_seconds_total"
    computed = [after.get(name, stage=stage, part="compute") for stage in stages(NUM_STAGES)]
    assert computed.index(max(computed)) == 1


async def test_prefix_hits_are_counted_across_epochs() -> None:
    prompt = tuple(range(40))  # five blocks of eight
    async with MetricsCluster("step=1ms", num_stages=2) as cluster:
        for _ in range(2):
            await cluster.generate(RequestCase(prompt=prompt, max_tokens=2))
        cluster.server.controller.fail_epoch(cluster.epoch, "the test wants another")
        await cluster.generate(RequestCase(prompt=prompt, max_tokens=2))
        scraped = await cluster.scrape_until(
            lambda scraped: scraped.get("stageline_kv_prefix_wanted_total") >= 2 * 3 * 5
        )
        assert scraped.get("stageline_prompt_cached_tokens_total") == 39
        for stage in stages(2):
            # The first request hits nothing, the second everything, and an epoch begins with empty pools.
            hits = scraped.get("stageline_kv_prefix_hits_total", stage=stage)
            wanted = scraped.get("stageline_kv_prefix_wanted_total", stage=stage)
            assert 4 <= hits <= 5 < wanted
        assert scraped.get("stageline_recoveries_total", reason="broken") == 1
        assert scraped.get("stageline_recoveries_total") == 1
        assert scraped.get("stageline_recovery_duration_seconds_count", reason="broken") == 1


async def test_requests_are_counted_by_state_and_outcome() -> None:
    async with MetricsCluster("step=2ms", num_stages=2) as cluster:
        task = asyncio.create_task(cluster.generate(case := RequestCase(prompt=(1, 2), max_tokens=4000)))
        await cluster.scrape_until(
            lambda scraped: scraped.get("stageline_request_active", state="decode") == 1
        )
        in_flight = await cluster.scrape_until(lambda scraped: scraped.get("stageline_steps_in_flight") > 0)
        assert in_flight.get("stageline_request_duration_seconds_count") == 0
        cluster.server.engine.cancel(case.request_id)
        assert isinstance((await task).error, Cancelled)
        scraped = await cluster.scrape()
        assert scraped.get("stageline_request_active") == 0
        assert scraped.get("stageline_request_ended_total", outcome="cancelled") == 1
        assert scraped.get("stageline_request_duration_seconds_count", outcome="cancelled") == 1


async def test_a_lost_worker_counts_as_a_recovery() -> None:
    async with MetricsCluster("step=1ms", num_stages=2, num_workers=3) as cluster:
        await cluster.scrape_until(
            lambda scraped: all(
                scraped.has("stageline_process_resident_memory_bytes", worker=f"w{index}")
                for index in range(3)
            )
        )
        async with cluster.generating([RequestCase(prompt=(1, 2, 3), max_tokens=200)]) as answers:
            await cluster.scrape_until(lambda _: len(answers[0].tokens) > 5)
            lost = cluster.server.controller.state.stage_workers[1].identity.name
            await cluster.workers[lost].stop()
        assert answers[0].succeeded
        scraped = await cluster.scrape()
        assert scraped.get("stageline_recoveries_total") == 1
        assert scraped.get("stageline_recovery_duration_seconds_count") == 1
        assert scraped.get("stageline_recoveries_total", reason="death") == 1
        # Its last metrics are kept for a while.
        assert scraped.has("stageline_process_resident_memory_bytes", worker=lost)


async def test_open_metrics_of_a_whole_cluster_is_valid() -> None:
    async with MetricsCluster("step=1ms", num_stages=2) as cluster:
        await cluster.generate_all(mixed_cases(4))
        await cluster.scrape_until(lambda scraped: scraped.has("stageline_stage_busy_time_seconds_total"))
        text, content_type = await cluster.server.metrics.metrics_text("application/openmetrics-text")
        assert content_type.startswith("application/openmetrics-text")
        assert len(list(text_string_to_metric_families(text.decode()))) > 25


async def test_a_cluster_without_workers_shows_that_it_does_not_serve() -> None:
    async with MetricsCluster("step=1ms", num_stages=2, num_workers=1, waits=False) as cluster:
        name = "stageline_cluster_serving_ratio"
        assert (await cluster.scrape()).has(name)
        assert (await cluster.scrape()).get(name) == 0
        await cluster.start_worker("w1")
        await cluster.scrape_until(lambda scraped: scraped.get(name) == 1)
