"""Activity of a pipeline of mock stages over HTTP and gRPC."""

from __future__ import annotations

import asyncio
from functools import partial
from io import StringIO
from typing import Any

from httpx2 import AsyncClient
from rich.console import Console

from stageline.cli.top import TopFrame, top_view
from stageline.client.errors import Cancelled
from stageline_rpc.v1 import telemetry_pb2
from tests.integration.calls import until
from tests.integration.cluster import DEADLINE_S, Cluster
from tests.integration.request_cases import mixed_cases
from tests.integration.test_mock_cluster import check, has_tokens, mock_cluster
from wire.ids import id_text

TOKEN = "0123456789abcdef"
SLOW_LAST = ("step=2ms", "step=2ms", "step=4ms")


def served(num_stages: int = 3, *times: str, **settings: Any) -> Cluster:
    return mock_cluster(num_stages, *times, http="127.0.0.1:0", token=TOKEN, **settings)


def url(cluster: Cluster, path: str) -> str:
    dashboard = cluster.server.dashboard
    assert dashboard is not None
    return dashboard.url + path


async def get(cluster: Cluster, path: str) -> Any:
    async with AsyncClient() as client:
        response = await client.get(url(cluster, path))
    assert response.status_code == 200, response.text
    return response.json()


async def post(cluster: Cluster, path: str) -> int:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with AsyncClient() as client:
        return (await client.post(url(cluster, path), headers=headers)).status_code


async def test_activity_accounts_for_every_token() -> None:
    async with served(3, *SLOW_LAST) as cluster:
        cases = mixed_cases(8, max_tokens=40, prompt_lengths=(1, 8, 23, 90))
        check(await cluster.generate_all(cases))
        await cluster.wait_drained()
        activity = await cluster.client.activity()
        assert sum(second.generated_tokens for second in activity.seconds) == 8 * 40
        prompt_tokens = sum(len(case.prompt) for case in cases)
        cached_tokens = (await cluster.client.status()).requests.cached_tokens
        assert sum(second.prefill_tokens for second in activity.seconds) == prompt_tokens - cached_tokens
        assert {request.request_id for request in activity.requests} == {
            id_text(case.request_id) for case in cases
        }
        assert {request.phase for request in activity.requests} == {telemetry_pb2.REQUEST_PHASE_FINISHED}
        assert activity.rates.first_token.count == 8
        assert activity.rates.inter_token.count == 8 * 39
        assert not activity.in_flight


async def test_the_status_has_the_lag_of_the_event_loop() -> None:
    async with served(1, "step=1ms") as cluster:
        status = await cluster.wait_status(lambda status: status.HasField("loop_lag"))
        p50_us, p99_us = (lag.ToMicroseconds() for lag in (status.loop_lag.p50, status.loop_lag.p99))
        assert 0 <= p50_us <= p99_us <= 1e6 * DEADLINE_S
        assert (await get(cluster, "api/status"))["loop_lag"].keys() == {"p50", "p99"}


async def test_stage_times_lie_within_their_step_and_do_not_overlap() -> None:
    async with served(3, "step=20ms", "step=20ms", "step=40ms") as cluster:
        check(await cluster.generate_all(mixed_cases(8, max_tokens=12)))
        activity = await cluster.client.activity()
        steps = [step for step in activity.steps if step.kind != telemetry_pb2.STEP_KIND_EMPTY]
        assert len(steps) > 12
        slack_us = 10_000  # a busy machine delays the messages that synchronise two clocks
        for stage in range(3):
            ends_us = 0
            for step in steps:
                begin_us, end_us = (
                    step.sent_us + offset_us for offset_us in step.computed_us[2 * stage : 2 * stage + 2]
                )
                assert step.sent_us <= begin_us + slack_us
                assert end_us <= step.answered_us + slack_us
                assert begin_us >= ends_us - slack_us
                ends_us = end_us


