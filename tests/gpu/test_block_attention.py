"""Attention to chosen blocks in the sizes of Qwen3.8-Flash-Next: kernels compute what torch's operators do on
the same GPU.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint import Attention, DType, parse_config
from kvcache.pages import IndexKeys, KvPages
from stage_worker.model import DecoderStage
from stage_worker.model.decoder_layer import GroupedAttention
from stage_worker.model.kernels import PRODUCTS, Kernels, by_triton
from stage_worker.model.operations import operations
from stage_worker.model.step_layout import LayerKv
from tests.gpu.layers import random_layer, random_slices
from tests.step_layouts import layout_for
from tests.unit.checkpoint.test_ngrams import PUBLISHED

pytestmark = pytest.mark.gpu

BLOCK, NUMBER = 16, 3
SLICES = ((4, 1), (2_047, 1), (2_055, 1), (8_191, 1), (140_000, 1), (9_000, 40), (0, 70))
"""(position of the first query, number of queries): with all blocks, and with up to three levels of a choice
of 512.
"""
LARGEST_DIFFERENCE = 0.05
"""Of the largest element: of blocks whose scores differ by a rounding another one may be chosen."""


@pytest.fixture
def gpu(prepared: torch.device) -> torch.device:
    if prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    return prepared


def pages_of(mixer: Attention, num_blocks: int, device: torch.device) -> KvPages:
    """Random keys and values, and keys of the indexer."""
    index = IndexKeys(
        widths=[mixer.index_width],
        num_blocks=num_blocks,
        block_size=BLOCK,
        dtype=torch.bfloat16,
        device=device,
    )
    pages = KvPages(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        dtype=torch.bfloat16,
        device=device,
        index=index,
    )
    generator = torch.Generator(device).manual_seed(4)
    for store in (pages.store(0), index.store(0)):
        store.normal_(generator=generator)
    return pages


def attended(kernels: Kernels, device: torch.device) -> tuple[Tensor, KvPages]:
    """Output of a layer for random input, and its pages afterwards."""
    config, weights = random_layer(parse_config(PUBLISHED), NUMBER, device)
    mixer = config.layers[NUMBER].mixer
    assert isinstance(mixer, Attention)
    slices, num_pages = random_slices(SLICES, BLOCK)
    stage = DecoderStage(
        config,
        layer_begin=NUMBER,
        layer_end=NUMBER + 1,
        has_embeddings=False,
        has_head=False,
        dtype=DType.BF16,
        device=device,
        kernels=kernels,
    )
    layout, pages = layout_for(stage, slices, block_size=BLOCK), pages_of(mixer, num_pages, device)
    attention = GroupedAttention(mixer, weights, operations(kernels), kernels)
    generator = torch.Generator(device).manual_seed(5)
    given = torch.randn(layout.num_tokens, config.hidden_size, device=device, generator=generator)
    return attention(given.bfloat16(), LayerKv(layout, pages, 0)), pages


@torch.inference_mode()
def test_kernels_compute_what_torchs_operators_compute(gpu: torch.device) -> None:
    """Keys and values, and keys of the indexer, in pages; and the output."""
    expected, pages = attended(PRODUCTS, gpu)
    found, written = attended(by_triton(parse_config(PUBLISHED)), gpu)
    assert written.index is not None and pages.index is not None
    torch.testing.assert_close(written.store(0).float(), pages.store(0).float(), rtol=0.02, atol=0.05)
    torch.testing.assert_close(
        written.index.store(0).float(), pages.index.store(0).float(), rtol=0.02, atol=0.05
    )
    assert expected.isfinite().all()
    difference = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert float(difference) < LARGEST_DIFFERENCE
