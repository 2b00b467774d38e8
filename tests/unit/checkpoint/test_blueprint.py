"""Descriptions of decoders: equal layers are one kind, and layers may differ."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checkpoint import Blueprint, DType
from checkpoint.boundary import BoundaryTensor
from checkpoint.compressed import PageShape
from checkpoint.streams import HyperConnection, WeightedCollapse
from tests.unit.coordinator.planner.small_models import llama


def with_windows(*windows: int | None) -> Blueprint:
    blueprint = llama(num_layers=len(windows))
    layers = zip(blueprint.layers, windows, strict=True)
    return replace(
        blueprint, layers=tuple(replace(layer, mixer=replace(layer.mixer, window=w)) for layer, w in layers)
    )


def test_layers_with_equal_plans_are_one_kind() -> None:
    mixed = with_windows(None, 8, None, 8, 5)
    assert len(llama(num_layers=8).kinds) == 1
    assert mixed.num_layers == 5
    assert mixed.kinds == (mixed.layers[0], mixed.layers[1], mixed.layers[4])
    assert mixed.layer_windows == (None, 8, None, 8, 5)


def test_layers_of_one_window_have_keys_of_one_shape() -> None:
    blueprint = with_windows(None, 8, None)
    layers = [replace(layer, mixer=replace(layer.mixer, head_dim=8)) for layer in blueprint.layers]
    mixed = replace(blueprint, layers=(blueprint.layers[0], layers[1], blueprint.layers[2]))
    assert (mixed.page_shape(None), mixed.page_shape(8)) == (PageShape(2, 2, 4), PageShape(2, 2, 8))
    both = replace(blueprint, layers=(*blueprint.layers[:2], layers[2]))
    with pytest.raises(
        ValueError, match="layers with window None have keys of 2 heads of 4 and 2 heads of 8"
    ):
        both.page_shape(None)


@pytest.mark.parametrize("layer", [-1, 0, 3])
def test_a_cut_before_a_layer_that_cannot_follow_another_one_is_rejected(layer: int) -> None:
    assert llama(num_layers=3).legal_cuts == {1, 2}
    with pytest.raises(ValueError, match=f"a stage cannot begin with layer {layer} of 3"):
        replace(llama(num_layers=3), legal_cuts=frozenset({1, layer}))


def test_hidden_states_alone_cross_a_cut() -> None:
    blueprint = llama(num_layers=2)
    assert blueprint.boundary == (BoundaryTensor(name="hidden_states", width=blueprint.hidden_size),)
    assert blueprint.boundary_width == blueprint.hidden_size


def test_residual_streams_cross_a_cut_as_one_tensor() -> None:
    blueprint = llama(num_layers=2)
    connection = HyperConnection(num_streams=3, norm_eps=1e-6, gate_eps=1e-6)
    layers = tuple(replace(layer, connection=connection) for layer in blueprint.layers)
    collapse = WeightedCollapse(num_streams=3, norm_eps=1e-6, gate_eps=1e-6)
    wide = replace(blueprint, layers=layers, collapse=collapse)
    width = 3 * blueprint.hidden_size
    assert wide.boundary == (BoundaryTensor(name="hidden_states", width=width),)
    assert wide.boundary_bytes(DType.BF16) == 2 * width
    for wrong in (layers[:1] + blueprint.layers[:1], blueprint.layers):
        with pytest.raises(ValueError, match="layers of other residual streams than 3"):
            replace(wide, layers=wrong)


def test_tensors_that_are_handed_on_cross_a_cut_after_the_hidden_states() -> None:
    streams = BoundaryTensor(name="streams", width=12)
    chosen = BoundaryTensor(name="chosen", width=3, dtype=DType.F32)
    blueprint = replace(llama(num_layers=2), handed_on=(streams, chosen))
    assert [tensor.name for tensor in blueprint.boundary] == ["hidden_states", "streams", "chosen"]
    assert blueprint.boundary_width == blueprint.hidden_size + 15
    assert blueprint.boundary_bytes(DType.BF16) == 2 * (blueprint.hidden_size + 12) + 4 * 3
    with pytest.raises(ValueError, match="tensors of one name cross a cut: hidden_states, hidden_states"):
        replace(blueprint, handed_on=(BoundaryTensor(name="hidden_states", width=1),))
