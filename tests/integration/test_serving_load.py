"""A load driven against a real cluster."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from stageline.load.driver import Driver, LoadConfig, PreparedLoad, WarmupFailed, prepared
from stageline.load.plan import Arrivals, LoadSpec, make_plan, parse_lengths
from stageline.load.results import INTERRUPTED, OK, Limits, LoadRun, Summary, summarize
from tests.integration.cluster import DEADLINE_S, Cluster

SPEC = LoadSpec(
    arrivals=Arrivals(rate_per_s=100),
    num_requests=20,
    duration_s=None,
    prompt_lengths=parse_lengths("uniform:5-40"),
    output_lengths=parse_lengths("uniform:1-12"),
)


@asynccontextmanager
async def load_on(
    cluster: Cluster, spec: LoadSpec, *, max_concurrency: int | None = None, **settings: float
) -> AsyncIterator[PreparedLoad]:
    config = LoadConfig(
        coordinator=cluster.address,
        spec=spec,
        limits=Limits(),
        max_concurrency=max_concurrency,
        num_warmups=int(settings.get("num_warmups", 0)),
        timeout_s=settings.get("timeout_s", DEADLINE_S),
        temperature=settings.get("temperature", 0.0),
    )
    async with prepared(config) as load:
        yield load


async def drive(cluster: Cluster, spec: LoadSpec, **settings: float) -> LoadRun:
    async with load_on(cluster, spec, **settings) as load:
        return await load.driver().run(make_plan(spec))


def numbers_of(run: LoadRun) -> Summary:
    return summarize(run, Limits())


async def test_every_request_of_a_load_has_its_planned_length() -> None:
    async with Cluster(None, layers=(6, 6)) as cluster:
        async with load_on(cluster, SPEC, temperature=1.0, num_warmups=3) as load:
            load.check_fits(make_plan(SPEC))
            await load.warm_up()
            run = await load.driver().run(make_plan(SPEC))
        status = await cluster.wait_drained()
    assert [record.status for record in run.records] == [OK] * 20
    assert [record.planned for record in run.records] == list(make_plan(SPEC))
    summary = numbers_of(run)
    assert summary.output_tokens == sum(request.output_tokens for request in make_plan(SPEC))
    assert summary.ttft_s is not None
    assert 0 < summary.ttft_s.p50 <= summary.ttft_s.max < run.duration_s
    for record in run.records:
        assert record.message_times_s == sorted(record.message_times_s)
        assert record.ended_s is not None
        assert record.planned.time_s <= (record.sent_s or 0) < record.message_times_s[0] <= record.ended_s
    assert status.requests.finished == 23, "warm-up requests are excluded"


@pytest.mark.full
async def test_prompts_share_their_group_prefix_and_nothing_of_a_previous_run(tiny_llama: Path) -> None:
    alone = replace(SPEC, arrivals=Arrivals(rate_per_s=math.inf))
    shared = replace(alone, shared_prefix_tokens=16, num_prefix_groups=2)
    async with Cluster(tiny_llama, layers=(2, 1), max_kv_tokens=8192) as cluster:
        for _ in range(2):
            assert numbers_of(await drive(cluster, alone)).cached_tokens == 0
        async with load_on(cluster, shared, max_concurrency=1, num_warmups=5) as load:
            await load.warm_up()
            run = await load.driver().run(make_plan(shared))
    # Sequential requests hit the two blocks of their group, except the first of each group.
    assert numbers_of(run).cached_tokens == 16 * (20 - 2)


@pytest.mark.full
async def test_the_concurrency_limit_holds_on_the_server(tiny_llama: Path) -> None:
    spec = replace(SPEC, arrivals=Arrivals(rate_per_s=math.inf))
    async with (
        Cluster(tiny_llama, layers=(2, 1), max_client_requests=3) as cluster,
        load_on(cluster, spec, max_concurrency=3) as load,
    ):
        summary = numbers_of(await load.driver().run(make_plan(spec)))
    assert (summary.num_completed, summary.max_concurrency) == (20, 3)


@pytest.mark.full
async def test_rejections_are_counted_by_status(tiny_llama: Path) -> None:
    spec = replace(SPEC, arrivals=Arrivals(rate_per_s=math.inf), output_lengths=parse_lengths("60"))
    async with Cluster(tiny_llama, layers=(2, 1), max_client_requests=5) as cluster:
        run = await drive(cluster, spec)
        summary = numbers_of(run)
    # No request ends before the last one is sent.
    assert summary.failures == {"RESOURCE_EXHAUSTED": 15}
    assert (summary.num_completed, summary.num_failed) == (5, 15)
    refused = [record for record in run.records if record.has_failed]
    assert all("5" in record.error and not record.message_times_s for record in refused)


async def test_deadlines_are_counted_as_failures(tiny_llama: Path) -> None:
    async with Cluster(tiny_llama, layers=(2, 1), num_workers=0, waits=False) as cluster:
        run = await drive(cluster, replace(SPEC, num_requests=2), timeout_s=0.2)
    assert numbers_of(run).failures == {"DEADLINE_EXCEEDED": 2}


async def test_a_failed_warm_up_reports_the_reason(tiny_llama: Path) -> None:
    async with (
        Cluster(tiny_llama, layers=(2, 1)) as cluster,
        load_on(cluster, SPEC, num_warmups=2, timeout_s=1e-6) as load,
    ):
        with pytest.raises(WarmupFailed, match="2 of 2 warm-up requests failed: DEADLINE_EXCEEDED"):
            await load.warm_up()


async def test_a_load_that_cannot_fit_is_rejected_before_sending(tiny_llama: Path) -> None:
    async with (
        Cluster(tiny_llama, layers=(2, 1), max_kv_tokens=64) as cluster,
        load_on(cluster, SPEC, num_warmups=1) as load,
    ):
        too_long = make_plan(
            replace(SPEC, prompt_lengths=parse_lengths("60"), output_lengths=parse_lengths("5"))
        )
        with pytest.raises(ValueError, match="together 65, more than the 64 that fit; 20 of 20"):
            load.check_fits(too_long)


async def test_an_interruption_frees_every_page(tiny_llama: Path) -> None:
    spec = replace(SPEC, arrivals=Arrivals(rate_per_s=math.inf), output_lengths=parse_lengths("80"))
    async with Cluster(tiny_llama, layers=(2, 1), max_kv_tokens=8192) as cluster:
        async with load_on(cluster, spec) as load:
            driver = load.driver()
            running = asyncio.create_task(driver.run(make_plan(spec)))
            await _until_tokens(driver)
            driver.interrupt()
            run = await running
        status = await cluster.wait_drained()
    assert run.is_interrupted
    assert {record.status for record in run.records} == {INTERRUPTED}
    assert numbers_of(run).output_tokens > 0
    # Some never reached the server: they were cancelled on the way.
    assert 0 < status.requests.cancelled <= 20
    assert status.requests.finished == 0


async def _until_tokens(driver: Driver) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while driver.tally.num_due < 20 or not driver.tally.output_tokens:
            await asyncio.sleep(0)
