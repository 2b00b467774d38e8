"""Pages of 8 bits return every key and value within the error that their format states."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from checkpoint import Attention, DType, ScaledDType, kv_bytes_per_token
from kvcache.pages import InvalidWrite
from kvcache.scaled_pages import ScaledPages
from stage_worker.backends.tensor_views import ELEMENTS
from tests.scaled_rows import RUN_DTYPES, adversarial_rows, error_bound

_LAYERS, _BLOCKS, _BLOCK_SIZE, _HEADS, _DIM = 2, 8, 4, 2, 32
FORMATS = list(ELEMENTS.values())


def make(dtype: torch.dtype, element: torch.dtype) -> ScaledPages:
    return ScaledPages(
        num_layers=_LAYERS,
        num_blocks=_BLOCKS,
        block_size=_BLOCK_SIZE,
        num_kv_heads=_HEADS,
        head_dim=_DIM,
        dtype=dtype,
        device="cpu",
        element=element,
    )


def everything(pages: ScaledPages, layer: int) -> Tensor:
    """[slots, 2 * heads, dim], in the order in which tokens are written."""
    both = torch.stack(pages.gather(layer, torch.arange(_BLOCKS)[None]))
    return both[:, :, 0].permute(2, 0, 1, 3).flatten(1, 2)


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize("dtype", RUN_DTYPES)
def test_rows_are_read_within_the_stated_error(dtype: torch.dtype, element: torch.dtype) -> None:
    tokens = adversarial_rows(16 * 2 * _HEADS, _DIM, dtype).view(16, 2 * _HEADS, _DIM)
    pages, slots = make(dtype, element), torch.randperm(32)[:16]
    written = tokens.clone()
    pages.write(1, written, slots)
    found = everything(pages, 1)[slots]
    assert found.dtype is dtype
    assert torch.equal(found, written), "fresh keys and values are rounded to what the pages return"
    error = (found.double() - tokens.double()).abs()
    assert bool((error <= error_bound(tokens, element)).all())
    assert bool((found == 0).logical_or(tokens != 0).all()), "zeros stay zeros"
    assert everything(pages, 0).count_nonzero() == 0
    others = torch.ones(32, dtype=torch.bool).index_fill_(0, slots, False)
    assert everything(pages, 1)[others].count_nonzero() == 0


@pytest.mark.parametrize("element", FORMATS)
def test_chosen_rows_are_stored_and_all_are_rounded(element: torch.dtype) -> None:
    tokens, pages = torch.randn(5, 2 * _HEADS, _DIM), make(torch.float32, element)
    pages.write(0, tokens, torch.tensor([9, 2]), torch.tensor([4, 1]))
    rounded = tokens.clone()
    make(torch.float32, element).write(0, rounded, torch.arange(5))
    assert torch.equal(everything(pages, 0)[[9, 2]], tokens[[4, 1]])
    assert torch.equal(tokens[[4, 1]], rounded[[4, 1]])
    assert not everything(pages, 0)[[1, 4]].any()
    assert float((tokens - rounded).abs().max()) < 1e-6, "rows that are not stored are rounded, too"


@pytest.mark.parametrize("element", FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_rows_spoil_themselves_until_their_page_is_cleared(
    bad: float, element: torch.dtype
) -> None:
    tokens, pages = torch.randn(8, 2 * _HEADS, _DIM), make(torch.float32, element)
    tokens[5, 1, 7] = bad
    pages.write(0, tokens, torch.arange(8))
    are_finite = everything(pages, 0).isfinite()
    assert not are_finite[5, 1].any()
    assert int(are_finite.logical_not().sum()) == _DIM
    pages.clear(torch.tensor([1]))
    assert everything(pages, 0).isfinite().all()
    assert not everything(pages, 0)[4:8].any()
    assert everything(pages, 0)[:4].any(dim=2).all()


@pytest.mark.parametrize("kv_dtype", ScaledDType)
def test_the_planned_bytes_are_the_allocated_ones(kv_dtype: ScaledDType) -> None:
    pages = make(torch.bfloat16, ELEMENTS[kv_dtype])
    mixer = Attention(num_heads=4, num_kv_heads=_HEADS, head_dim=_DIM, rope=None, scale=1.0)
    per_token = kv_bytes_per_token(mixer, kv_dtype)
    assert pages.size_bytes == _LAYERS * _BLOCKS * _BLOCK_SIZE * per_token
    assert per_token == kv_bytes_per_token(mixer, DType.BF16) // 2 + 2 * _HEADS * 4
    scales = pages.scales(0)
    assert scales is not None
    held = pages.store(0).numel() * pages.store(0).element_size() + scales.numel() * scales.element_size()
    assert pages.size_bytes == _LAYERS * held


def test_a_write_that_does_not_fit_writes_nothing() -> None:
    pages = make(torch.bfloat16, torch.int8)
    with pytest.raises(InvalidWrite, match=r"expected torch.bfloat16 \(2, 4, 32\) on cpu, got torch.float32"):
        pages.write(0, torch.ones(2, 2 * _HEADS, _DIM), torch.tensor([1, 2]))
    assert everything(pages, 0).count_nonzero() == 0
