"""Plans with matrices of quantised checkpoints as they are stored: only if all workers multiply by them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint import WeightFormat
from checkpoint.implementation import Implementation
from coordinator.cluster.actions import AssignStage
from coordinator.cluster.messages import encode_assign, encode_prefetch
from coordinator.config import CoordinatorConfig
from coordinator.model import ServedModel, open_model
from coordinator.planner.plan import DeviceKind, Plan, WorkerCapacity
from coordinator.planner.planner import plan_for
from stage_worker.assignment import decode_assignment, decode_prefetch
from stageline_rpc.internal.v1 import join_pb2
from tests.quantized import FORMATS, write_quantized

GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> CoordinatorConfig:
    write_quantized(tmp_path, FORMATS["gptq"])
    return CoordinatorConfig(model=tmp_path, num_stages=2)


def plan_on(config: CoordinatorConfig, *devices: DeviceKind, model: ServedModel | None = None) -> Plan:
    workers = [
        WorkerCapacity(name=f"w{number}", memory_bytes=GIB, device=device)
        for number, device in enumerate(devices)
    ]
    return plan_for(config, model or open_model(config), workers)


IN_PLACE = DeviceKind.GPU_IN_PLACE


@pytest.mark.parametrize(
    ("devices", "holds"),
    [
        ((IN_PLACE, IN_PLACE), True),
        ((IN_PLACE, DeviceKind.GPU), False),
        ((DeviceKind.HOST, IN_PLACE), False),
        ((DeviceKind.HOST, DeviceKind.HOST), False),
    ],
)
def test_a_plan_holds_stored_weights_if_all_workers_do(
    devices: tuple[DeviceKind, ...], holds: bool, config: CoordinatorConfig
) -> None:
    plan, unpacked = (plan_on(config, *found) for found in (devices, (DeviceKind.HOST, DeviceKind.HOST)))
    assert plan.holds_stored is holds
    saved = unpacked.stages[0].weight_bytes - plan.stages[0].weight_bytes
    assert (saved > unpacked.stages[0].weight_bytes / 4) if holds else saved == 0
    assert plan.stages[0].cost < unpacked.stages[0].cost if holds else plan.stages[0].cost > 0


def test_rounded_weights_and_other_implementations_are_not_stored_ones(config: CoordinatorConfig) -> None:
    model = open_model(config)
    rounded = replace(model, config=model.config.with_weights(WeightFormat.INT8))
    assert not plan_on(config, IN_PLACE, IN_PLACE, model=rounded).holds_stored
    by_transformers = replace(model, implementation=Implementation.TRANSFORMERS)
    assert not plan_on(config, IN_PLACE, IN_PLACE, model=by_transformers).holds_stored


@pytest.mark.parametrize("form", ["nf4", "nf4-nested", "pack8-group-asymmetric", "gptq-8-bits", "fp8-block"])
def test_formats_without_products_are_unpacked(form: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS[form])
    config = CoordinatorConfig(model=tmp_path, num_stages=2)
    assert not plan_on(config, IN_PLACE, IN_PLACE).holds_stored


@pytest.mark.parametrize("device", [IN_PLACE, DeviceKind.HOST])
def test_workers_are_told(device: DeviceKind, config: CoordinatorConfig) -> None:
    plan, model = plan_on(config, device, device), open_model(config)
    assign = encode_assign(
        AssignStage(worker=None, plan_id=1, stage=plan.stages[0], plan=plan),  # type: ignore[arg-type]
        model,
        join_pb2.WeightSources(),
    ).assign
    assert decode_assignment(assign, coordinator="host:1").holds_stored is (device is IN_PLACE)
    prefetch = encode_prefetch(model, plan, plan.stages, join_pb2.WeightSources()).prefetch_weights
    wanted = decode_prefetch(prefetch, coordinator="host:1")
    assert wanted is not None and wanted.holds_stored is (device is IN_PLACE), "spares keep the same form"
