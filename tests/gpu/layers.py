"""Layers of published sizes with random weights, and slices with pages in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from checkpoint import Blueprint, Experts
from stage_worker.model.layer_weights import LayerWeights, allocate_layer
from stage_worker.validation import SliceLayout


def random_layer(config: Blueprint, number: int, device: torch.device) -> tuple[Blueprint, LayerWeights]:
    """Layer `number` of `config`, with few and narrow experts in bfloat16, and a model of such layers."""
    layer = config.layers[number]
    assert isinstance(layer.feed_forward, Experts)
    experts = replace(layer.feed_forward, count=8, width=16)
    layers = [replace(layer, feed_forward=experts)] * len(config.layers)
    config = replace(config, layers=tuple(layers))
    weights, tensors = allocate_layer(
        config, number, lambda *size: torch.empty(size, dtype=torch.bfloat16, device=device)
    )
    generator = torch.Generator(device).manual_seed(3)
    for tensor in tensors.values():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            is_matrix = tensor.dim() > 1
            tensor.normal_(0.0, tensor.shape[-1] ** -0.5 if is_matrix else 0.1, generator=generator)
            tensor.add_(0.0 if is_matrix else 1.0)
    return config, weights


def random_slices(slices: Sequence[tuple[int, int]], block_size: int) -> tuple[list[SliceLayout], int]:
    """Slices with pages in any order, and the number of pages; `slices` are the position of the first query
    and the number of queries.
    """
    counts = [-(-(first + count) // block_size) for first, count in slices]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
    found = [
        SliceLayout(
            first_position=first,
            num_tokens=count,
            pages=tuple(order.pop() for _ in range(num_pages)),
            num_valid=first,
        )
        for (first, count), num_pages in zip(slices, counts, strict=True)
    ]
    return found, sum(counts)
