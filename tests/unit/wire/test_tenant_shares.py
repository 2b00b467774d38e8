"""What tenants share: each has its part of the places and of a cache."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.tenant_shares import TenantCache, has_room

TENANTS = "abcd"


@pytest.mark.parametrize(
    ("num_of", "tenant", "count", "expected"),
    [
        ({}, "a", 8, True),
        ({}, "a", 9, False),
        ({"a": 8}, "a", 1, False),
        ({"a": 8}, "b", 4, True),
        ({"a": 8}, "b", 5, False),
        ({"a": 8, "b": 4}, "b", 1, False),
        ({"a": 8, "b": 4}, "c", 2, True),
        ({"a": 8, "b": 0}, "b", 4, True),
    ],
)
def test_a_tenant_has_an_equal_part_of_places_that_others_have_filled(
    num_of: dict[str, int], tenant: str, count: int, expected: bool
) -> None:
    assert has_room(num_of, tenant, count, limit=8) is expected


@pytest.mark.parametrize("limit", [1, 2])
def test_a_tenant_has_a_place_although_there_are_more_tenants_than_places(limit: int) -> None:
    others = dict.fromkeys("abc", 1)
    assert has_room(others, "d", 1, limit=limit)
    assert not has_room(others, "d", 2, limit=limit)
    assert not has_room(others, "a", 1, limit=limit)


@given(arrivals=st.lists(st.sampled_from(TENANTS), max_size=80), limit=st.integers(1, 20))
def test_tenants_together_exceed_the_places_by_a_bounded_number(arrivals: list[str], limit: int) -> None:
    taken = Counter[str]()
    for tenant in arrivals:
        if has_room(taken, tenant, 1, limit=limit):
            taken[tenant] += 1
    assert taken.total() <= sum(max(1, limit // number) for number in range(1, len(TENANTS) + 1))


def test_the_tenant_with_the_most_makes_room_and_loses_its_oldest() -> None:
    cache = TenantCache[int, str](max_entries=4, max_bytes=1000)
    for number in range(3):
        assert cache.add("a", number, f"a{number}", num_bytes=1) == []
    assert cache.add("b", 0, "b0", num_bytes=500) == []
    assert cache.add("b", 1, "b1", num_bytes=100) == ["a0"]
    assert cache.get("b", 0) == "b0"
    assert cache.add("a", 3, "a3", num_bytes=1) == ["a1"]
    assert (len(cache), cache.num_bytes) == (4, 602)


def test_bytes_make_room_at_the_tenant_that_has_the_most_of_them() -> None:
    cache = TenantCache[int, str](max_bytes=100)
    cache.add("a", 0, "small", num_bytes=10)
    cache.add("b", 0, "older", num_bytes=50)
    assert cache.add("b", 1, "newer", num_bytes=45) == ["older"]
    assert (cache.get("a", 0), cache.get("b", 1), cache.num_bytes) == ("small", "newer", 55)


def test_an_entry_that_was_used_last_stays_longest() -> None:
    cache = TenantCache[int, str](max_entries=2, max_bytes=100)
    cache.add("a", 0, "first", num_bytes=1)
    cache.add("a", 1, "second", num_bytes=1)
    assert cache.get("a", 0) == "first"
    assert cache.add("a", 2, "third", num_bytes=1) == ["second"]


def test_an_entry_larger_than_the_cache_is_not_kept() -> None:
    cache = TenantCache[int, str](max_bytes=10)
    assert cache.add("a", 0, "large", num_bytes=11) == ["large"]
    assert (len(cache), cache.get("a", 0)) == (0, None)


def test_entries_of_one_tenant_are_not_found_by_another() -> None:
    cache = TenantCache[int, str](max_bytes=10)
    cache.add("a", 0, "mine", num_bytes=1)
    assert cache.get("b", 0) is None
    cache.remove("b", 0)
    assert cache.get("a", 0) == "mine"


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(TENANTS), st.integers(0, 5), st.integers(0, 40) | st.none()), max_size=60
    )
)
def test_counts_and_bytes_are_those_of_the_entries(steps: list[tuple[str, int, int | None]]) -> None:
    """A step without a size removes."""
    cache, known = (
        TenantCache[int, tuple[str, int]](max_entries=6, max_bytes=100),
        dict[tuple[str, int], int](),
    )
    for tenant, key, num_bytes in steps:
        if num_bytes is None:
            cache.remove(tenant, key)
            known.pop((tenant, key), None)
            continue
        known[tenant, key] = num_bytes
        for removed in cache.add(tenant, key, (tenant, key), num_bytes=num_bytes):
            del known[removed]
    assert (len(cache), cache.num_bytes) == (len(known), sum(known.values()))
    assert len(known) <= 6
    assert sum(known.values()) <= 100
