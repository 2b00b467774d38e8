"""Weights on the host come back bit by bit, in the form in which the device had them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint
from stage_worker.backends.contract import DeviceError
from stage_worker.backends.transfers import Event
from stage_worker.model.attention_views import HostArray
from stage_worker.model.held_matrices import ByteMatrix, NibbleMatrix
from stage_worker.model.host_weights import HostWeights, with_tensors
from stage_worker.model.kernels import ProductMethod
from stage_worker.model.layer_weights import DeltaWeights, LatentWeights, LayerWeights, allocate_layer
from stage_worker.model.parts import held_for
from stage_worker.model.weight_reads import WINDOW_BYTES, WeightReads
from stage_worker.model.weights import load_tensors
from tests.checkpoints import make_checkpoint
from tests.fake_device import FakeQueue
from tests.families import make_family
from tests.quantized import CONFIG, FORMATS, LATENT_CONFIG, write_quantized
from tests.unit.stage_worker.model.test_held_loading import loaded
from tests.unit.stage_worker.model.test_weight_reads import tensors_of

CPU = torch.device("cpu")


class PinnedQueue(FakeQueue):
    """Uploads from pinned memory only."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[HostArray] = []

    def host_memory(self, num_bytes: int) -> HostArray:
        self.pinned.append(super().host_memory(num_bytes))
        return self.pinned[-1]

    def upload(self, target: Tensor, source: HostArray) -> Event:
        assert any(np.may_share_memory(source, memory) for memory in self.pinned), "pageable memory"
        return super().upload(target, source)


@torch.inference_mode()
def round_trip(weights: LayerWeights, pinned_limit_bytes: int) -> LayerWeights:
    queue = FakeQueue()
    host = HostWeights.copied(weights, queue, pinned_limit_bytes=pinned_limit_bytes)
    for tensor in tensors_of(weights):
        tensor.fill_(77)  # the device's memory is used again
    with WeightReads(queue) as reads:
        return host.restored(CPU, reads, lambda: None)


@pytest.mark.parametrize("pinned_limit_bytes", [0, 1 << 40], ids=["pageable", "pinned"])
@pytest.mark.parametrize("form", ["awq", "gptq", "pack4-actorder", "fp8-block-bf16", "gptq-8-bits"])
def test_stored_forms_come_back_bit_by_bit(form: str, pinned_limit_bytes: int, tmp_path: Path) -> None:
    _, weights, _ = loaded(tmp_path, FORMATS[form], 0)
    expected = with_tensors(weights, torch.clone)
    found = round_trip(weights, pinned_limit_bytes)
    pairs = list(zip(tensors_of(found), tensors_of(expected), strict=True))
    assert all(one.dtype is other.dtype and torch.equal(one, other) for one, other in pairs)
    assert type(found.o) is type(expected.o)


def test_keys_and_values_of_latents_come_back_though_they_are_parts_of_one_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", "deepseek_v3"))
    weights, _ = allocate_layer(checkpoint.config, 0, torch.rand)
    assert isinstance(weights.mixer, LatentWeights) and not weights.mixer.keys.is_contiguous()
    expected = with_tensors(weights, torch.clone)
    found = round_trip(weights, 0)
    assert all(map(torch.equal, tensors_of(found), tensors_of(expected)))


@pytest.mark.parametrize("num_pinned", [0, 1, 2, 3, 4])
def test_tensors_over_the_ends_of_blocks_come_back_bit_by_bit(num_pinned: int) -> None:
    sizes = (1, WINDOW_BYTES - 1, WINDOW_BYTES + 7, 3, WINDOW_BYTES // 2)
    given = {number: torch.randint(0, 256, (size,), dtype=torch.uint8) for number, size in enumerate(sizes)}
    queue = PinnedQueue()
    limit = num_pinned * WINDOW_BYTES + 17
    host = HostWeights.copied(given, queue, pinned_limit_bytes=limit)
    assert host.num_bytes == sum(sizes)
    assert host.pinned_bytes <= limit and host.num_pinned == min(num_pinned, 3)
    with WeightReads(queue) as reads:
        found = host.restored(CPU, reads, lambda: None)
    assert all(torch.equal(found[number], given[number]) for number in given)


def test_a_device_that_fails_ends_the_copies_to_it_and_from_it() -> None:
    queue = FakeQueue()
    host = HostWeights.copied({0: torch.ones(9)}, queue, pinned_limit_bytes=0)
    queue.fail("the device failed")
    with pytest.raises(DeviceError, match="the device failed"), WeightReads(queue) as reads:
        host.restored(CPU, reads, lambda: None)
    with pytest.raises(DeviceError, match="the device failed"):
        HostWeights.copied({0: torch.ones(9)}, queue, pinned_limit_bytes=0)


@pytest.mark.parametrize(
    ("products", "rounded", "config"),
    [
        (ProductMethod.TRITON_INT8, ByteMatrix, CONFIG),
        (ProductMethod.TRITON_INT4, NibbleMatrix, CONFIG),
        (ProductMethod.TRITON_INT8, ByteMatrix, LATENT_CONFIG),
    ],
    ids=["int8", "int4", "int8, latents and experts"],
)
def test_matrices_are_rounded_as_the_products_of_a_gpu_round_them(
    products: ProductMethod,
    rounded: Callable[..., object],
    config: dict[str, object],
    tmp_path: Path,
) -> None:
    write_quantized(tmp_path, FORMATS["fp8-block-bf16"], seed=5, config=config)
    checkpoint = Checkpoint.open(tmp_path)
    weights, destinations = allocate_layer(checkpoint.config, 1, lambda *shape: torch.empty(shape))
    load_tensors(checkpoint, destinations)
    found = held_for(products, weights)
    assert isinstance(found.o, rounded) and isinstance(weights.o, Tensor)  # type: ignore[arg-type]
    expected = rounded.quantized(weights.o)  # type: ignore[attr-defined]
    assert torch.equal(found.o.codes, expected.codes) and torch.equal(found.o.scales, expected.scales)
    assert held_for(ProductMethod.TRITON_ROWS, weights) is weights
    kept, plain = sum(map(_num_bytes, tensors_of(found))), sum(map(_num_bytes, tensors_of(weights)))
    assert kept < 0.75 * plain, "all projections are rounded"


@pytest.mark.full
def test_inputs_of_gated_delta_networks_are_rounded_and_states_are_not(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "qwen3_next", num_layers=4))
    weights, _ = allocate_layer(checkpoint.config, 0, lambda *shape: torch.ones(shape))
    found = held_for(ProductMethod.TRITON_INT8, weights)
    assert isinstance(found.mixer, DeltaWeights) and isinstance(weights.mixer, DeltaWeights)
    assert isinstance(found.mixer.input, ByteMatrix) and isinstance(found.o, ByteMatrix)
    assert found.mixer.conv is weights.mixer.conv and found.mixer.decay is weights.mixer.decay


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
