"""A peer that computes only the matrix products of a whole model, with weights in several formats.

python -m bench.harness.quantized_products MODEL

Question: {"rows": 1, "seconds": 1.0}. Answer: {"bf16_s": ..., "int8_s": ..., "int4_s": ...}: medians of one
pass over all layers and the output head, which is bfloat16 in every format. They are the products that a
stage of this host chooses, on one thread, and take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

import torch
from torch import Tensor

from bench.harness.llama import NAMES, Geometry
from checkpoint import Blueprint, Checkpoint, WeightFormat
from stage_worker.model.kernels import Kernels
from stage_worker.model.projections import Projection, project

FORMATS: dict[str, WeightFormat | None] = {
    "bf16_s": None,
    "int8_s": WeightFormat.INT8,
    "int4_s": WeightFormat.INT4,
}
WARMUP_PASSES = 2

Products = list[tuple[Projection, int]]
"""Projections with the width of their input."""


def products_of(geometry: Geometry, config: Blueprint, weights: WeightFormat | None) -> Products:
    """All products of a model, with random weights."""
    chosen = Kernels.of(config.with_weights(weights), torch.device("cpu"), torch.bfloat16)
    shapes = [(shape, chosen.layer_products) for shape in geometry.layer_products] * geometry.num_layers
    shapes.append((geometry.head_product, chosen.products))
    return [
        (project(torch.randn(out, width).bfloat16(), None, method), width) for (out, width), method in shapes
    ]


def measure(products: dict[str, Products], *, rows: int, seconds: float) -> dict[str, float]:
    """Measure all formats in turns for `seconds`."""
    widths = {width for work in products.values() for _, width in work}
    inputs = {width: torch.randn(rows, width).bfloat16() for width in widths}
    times_s: dict[str, list[float]] = {name: [] for name in products}
    for _ in range(WARMUP_PASSES):
        for work in products.values():
            _multiply(work, inputs)
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < seconds or len(times_s["bf16_s"]) < 3:
        for name, work in products.items():
            started = time.perf_counter()
            _multiply(work, inputs)
            times_s[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in times_s.items()}


def _multiply(work: Products, inputs: dict[int, Tensor]) -> None:
    for projection, width in work:
        projection(inputs[width])


@torch.inference_mode()
def main(name: str, directory: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    geometry = next(geometry for geometry, known in NAMES.items() if known == name)
    config = Checkpoint.open(directory).config
    products = {key: products_of(geometry, config, weights) for key, weights in FORMATS.items()}
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(measure(products, rows=asked["rows"], seconds=asked["seconds"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
