"""What a request waits for, on standard error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from certificates.identity import Role
from stageline.cli import waiting
from stageline.cli.waiting import waiting_text, with_notices
from stageline.client.client import Client
from stageline.client.output import GenerateOutput
from stageline_rpc.v1 import cluster_pb2
from tests import fake_stageline
from tests.issued import Certificates


async def test_a_request_says_once_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.05)
    monkeypatch.setattr(waiting, "_BETWEEN_S", 0.01)
    server, address, inference = await fake_stageline.serve("127.0.0.1:0", 2)
    inference.may_answer.clear()
    try:
        async with Client(address) as client:
            outputs = with_notices(client, client.generate("hello", max_tokens=2))
            first = asyncio.ensure_future(anext(outputs))
            while not (said := capsys.readouterr().err):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            inference.may_answer.set()
            assert (await first).text == " 0"
            assert [output.text async for output in outputs] == [" 1"]
    finally:
        await server.stop(None)
    assert said == (
        "(waiting: 0 of 2 workers joined; start workers with `stageline worker --coordinator HOST:PORT`)\n"
    )
    assert capsys.readouterr().err == ""


async def test_a_request_that_is_answered_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.05)

    async def outputs() -> AsyncGenerator[GenerateOutput, None]:
        yield GenerateOutput.__new__(GenerateOutput)
        await asyncio.sleep(0.1)

    async with Client("127.0.0.1:1") as client:
        assert len([output async for output in with_notices(client, outputs())]) == 1
    assert capsys.readouterr().err == ""


async def test_a_client_that_may_not_see_the_status_does_not_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The coordinator would count its call as a denied one."""
    monkeypatch.setattr(waiting, "FIRST_NOTICE_S", 0.0)
    tls_dir = Certificates(tmp_path).of("you", Role.CLIENT)

    async def outputs() -> AsyncGenerator[GenerateOutput, None]:
        await asyncio.sleep(0.1)
        yield GenerateOutput.__new__(GenerateOutput)

    async with Client("127.0.0.1:1", tls_dir=tls_dir) as client:
        assert len([output async for output in with_notices(client, outputs(), tls_dir=tls_dir)]) == 1
    assert capsys.readouterr().err == "(waiting; a certificate of role operator shows for what)\n"


def test_a_serving_cluster_tells_of_its_queue() -> None:
    status = cluster_pb2.GetStatusResponse(
        state=cluster_pb2.CLUSTER_STATE_SERVING,
        requests=cluster_pb2.RequestCounts(waiting=7, prefill=1, decode=3),
    )
    assert waiting_text(status) == "the cluster serves, 4 sequences run and 7 wait"
    blocked = cluster_pb2.GetStatusResponse(state=cluster_pb2.CLUSTER_STATE_BLOCKED, detail="no plan fits")
    assert waiting_text(blocked) == "no plan fits"
