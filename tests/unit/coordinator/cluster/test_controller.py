"""Overlapping streams of a worker: messages of the old one do not count for the new one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.cluster.controller import Controller
from coordinator.cluster.membership import WorkerState
from coordinator.cluster.step_limits import ServingSettings
from coordinator.engine.admission import AdmissionLimits
from coordinator.engine.engine import Engine
from coordinator.recovery.policy import DEFAULT_POLICY
from tests.unit.coordinator.api.small_requests import served_model
from tests.unit.coordinator.cluster.cluster_driver import ClusterDriver, identity_of
from wire.errors import NameInUse
from wire.ids import new_incarnation


def new_controller(*, num_stages: int) -> Controller:
    return Controller(
        ClusterDriver(num_stages=num_stages).state,
        Engine(AdmissionLimits(queue_size=4), policy=DEFAULT_POLICY),
        served_model(),
        incarnation=new_incarnation(),
        policy=DEFAULT_POLICY,
        settings=ServingSettings(),
        on_serving=lambda is_serving: None,
    )


async def test_a_worker_may_reconnect_before_its_broken_stream_is_detected() -> None:
    """Same process and incarnation: the end of the old stream is not the loss of the worker."""
    controller = new_controller(num_stages=1)
    old = controller.join(identity_of("a"))
    new = controller.join(identity_of("a"), old.rejoin_secret)
    controller.leave(old, "its stream broke")
    assert controller.connections == {"a": new}
    assert controller.state.workers["a"].state is WorkerState.LOADING
    controller.leave(new, "its stream broke")
    assert controller.connections == {}
    assert list(controller.state.workers) == []


async def test_a_process_keeps_its_name_at_another_address() -> None:
    controller = new_controller(num_stages=1)
    old = controller.join(identity_of("a"))
    moved = replace(identity_of("a"), incarnation=new_incarnation(), address="elsewhere:1")
    new = controller.join(moved, old.rejoin_secret)
    assert controller.connections == {"a": new}
    assert controller.state.workers["a"].identity is moved


async def test_a_stream_ends_once() -> None:
    controller = new_controller(num_stages=2)
    connection = controller.join(identity_of("a"))
    for _ in range(2):
        controller.leave(connection, "its stream broke")
    assert list(controller.state.workers) == []


@pytest.mark.parametrize("secret", [b"", b"\0" * 32])
async def test_the_name_of_a_live_worker_is_taken_at_any_address(secret: bytes) -> None:
    controller = new_controller(num_stages=1)
    worker = controller.join(identity_of("a"))
    stranger = replace(identity_of("a"), incarnation=new_incarnation())
    with pytest.raises(NameInUse, match="the name 'a' is in use by the worker at"):
        controller.join(stranger, secret)
    assert controller.connections == {"a": worker}
    assert controller.state.workers["a"].identity is worker.identity
    controller.leave(worker, "its stream broke")
    assert controller.join(stranger, secret).identity is stranger
