"""Identities are UUIDv7; other values are rejected."""

from __future__ import annotations

from uuid import UUID, uuid1, uuid4

import pytest

from wire.ids import (
    RequestId,
    SequenceKey,
    StageRole,
    id_text,
    new_incarnation,
    new_request_id,
    parse_request_id,
)


def test_new_ids_are_increasing_uuid7() -> None:
    ids = [new_request_id() for _ in range(100)]
    assert all(UUID(bytes=id_bytes).version == 7 for id_bytes in ids)
    assert ids == sorted(set(ids))
    assert UUID(bytes=new_incarnation()).version == 7


def test_an_id_round_trips_through_text() -> None:
    request_id = new_request_id()
    assert parse_request_id(id_text(request_id)) == request_id
    assert parse_request_id(id_text(request_id).upper()) == request_id


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (str(uuid4()), "version 4, expected version 7"),
        (str(uuid1()), "version 1, expected version 7"),
        (str(UUID(int=0)), "expected version 7"),
        ("", "is not a UUID"),
        ("no-uuid", "is not a UUID"),
        (id_text(new_request_id())[:-1], "is not a UUID"),
    ],
    ids=["version 4", "version 1", "nil", "empty", "text", "a digit short"],
)
def test_anything_but_a_uuid7_is_rejected(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as caught:
        parse_request_id(text)
    assert repr(text) in str(caught.value)


def test_malformed_ids_can_be_printed() -> None:
    assert id_text(b"") == "(none)"
    assert id_text(b"\x01\x02") == "0102"
    assert str(SequenceKey(RequestId(bytes(16)), 3)) == "00000000-0000-0000-0000-000000000000/3"


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
    with pytest.raises(ValueError, match=rf"stage {stage} is not in 0\.\."):
        StageRole.of_stage(stage, num_stages)
