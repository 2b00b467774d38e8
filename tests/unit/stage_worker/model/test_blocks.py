"""Blocks of GGUF files are unpacked to the bits of the `gguf` package's dequantisers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from checkpoint.dtypes import BlockDType
from stage_worker.model.blocks import block_values


@pytest.mark.parametrize("dtype", BlockDType)
def test_values_of_random_bytes_have_the_bits_of_the_gguf_package(dtype: BlockDType) -> None:
    kind = gguf.GGMLQuantizationType[dtype.name]
    assert gguf.GGML_QUANT_SIZES[kind] == (dtype.num_elements, dtype.num_bytes)
    octets = np.random.default_rng(5).integers(0, 256, (2000, dtype.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = np.asarray(gguf.quants.dequantize(octets, kind))
    found = block_values(dtype, torch.from_numpy(octets)).numpy()
    # random scales may be NaN, whose payload is not compared
    numbers = ~np.isnan(expected)
    assert numbers.mean() > 0.9
    assert np.array_equal(np.isnan(found), ~numbers)
    assert np.array_equal(found.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])


def test_every_code_of_mxfp4s_scale_has_its_value() -> None:
    octets = torch.zeros((256, 17), dtype=torch.uint8)
    octets[:, 0] = torch.arange(256)
    octets[:, 1:] = 0x72  # 1 in the first half of the elements, 6 in the second
    values = block_values(BlockDType.MXFP4, octets)
    scales = 2.0 ** (torch.arange(256, dtype=torch.float64) - 127)
    assert torch.equal(values[:255, 0].double(), scales[:255])
    assert torch.equal(values[:250, 31].double(), 6 * scales[:250])
