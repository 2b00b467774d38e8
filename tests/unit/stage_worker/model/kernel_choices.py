"""The ways to compute a bfloat16 stage on this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from checkpoint import Blueprint
from stage_worker.model.kernels import (
    ALL_COMPILED,
    PLAIN,
    AttentionMethod,
    Kernels,
    ProductMethod,
    unavailable_because,
)

PACKED_SDPA = replace(PLAIN, products=ProductMethod.ONEDNN)
PRODUCTS = replace(PLAIN, decode=AttentionMethod.PRODUCTS, prefill=AttentionMethod.PRODUCTS)
IN_PLACE = replace(PRODUCTS, products=ProductMethod.ONEDNN, decode=AttentionMethod.IN_PLACE)

CHOICES = {
    "plain": PLAIN,
    "packed": PACKED_SDPA,
    "products": PRODUCTS,
    "in place": IN_PLACE,
    "compiled": ALL_COMPILED,
}


def skip_unless_possible(kernels: Kernels, config: Blueprint) -> None:
    """Skip the test with the reason if this machine or installation lacks the kernel."""
    if kernels.products is ProductMethod.ONEDNN and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 for this CPU")
    if kernels.decode is AttentionMethod.IN_PLACE and (reason := unavailable_because(config)):
        pytest.skip(reason)
