from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from bench.harness.catalogue import GROUPS
from bench.harness.group import OtherEngine, Setting
from bench.harness.run import run_groups

QUICK_GROUPS = {"hop": 6, "clients": 2, "stage-step": 2, "lag": 3, "big-frames": 2, "tenants": 2, "tls": 9}
REAL_GROUPS = {"burst": 4, "arrivals": 5}
"""Numbers of figures; those with much load on real stages take minutes beside other tests."""


def setting(folder: Path, *, openai_url: str | None = None) -> Setting:
    return Setting(
        is_quick=True,
        output_directory=folder,
        cache_directory=folder / "cache",
        say=lambda text: None,
        other_engine=OtherEngine(openai_url=openai_url),
    )


@pytest.mark.parametrize(
    ("name", "num_figures"),
    [
        *(pytest.param(*group, marks=pytest.mark.bench) for group in QUICK_GROUPS.items()),
        *(pytest.param(*group, marks=pytest.mark.nightly) for group in REAL_GROUPS.items()),
    ],
)
async def test_a_quick_run_measures_every_figure_and_leaves_no_process(
    name: str, num_figures: int, tmp_path: Path
) -> None:
    (group,) = (group for group in GROUPS if group.name == name)
    before = set(psutil.Process().children(recursive=True))
    (result,) = await run_groups([group], setting(tmp_path))
    assert result.problem is None
    assert len(result.figures) == num_figures
    assert set(psutil.Process().children(recursive=True)) <= before


async def test_peers_need_another_engine(tmp_path: Path) -> None:
    (group,) = (group for group in GROUPS if group.name == "peers")
    (result,) = await run_groups([group], setting(tmp_path))
    assert result.problem == "NotMeasured: no other engine: pass --vllm-python PATH or --openai-url URL"


async def test_peers_end_all_processes_if_the_other_engine_is_not_there(tmp_path: Path) -> None:
    (group,) = (group for group in GROUPS if group.name == "peers")
    (result,) = await run_groups([group], setting(tmp_path, openai_url="http://127.0.0.1:9"))
    assert result.problem is not None and "lists no models" in result.problem
