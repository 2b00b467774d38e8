"""Hidden states between torch and the wire.

Rows of fp8 and int8 are rounded as those of the KV cache, see `kvcache.scaled_pages`.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from checkpoint import BoundaryTensor, DType, ScaledDType
from checkpoint.blueprint import HIDDEN_STATES
from kvcache.scaled_pages import scaled_rows, unscaled_rows
from stage_worker.model.layer_weights import TORCH_DTYPES
from wire.reference import NUM_PROJECTIONS
from wire.tensors import HiddenStates, TensorView, WireDType


@torch.inference_mode()
def project(hidden: Tensor) -> Tensor:
    """Project `hidden` [n, width] to float32 [n, STATE_WIDTH]: sums of elements with fixed signs, and the
    norm.

    The expected square of a projection is the square of the norm. Source: Achlioptas 2003,
    "Database-friendly random projections".
    """
    wide = hidden.float().cpu()
    return torch.cat((wide @ _signs(wide.shape[1]), wide.norm(dim=1, keepdim=True)), dim=1)


def as_array(states: Tensor) -> array[float]:
    """`states` [n, STATE_WIDTH] as a flat array, row by row."""
    return array("f", states.contiguous().numpy().tobytes())


@lru_cache(maxsize=2)
def _signs(width: int) -> Tensor:
    """float32 [width, NUM_PROJECTIONS] of 1 and -1, equal on all hosts: murmur's finalizer of the index."""
    bits = np.arange(width * NUM_PROJECTIONS, dtype=np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return torch.from_numpy(1.0 - 2.0 * (bits >> np.uint32(31)).astype(np.float32)).view(width, -1)


ELEMENTS = {ScaledDType.F8_E4M3: torch.float8_e4m3fn, ScaledDType.I8: torch.int8}


def scale_rows(hidden: Tensor, dtype: ScaledDType) -> Tensor:
    """Encode `hidden` [n, width] as uint8: the elements of all rows, then their n scales."""
    elements, scales = scaled_rows(hidden, ELEMENTS[dtype])
    return torch.cat((elements.flatten(), scales.view(torch.uint8).flatten()))


def unscale_rows(payload: Tensor, dtype: ScaledDType, shape: tuple[int, int], into: torch.dtype) -> Tensor:
    """Decode a uint8 payload to hidden states [n, width] in `into`; does not modify the payload."""
    num_elements = shape[0] * shape[1]
    # Scales after an odd number of elements are misaligned for float32; a copy is aligned.
    scales = payload[num_elements:].clone().view(torch.float32)
    return unscaled_rows(payload[:num_elements].view(shape), scales[:, None], ELEMENTS[dtype], into)


_DTYPES: dict[torch.dtype, DType] = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}

with warnings.catch_warnings():
    # torch warns once per process about tensors over read-only bytes; this module never writes them.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)


def to_view(tensor: Tensor, *, name: str = HIDDEN_STATES) -> TensorView:
    """View of the tensor's bytes, without a copy on a CPU; keeps them alive."""
    dense = tensor.detach().contiguous().cpu()
    return TensorView(_DTYPES[dense.dtype], tuple(dense.shape), dense.view(torch.uint8).numpy().data, name)


def from_view(view: TensorView, *, device: torch.device) -> Tensor:
    """Tensor over the view's bytes on a CPU, unless misaligned; must not be modified."""
    assert isinstance(view.dtype, DType), "rows with scales are for from_wire"
    raw = _raw(view)
    if raw.data_ptr() % view.dtype.size_bytes:
        raw = raw.clone()
    return raw.view(TORCH_DTYPES[view.dtype]).view(view.shape).to(device)


def to_wire(hidden: Tensor, wire_dtype: WireDType, *, name: str = HIDDEN_STATES) -> TensorView:
    """Encode hidden states [n, width] for sending, on their device where possible."""
    if isinstance(wire_dtype, DType):
        return to_view(hidden.to(TORCH_DTYPES[wire_dtype]), name=name)
    payload = scale_rows(hidden.detach(), wire_dtype).cpu()
    return TensorView(wire_dtype, tuple(hidden.shape), payload.numpy().data, name)


def to_frame(
    tensors: Sequence[Tensor], boundary: Sequence[BoundaryTensor], wire_dtype: WireDType
) -> HiddenStates:
    """Encode what crosses a cut: a tensor [n, width] for each of `boundary`, in its order."""
    return tuple(
        to_wire(tensor, one.dtype or wire_dtype, name=one.name)
        for tensor, one in zip(tensors, boundary, strict=True)
    )


def from_frame(
    hidden: HiddenStates, boundary: Sequence[BoundaryTensor], *, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Decode what crosses a cut, with the run dtype `dtype`; must not be modified."""
    return tuple(
        from_wire(view, device=device, dtype=dtype if one.dtype is None else TORCH_DTYPES[one.dtype])
        for view, one in zip(hidden, boundary, strict=True)
    )


def from_wire(view: TensorView, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Decode hidden states [n, width] to `dtype`; must not be modified."""
    if isinstance(view.dtype, ScaledDType):
        num_rows, width = view.shape
        return unscale_rows(_raw(view).to(device), view.dtype, (num_rows, width), dtype)
    return from_view(view, device=device).to(dtype)


def _raw(view: TensorView) -> Tensor:
    """uint8 tensor over the view's bytes."""
    if not view.size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view.data, dtype=torch.uint8)
