"""Launches of Triton kernels that are recorded and not run, for tensors without data (`tests.fake_cuda`).

Results of kernels have their shapes only. What distinguishes compiled variants of a kernel is recorded, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from stage_worker.model.triton_kernels.launch import Launch

_ALIGNED = 16
"""Bytes of a pointer's alignment, and a divisor of a number, for which Triton compiles a variant."""
Variant = tuple[Any, ...]


@dataclass
class Launches:
    """Names of kernels in the order of their launches, and the variants that were launched."""

    names: list[str]
    variants: set[Variant]

    def clear(self) -> None:
        """Forget all launches, but no variant."""
        self.names.clear()


def record_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Record all launches from now on, as on a GPU of compute capability 9.0."""
    found = Launches([], set())

    def record(launch: Launch, *arguments: Any) -> None:
        if 0 not in launch.grid:
            found.names.append(launch.kernel.fn.__name__)
            found.variants.add(variant_of(launch, arguments))

    monkeypatch.setattr(Launch, "__call__", record)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    return found


def variant_of(launch: Launch, arguments: tuple[Any, ...]) -> Variant:
    """What Triton compiles a kernel for: constants, warps, stages, and properties of `arguments`."""
    given = [parameter for parameter in launch.kernel.params if not parameter.is_constexpr]
    assert len(given) == len(arguments), launch.kernel.fn.__name__
    properties = tuple(map(_property_of, given, arguments))
    constants = tuple(sorted((name, str(value)) for name, value in launch.constants.items()))
    return launch.kernel.fn.__name__, constants, launch.num_warps, launch.num_stages, properties


def _property_of(parameter: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        place = value.storage_offset() * value.element_size()
        can_align = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        return value.dtype, can_align and place % _ALIGNED == 0
    if value is None or isinstance(value, bool | float):
        return value if value is None else type(value)
    assert isinstance(value, int), f"{parameter.name} is {value!r}"
    size = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if parameter.do_not_specialize:
        return size
    if value == 1:
        return 1
    return size, not parameter.do_not_specialize_on_alignment and value % _ALIGNED == 0
