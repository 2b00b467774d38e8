"""Hidden states between torch and the wire."""

import torch
from torch import Tensor

from checkpoint import DType
from stage_worker.models import TORCH_DTYPES
from wire.tensors import TensorView

_DTYPES: dict[torch.dtype, DType] = {torch_dtype: dtype for dtype, torch_dtype in TORCH_DTYPES.items()}


def to_view(tensor: Tensor) -> TensorView:
    """The tensor's own bytes where it is on the CPU; the view keeps them alive."""
    dense = tensor.detach().contiguous().cpu()
    return TensorView(_DTYPES[dense.dtype], tuple(dense.shape), dense.view(torch.uint8).numpy().data)


def from_view(view: TensorView, *, device: torch.device) -> Tensor:
    """A tensor with a copy of the view's bytes: what arrived stays as it is."""
    copied = torch.empty(view.shape, dtype=TORCH_DTYPES[view.dtype])
    copied.view(torch.uint8).numpy().data.cast("B")[:] = memoryview(view.data).cast("B")
    return copied.to(device)
