from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.harness.catalogue import GROUPS, chosen
from bench.harness.figure import Figure
from bench.harness.group import Group, Setting
from bench.harness.machine import Neighbour
from bench.harness.product_bound import StageWork, slowest_candidates
from bench.harness.recorded import Change, Compared
from bench.harness.report import remarks
from bench.harness.run import GroupResult, run_groups
from tests.unit.bench.runs import figure

SETTING = Setting(is_quick=True, output_directory=Path(), cache_directory=Path(), say=lambda text: None)


def group(name: str, timeout_s: float = 60.0) -> Group:
    return Group(name=name, about="", module=f"bench.figures.{name}", about_s=1, timeout_s=timeout_s)


async def _well(setting: Setting) -> list[Figure]:
    return [figure()]


async def _badly(setting: Setting) -> list[Figure]:
    raise RuntimeError("the cluster [is] gone")


async def _never(setting: Setting) -> list[Figure]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_a_failed_or_hung_group_does_not_affect_the_others() -> None:
    works = {"badly": _badly, "never": _never, "well": _well}
    groups = [group("badly"), group("never", timeout_s=0.01), group("well")]
    results = await run_groups(groups, SETTING, load=lambda group: works[group.name])
    assert [result.problem for result in results] == [
        "RuntimeError: the cluster [is] gone",
        "not done after 0.01 s",
        None,
    ]
    assert results[2].figures == (figure(),)
    assert len(remarks(results, ())) >= 2


def test_groups_run_in_their_own_order_for_any_requested_order() -> None:
    names = [group.name for group in GROUPS]
    assert [group.name for group in chosen([names[3], names[1]])] == [names[1], names[3]]
    assert chosen([]) == [group for group in GROUPS if group.is_default]


def test_an_unknown_group_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="speed: no such figures; there are hop"):
        chosen(["speed"])


def test_each_group_has_a_module_and_all_of_them_fit_into_ten_minutes() -> None:
    for group in GROUPS:
        assert Path(*group.module.split(".")).with_suffix(".py").exists(), group.module
    assert sum(group.about_s for group in GROUPS if group.is_default) < 600


def test_regressions_are_listed_below_the_table() -> None:
    compared = [
        Compared("a", Change.WORSE, -0.2, 0.1),
        Compared("b", Change.SAME, -0.05, 0.1),
        Compared("c", Change.GONE),
    ]
    neighbours = (Neighbour("compiler", 0.15), Neighbour("shell", 0.03))
    results = [
        GroupResult(name="decode", foreign_share=0.2),
        GroupResult(name="hop", foreign_share=0.19, neighbours=neighbours),
        GroupResult(name="clients", foreign_share=0.04, neighbours=neighbours[1:]),
        GroupResult(name="memory", foreign_share=0.4, neighbours=neighbours[1:]),
    ]
    lines = remarks(results, compared)
    assert [line.rpartition("]")[2].strip() for line in lines] == [
        "a: -20%, noise is up to 10%",
        "c",
        "decode: other processes used 20% of the machine",
        "hop: other processes used 19% of the machine; busy: compiler 15%, shell 3%",
        "memory: other processes used 40% of the machine; busy: shell 3%, ended ones 37%",
    ]


def test_only_stages_that_may_be_the_slowest_are_measured() -> None:
    small, large, head = (
        StageWork(5, has_head=False),
        StageWork(7, has_head=False),
        StageWork(6, has_head=True),
    )
    assert slowest_candidates([small, large, head]) == [head, large]
    assert slowest_candidates([StageWork(6, has_head=False), head, head]) == [head]