async def test_a_slow_stage_is_named_in_http_and_top() -> None:
    async with served(3, *SLOW_LAST) as cluster:
        check(await cluster.generate_all(mixed_cases(8, max_tokens=40)))
        over_http = await get(cluster, "api/activity")
        assert over_http["slowest_stage"] == 2
        assert over_http["summary"].startswith("Stage 2 (w2) is the slowest: ")
        frame = TopFrame(await cluster.client.status(), await cluster.client.activity())
        for width in (80, 120):
            console = Console(width=width, record=True, file=StringIO())
            console.print(top_view(frame, width=width))
            shown = console.export_text()
            assert "Stage 2 (w2) is the slowest: " in shown
            assert ">2    w2" in shown
            assert max(map(len, shown.splitlines())) <= width
            assert "…" not in shown


async def test_a_trace_has_all_stages_and_names_the_slow_one() -> None:
    async with served(3, *SLOW_LAST) as cluster:
        cases = mixed_cases(4, max_tokens=40)
        check(await cluster.generate_all(cases))
        wanted = {id_text(request.request_id) for request in cases}
        async with asyncio.timeout(DEADLINE_S):
            while {entry["request_id"] for entry in (await get(cluster, "api/traces"))["traces"]} != wanted:
                await asyncio.sleep(0.05)
            path = f"api/traces/{id_text(cases[0].request_id)}"
            while len((trace := await get(cluster, path))["stages"]) < 3 or not trace["slowest_stage"]:
                await asyncio.sleep(0.05)
        assert trace["slowest_stage"]["worker"] == "w2"
        assert {row["title"] for row in trace["rows"]} >= {"queue", "prefill", "decode", "stage 0", "stage 2"}
        assert trace["completion_tokens"] == 40


async def test_activity_shows_a_new_epoch_and_the_pause_before_it() -> None:
    async with served(3) as cluster:
        async with cluster.generating(mixed_cases(6, max_tokens=60)) as answers:
            await until(partial(has_tokens, answers, 3))
            await cluster.workers["w1"].stop()
            await cluster.start_worker("w1")
        check(answers)
        first, *_, last = (await get(cluster, "api/activity"))["epochs"]
        assert int(first["stopped_us"]) <= int(last["started_us"])
        assert last["stopped_us"] is None
        assert first["cause"] == "EPOCH_END_CAUSE_DEATH" and "w1" in first["detail"]
        assert (await get(cluster, "api/status"))["end_cause"] == "EPOCH_END_CAUSE_DEATH"


async def test_ready_follows_the_pipeline() -> None:
    async with served(2) as cluster:

        async def ready() -> int:
            async with AsyncClient() as client:
                return (await client.get(url(cluster, "readyz"))).status_code

        assert await ready() == 200
        await cluster.workers["w1"].stop()
        async with asyncio.timeout(DEADLINE_S):
            while await ready() != 503:
                await asyncio.sleep(0.01)


async def test_a_cancel_over_http_ends_the_request_for_its_client() -> None:
    async with served(3) as cluster:
        (case,) = mixed_cases(1, max_tokens=900)
        async with cluster.generating([case]) as answers:
            await until(partial(has_tokens, answers, 3))
            assert await post(cluster, f"api/requests/{id_text(case.request_id)}/cancel") == 200
        assert isinstance(answers[0].error, Cancelled)
        (request,) = (await get(cluster, "api/activity"))["requests"]
        assert request["phase"] == "REQUEST_PHASE_CANCELLED"
        assert request["error"] == "the request was cancelled"
        await cluster.wait_drained()


async def test_a_drain_over_http_removes_the_worker() -> None:
    async with served(2, num_workers=3) as cluster:
        await cluster.wait_status(lambda status: len(status.workers) == 3)
        assert await post(cluster, "api/workers/w0/drain") == 202
        await cluster.wait_status(lambda status: "w0" not in [worker.name for worker in status.workers])


async def test_without_http_there_is_no_server() -> None:
    async with mock_cluster(1) as cluster:
        assert cluster.server.dashboard is None
