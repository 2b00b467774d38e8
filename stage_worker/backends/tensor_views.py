"""Hidden states between torch and the wire.

Rows of fp8 and int8 are rounded as those of the KV cache, see `kvcache.scaled_pages`.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from checkpoint import BoundaryTensor, DType, ScaledDType
from checkpoint.boundary import HIDDEN_STATES
from kvcache.scaled_pages import scaled_rows, unscaled_rows
from stage_worker.backends.transfers import host_bytes
from stage_worker.model.kernels import AttentionMethod, Kernels, load_triton
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


HandOn = Callable[[Sequence[Tensor]], Sequence[memoryview]]
"""Has the bytes of each tensor: now, or once a download has ended, or never on the host."""
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


@dataclass(frozen=True, slots=True)
class RowScaling:
    """How rows get 8 bits and back: see `scale_rows` and `unscale_rows`."""

    scale: Callable[[Tensor, ScaledDType], Tensor]
    unscale: Callable[[Tensor, ScaledDType, tuple[int, int], torch.dtype], Tensor]

    @classmethod
    def of(cls, kernels: Kernels) -> RowScaling:
        """Triton kernels of one launch where a stage has such kernels, else torch's operators."""
        if kernels.decode is not AttentionMethod.TRITON:
            return BY_TORCH
        module = load_triton("wire_rows")
        return cls(module.scale_rows, module.unscale_rows)


BY_TORCH = RowScaling(scale_rows, unscale_rows)

with warnings.catch_warnings():
    # torch warns once per process and function about tensors over read-only bytes, which are never written.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(bytes(1), np.uint8))
    torch.frombuffer(bytes(1), dtype=torch.uint8)


def to_wire(
    hidden: Tensor,
    wire_dtype: WireDType,
    *,
    name: str = HIDDEN_STATES,
    scaling: RowScaling = BY_TORCH,
) -> TensorView:
    """Encode hidden states [n, width] for sending, on their device where possible."""
    return TensorView(wire_dtype, tuple(hidden.shape), host_bytes(encoded(hidden, wire_dtype, scaling)), name)


def encoded(hidden: Tensor, wire_dtype: WireDType, scaling: RowScaling = BY_TORCH) -> Tensor:
    """Hidden states [n, width] as sent: in a dtype of torch, or uint8 with the scales of rows behind them."""
    if isinstance(wire_dtype, DType):
        return hidden.to(TORCH_DTYPES[wire_dtype])
    return scaling.scale(hidden.detach(), wire_dtype)


def sum_of_scales(sent: Tensor, num_elements: int) -> Tensor:
    """A sum float32 that is finite if all values of `sent`, uint8 with scales, are: of its scales."""
    return sent[num_elements:].clone().view(torch.float32).sum()


def sum_of_sent(
    carried: Sequence[Tensor],
    sent: Sequence[Tensor],
    boundary: Sequence[BoundaryTensor],
    wire_dtype: WireDType,
) -> Tensor:
    """A sum float32 that is finite if what crosses a cut is, but for an overflow: see `encoded_all`."""
    parts, unscaled = [], []
    for tensor, content, one in zip(carried, sent, boundary, strict=True):
        if isinstance(one.dtype or wire_dtype, ScaledDType):
            parts.append(sum_of_scales(content, tensor.numel()))
        else:
            unscaled.append(tensor)
    if unscaled:
        parts.append(sum_of(unscaled))
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def beside(carried: Sequence[Tensor]) -> Tensor:
    """The tensors [tokens, width] of a boundary beside each other, for checks of their values."""
    return carried[0] if len(carried) == 1 else torch.cat([tensor.float() for tensor in carried], dim=1)


def sum_of(carried: Sequence[Tensor]) -> Tensor:
    """The sum of all values, float32: finite if they are, but for an overflow."""
    return beside(carried).sum(dtype=torch.float32)


def all_host_bytes(sent: Sequence[Tensor]) -> list[memoryview]:
    """See `host_bytes`."""
    return [host_bytes(tensor) for tensor in sent]


def to_frame(
    tensors: Sequence[Tensor],
    boundary: Sequence[BoundaryTensor],
    wire_dtype: WireDType,
    hand_on: HandOn = all_host_bytes,
    scaling: RowScaling = BY_TORCH,
) -> HiddenStates:
    """Encode what crosses a cut: a tensor [n, width] for each of `boundary`, in its order."""
    sent = encoded_all(tensors, boundary, wire_dtype, scaling)
    return views_of(tensors, hand_on(sent), boundary, wire_dtype)


def encoded_all(
    tensors: Sequence[Tensor],
    boundary: Sequence[BoundaryTensor],
    wire_dtype: WireDType,
    scaling: RowScaling = BY_TORCH,
) -> list[Tensor]:
    """What crosses a cut as sent, see `encoded`."""
    return [
        encoded(tensor, one.dtype or wire_dtype, scaling)
        for tensor, one in zip(tensors, boundary, strict=True)
    ]


def views_of(
    tensors: Sequence[Tensor],
    contents: Sequence[memoryview],
    boundary: Sequence[BoundaryTensor],
    wire_dtype: WireDType,
) -> HiddenStates:
    """Views of what crosses a cut, whose bytes as sent are `contents`."""
    return tuple(
        TensorView(one.dtype or wire_dtype, tuple(tensor.shape), content, one.name)
        for tensor, content, one in zip(tensors, contents, boundary, strict=True)
    )


def from_frame(
    hidden: HiddenStates,
    payloads: Sequence[Tensor],
    boundary: Sequence[BoundaryTensor],
    dtype: torch.dtype,
    scaling: RowScaling = BY_TORCH,
) -> tuple[Tensor, ...]:
    """Decode what crosses a cut, with the run dtype `dtype`, from `payload` of each; must not be modified."""
    return tuple(
        decoded(payload, view, dtype if one.dtype is None else TORCH_DTYPES[one.dtype], scaling)
        for view, payload, one in zip(hidden, payloads, boundary, strict=True)
    )


def from_wire(view: TensorView, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Decode hidden states [n, width] to `dtype`; must not be modified."""
    return decoded(torch.from_numpy(payload(view)).to(device), view, dtype)


def payload(view: TensorView) -> NDArray[np.uint8]:
    """The view's bytes."""
    return np.frombuffer(view.data, np.uint8)


def decoded(payload: Tensor, view: TensorView, dtype: torch.dtype, scaling: RowScaling = BY_TORCH) -> Tensor:
    """Decode hidden states [n, width] from uint8 `payload` with the bytes of `view`; must not be modified."""
    num_rows, width = view.shape
    return decoded_rows(payload, view.dtype, (num_rows, width), dtype, scaling)


def decoded_rows(
    payload: Tensor,
    wire_dtype: WireDType,
    shape: tuple[int, int],
    dtype: torch.dtype,
    scaling: RowScaling = BY_TORCH,
) -> Tensor:
    """Decode hidden states [n, width] of `shape` from uint8 `payload`; must not be modified."""
    if isinstance(wire_dtype, ScaledDType):
        return scaling.unscale(payload, wire_dtype, shape, dtype)
    if payload.device.type == "cpu" and payload.data_ptr() % wire_dtype.size_bytes:
        payload = payload.clone()
    return payload.view(TORCH_DTYPES[wire_dtype]).view(shape).to(dtype)
