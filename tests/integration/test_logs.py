"""Logs of a cluster: each cluster event once, nothing about served requests."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from stageline.client.errors import InvalidRequest, ServerError, StagelineError
from stageline_rpc.v1 import cluster_pb2
from telemetry.logs import PACKAGES
from tests.integration.alterations import flip_byte
from tests.integration.calls import until
from tests.integration.cluster import TEST_POLICY, TOKEN
from tests.integration.request_cases import mixed_cases
from tests.integration.test_mock_cluster import check, has_tokens, mock_cluster
from wire.frames import Frame
from wire.ids import id_text, new_request_id


class Lines:
    """Log records of Stageline's packages, from debug on."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def all(self) -> list[logging.LogRecord]:
        return [record for record in self._caplog.records if record.name.partition(".")[0] in PACKAGES]

    def at_least(self, level: int, *, of: str = "") -> list[logging.LogRecord]:
        """Records of the packages that begin with `of`."""
        return [record for record in self.all() if record.levelno >= level and record.name.startswith(of)]

    def messages(self, *, of: str) -> list[str]:
        return [record.getMessage() for record in self.at_least(logging.INFO, of=of)]

    def the(self, pattern: str) -> Any:
        """The only record that matches; its fields are attributes."""
        (found,) = (record for record in self.all() if re.match(pattern, record.getMessage()))
        return found

    def clear(self) -> None:
        self._caplog.clear()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    for package in PACKAGES:
        caplog.set_level(logging.DEBUG, logger=package)
    return Lines(caplog)


async def test_startup_logs_each_event_once(lines: Lines) -> None:
    async with mock_cluster(3):
        messages = sorted(
            re.sub(r"127\.0\.0\.1:\d+|\d+ ms", "...", message) for message in lines.messages(of="coord")
        )
    assert messages == [
        "plan 1: layers 0-1 on w0, 2-3 on w1, 4-5 on w2",
        "serving: epoch 1, 3 stages",
        "worker w0 is ready (...)",
        "worker w0 joined from ... (mock)",
        "worker w1 is ready (...)",
        "worker w1 joined from ... (mock)",
        "worker w2 is ready (...)",
        "worker w2 joined from ... (mock)",
    ]
    assert [lines.the(f"worker {name} joined").worker for name in ("w0", "w1", "w2")] == ["w0", "w1", "w2"]
    assert lines.the("serving: ").epoch == 1
    assert not hasattr(lines.the("serving: "), "duration_s")


@pytest.mark.full
async def test_served_requests_log_at_debug_and_steps_not_at_all(lines: Lines) -> None:
    num_lines = []
    async with mock_cluster(3) as cluster:
        for max_tokens in (5, 150):
            lines.clear()
            check(await cluster.generate_all(mixed_cases(8, max_tokens=max_tokens)))
            await cluster.wait_drained()
            assert lines.at_least(logging.INFO) == []
            num_lines.append(len(lines.all()))
    assert num_lines == [16, 16]  # accepted and finished


async def test_rejected_requests_log_at_debug(lines: Lines) -> None:
    async with mock_cluster(2) as cluster:
        lines.clear()
        request_id = id_text(new_request_id())
        with pytest.raises(InvalidRequest):
            await cluster.client.complete([1, 2, 3], max_tokens=4, regex="a+", request_id=request_id)
        assert lines.at_least(logging.INFO) == []
        refused = lines.the("/stageline.v1.Inference/Generate ends as INVALID_ARGUMENT: regex: structured")
        assert refused.request_id == request_id


async def test_cancelled_requests_log_at_debug(lines: Lines) -> None:
    async with mock_cluster(2) as cluster:
        lines.clear()
        request_id = id_text(new_request_id())
        async for _ in cluster.client.generate([1, 2, 3], max_tokens=3000, request_id=request_id):
            await cluster.client.cancel(request_id)
            break
        await cluster.wait_drained()
        assert lines.at_least(logging.INFO) == []
        assert lines.the(f"request {request_id} ended: RequestCancelled: ").request_id == request_id


