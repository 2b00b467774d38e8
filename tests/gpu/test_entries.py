"""Layers of DeepSeek V4 in published sizes: kernels compute what torch's operators do on the same GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint import Blueprint, Compressed, DType, parse_config
from kvcache.layer_rows import LayerRows, RowKind
from kvcache.pages import KvPages
from stage_worker.model import DecoderStage
from stage_worker.model.compressed_attention import CompressedAttention
from stage_worker.model.kernels import PRODUCTS, Kernels, by_triton
from stage_worker.model.layer_weights import CompressedWeights
from stage_worker.model.step_layout import LayerEntries, LayerKv, StepLayout
from stage_worker.validation import SliceLayout
from tests.gpu.layers import random_layer, random_slices
from tests.step_layouts import layout_for
from tests.unit.checkpoint.test_compressed_config import PLAIN

pytestmark = pytest.mark.gpu

BLOCK = 16
SLICES = ((4, 1), (127, 1), (2_100, 1), (8_191, 1), (140_000, 1), (9_000, 40), (0, 70))
"""(position of the first query, number of queries): without entries, with all of them, and with up to three
levels of a choice.
"""
LARGEST_DIFFERENCE = 0.05
"""Of the largest element: of entries whose scores differ by a rounding another one may be chosen, and a query
mixes some 600 values.
"""
SPARSE, HEAVY, WINDOW = 2, 3, 0
"""Numbers of layers."""


@pytest.fixture
def gpu(prepared: torch.device) -> torch.device:
    if prepared.type == "cpu":
        pytest.skip("Triton kernels need a GPU; `make test-kernels` interprets them")
    return prepared


def pages_of(mixer: Compressed, num_blocks: int, device: torch.device) -> tuple[KvPages, KvPages]:
    """Random entries, and random keys with what entries are pooled of."""
    generator = torch.Generator(device).manual_seed(4)

    def rows(per_block: int, width: int) -> LayerRows:
        found = LayerRows({0: (per_block, width)}, num_blocks=num_blocks, dtype=torch.bfloat16, device=device)
        found.blocks(0).normal_(generator=generator)
        return found

    def pages(layers: int, width: int, beside: dict[RowKind, LayerRows]) -> KvPages:
        return KvPages(
            num_layers=layers,
            num_blocks=num_blocks,
            block_size=BLOCK,
            num_kv_heads=1,
            head_dim=width,
            dtype=torch.bfloat16,
            device=device,
            num_parts=1,
            rows=beside,
        )

    entries, pending = dict[RowKind, LayerRows](), dict[RowKind, LayerRows]()
    if mixer.compressor is not None:
        per_block = mixer.compressor.rows_per_block(BLOCK)
        entries[RowKind.ENTRY] = rows(per_block, mixer.head_dim)
        if mixer.entry_index_width:
            entries[RowKind.ENTRY_KEY] = rows(per_block, mixer.entry_index_width)
        pending[RowKind.PENDING] = rows(BLOCK, mixer.pending_width)
    keys = pages(1, mixer.head_dim, pending)
    keys.store(0).normal_(generator=generator)
    return pages(0, 1, entries), keys


def layouts_by(
    kernels: Kernels, config: Blueprint, number: int, slices: list[SliceLayout], device: torch.device
) -> tuple[StepLayout, StepLayout]:
    """Of entries, and of keys."""
    stage = DecoderStage(
        config,
        layer_begin=number,
        layer_end=number + 1,
        has_embeddings=False,
        has_head=False,
        dtype=DType.BF16,
        device=device,
        kernels=kernels,
    )
    window = config.layers[number].mixer.window
    of_entries, of_keys = (
        layout_for(stage, slices, block_size=BLOCK, windows={one}) for one in (None, window)
    )
    return of_entries, of_keys


def attended(number: int, kernels: Kernels, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Output of a layer for random input, and what is in its pages afterwards."""
    config, weights = random_layer(parse_config(PLAIN), number, device)
    mixer = config.layers[number].mixer
    assert isinstance(mixer, Compressed) and isinstance(weights.mixer, CompressedWeights)
    slices, num_pages = random_slices(SLICES, BLOCK)
    of_entries, of_keys = layouts_by(kernels, config, number, slices, device)
    entries, keys = pages_of(mixer, num_pages, device)
    attention = CompressedAttention(mixer, weights.mixer, weights.norms, kernels)
    generator = torch.Generator(device).manual_seed(5)
    given = torch.randn(of_keys.num_tokens, config.hidden_size, device=device, generator=generator)
    kv = LayerKv(of_keys, keys, 0)
    if mixer.compressor is not None:
        kv.entries = LayerEntries(of_entries, entries.rows, 0)
    output = attention(given.bfloat16(), kv)
    beside = [rows.blocks(0) for pages in (entries, keys) for rows in pages.rows.values()]
    return output, [keys.store(0), *beside]


@pytest.mark.parametrize("number", [WINDOW, SPARSE, HEAVY], ids=["window", "chosen", "all"])
@torch.inference_mode()
def test_kernels_compute_what_torchs_operators_compute(number: int, gpu: torch.device) -> None:
    """Keys, what entries are pooled of, entries and their keys in pages; and the layer's output."""
    kernels = by_triton(parse_config(PLAIN))
    expected, pages = attended(number, PRODUCTS, gpu)
    found, written = attended(number, kernels, gpu)
    for one, other in zip(written, pages, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=0.05)
    assert expected.isfinite().all()
    difference = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert float(difference) < LARGEST_DIFFERENCE
