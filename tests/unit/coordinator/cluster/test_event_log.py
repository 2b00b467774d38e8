"""Lines in the coordinator's log about plans."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from checkpoint import DType
from coordinator.cluster.actions import AssignStage
from coordinator.cluster.event_log import EventLog
from coordinator.planner.plan import Plan
from coordinator.planner.planner import make_plan
from tests.unit.coordinator.cluster.cluster_driver import identity_of
from tests.unit.coordinator.planner.small_models import SMALL_STEPS, llama, workers


def assign(log: EventLog, plan: Plan) -> None:
    for stage in plan.stages:
        log.assigned(AssignStage(identity_of(stage.worker), 3, plan, stage))


def test_a_plan_with_too_few_states_is_a_warning_with_the_numbers(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    plan = make_plan(llama(), DType.BF16, workers(1 << 20, 1 << 20), limits=SMALL_STEPS, block_size=4)
    for num_states in (0, plan.num_in_flight):
        assign(EventLog(), replace(plan, num_states=num_states))
    assert caplog.messages == []
    assign(EventLog(), replace(plan, num_states=plan.num_in_flight - 1))
    (message,) = caplog.messages
    assert message.startswith("plan 3: memory for 5 recurrent states, 6 sequences are in flight at most")
