"""Stages with weights of 4 and 8 bits: logits of the CPU's products, few launches, nothing that waits.

Logits of float32 differ by at most 1e-4 of their spread.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint import Blueprint, Checkpoint, WeightFormat
from checkpoint.held import held_plans
from checkpoint.names import TensorRole
from stage_worker.model import attention_work, parts
from stage_worker.model.kernels import Kernels, ProductMethod, by_triton
from stage_worker.model.triton_kernels import launch
from tests.fake_cuda import DEVICE, FakeCudaQueue, fake_cuda
from tests.families import make_family
from tests.gpt_oss import make_gpt_oss
from tests.integration.stage_bench import GREEDY, Log, hidden_for, new_assignment
from tests.kernels.interpreted.test_stage import launches_of_a_step, logits
from tests.quantized import CONFIG, EIGHT_EXPERTS, FORMATS, LATENT_CONFIG, MOE_CONFIG, write_quantized
from tests.staged import staged_executor
from tests.unit.stage_worker.test_fake_cuda_steps import steps
from wire.frames import Frame

pytestmark = pytest.mark.kernels

METHODS = {
    WeightFormat.INT8: (ProductMethod.TRITON_INT8, ProductMethod.INT8),
    WeightFormat.INT4: (ProductMethod.TRITON_INT4, ProductMethod.INT4),
}
FAMILIES = ("llama", "phi3", "gemma2")


def rounded(directory: Path, family: str, form: WeightFormat) -> tuple[Checkpoint, Kernels]:
    """A checkpoint for `--quantize`, and its kernels on a GPU."""
    checkpoint = Checkpoint.open(make_family(directory / "model", family, intermediate_size=96))
    checkpoint = checkpoint.with_weights(form)
    return checkpoint, replace(by_triton(checkpoint.config), quantized=METHODS[form][0])


@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_rounded_weights_equal_those_of_the_cpu(
    family: str, form: WeightFormat, tmp_path: Path
) -> None:
    checkpoint, kernels = rounded(tmp_path, family, form)
    expected = logits(checkpoint, Kernels.of(checkpoint.config, torch.device("cpu"), torch.float32))
    found = logits(checkpoint, kernels)
    assert float((found - expected).abs().max() / expected.std()) < 1e-4
    plain = logits(checkpoint.with_weights(None), None)
    assert float((found - plain).abs().max() / expected.std()) > 1e-3, "not rounded"


@pytest.mark.parametrize("form", WeightFormat)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_with_rounded_weights_launches_at_most_ten_kernels(
    family: str, form: WeightFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, kernels = rounded(tmp_path, family, form)
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 32)
    counts = launches_of_a_step(checkpoint, monkeypatch, [40, 3], kernels)
    product = "byte_kernel" if form is WeightFormat.INT8 else "nibble_kernel"
    num_layers = checkpoint.config.num_layers
    assert counts[product] == 4 * num_layers
    assert counts["merge_kernel"] == num_layers
    assert counts.total() <= 10 * num_layers, counts


STORED = {
    "fp8-block-bf16": CONFIG,
    "float-channel": CONFIG,
    "pack4-group-asymmetric": CONFIG,
    "gptq": CONFIG,
    "awq": CONFIG,
    "nvfp4": CONFIG,
    "modelopt-nvfp4": CONFIG,
    "mxfp4-compressed": CONFIG,
    "mxfp4": CONFIG,
    "fp8-tensor-vllm": LATENT_CONFIG,
    "fp8-block-e8m0": MOE_CONFIG,
    "int-channel": EIGHT_EXPERTS,
    "pack4-group": EIGHT_EXPERTS,
    "gptq-v2": EIGHT_EXPERTS,
    "pack4-actorder": EIGHT_EXPERTS,
}


def stored(directory: Path, form: str) -> tuple[Checkpoint, Kernels]:
    """A quantised checkpoint that is held as it is stored, and its kernels on a GPU."""
    write_quantized(directory, FORMATS[form], config=STORED[form])
    return held(directory)


def held(directory: Path) -> tuple[Checkpoint, Kernels]:
    checkpoint = Checkpoint.open(directory).with_stored(holds_stored=True)
    return checkpoint, replace(by_triton(checkpoint.config), holds_stored=True)


@pytest.mark.parametrize("form", STORED)
def test_logits_of_stored_weights_equal_those_of_unpacked_ones(form: str, tmp_path: Path) -> None:
    assert_stored(*stored(tmp_path, form))


def assert_stored(checkpoint: Checkpoint, kernels: Kernels) -> None:
    expected = logits(checkpoint.with_stored(holds_stored=False), None, cut=1)
    found = logits(checkpoint, kernels, cut=1)
    assert float((found - expected).abs().max() / expected.std()) < 1e-4


def test_logits_of_stored_experts_of_gpt_oss_equal_those_of_unpacked_ones(tmp_path: Path) -> None:
    """Stacks of MXFP4 with biases, whose gates and ups take turns, and clamped SwiGLU."""
    checkpoint, kernels = held(make_gpt_oss(tmp_path)[1])
    assert {TensorRole.EXPERT_GATE, TensorRole.EXPERT_DOWN} <= set(held_plans(checkpoint.config, 1))
    assert_stored(checkpoint, kernels)


@pytest.mark.parametrize(("form", "product"), [("fp8-block-bf16", "byte_kernel"), ("gptq", "nibble_kernel")])
def test_a_layer_with_stored_weights_launches_at_most_ten_kernels(
    form: str, product: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One matrix of the second layer is plain in fp8-block-bf16, and so is all that is stacked with it."""
    checkpoint, kernels = stored(tmp_path, form)
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 32)
    counts = launches_of_a_step(checkpoint, monkeypatch, [40, 3], kernels)
    assert counts[product] == (8 if form == "gptq" else 7)
    assert counts["merge_kernel"] == 2
    assert counts.total() <= 10 * 2, counts


