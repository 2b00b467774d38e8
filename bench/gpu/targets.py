"""Targets of `python -m bench gpu` on an H100, in one table. Pure.

Shares of bounds are of rates measured in the same run, so they compare between GPUs; times are an H100's.
"""

from __future__ import annotations

from bench.gpu.rows import Row
from bench.harness.figure import Better

NO_RUN = "no run on a GPU yet"


def decode_name(num_sequences: int, context: int, kernels: str = "auto") -> str:
    """Name of the figure of a decode step; `kernels` as in --kernels."""
    chosen = "" if kernels == "auto" else f", {kernels} kernels"
    return f"decode step, batch {num_sequences}, context {context}{chosen}"


def attention_name(num_sequences: int, context: int) -> str:
    return f"attention of a decode step, batch {num_sequences}, context {context}"


def prompt_name(num_tokens: int, start: int) -> str:
    return f"prompt step, {num_tokens} tokens behind {start}"


def gap_name(num_sequences: int, context: int) -> str:
    return f"gap between decode steps, batch {num_sequences}, context {context}"


def busy_name(num_sequences: int, context: int) -> str:
    return f"GPU busy with decode steps waiting, batch {num_sequences}, context {context}"


def sampling_name(kind: str, num_sequences: int) -> str:
    return f"sampling adds to a decode step, {kind}, batch {num_sequences}"


def experts_name(layer: str, num_rows: int) -> str:
    return f"experts of one layer, {layer}, batch {num_rows}"


LOADING_NAME = "reading the weights of the reference stage"
PEAK_NAME = "memory of the largest step, of the plan"
POISON_NAME = "device-side assert until the worker has ended"


def _row(phase: str, name: str, unit: str, target: float, better: Better = Better.HIGHER) -> Row:
    return Row(phase=phase, name=name, unit=unit, target=target, better=better, reason=NO_RUN)


OF_BOUNDS: tuple[Row, ...] = (
    _row("decode", decode_name(1, 2048), "ms", 0.70, Better.LOWER),
    _row("decode", decode_name(32, 2048), "ms", 0.77, Better.LOWER),
    _row("decode", decode_name(128, 2048), "ms", 0.78, Better.LOWER),
    _row("decode", attention_name(32, 2048), "ms", 0.80, Better.LOWER),
    _row("decode", LOADING_NAME, "GB/s", 0.80),
    _row("prompts", prompt_name(2048, 0), "ms", 0.75, Better.LOWER),
    _row("prompts", prompt_name(2048, 30720), "ms", 0.70, Better.LOWER),
    _row("experts", experts_name("gpt-oss-120b, mxfp4", 32), "ms", 0.70, Better.LOWER),
    _row("experts", experts_name("DeepSeek V3, fp8", 32), "ms", 0.70, Better.LOWER),
)
"""The figures whose target is a share of their bound; rows without a value."""

TARGETS: tuple[Row, ...] = (
    *OF_BOUNDS,
    _row("decode", gap_name(32, 2048), "us", 50.0, Better.LOWER),
    _row("decode", busy_name(32, 2048), "share", 0.97),
    _row("decode", PEAK_NAME, "share", 0.95),
    _row("sampling", sampling_name("greedy", 128), "ms", 0.5, Better.LOWER),
    _row("sampling", sampling_name("top-p 0.95", 128), "ms", 0.5, Better.LOWER),
    _row("failures", POISON_NAME, "s", 1.0, Better.LOWER),
)
"""All figures with a target, the others' of their values."""

_BY_NAME = {row.name: row.target for row in TARGETS}


def target_of(name: str) -> float | None:
    """Target of the figure `name`; None for other figures, and for other shapes as in --quick."""
    return _BY_NAME.get(name)
