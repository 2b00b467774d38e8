"""The coordinator's stream to FIRST, and its cleanup."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from coordinator.cluster.pipeline import LinkBroken, PipelineLink
from coordinator.recovery.policy import DEFAULT_POLICY
from stageline_rpc.internal.v1 import forward_pb2
from wire.stage_calls import Messages, forward_handler

DEADLINE_S = 10.0


class First:
    """Accepts streams until `ends` is set, then aborts them."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.accepts = True
        self.num_overloaded = 0

    async def forward(self, requests: Messages, context: Any) -> AsyncIterator[forward_pb2.ForwardResponse]:
        assert forward_pb2.ForwardRequest.FromString(await anext(requests)).HasField("hello")
        if self.num_overloaded:
            self.num_overloaded -= 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams wait")
        if not self.accepts:
            await context.abort(grpc.StatusCode.ABORTED, "not now")
        yield forward_pb2.ForwardResponse(accepted=forward_pb2.HopAccepted())
        await self.ends.wait()
        await context.abort(grpc.StatusCode.ABORTED, "the epoch is over")


@pytest.fixture
async def first() -> AsyncIterator[tuple[First, str]]:
    stage, server = First(), grpc.aio.server()
    server.add_generic_rpc_handlers((forward_handler(stage.forward),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield stage, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_ended_links_leave_no_task(first: tuple[First, str], caplog: pytest.LogCaptureFixture) -> None:
    """Ended by this side, by the other side, and before acceptance."""
    stage, address = first
    before = asyncio.all_tasks()
    for ending in ("here", "there", "refused"):
        stage.accepts = ending != "refused"
        broke = asyncio.get_running_loop().create_future()
        link = PipelineLink(
            address, forward_pb2.HopHello(), broke.set_result, timeout_s=DEFAULT_POLICY.connect_timeout_s
        )
        if ending == "refused":
            with pytest.raises(LinkBroken, match="not now"):
                await link.open()
        else:
            await link.open()
        if ending == "there":
            stage.ends.set()
            assert "the epoch is over" in await asyncio.wait_for(broke, DEADLINE_S)
        await link.close()
        del link
        gc.collect()
    # grpc's own tasks of a call end a moment after it.
    async with asyncio.timeout(DEADLINE_S):
        while any("_consume_request_iterator" in repr(task) for task in asyncio.all_tasks() - before):
            await asyncio.sleep(0.01)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_a_stream_rejected_for_too_many_waiting_streams_is_retried(first: tuple[First, str]) -> None:
    stage, address = first
    stage.num_overloaded = 2
    link = PipelineLink(
        address, forward_pb2.HopHello(), lambda reason: None, timeout_s=DEFAULT_POLICY.connect_timeout_s
    )
    await link.open()
    await link.close()
    assert stage.num_overloaded == 0
