"""Attention of prompts to pages on a GPU equals its formula, with the kernel of Hopper and of other GPUs."""

from __future__ import annotations

import pytest
import torch

from stage_worker.model.attention_work import AttentionWork
from tests.kernels.interpreted.paged import Given, Paged, Shape

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.gpu

from stage_worker.model.triton_kernels.attention import attend  # noqa: E402

TOLERANCES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Errors, relative to the values, which have a spread of 1."""
SLICES = [(0, 1), (127, 1), (1300, 1), (0, 200), (1000, 150), (5000, 40)]
SHAPES = {
    "one head a key": Shape(heads=2, kv_heads=2, width=128),
    "four heads a key": Shape(heads=8, kv_heads=2, width=128),
    "six heads a key": Shape(heads=6, kv_heads=1, width=128),
    "twelve heads a key": Shape(heads=12, kv_heads=1, width=128),
    "narrow heads": Shape(heads=4, kv_heads=1, width=64),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_chunks_and_prompts_in_one_step(
    shape: str, dtype: torch.dtype, prepared: torch.device
) -> None:
    """Memory that holds no keys is NaN. Some items have no queries, as in steps that are CUDA graphs."""
    if prepared.type != "cuda":
        pytest.skip("kernels of Triton need a GPU")
    paged = Paged(Given(shape=SHAPES[shape], slices=SLICES, dtype=dtype))
    work = paged.work()
    on_device = AttentionWork(
        items=torch.cat([work.items, torch.zeros_like(work.items[:3])]).to(prepared),
        table=work.table.to(prepared),
        merges=work.merges.to(prepared),
        num_partial=work.num_partial,
        num_queries=work.num_queries,
    )
    query, pages = paged.query.to(prepared), paged.pages.to(prepared)
    output = torch.full_like(query, float("nan"))
    attend(query, output, on_device, pages, scale=SHAPES[shape].row_width ** -0.5)
    error = (output.double().cpu() - paged.expected()).abs().max()
    assert float(error) < TOLERANCES[dtype]
