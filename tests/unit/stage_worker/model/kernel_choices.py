"""The ways to compute a bfloat16 stage on this machine."""

from __future__ import annotations

import pytest
import torch

from checkpoint import ModelConfig
from stage_worker.model.kernels import PLAIN, AttentionMethod, Kernels, unavailable_because

PACKED_SDPA = Kernels(packs_weights=True, decode=AttentionMethod.SDPA, prefill=AttentionMethod.SDPA)
PRODUCTS = Kernels(packs_weights=False, decode=AttentionMethod.PRODUCTS, prefill=AttentionMethod.PRODUCTS)
IN_PLACE = Kernels(packs_weights=True, decode=AttentionMethod.IN_PLACE, prefill=AttentionMethod.PRODUCTS)

CHOICES = {"plain": PLAIN, "packed": PACKED_SDPA, "products": PRODUCTS, "in place": IN_PLACE}


def skip_unless_possible(kernels: Kernels, config: ModelConfig) -> None:
    """Skip the test with the reason if this machine or installation lacks the kernel."""
    if kernels.packs_weights and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 for this CPU")
    if kernels.decode is AttentionMethod.IN_PLACE and (reason := unavailable_because(config)):
        pytest.skip(reason)
