"""A peer that computes only the matrix products of some layers, the lower bound of a step's time.

python -m bench.harness.products CORE

Question: {"batch": 8, "layers": 6, "head_rows": 8, "seconds": 1.0}; head_rows 0 for a stage without head.
Answer: {"plain_s": ..., "packed_s": ...}, medians of one pass over all layers.

Weights are random bfloat16 and together larger than the caches. Every pass reads all of them in the order of
the layers, so they come from memory as in a real step. "plain" is `torch.nn.functional.linear`, "packed"
the same product with weights in oneDNN's own layout, packed once for all batch sizes; the two alternate.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness.llama import LLAMA_88M, Geometry

PACKED_FOR = 16
WARMUP_PASSES = 2

Pass = Callable[[], object]


class Weights:
    """Matrices of one stage, plain and packed, and inputs of every width."""

    def __init__(self, geometry: Geometry, num_layers: int) -> None:
        torch.manual_seed(0)
        self._geometry = geometry
        self._layers = [[_Matrix(*shape) for shape in geometry.layer_products] for _ in range(num_layers)]
        self._head = _Matrix(*geometry.head_product)

    def passes(self, *, num_layers: int, batch: int, head_rows: int) -> tuple[Pass, Pass]:
        """Compute the first `num_layers` layers and the head, plain and packed."""
        inputs = {matrix.width: torch.randn(batch, matrix.width).bfloat16() for matrix in self._layers[0]}
        rows = torch.randn(max(1, head_rows), self._geometry.hidden).bfloat16()
        work = [(matrix, inputs[matrix.width]) for layer in self._layers[:num_layers] for matrix in layer]
        if head_rows:
            work.append((self._head, rows))
        return lambda: [m.plain(x) for m, x in work], lambda: [m.packed(x) for m, x in work]


class _Matrix:
    """A weight [out, in]."""

    def __init__(self, out: int, width: int) -> None:
        self.width = width
        self._weight = torch.randn(out, width).bfloat16()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, PACKED_FOR)

    def plain(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self._weight)

    def packed(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
        return product


def measure(plain: Pass, packed: Pass, *, seconds: float) -> dict[str, float]:
    """Measure both in turns for `seconds`."""
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(WARMUP_PASSES):
        plain(), packed()
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds or len(times_s[0]) < 3:
        for work, times in zip((plain, packed), times_s, strict=True):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
    return {"plain_s": statistics.median(times_s[0]), "packed_s": statistics.median(times_s[1])}


def main(core: int) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[core % len(allowed)]})
    torch.set_num_threads(1)
    weights = Weights(LLAMA_88M, LLAMA_88M.num_layers)
    with torch.inference_mode():
        for line in sys.stdin:
            asked = json.loads(line)
            passes = weights.passes(
                num_layers=asked["layers"], batch=asked["batch"], head_rows=asked["head_rows"]
            )
            print(json.dumps(measure(*passes, seconds=asked["seconds"])), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
