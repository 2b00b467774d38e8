"""Assignments, and their effect on a worker with its own wire dtype."""

import pytest

from checkpoint import DType, WeightFormat
from checkpoint.dtypes import ScaledDType
from checkpoint.implementation import Implementation
from stage_worker.assignment import decode_assignment, wants
from stageline_rpc.internal.v1 import join_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.integration.stage_bench import assign_message, new_assignment

FP8, INT8 = ScaledDType.F8_E4M3, ScaledDType.I8


@pytest.fixture(scope="module")
def message(tmp_path_factory: pytest.TempPathFactory) -> join_pb2.AssignStage:
    directory = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_layers=3)
    return assign_message(new_assignment(directory, stage=1))


def with_wire_dtype(message: join_pb2.AssignStage, number: int) -> join_pb2.AssignStage:
    changed = join_pb2.AssignStage()
    changed.CopyFrom(message)
    changed.wire_dtype = number  # type: ignore[assignment]
    return changed


def test_hidden_states_are_sent_as_computed_by_default(
    message: join_pb2.AssignStage,
) -> None:
    in_int8 = with_wire_dtype(message, cluster_pb2.DTYPE_I8)
    assert decode_assignment(message).sent_dtype is DType.F32
    assert decode_assignment(in_int8).sent_dtype is INT8
    assert decode_assignment(in_int8, wire_dtype=FP8).sent_dtype is FP8
    with pytest.raises(ValueError, match="wire dtype f16 is not smaller than hidden states in f32"):
        decode_assignment(message, wire_dtype=DType.F16)


def test_a_stage_with_another_wire_dtype_is_reloaded(message: join_pb2.AssignStage) -> None:
    in_int8 = with_wire_dtype(message, cluster_pb2.DTYPE_I8)
    assert not decode_assignment(message).loads_like(decode_assignment(in_int8))


def test_a_stage_with_other_weights_is_reloaded(message: join_pb2.AssignStage) -> None:
    in_int4 = join_pb2.AssignStage()
    in_int4.CopyFrom(message)
    in_int4.weights = cluster_pb2.WEIGHT_FORMAT_INT4
    assert decode_assignment(message).weights is None
    assert decode_assignment(in_int4).weights is WeightFormat.INT4
    assert not decode_assignment(message).loads_like(decode_assignment(in_int4))
    in_int4.weights = 77  # type: ignore[assignment]
    with pytest.raises(ValueError, match="weight format number 77 is not known"):
        decode_assignment(in_int4)


def test_a_stage_with_another_implementation_is_reloaded(message: join_pb2.AssignStage) -> None:
    by_transformers = join_pb2.AssignStage()
    by_transformers.CopyFrom(message)
    by_transformers.implementation = cluster_pb2.IMPLEMENTATION_TRANSFORMERS
    assert decode_assignment(message).implementation is Implementation.NATIVE
    assert decode_assignment(by_transformers).implementation is Implementation.TRANSFORMERS
    assert not decode_assignment(message).loads_like(decode_assignment(by_transformers))
    by_transformers.implementation = 77  # type: ignore[assignment]
    with pytest.raises(ValueError, match="implementation number 77 is not known"):
        decode_assignment(by_transformers)


def test_a_stage_with_another_dtype_of_keys_and_values_is_reloaded(message: join_pb2.AssignStage) -> None:
    in_fp8 = join_pb2.AssignStage()
    in_fp8.CopyFrom(message)
    in_fp8.kv_dtype = cluster_pb2.DTYPE_F8_E4M3
    assert decode_assignment(message).kv_dtype is None
    assert decode_assignment(in_fp8).kv_dtype is FP8
    assert not decode_assignment(message).loads_like(decode_assignment(in_fp8))
    in_fp8.kv_dtype = cluster_pb2.DTYPE_F16
    with pytest.raises(ValueError, match="number 2 is not a dtype of keys and values"):
        decode_assignment(in_fp8)


def test_a_load_continues_if_the_worker_overrides_the_wire_dtype(message: join_pb2.AssignStage) -> None:
    loading = decode_assignment(message, wire_dtype=FP8)
    in_int8 = with_wire_dtype(message, cluster_pb2.DTYPE_I8)
    assert wants(in_int8, loading, wire_dtype=FP8)
    assert not wants(in_int8, loading)
