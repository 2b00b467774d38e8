"""Memory of tensors while code runs, by torch's dispatcher."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts memory of tensors on the CPU that are made while it is entered, but for packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(one) for one in _counted(args, kwargs)}
        output = function(*args, **(kwargs or {}))
        for one in _counted(output):
            if self._key(one) not in given:
                self._count(one.untyped_storage())
        self.peak = max(self.peak, self._live)
        return output

    def _key(self, tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = int(storage._cdata)
        if key not in self._known:
            self._known.add(key)
            self._live += storage.nbytes()
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self._live -= num_bytes


def _counted(*values: Any) -> list[Tensor]:
    """The tensors among `values` with memory of the CPU that can be read."""
    found = [one for one in tree_leaves(values) if isinstance(one, Tensor)]
    return [one for one in found if one.device.type == "cpu" and one.layout is torch.strided]
