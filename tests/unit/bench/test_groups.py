from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bench.harness.catalogue import GROUPS
from bench.harness.group import OtherEngine, Setting
from bench.harness.run import run_groups

QUICK = ("hop", "clients", "burst", "arrivals", "lag", "big-frames")
FIGURES = {"hop": 6, "clients": 2, "burst": 4, "arrivals": 5, "lag": 3, "big-frames": 2}


def setting(folder: Path, **rest: OtherEngine) -> Setting:
    return Setting(
        is_quick=True,
        output_directory=folder,
        cache_directory=folder / "cache",
        say=lambda text: None,
        **rest,
    )


@pytest.mark.full
@pytest.mark.parametrize("name", QUICK)
async def test_a_quick_run_measures_every_figure_and_leaves_no_process(name: str, tmp_path: Path) -> None:
    (group,) = (group for group in GROUPS if group.name == name)
    before = set(psutil.Process().children(recursive=True))
    (result,) = await run_groups([group], setting(tmp_path))
    assert result.problem is None
    assert len(result.figures) == FIGURES[name]
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_peers_need_another_engine(tmp_path: Path) -> None:
    (group,) = (group for group in GROUPS if group.name == "peers")
    (result,) = await run_groups([group], setting(tmp_path))
    assert result.problem == "NotMeasured: no other engine: pass --vllm-python PATH or --openai-url URL"


async def test_peers_end_all_processes_if_the_other_engine_is_not_there(tmp_path: Path) -> None:
    (group,) = (group for group in GROUPS if group.name == "peers")
    nowhere = setting(tmp_path, other_engine=OtherEngine(openai_url="http://127.0.0.1:9"))
    (result,) = await run_groups([group], nowhere)
    assert result.problem is not None and "lists no models" in result.problem
