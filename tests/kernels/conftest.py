"""Triton's interpreter is chosen for a whole process, before kernels are imported: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parent
_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = []
if not (_IS_INTERPRETED and find_spec("triton")):
    collect_ignore_glob.append("interpreted/*")
if _IS_INTERPRETED or not find_spec("triton"):
    collect_ignore_glob += ["compiled/*", "emulated/*", "recorded/*"]

NUM_CI_CASES = 20
CI_CASES = (
    "test_shapes_equal_those_of_torch[delta-tiled]",
    "test_shapes_equal_those_of_torch[kimi-rates]",
    "test_shapes_equal_those_of_torch[mamba-one-group]",
)
"""Beside those, one of each recurrent mixer."""
CI_ARCHITECTURE = "sm_90"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With STAGELINE_TEST_KERNEL_CASES=ci, keep 20 interpreted cases spread over all and `CI_CASES`, and the
    compiler's for one architecture, beside those that neither run nor compile a kernel.
    """
    if os.environ.get("STAGELINE_TEST_KERNEL_CASES") != "ci":
        return
    mine = [item for item in items if FOLDER in item.path.parents]
    if _IS_INTERPRETED:
        kept = [mine[number * len(mine) // NUM_CI_CASES] for number in range(NUM_CI_CASES)]
        kept += [item for item in mine if item.name in CI_CASES and item not in kept]
    else:
        every = ("emulated", "recorded")
        kept = [item for item in mine if CI_ARCHITECTURE in item.name or item.path.parent.name in every]
    items[:] = [item for item in items if item not in mine] + kept


def _call_without_patches() -> None:
    """Make calls between interpreted functions fast: they replace the functions of `triton.language` at every
    call, by 300 lookups, although the first call has done so.
    """
    from triton.runtime import interpreter

    call, prepared = interpreter.InterpretedFunction.__call__, set()

    def fast_call(function: Any, *arguments: Any, **keywords: Any) -> Any:
        module = function.fn.__module__
        if module in prepared:
            return function.rewrite()(*arguments, **keywords)
        prepared.add(module)
        return call(function, *arguments, **keywords)

    interpreter.InterpretedFunction.__call__ = fast_call


if _IS_INTERPRETED and find_spec("triton"):
    _call_without_patches()


def _round_as_gpus() -> None:
    """Round float32 to bfloat16 half to even; Triton 3.8's interpreter truncates. No warnings of numpy."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def exact(given: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        if (str(from_type), str(to_type)) != ("fp32", "bf16"):
            return convert(given, from_type, to_type, rounding)
        rounded = torch.from_numpy(np.ascontiguousarray(given).view(np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = exact
    np.seterr(over="ignore", invalid="ignore")


if _IS_INTERPRETED and find_spec("triton"):
    _round_as_gpus()
