"""Detection of stages that use different kernels."""

from __future__ import annotations

import pytest

from wire.kernels import StageKernels, differing_kernels

COMPILED, PLAIN = StageKernels("cpu", "compiled"), StageKernels("cpu", "plain")


@pytest.mark.parametrize(
    "stages",
    [
        [],
        [PLAIN],
        [COMPILED, COMPILED, COMPILED],
        [StageKernels("cuda:0", "plain"), StageKernels("cuda:1", "plain")],
        [StageKernels("mock", ""), StageKernels("mock", "")],
        [COMPILED, None, COMPILED],
    ],
)
def test_stages_with_equal_kernels_give_no_warning(stages: list[StageKernels | None]) -> None:
    assert differing_kernels(stages) == ""


def test_differing_stages_are_named_with_their_kernels() -> None:
    stages = [COMPILED, PLAIN, COMPILED, StageKernels("cuda:0", "plain")]
    assert differing_kernels(stages) == (
        "stages compute differently: stages 0, 2: compiled on cpu; stage 1: plain on cpu; "
        "stage 3: plain on cuda"
    )
