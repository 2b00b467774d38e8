"""Gated DeltaNet: chunks of any size give the same sums, and configs are read completely."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import DeltaLayout, GatedDelta, UnsupportedModel, parse_config
from kvcache import LiveState, SavedState, SlotChange
from kvcache.state_store import StateStore
from stage_worker.model.gated_delta import delta_chunk
from tests.families import config_of


def inputs(num_tokens: int, num_heads: int = 3) -> tuple[Tensor, ...]:
    """Queries, keys, values, strengths, decays and a state, float64."""
    torch.manual_seed(0)
    query, key = (torch.randn(num_tokens, num_heads, 6, dtype=torch.float64) for _ in range(2))
    value = torch.randn(num_tokens, num_heads, 5, dtype=torch.float64)
    strength = torch.rand(num_tokens, num_heads, dtype=torch.float64)
    decay = -torch.rand(num_tokens, num_heads, dtype=torch.float64)
    state = torch.randn(num_heads, 6, 5, dtype=torch.float64)
    return query, key / key.norm(dim=-1, keepdim=True), value, strength, decay, state


@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (7, 13, 20), (39, 1)])
def test_a_chunk_equals_its_tokens_one_by_one(sizes: tuple[int, ...]) -> None:
    query, key, value, strength, decay, state = inputs(40)
    expected, kept = [], state.clone()
    for token in range(40):
        kept = kept * decay[token].exp()[:, None, None]
        error = (value[token] - (kept * key[token][..., None]).sum(1)) * strength[token][:, None]
        kept = kept + key[token][..., None] * error[:, None]
        expected.append((kept * query[token][..., None]).sum(1))
    parts = zip(*(x.split(sizes) for x in (query, key, value, strength, decay)), strict=True)
    found = [delta_chunk(*part, state) for part in parts]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected))
    torch.testing.assert_close(state, kept)


def test_a_strong_decay_does_not_overflow() -> None:
    query, key, value, strength, _, state = (x.float() for x in inputs(64))
    output = delta_chunk(query, key, value, strength, torch.full((64, 3), -500.0), state)
    assert bool(output.isfinite().all()) and bool(state.isfinite().all())


def test_a_store_copies_and_zeroes_whole_slots() -> None:
    """Also of a layer that has a part more."""
    parts, more = [((2,), torch.bfloat16), ((3, 4), torch.float32)], ((2,), torch.bfloat16)
    store = StateStore(layers=[parts, [*parts, more], parts], num_states=3, device="cpu")
    shapes = [[tuple(part.shape[1:]) for part in store.layer(layer)] for layer in range(3)]
    assert shapes == [[(2,), (3, 4)], [(2,), (3, 4), (2,)], [(2,), (3, 4)]]
    for layer in range(3):
        for number, part in enumerate(store.layer(layer)):
            part[0] = 10 * layer + number + 1
    store.change([SlotChange(2, 0), SlotChange(0, None)])
    for layer in range(3):
        for number, part in enumerate(store.layer(layer)):
            assert part[2].unique().tolist() == [10 * layer + number + 1]
            assert not part[0].any() and not part[1].any()
    assert store.size_bytes == 3 * (3 * (2 * 2 + 3 * 4 * 4) + 2 * 2)
    with pytest.raises(ValueError, match="at least 1"):
        StateStore(layers=[], num_states=3, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 5}, "all 5 layers are recurrent"),
        ({"layer_types": ["conv"] * 5}, r"layer_types\[0\]' = 'conv' is not supported"),
        ({"linear_num_value_heads": 5}, "5 is not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "the minimum is 2"),
        ({"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "states are summed in float32"),
    ],
)
def test_impossible_configs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModel, ValueError), match=message):
        parse_config(config_of("qwen3_5_text") | changes)


def test_every_fourth_layer_has_full_attention_by_default() -> None:
    raw = config_of("qwen3_5_text") | {"layer_types": None, "num_hidden_layers": 8}
    kinds = [isinstance(layer.mixer, GatedDelta) for layer in parse_config(raw).layers]
    assert kinds == [True, True, True, False] * 2
    every_second = parse_config(raw | {"full_attention_interval": 2})
    assert [isinstance(layer.mixer, GatedDelta) for layer in every_second.layers] == [True, False] * 4


def test_layers_with_equal_states_are_one_kind() -> None:
    plan = GatedDelta(num_heads=4, num_key_heads=2, key_dim=8, value_dim=8, kernel_size=4, norm_eps=1e-6)
    assert plan.state_parts[0].shape == (2 * 16 + 32, 3)
    assert plan.state_parts[1].shape == (4, 8, 8) and plan.state_parts[1].is_wide
    assert replace(plan, layout=DeltaLayout(is_grouped=True)) != plan
    assert LiveState(1) != SavedState(1)
