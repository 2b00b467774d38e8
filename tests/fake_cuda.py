"""CUDA tensors without data on a machine without a GPU: what would wait for the device raises here.

FakeTensorMode has shapes, dtypes and devices only: `item`, `tolist` and `nonzero` of its tensors raise, and
so does mixing tensors of two devices. Copies between host and device are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stage_worker.backends.transfers import DeviceQueue, Event
from stage_worker.model.attention_views import HostArray

DEVICE = torch.device("cuda:0")
_aten = torch.ops.aten
T = TypeVar("T")


class _WithoutDriver(TorchFunctionMode):
    """Functions for which a build of torch without CUDA looks for a driver, by others."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else _aten.clone.default(x, memory_format=torch.contiguous_format)


def _indexed(x: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if all(isinstance(part, Tensor) for part in parts):
        found: Tensor = _aten.index.Tensor(x, parts)
        return found
    if Ellipsis in parts:
        place = parts.index(Ellipsis)
        missing = x.dim() - sum(part is not None for part in parts) + 1
        parts[place : place + 1] = [slice(None)] * missing
    dim = 0
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, int):
            x, dim = x.select(dim, part), dim - 1
        elif isinstance(part, slice):
            begin, end, step = part.indices(x.shape[dim])
            x = _aten.slice.Tensor(x, dim, begin, max(begin, end), step)
        else:
            raise TypeError(f"an index {part!r} is copied to the device")
        dim += 1
    return x


def _assign(x: Tensor, index: Any, value: Tensor) -> None:
    _aten.copy_.default(_indexed(x, index), value)


def _attention(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
    mask = others.get("attn_mask")
    scores = query @ key.transpose(-1, -2)
    return torch.softmax(scores if mask is None else scores + mask, dim=-1) @ value


_REPLACED: dict[Any, Callable[..., Any]] = {
    Tensor.__getitem__: _indexed,
    Tensor.__setitem__: _assign,
    Tensor.__invert__: _aten.bitwise_not.default,
    Tensor.contiguous: _contiguous,
    Tensor.copy_: _aten.copy_.default,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}


class Copies(TorchDispatchMode):
    """Counts operations, and copies by their direction: "up" and "down"."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = {leaf.device.type for leaf in tree_leaves(found) if isinstance(leaf, Tensor)}
        self.counts["operations"] += 1
        is_copy = func is not _aten.new_empty.default  # like a table in memory of the host
        if "cpu" in given and "cuda" in made and is_copy:
            self.counts["up"] += 1
        if "cuda" in given and "cpu" in made:
            self.counts["down"] += 1
        return found


@contextmanager
def fake_cuda() -> Iterator[Copies]:
    copies = Copies()
    with FakeTensorMode(allow_non_fake_inputs=True), copies, _WithoutDriver():
        yield copies


def with_data(make: Callable[..., T]) -> Callable[..., T]:
    """`make`, with tensors of the host that have data, as frames have."""

    def made(*arguments: Any, **options: Any) -> T:
        with unset_fake_temporarily():
            return make(*arguments, **options)

    return made


class _Ended(Event):
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


NO_HOP = "these steps have no hop in memory of a device"


class FakeCudaQueue(DeviceQueue):
    """Copies of nothing, which count; what is downloaded is zeros."""

    def host_memory(self, num_bytes: int) -> HostArray:
        return np.zeros(num_bytes, np.uint8)

    def locked_memory(self, num_bytes: int) -> HostArray:
        return np.zeros(num_bytes, np.uint8)

    def device_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)

    def fence_uploads(self) -> None:
        pass

    def upload(self, target: Tensor, source: HostArray) -> Event:
        target.copy_(torch.from_numpy(source), non_blocking=True)
        return _Ended()

    def download(self, target: HostArray, source: Tensor) -> Event:
        torch.from_numpy(target).copy_(source, non_blocking=True)
        return _Ended()

    def copy_out(self, address: int, source: Tensor) -> None:
        raise AssertionError(NO_HOP)

    def copy_in(self, target: Tensor, address: int) -> Event:
        raise AssertionError(NO_HOP)

    def read(self, address: int, num_bytes: int) -> HostArray:
        raise AssertionError(NO_HOP)

    def synchronize(self) -> None:
        pass
