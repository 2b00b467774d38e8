"""Finds the compiled functions of _cpu_kernels.c, and says where they can be used.

Where installing found no C compiler the module is not there; then, and for shapes and CPUs that the functions
are not made for, torch's operators do the same work.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from checkpoint import ModelConfig

_MODULE = "stage_worker.models._cpu_kernels"
_HEAD_DIMS = (32, 64, 96, 128, 256)
_MOST_ELEMENTS = 64 * 256
_LANES = 16


def load() -> ModuleType:
    """The compiled module. Raises ImportError where it was not built."""
    return importlib.import_module(_MODULE)


def missing_because() -> str | None:
    """Why this installation or CPU has no compiled functions, whatever the model; None if it has them."""
    try:
        module = load()
    except ImportError:
        return "the compiled kernels were not built when Stageline was installed"
    return None if module.is_supported() else "this CPU lacks AVX-512 with bfloat16"


def unavailable_because(config: ModelConfig) -> str | None:
    """Why a model of this shape cannot be computed here by the compiled functions; None if it can."""
    if (reason := missing_because()) is not None:
        return reason
    if config.head_dim not in _HEAD_DIMS or config.q_size > _MOST_ELEMENTS:
        return f"{config.num_attention_heads} heads of {config.head_dim} are none that the kernels are for"
    if config.hidden_size % _LANES or config.intermediate_size % _LANES:
        return f"widths {config.hidden_size} and {config.intermediate_size} are no multiples of {_LANES}"
    return None
