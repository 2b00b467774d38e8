"""Why Triton kernels do not compute a model, by the first part that they lack."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import Attention, LayerPlan, Pageless, parse_config
from checkpoint.choices import no_choice_kernels_because
from checkpoint.devices import no_kernels_because
from tests.families import config_of


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "hy_v4", "deepseek_v4", "qwen4_exp_text"])
def test_kernels_compute_families_in_16_bits(family: str) -> None:
    assert no_kernels_because(parse_config(config_of(family)).kinds, is_float32=False) is None


def test_parts_beside_attention_have_kernels() -> None:
    kinds = parse_config(config_of("qwen4_exp_text")).kinds
    recurrent = [kind for kind in kinds if isinstance(kind.mixer, Pageless)]
    assert any(kind.ngrams is not None for kind in recurrent)
    assert no_kernels_because(recurrent, is_float32=False) is None


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v4"])
def test_rows_of_latents_and_entries_are_too_wide_in_float32(family: str) -> None:
    found = no_kernels_because(parse_config(config_of(family)).kinds, is_float32=True)
    assert found is not None and "tiles of float32 exceed a GPU's registers" in found


def test_choices_of_blocks_that_kernels_do_not_make_are_named() -> None:
    """Layers that choose unlike numbers of blocks, or more than a program holds."""
    kinds = parse_config(config_of("qwen4_exp_text")).kinds
    assert no_choice_kernels_because(kinds) is None
    (layer, *_) = [kind for kind in kinds if isinstance(kind.mixer, Attention)]
    mixer = layer.mixer
    assert isinstance(mixer, Attention) and mixer.indexer is not None
    indexer = mixer.indexer

    def with_indexer(**changes: int) -> LayerPlan:
        return replace(layer, mixer=replace(mixer, indexer=replace(indexer, **changes)))

    plain = replace(layer, mixer=replace(mixer, indexer=None))
    alike = "Triton kernels choose as many blocks of all tokens in each layer with pages"
    for layers, reason in (
        ([with_indexer(top_blocks=4097)], "Triton kernels choose up to 4096 blocks, not 4097"),
        ([with_indexer(num_heads=129)], "Triton kernels have no indexer of 129 heads of 16"),
        ([with_indexer(head_dim=512)], "Triton kernels have no indexer of 8 heads of 512"),
        ([layer, with_indexer(top_blocks=7)], alike),
        ([layer, plain], alike),
        ([replace(layer, mixer=replace(mixer, window=64))], alike),
    ):
        assert no_choice_kernels_because(layers) == reason
