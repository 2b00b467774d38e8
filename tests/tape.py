"""Graphs on a CPU: operators of torch are recorded with their tensors, and repeated on the same memory.

As in a CUDA graph, no Python runs in a replay: values of the host are those of the time of recording, and
what is read is what then is in the memory that was recorded. Memory that operators leave undefined is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from stage_worker.backends.step_graphs import Graph, GraphRecorder

_aten = torch.ops.aten
_WAITS = (_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.bincount.default)
_UNDEFINED = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided")


def tensors(*trees: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(trees) if isinstance(leaf, Tensor)]


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True)
class Call:
    """One operator with its arguments and what it returned."""

    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    found: Any

    def repeat(self) -> None:
        given = {address(tensor) for tensor in tensors(self.arguments, self.keywords)}
        again = tensors(self.function(*self.arguments, **self.keywords))
        for old, new in zip(tensors(self.found), again, strict=True):
            if address(old) not in given:
                old.copy_(_marked(self.function, new))

    def without_tensors(self) -> tuple[Any, ...]:
        """The operator with all that a replay cannot change: shapes, strides and values of the host."""

        def fixed(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, Tensor)
            return (leaf.shape, leaf.stride(), leaf.storage_offset()) if is_tensor else leaf

        return str(self.function), tree_map(fixed, (self.arguments, self.keywords, self.found))


def _marked(function: Any, found: Any) -> Any:
    if function._schema.name in _UNDEFINED and found.is_floating_point() and found.element_size() > 1:
        found.fill_(float("nan"))
    return found


class Tape(TorchDispatchMode, Graph):
    """Recorded operators, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _WAITS:
            raise RuntimeError(f"{func} waits for the device")
        found = _marked(func, func(*args, **(kwargs or {})))
        self.calls.append(Call(func, args, kwargs or {}, found))
        return found

    def replay(self) -> None:
        for call in self.calls:
            call.repeat()

    @property
    def outside(self) -> set[int]:
        """Addresses of the memory that is used, and that was not allocated while recording."""
        made: set[int] = set()
        used: set[int] = set()
        for call in self.calls:
            given = {address(tensor) for tensor in tensors(call.arguments, call.keywords)}
            used |= given - made
            made |= {address(tensor) for tensor in tensors(call.found)} - given
        return used - {0}


class TapeRecorder(GraphRecorder):
    """Records tapes; `failure` is raised in the place of the next records."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.num_replays = 0
        self.failure: Exception | None = None
        self.broken: Exception | None = None
        self.num_held_bytes = 0

    def capture(self, run: Callable[[], None]) -> Graph:
        if self.failure is not None:
            raise self.failure
        tape = Tape()
        with tape:
            run()
        self.tapes.append(tape)
        return _Counted(self, tape)

    @property
    def num_bytes(self) -> int:
        return self.num_held_bytes

    def synchronize(self) -> None:
        if self.broken is not None:
            raise self.broken


@dataclass(frozen=True)
class _Counted(Graph):
    recorder: TapeRecorder
    tape: Tape

    def replay(self) -> None:
        self.recorder.num_replays += 1
        self.tape.replay()
