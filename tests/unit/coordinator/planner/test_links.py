"""The order of workers is the best one of all, by the time of a step on the links."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest

from checkpoint.dtypes import DType, ScaledDType
from coordinator.planner.links import (
    COORDINATOR,
    MAX_EXACT,
    MIN_GAIN,
    SAME_HOST,
    Link,
    Links,
    LinkTable,
    best_order,
    wire_dtype_advice,
)

NUM_BYTES = 1_000_000
FAST, SLOW = Link(round_trip_s=0.001, bytes_per_s=1e9), Link(round_trip_s=0.05, bytes_per_s=1e7)


def random_links(names: list[str], seed: int) -> Links:
    generator = random.Random(seed)
    return Links(
        {
            (one, other): Link(
                round_trip_s=generator.uniform(0.0001, 0.1), bytes_per_s=10 ** generator.uniform(6, 10)
            )
            for number, one in enumerate([COORDINATOR, *names])
            for other in names[number:]
        }
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_the_best_of_all(seed: int) -> None:
    names = [f"w{number}" for number in range(2 + seed % 5)]
    links = random_links(names, seed)
    best = min(links.step_s(order, NUM_BYTES) for order in permutations(names))
    found = links.step_s(best_order(names, links, NUM_BYTES), NUM_BYTES)
    as_named = links.step_s(names, NUM_BYTES)
    assert found == pytest.approx(best if best <= as_named * (1 - MIN_GAIN) else as_named)


def test_slow_links_are_avoided() -> None:
    links = Links({("a", "b"): SLOW, ("b", "c"): FAST, ("a", "c"): FAST, (COORDINATOR, "a"): FAST})
    assert best_order(["a", "b", "c"], links, NUM_BYTES) in (["a", "c", "b"], ["b", "c", "a"])


def test_a_rate_stays_until_it_is_measured_again() -> None:
    table = LinkTable()
    table.put("a", {"b": FAST})
    table.put("b", {"a": Link(round_trip_s=0.5)})
    assert table.find("a", "b") == Link(round_trip_s=0.5, bytes_per_s=FAST.bytes_per_s)
    table.put("a", {"b": SLOW})
    assert table.find("b", "a") == SLOW


def test_workers_with_a_common_name_of_their_host_are_near() -> None:
    table = LinkTable()
    table.put("a", {"b": SLOW, "c": SLOW})
    hosts = {"a": {"10.0.0.1", "domain"}, "b": {"10.0.0.2", "domain"}, "c": {"10.0.0.3"}, "d": {"10.0.0.3"}}
    links = table.between(hosts)
    assert links.between("a", "b") == links.between("c", "d") == SAME_HOST
    assert links.between("a", "c") == SLOW
    assert links.between("b", "c") is None
    assert not table.between({"a": {"domain"}, "b": {"domain"}})


def test_an_unmeasured_link_is_as_the_links_between_hosts() -> None:
    table = LinkTable()
    table.put("a", {"far": SLOW})
    hosts = {name: {"10.0.0.1"} for name in "abcde"} | {"far": {"10.0.0.2"}}
    links = table.between(hosts)
    assert links.typical == SLOW, "ten links within the host are no sample"
    assert links.hop_s("b", "far", NUM_BYTES) == SLOW.transfer_s(NUM_BYTES)


def test_a_smaller_wire_dtype_is_advised_where_it_saves_much() -> None:
    shape = 512, 4096
    told = "a step of 512 tokens takes 419 ms, 210 ms with --wire-dtype int8"
    assert wire_dtype_advice(SLOW, *shape, DType.BF16) == told
    for link, used in ((FAST, DType.BF16), (SLOW, ScaledDType.I8), (Link(round_trip_s=1.0), DType.F32)):
        assert wire_dtype_advice(link, *shape, used) == ""


def test_small_differences_and_no_measurements_keep_the_order() -> None:
    nearly = Link(round_trip_s=0.00101, bytes_per_s=0.99e9)
    links = Links({("a", "b"): nearly, ("b", "c"): FAST, ("a", "c"): FAST})
    assert best_order(["a", "b", "c"], links, NUM_BYTES) == ["a", "b", "c"]
    assert best_order(["b", "a"], Links({}), NUM_BYTES) == ["b", "a"]
    assert best_order(["a"], links, NUM_BYTES) == ["a"]


def test_many_workers_get_a_good_order_in_a_short_time() -> None:
    names = [f"w{number:02}" for number in range(MAX_EXACT + 14)]
    chain = list(names)
    random.Random(3).shuffle(chain)
    near = dict.fromkeys(pairwise(chain), FAST)
    far = {(one, other): SLOW for one in names for other in names if one < other}
    links = Links({**far, **near, **{(other, one): FAST for one, other in near}})
    found = best_order(names, links, NUM_BYTES)
    assert sorted(found) == names
    assert links.step_s(found, NUM_BYTES) < 0.6 * links.step_s(names, NUM_BYTES)
