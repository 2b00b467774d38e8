"""Hidden states between torch and the wire."""

import warnings

import torch
from torch import Tensor

from checkpoint import DType
from stage_worker.models import TORCH_DTYPES
from stage_worker.row_scaling import scale_rows, unscale_rows
from wire.tensors import TensorView
from wire.wire_dtypes import ScaledDType, WireDType

_DTYPES: dict[torch.dtype, DType] = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}

with warnings.catch_warnings():
    # torch warns once in a process of a tensor over bytes that must not be written; nothing here writes them.
    warnings.simplefilter("ignore")
    torch.frombuffer(bytes(1), dtype=torch.uint8)


def to_view(tensor: Tensor) -> TensorView:
    """The tensor's own bytes where it is on the CPU; the view keeps them alive."""
    dense = tensor.detach().contiguous().cpu()
    return TensorView(_DTYPES[dense.dtype], tuple(dense.shape), dense.view(torch.uint8).numpy().data)


def from_view(view: TensorView, *, device: torch.device) -> Tensor:
    """A tensor in the view's own dtype, which must not be modified: on the CPU it is the view's bytes, unless
    they lie where elements of this size may not. The tensor keeps them alive.
    """
    assert isinstance(view.dtype, DType), "rows with scales are for from_wire"
    raw = _raw(view)
    if raw.data_ptr() % view.dtype.size_bytes:
        raw = raw.clone()
    return raw.view(TORCH_DTYPES[view.dtype]).view(view.shape).to(device)


def to_wire(hidden: Tensor, wire_dtype: WireDType) -> TensorView:
    """Hidden states [n, width] as they are to travel; what the device can do is done there."""
    if isinstance(wire_dtype, DType):
        return to_view(hidden.to(TORCH_DTYPES[wire_dtype]))
    payload = scale_rows(hidden.detach(), wire_dtype).cpu()
    return TensorView(wire_dtype, tuple(hidden.shape), payload.numpy().data)


def from_wire(view: TensorView, *, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Hidden states [n, width] in `dtype`, to compute from and not to be modified."""
    if isinstance(view.dtype, ScaledDType):
        num_rows, width = view.shape
        return unscale_rows(_raw(view).to(device), view.dtype, (num_rows, width), dtype)
    return from_view(view, device=device).to(dtype)


def _raw(view: TensorView) -> Tensor:
    """uint8 over the view's bytes."""
    if not view.size_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(view.data, dtype=torch.uint8)
