"""A model that is nothing but its sizes."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from checkpoint import DType
from coordinator.config import CoordinatorConfig
from coordinator.mock_model import mock_fingerprint, parse_mock_model
from coordinator.model import open_model
from coordinator.planner.plan import PlanImpossible, WorkerCapacity
from coordinator.planner.planner import plan_for


def config_of(mock_model: str | None, **settings: object) -> CoordinatorConfig:
    values: dict[str, object] = {
        "model": None,
        "listen": "127.0.0.1:0",
        "num_stages": 2,
        "layers": None,
        "dtype": None,
        "block_size": 16,
        "max_step_tokens": 64,
        "max_step_sequences": 8,
        "max_sequence_tokens": None,
        "max_kv_tokens": 1024,
        "queue_size": 8,
        "mock_model": mock_model,
    }
    return CoordinatorConfig(**{**values, **settings})  # type: ignore[arg-type]


def test_only_the_number_of_layers_is_required() -> None:
    model = parse_mock_model("layers=7")
    assert model.num_layers == len(model.layer_windows) == 7
    assert (model.hidden_size, model.vocab_size, model.max_position_embeddings) == (1024, 32_000, 4096)


def test_every_size_can_be_set() -> None:
    model = parse_mock_model("vocab=11, max_len=22,layers=3,hidden=44,ffn=55,heads=6,kv_heads=2,head_dim=77")
    sizes = (model.vocab_size, model.max_position_embeddings, model.num_layers, model.hidden_size)
    assert sizes == (11, 22, 3, 44)
    (layer,) = model.kinds
    mixer, dense = layer.mixer, layer.feed_forward
    others = (dense.width, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim)
    assert others == (55, 6, 2, 77)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mock model '': expected layers=N, hidden=N"),
        ("layers", "mock model 'layers': expected layers=N"),
        ("64", "mock model '64': expected layers=N"),
        ("layers=64,", "mock model '': expected"),
        ("layers=64,depth=3", "mock model 'depth=3': expected"),
        ("layers=64,layers=64", "mock model 'layers' is given twice"),
        ("hidden=64", "mock model 'hidden=64' has no number of layers: add layers=N"),
        ("layers=0", "mock model layers='0': expected a number from 1 to 4096"),
        ("layers=-1", "mock model layers='-1': expected a number"),
        ("layers=1.5", "mock model layers='1.5': expected a number"),
        ("layers=", "mock model layers='': expected a number"),
        ("layers=\u0663", "expected a number"),
        ("layers=²", "expected a number"),
        ("layers=4097", "expected a number from 1 to 4096"),
        ("layers=1,hidden=" + "9" * 5000, "expected a number from 1 to 1048576"),
    ],
)
def test_invalid_values_are_rejected_with_the_reason(text: str, message: str) -> None:
    for refusing in (parse_mock_model, config_of):
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is compared below
            refusing(text)
        assert message in str(refused.value)


def test_a_mock_model_is_served_in_the_place_of_another(tmp_path: object) -> None:
    with pytest.raises(ValueError, match="--mock-model replaces the model: it cannot be used with"):
        config_of("layers=4", model=tmp_path)


def test_a_served_mock_is_marked_as_a_mock() -> None:
    model = open_model(config_of("layers=4"))
    assert model.is_mock
    assert model.name == "mock"
    assert model.fingerprint.startswith("mock-")
    assert model.directory_for_workers == ""
    assert (model.text, model.grammars, model.eos_token_ids) == (None, None, ())
    assert model.dtype is DType.BF16
    assert open_model(config_of("layers=4", dtype="f32")).dtype is DType.F32
    assert not open_model(config_of(None)).is_mock


def test_models_of_other_sizes_have_other_fingerprints() -> None:
    names = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "max_len")
    texts = [",".join(f"{name}={9 if name == other else 5}" for name in names) for other in names]
    fingerprints = {mock_fingerprint(parse_mock_model(text)) for text in texts}
    fingerprints.add(mock_fingerprint(parse_mock_model(",".join(f"{name}=5" for name in names))))
    assert len(fingerprints) == len(names) + 1
    assert mock_fingerprint(parse_mock_model("layers=4")) == mock_fingerprint(parse_mock_model(" layers=4"))


def test_it_is_planned_as_if_it_had_weights() -> None:
    config = config_of("layers=8")
    model = open_model(config)
    workers = [WorkerCapacity(name=name, memory_bytes=1 << 40) for name in ("a", "b")]
    plan = plan_for(config, model, workers)
    assert [stage.layer_begin for stage in plan.stages] == [0, plan.stages[0].layer_end]
    assert plan.stages[1].layer_end == 8
    assert all(stage.weight_bytes > 1 << 20 for stage in plan.stages)
    small = [dataclasses.replace(worker, memory_bytes=1 << 20) for worker in workers]
    with pytest.raises(PlanImpossible):
        plan_for(config, model, small)


@pytest.mark.parametrize(
    ("dtype", "lacking", "planned"),
    [
        (None, [], DType.BF16),
        (None, ["b"], DType.F32),
        ("bf16", ["a", "b"], DType.BF16),
        ("f16", ["a"], DType.F16),
    ],
)
def test_a_worker_without_bfloat16_makes_the_plan_float32_by_default(
    dtype: str | None, lacking: list[str], planned: DType
) -> None:
    config = config_of("layers=8", dtype=dtype)
    model = open_model(config)
    assert model.config.dtype is DType.BF16
    workers = [
        WorkerCapacity(name=name, memory_bytes=1 << 40, supports_bf16=name not in lacking)
        for name in ("a", "b")
    ]
    assert plan_for(config, model, workers).dtype is planned


@pytest.mark.parametrize(
    ("model_type", "without_f16", "planned"),
    [
        ("llama", [], DType.F16),
        ("llama", ["b"], DType.F32),  # a CPU
        ("gemma2", [], DType.F32),  # its hidden states overflow float16
    ],
)
def test_gpus_without_bfloat16_compute_in_float16_where_the_model_fits_it(
    model_type: str, without_f16: list[str], planned: DType
) -> None:
    config = config_of("layers=8")
    model = open_model(config)
    model = replace(model, config=replace(model.config, model_type=model_type))
    workers = [
        WorkerCapacity(
            name=name, memory_bytes=1 << 40, supports_bf16=False, supports_f16=name not in without_f16
        )
        for name in ("a", "b")
    ]
    assert plan_for(config, model, workers).dtype is planned
