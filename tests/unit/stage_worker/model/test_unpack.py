"""Unpacked weights equal, bit for bit, those of an independent decoder, whatever the windows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import BadHeader, Checkpoint
from stage_worker.model.weights import load_rows, load_tensors
from tests.quantized import FORMATS, is_packed, stored, write_quantized

UP = "model.layers.0.mlp.up_proj.weight"


def _assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    kind = {4: torch.int32, 2: torch.int16}[found.element_size()]
    # + 0.0 because the sign of zero is lost in some orders of operations.
    assert torch.equal((found + 0.0).view(kind), (expected + 0.0).view(kind))


@pytest.mark.matrix(5)
@pytest.mark.parametrize("form", FORMATS)
def test_every_matrix_is_unpacked_bit_by_bit_in_windows_of_any_size(form: str, tmp_path: Path) -> None:
    weights = write_quantized(tmp_path, FORMATS[form])
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.packed) == {name for name in weights if is_packed(FORMATS[form], name)}
    for window_bytes in (16, 16 * 1000, 1 << 25):
        places = {name: torch.full(array.shape, float("nan")) for name, array in weights.items()}
        load_tensors(checkpoint, places, window_bytes=window_bytes)
        for name, array in weights.items():
            _assert_same_bits(places[name], torch.from_numpy(np.ascontiguousarray(array)))


@pytest.mark.parametrize("form", FORMATS)
def test_rows_are_those_of_the_matrix(form: str, tmp_path: Path) -> None:
    weights = write_quantized(tmp_path, FORMATS[form])
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.packed:
        array = weights[name]
        for first, last in ((0, 1), (3, 4), (5, 27), (33, len(array)), (0, len(array))):
            rows = torch.empty((last - first, array.shape[1]))
            load_rows(checkpoint, name, rows, first_row=first)
            _assert_same_bits(rows, torch.from_numpy(np.ascontiguousarray(array[first:last])))


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_rounded_once_from_float32(form: str, tmp_path: Path) -> None:
    weights = write_quantized(tmp_path, FORMATS[form])
    place = torch.empty(weights[UP].shape, dtype=torch.bfloat16)
    load_tensors(Checkpoint.open(tmp_path), {UP: place})
    _assert_same_bits(place, torch.from_numpy(np.ascontiguousarray(weights[UP])).bfloat16())


@pytest.mark.parametrize("form", FORMATS)
def test_progress_adds_up_to_the_stored_bytes(form: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS[form])
    checkpoint = Checkpoint.open(tmp_path)
    seen: list[int] = []

    class Progress:
        def expect(self, num_bytes: int) -> None:
            raise AssertionError

        def advance(self, num_bytes: int) -> None:
            seen.append(num_bytes)

    places = {name: torch.empty(checkpoint.shape_of(name)) for name in checkpoint.packed}
    load_tensors(checkpoint, places, window_bytes=4096, progress=Progress())
    names = {part.name for matrix in checkpoint.packed.values() for part in matrix.parts.values()}
    assert sum(seen) == sum(checkpoint.tensors[name].num_bytes for name in names)


def test_a_group_beyond_the_scales_is_rejected_by_name(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["gptq"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.g_idx"][5] = 4
    save_file(tensors, file)
    with pytest.raises(BadHeader, match=r"up_proj\.g_idx has groups from 0 to 4, the limits are 0 and 3"):
        load_tensors(Checkpoint.open(tmp_path), {UP: torch.empty(192, 128)})


def test_nested_scales_of_another_block_are_rejected(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["nf4-nested"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = f"{UP}.quant_state.bitsandbytes__nf4"
    text = tensors[name].numpy().tobytes().replace(b'"nested_blocksize": 256', b'"nested_blocksize": 128')
    tensors[name] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    save_file(tensors, file)
    with pytest.raises(BadHeader, match="nested_blocksize 128, expected 256"):
        load_tensors(Checkpoint.open(tmp_path), {UP: torch.empty(192, 128)})


def test_float16_cannot_hold_a_large_scale(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["fp8-tensor-vllm"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.mlp.up_proj.weight_scale"][0] = 1e6
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"up_proj\.weight of fp8 has values that float16 cannot hold"):
        load_tensors(Checkpoint.open(tmp_path), {UP: torch.empty(192, 128, dtype=torch.float16)})


def test_the_oracle_knows_the_bits_of_the_formats() -> None:
    """The oracle against torch, which shares no code with it."""
    from tests.quantized import E4M3

    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3, expected)
    assert stored("I32", np.array([-2], dtype=np.int32)).data == b"\xfe\xff\xff\xff"
