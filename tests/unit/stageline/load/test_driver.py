"""The driver sends each request when it is due, independent of the others."""

import asyncio
from collections.abc import Sequence

import pytest

from stageline import GenerateOutput, Overloaded, Usage
from stageline.client.output import FinishReason
from stageline.load.driver import Driver, Outputs
from stageline.load.plan import PlannedRequest
from stageline.load.results import INTERRUPTED, OK, LoadRun
from tests.unit.stageline.load.runs import planned

DEADLINE_S = 20.0


class FakeCluster:
    """Serves a request once released: one token per message, the remaining ones in the last."""

    def __init__(self, *, num_tokens: int = 3) -> None:
        self.started: list[int] = []
        self.left: list[int] = []
        self.released: dict[int, asyncio.Event] = {}
        self.changed = asyncio.Event()
        self._num_tokens = num_tokens

    def prepare(self, request: PlannedRequest) -> Outputs:
        return self._outputs(request.index)

    def release(self, *indices: int) -> None:
        for index in indices:
            self._release_of(index).set()

    async def until_begun(self, num_requests: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.started) < num_requests:
                self.changed.clear()
                await self.changed.wait()

    async def _outputs(self, index: int) -> Outputs:
        self.started.append(index)
        self.changed.set()
        try:
            yield _output(0, 1)
            await self._release_of(index).wait()
            yield _output(1, 0)
            if index == 13:
                raise Overloaded("the queue is full")
            yield _output(1, self._num_tokens - 1, is_last=True)
        finally:
            self.left.append(index)

    def _release_of(self, index: int) -> asyncio.Event:
        return self.released.setdefault(index, asyncio.Event())


def _output(first: int, num_tokens: int, *, is_last: bool = False) -> GenerateOutput:
    usage = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4, seed=0, restarts=1)
    return GenerateOutput(
        request_id="x",
        choice=0,
        token_ids=list(range(num_tokens)),
        text="",
        first_token_index=first,
        text_offset=0,
        finish_reason=FinishReason.LENGTH if is_last else None,
        usage=usage if is_last else None,
    )


async def drive(driver: Driver, plan: Sequence[PlannedRequest]) -> LoadRun:
    async with asyncio.timeout(DEADLINE_S):
        return await driver.run(plan)


async def test_a_hanging_request_does_not_delay_later_ones() -> None:
    cluster = FakeCluster()
    cluster.release(1, 2)
    driver = Driver(cluster.prepare)
    running = asyncio.create_task(drive(driver, [planned(i, due_s=i * 0.02) for i in range(3)]))
    await cluster.until_begun(3)
    cluster.release(0)
    run = await running
    assert [record.status for record in run.records] == [OK] * 3
    assert run.records[0].e2e_s > run.records[2].ttft_s + 0.04
    assert driver.tally.num_completed == 3
    assert driver.tally.output_tokens == 9


async def test_nothing_is_sent_before_it_is_due_and_lag_counts_from_then() -> None:
    cluster = FakeCluster()
    cluster.release(*range(10))
    plan = [planned(index, due_s=index * 0.011) for index in range(10)]
    run = await drive(Driver(cluster.prepare), plan)
    for record, request in zip(run.records, plan, strict=True):
        assert record.planned == request
        assert record.sent_s is not None
        assert record.sent_s >= request.time_s
        assert record.slot_wait_s == 0
        assert record.lag_s == record.sent_s - request.time_s
        assert record.message_tokens == [1, 2], "a message without tokens is no arrival"
        assert record.cached_tokens == 4
        assert record.restarts == 1


async def test_beyond_the_limit_requests_wait_in_order_and_their_latency_counts_it() -> None:
    cluster = FakeCluster()
    driver = Driver(cluster.prepare, max_concurrency=2)
    running = asyncio.create_task(drive(driver, [planned(index) for index in range(4)]))
    await cluster.until_begun(2)
    assert (cluster.started, driver.tally.num_running) == ([0, 1], 2)
    while driver.tally.num_due < 4:
        await asyncio.sleep(0)
    assert cluster.started == [0, 1]
    cluster.release(1)
    await cluster.until_begun(3)
    assert cluster.started == [0, 1, 2]
    cluster.release(0, 2, 3)
    last = (await running).records[3]
    assert cluster.started == [0, 1, 2, 3]
    assert last.slot_wait_s > 0
    assert last.ttft_s >= last.slot_wait_s
    assert last.lag_s is not None
    assert last.lag_s + last.slot_wait_s == pytest.approx(last.sent_s or 0)


async def test_failures_have_their_status_and_end_no_other_request() -> None:
    cluster = FakeCluster()
    cluster.release(12, 13, 14)
    driver = Driver(cluster.prepare)
    run = await drive(driver, [planned(index) for index in (12, 13, 14)])
    assert [record.status for record in run.records] == [OK, "RESOURCE_EXHAUSTED", OK]
    assert [record.reason for record in run.records] == ["", "OVERLOADED", ""]
    assert run.records[1].error == "the queue is full"
    assert (driver.tally.num_failed, driver.tally.num_running) == (1, 0)


async def test_an_output_of_another_length_than_asked_for_is_a_failure() -> None:
    cluster = FakeCluster(num_tokens=2)
    cluster.release(0)
    (record,) = (await drive(Driver(cluster.prepare), [planned(0)])).records
    assert (record.status, record.error) == ("INTERNAL", "received 2 tokens, expected 3")


async def test_an_interruption_stops_all_requests_and_keeps_measurements() -> None:
    cluster = FakeCluster()
    cluster.release(0)
    driver = Driver(cluster.prepare, max_concurrency=2)
    plan = [*map(planned, range(4)), planned(4, due_s=3600)]
    running = asyncio.create_task(drive(driver, plan))
    await cluster.until_begun(3)
    driver.interrupt()
    run = await running
    assert run.is_interrupted
    assert [record.status for record in run.records] == [OK, *[INTERRUPTED] * 3]
    assert run.records[3].sent_s is None
    assert sorted(cluster.left) == [0, 1, 2]
    assert (run.num_planned, driver.tally.num_running) == (5, 0)


async def test_an_interruption_before_the_begin_sends_nothing() -> None:
    cluster = FakeCluster()
    driver = Driver(cluster.prepare)
    driver.interrupt()
    run = await drive(driver, [planned(0)])
    assert run.is_interrupted
    assert (run.records, cluster.started) == ((), [])


async def test_a_load_longer_than_the_prepared_part_is_sent_whole() -> None:
    cluster = FakeCluster()
    cluster.release(*range(14, 714))
    run = await drive(Driver(cluster.prepare), [planned(index) for index in range(14, 714)])
    assert cluster.started == list(range(14, 714))
    assert all(record.is_complete for record in run.records)


async def test_cancelling_the_driver_cancels_the_load() -> None:
    cluster = FakeCluster()
    running = asyncio.create_task(Driver(cluster.prepare).run([planned(0)]))
    await cluster.until_begun(1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert cluster.left == [0]