OF_THE_HEAD = ("picked_norm_kernel", "parts_kernel", "decide_kernel")


@pytest.mark.parametrize("stage", [0, 1], ids=["FIRST", "LAST"])
@pytest.mark.parametrize(
    ("form", "config"),
    [
        *((form, CONFIG) for form in (*WeightFormat, "pack4-group")),
        *((form, EIGHT_EXPERTS) for form in ("pack4-group", "fp8-block-bf16")),
    ],
    ids=["int8", "int4", "stored", "experts-int4", "experts-fp8"],
)
def test_a_step_of_held_weights_waits_for_no_gpu(
    form: WeightFormat | str,
    config: dict[str, Any],
    stage: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tensors of a GPU that does not exist, with kernels that are counted: at most ten a layer."""
    launched: Counter[str] = Counter()
    monkeypatch.setattr(launch.Launch, "__call__", lambda one, *_: launched.update([one.kernel.fn.__name__]))
    monkeypatch.setattr(parts, "load_tensors", lambda *_, **__: None)  # weights without data
    write_quantized(
        tmp_path, FORMATS["pack4-group" if isinstance(form, WeightFormat) else form], config=config
    )
    assignment = replace(
        new_assignment(tmp_path, num_stages=2, stage=stage),
        weights=form if isinstance(form, WeightFormat) else None,
        holds_stored=isinstance(form, str),
    )
    frames = [
        (kind, Frame(step, hidden_for(step, config["hidden_size"]) if stage else ()))
        for kind, step in steps(Log(assignment), (GREEDY,))
    ]

    def kernels(config: Blueprint) -> Kernels:
        method = METHODS[form][0] if isinstance(form, WeightFormat) else None
        return replace(by_triton(config), quantized=method, holds_stored=config.holds_stored)

    with fake_cuda() as copies:
        executor = staged_executor(assignment, FakeCudaQueue(), DEVICE, kernels)
        executor.begin_epoch(1, stage=stage)
        for kind, frame in frames:
            copies.counts.clear()
            launched.clear()
            executor.run(frame)
            assert (copies.counts["up"], copies.counts["down"]) == (1, 1), kind
            assert launched["nibble_kernel"] + launched["byte_kernel"] >= 2, kind
            has_experts = stage == 1 and config is EIGHT_EXPERTS
            of_experts = launched["nibble_expert_kernel"] + launched["byte_expert_kernel"]
            assert of_experts == (2 if has_experts else 0), launched
            of_layer = Counter({name: count for name, count in launched.items() if name not in OF_THE_HEAD})
            assert of_layer.total() <= 10, kind