async def test_a_failed_request_logs_a_warning_with_its_id(lines: Lines) -> None:
    async with mock_cluster(3) as cluster:
        lines.clear()
        request_id = id_text(new_request_id())
        with pytest.raises(ServerError):
            await cluster.client.complete(
                [1, 2, 3],
                max_tokens=4,
                allowed_token_ids=[5],
                bad_word_ids=[[5]],
                request_id=request_id,
            )
        (failed,) = lines.at_least(logging.INFO)
        assert failed.levelno == logging.WARNING
        expected = (
            rf"request {request_id} failed: SliceFailed: stage 2, step \d+: no token is allowed at position 3"
        )
        assert lines.the(expected) is failed
        assert lines.the(expected).request_id == request_id


async def test_a_request_without_a_pipeline_logs_a_warning_with_its_id(lines: Lines) -> None:
    policy = replace(TEST_POLICY, recovery_timeout_s=0.05)
    async with mock_cluster(2, num_workers=1, waits=False, policy=policy) as cluster:
        request_id = id_text(new_request_id())
        with pytest.raises(StagelineError):
            await cluster.client.complete([1, 2, 3], max_tokens=4, request_id=request_id, timeout_s=5)
        not_taken = lines.the(f"rejected request {request_id}: no pipeline within 0.05 s: ")
        assert (not_taken.levelno, not_taken.request_id) == (logging.WARNING, request_id)


async def test_a_step_fault_logs_epoch_step_stage_and_requests(lines: Lines) -> None:
    async with mock_cluster(3, hop_proxies=[1]) as cluster:
        cases = mixed_cases(4, max_tokens=40)
        async with cluster.generating(cases) as answers:
            await until(partial(has_tokens, answers, 3))
            injection = cluster.proxy(1).inject(flip_byte, when=_has_slices)
        check(answers)
        stage, coordinator = lines.the("epoch 1 refused: "), lines.the("step fault: ")
        for line in (stage, coordinator):
            assert (line.levelno, line.epoch, line.stage) == (logging.ERROR, 1, 1)
            assert [line.step] == [step.step_id for step in injection.steps]
        carried = {
            id_text(step_slice.sequence.request_id) for step in injection.steps for step_slice in step.slices
        }
        assert set(coordinator.request_ids) == carried
        assert coordinator.worker == "w1"
        over, again = lines.the("epoch 1 is over: stage 1, step "), lines.the(r"serving: epoch 2, .*, again")
        assert (over.levelno, over.epoch) == (logging.WARNING, 1)
        assert (again.levelno, again.epoch) == (logging.INFO, 2)
        assert again.duration_s >= 0
        assert lines.messages(of="coordinator").count(over.getMessage()) == 1


async def test_a_lost_worker_and_the_pause_are_logged(lines: Lines) -> None:
    async with mock_cluster(2) as cluster:
        lines.clear()
        async with cluster.generating(mixed_cases(3, max_tokens=60)) as answers:
            await until(partial(has_tokens, answers, 5))
            await cluster.workers["w1"].stop()
            await cluster.start_worker("w1")
        check(answers)
        left, over = lines.the("worker w1 left: "), lines.the("epoch 1 is over: ")
        again = lines.the(r"serving: epoch \d+, 2 stages, again after \d+\.\d\d s")
        assert left.worker == "w1"
        assert (over.levelno, over.epoch) == (logging.WARNING, 1)
        assert again.epoch == cluster.epoch
        assert again.duration_s > 0


async def test_a_drain_logs_no_warning(lines: Lines) -> None:
    async with mock_cluster(2, num_workers=3) as cluster:
        await cluster.wait_status(lambda status: len(status.workers) == 3)
        plan = cluster.server.controller.state.plan
        assert plan is not None
        name = plan.stages[0].worker
        lines.clear()
        await cluster.client.drain(name, token=TOKEN)
        await cluster.wait_state(cluster_pb2.CLUSTER_STATE_SERVING)
        assert lines.the(f"worker {name} drains, requested by an operator").worker == name
        assert lines.the(f"worker {name} left: ").worker == name
        assert lines.the(f"epoch 1 is over: worker {name} is drained").levelno == logging.INFO
        assert lines.at_least(logging.WARNING) == []


def _has_slices(frame: Frame) -> bool:
    return bool(frame.step.slices)
