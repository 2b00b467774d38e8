"""Start of kernels, in one place, so that tests can count launches and compile them for other GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

IS_INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1).

It multiplies bfloat16 as integers: products widen their operands to float32 there.
"""


PRECISION = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
"""Products of float32: three of tf32, which keep 21 bits; ROCm has none, and multiplies float32 as it is."""


@dataclass(frozen=True, slots=True)
class Launch:
    """Run `kernel` in `grid` programs, each of `num_warps`; loops load `num_stages` tiles ahead."""

    kernel: Any
    grid: tuple[int, ...]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2

    def __call__(self, *arguments: Any) -> None:
        """Enqueue the kernel on the current stream of the current device."""
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            *arguments, **self.constants, num_warps=self.num_warps, num_stages=self.num_stages
        )


def padded(size: int, least: int = 1) -> int:
    """The least power of two that is at least `size` and `least`: sizes of tiles are powers of two."""
    found: int = triton.next_power_of_2(max(size, least))
    return found
