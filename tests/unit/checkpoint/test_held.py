"""Which models `--quantize` refuses, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from checkpoint import KimiDelta, Latent, Mamba2, UnsupportedModel, WeightFormat, parse_config
from checkpoint.held import check_can_hold
from tests.unit.checkpoint.test_compressed_config import PLAIN
from tests.unit.checkpoint.test_latent_config import V3
from tests.unit.coordinator.planner.small_models import llama

COMPRESSED, LATENT = (parse_config(raw).layers[-1] for raw in (PLAIN, V3))
MAMBA = Mamba2(num_heads=8, head_dim=64, num_head_groups=2, state_size=128, kernel_size=4, norm_eps=1e-6)
KIMI = KimiDelta(num_heads=8, head_dim=64, rank=64, kernel_size=4, norm_eps=1e-6)


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("is a mixture of experts", {"feed_forward": LATENT.feed_forward}),
        ("has compressed attention", {"mixer": COMPRESSED.mixer}),
        ("has latent attention", {"mixer": LATENT.mixer}),
        ("has recurrent layers", {"mixer": KIMI}),
        ("has recurrent layers", {"beside": MAMBA}),
    ],
)
def test_weights_of_some_layers_are_not_rounded(what: str, changes: dict[str, Any]) -> None:
    assert isinstance(LATENT.mixer, Latent)
    usual = llama(num_layers=2)
    config = replace(usual, layers=(usual.layers[0], replace(usual.layers[1], **changes)))
    check_can_hold(config)
    for weights in WeightFormat:
        with pytest.raises(UnsupportedModel, match=f"'llama' {what}, which --quantize does not support"):
            check_can_hold(config.with_weights(weights))
