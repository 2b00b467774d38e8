"""Silent faults of weights: a copy of a checkpoint with one wrong tensor or layer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import Blueprint, Checkpoint
from checkpoint.names import TensorRole
from checkpoint.tensors import head_tensor, layer_tensors, rows_of_roles

Tensors = dict[str, Tensor]
Change = Callable[[Tensors, Blueprint, int], bool]
"""Changes the tensors of a layer; returns whether the layer has such a tensor."""
WEIGHTS_FILE = "model.safetensors"
_QUERIES = (TensorRole.Q, TensorRole.Q_UP, TensorRole.DELTA_QKV, TensorRole.MAMBA_IN)
_OUTPUTS = (TensorRole.O, TensorRole.STATE_OUT)
_NORMS = (TensorRole.FFN_NORM, TensorRole.MIXER_NORM, TensorRole.MIXER_OUT_NORM)


def whole_layer(tensors: Tensors, config: Blueprint, layer: int) -> bool:
    """Weights of another layer of the same kind."""
    for tensor in layer_tensors(config, layer):
        if tensors[tensor.name].is_floating_point():
            tensors[tensor.name] = _other(tensors[tensor.name])
    return True


def query_projection(tensors: Tensors, config: Blueprint, layer: int) -> bool:
    """Of another layer: of a recurrent mixer, the projection that has the queries."""
    return _replaced(tensors, config, layer, _QUERIES, _other)


def output_projection(tensors: Tensors, config: Blueprint, layer: int) -> bool:
    """Of another layer."""
    return _replaced(tensors, config, layer, _OUTPUTS, _other)


def norm_in_reverse(tensors: Tensors, config: Blueprint, layer: int) -> bool:
    return _replaced(tensors, config, layer, _NORMS, lambda rows: rows.flip(-1))


def router_in_reverse(tensors: Tensors, config: Blueprint, layer: int) -> bool:
    """Experts are taken from the other end."""
    return _replaced(tensors, config, layer, (TensorRole.ROUTER,), lambda rows: rows.flip(0))


def expert_of_zeros(tensors: Tensors, config: Blueprint, layer: int) -> bool:
    return _replaced(tensors, config, layer, (TensorRole.EXPERT_DOWN,), torch.zeros_like)


def head_in_reverse(tensors: Tensors, config: Blueprint, layer: int) -> bool:
    """The head multiplies the elements of a hidden state in reverse order."""
    name = head_tensor(config)
    tensors[name] = tensors[name].flip(1).contiguous()
    return True


CHANGES: tuple[Change, ...] = (
    whole_layer,
    query_projection,
    output_projection,
    norm_in_reverse,
    router_in_reverse,
    expert_of_zeros,
    head_in_reverse,
)


def with_change(source: Path, target: Path, change: Change, layers: Iterable[int]) -> Path | None:
    """Copy a checkpoint in one file with `change` to the first of `layers` that it applies to.

    Returns:
        `target`; None if it applies to no layer.
    """
    config = Checkpoint.open(source).config
    tensors = load_file(source / WEIGHTS_FILE)
    if not any(change(tensors, config, layer) for layer in layers):
        return None
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(WEIGHTS_FILE))
    save_file(tensors, target / WEIGHTS_FILE, metadata={"format": "pt"})
    return target


def _replaced(
    tensors: Tensors,
    config: Blueprint,
    layer: int,
    roles: tuple[TensorRole, ...],
    other: Callable[[Tensor], Tensor],
) -> bool:
    """Replace the rows of the first role that the layer has; of experts, the first one's."""
    places = rows_of_roles(config, layer)
    found = [
        rows for role in roles for (key, kind, _), rows in places.items() if (key, kind) == (role, "weight")
    ]
    if not found:
        return False
    rows, tensor = found[0], tensors[found[0].name]
    matrix = tensor.view(-1, tensor.shape[-1]) if tensor.dim() > 1 else tensor
    matrix[rows.begin : rows.end] = other(matrix[rows.begin : rows.end])
    return True


def _other(tensor: Tensor) -> Tensor:
    """Random values with the mean and deviation of `tensor`."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(tensor.numel()))
    spread = float(tensor.float().std(correction=0))
    return (noise * spread + float(tensor.float().mean())).to(tensor.dtype)
