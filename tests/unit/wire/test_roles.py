"""A stage's role follows from its place in the plan."""

from __future__ import annotations

import pytest

from wire.roles import StageRole


@pytest.mark.parametrize(
    ("num_stages", "roles"),
    [
        (1, [StageRole.ONLY]),
        (2, [StageRole.FIRST, StageRole.LAST]),
        (3, [StageRole.FIRST, StageRole.MIDDLE, StageRole.LAST]),
        (5, [StageRole.FIRST, StageRole.MIDDLE, StageRole.MIDDLE, StageRole.MIDDLE, StageRole.LAST]),
    ],
)
def test_roles_of_a_pipeline(num_stages: int, roles: list[StageRole]) -> None:
    assert [StageRole.of_stage(stage, num_stages) for stage in range(num_stages)] == roles
    assert [role.has_embeddings for role in roles] == [True] + [False] * (num_stages - 1)
    assert [role.has_head for role in roles] == [False] * (num_stages - 1) + [True]


@pytest.mark.parametrize(("stage", "num_stages"), [(-1, 3), (3, 3), (0, 0)])
def test_a_stage_outside_the_pipeline_has_no_role(stage: int, num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"stage {stage} of a plan with {num_stages} stages"):
        StageRole.of_stage(stage, num_stages)
