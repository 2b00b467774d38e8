"""A container's limit bounds what its processes take, but for file pages that the kernel drops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stage_worker.backends import torch_device
from wire import host_memory
from wire.host_memory import ControlGroup, available_memory_bytes

GIB = 2**30


def group_in(directory: Path, **texts: str) -> ControlGroup:
    """The files that are given exist."""
    for name, text in texts.items():
        (directory / name).write_text(text)
    return ControlGroup(*(directory / name for name in ("limit", "usage", "statistics")))


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=512 * GIB, available=400 * GIB)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: memory)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ({"limit": str(64 * GIB), "usage": str(10 * GIB)}, 54 * GIB),
        (
            {
                "limit": str(64 * GIB),
                "usage": str(60 * GIB),
                "statistics": f"anon 5\ninactive_file {50 * GIB}\nactive_file 7\n",
            },
            54 * GIB,
        ),
        (
            {
                "limit": str(64 * GIB),
                "usage": str(60 * GIB),
                "statistics": f"inactive_file 5\ntotal_inactive_file {50 * GIB}\n",
            },
            54 * GIB,
        ),
        ({"limit": str(64 * GIB), "usage": str(65 * GIB)}, 0),
        ({"limit": str(900 * GIB), "usage": "0"}, 400 * GIB),
        ({"limit": "max", "usage": "5"}, 400 * GIB),
        ({}, 400 * GIB),
    ],
    ids=["v2", "file pages", "v1", "above the limit", "no less than the host", "no limit", "no files"],
)
def test_available_memory_is_that_of_the_container(
    texts: dict[str, str], expected: int, host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", (group_in(tmp_path, **texts),))
    assert available_memory_bytes() == expected


def test_workers_share_what_their_container_may_use(
    host: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = group_in(tmp_path, limit=str(64 * GIB), usage=str(24 * GIB))
    monkeypatch.setattr(host_memory, "CONTROL_GROUPS", (group,))
    assert torch_device.default_memory_bytes(torch.device("cpu")) == 20 * GIB
    assert torch_device.table_memory_bytes(torch.device("cuda")) == 36 * GIB
