"""The choice of a free GPU, with listings that a process prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_worker.backends import gpu_choice
from stage_worker.backends.gpu_choice import GpuClaims, ListedGpu, NoFreeGpu, choose_gpu, list_gpus

GIB = 1 << 30


def gpu(index: int, free_gib: float) -> ListedGpu:
    free_bytes = int(free_gib * GIB)
    return ListedGpu(index=index, uuid=f"GPU-{index}", free_bytes=free_bytes, total_bytes=80 * GIB)


@pytest.fixture
def claims(tmp_path: Path) -> Iterator[list[GpuClaims]]:
    """Claims of three workers of a host."""
    made = [GpuClaims(tmp_path) for _ in range(3)]
    yield made
    for each in made:
        each.close()


def test_the_first_gpu_that_nobody_uses_is_chosen_once(claims: list[GpuClaims]) -> None:
    gpus = [gpu(0, 3), gpu(1, 79), gpu(2, 79.5)]
    first, second, third = claims
    assert choose_gpu(gpus, first).device == "cuda:1"
    assert choose_gpu(gpus, second).device == "cuda:2"
    text = (
        r"no free GPU: cuda:0 has 3.0 GiB of 80.0 GiB free; cuda:1 has .* free, claimed by another worker; "
        r"cuda:2 has .*, claimed by another worker: choose one with --device cuda:N"
    )
    with pytest.raises(NoFreeGpu, match=text):
        choose_gpu(gpus, third)


def test_a_claim_ends_with_its_holder(claims: list[GpuClaims]) -> None:
    holder, other, _ = claims
    assert holder.claim("GPU-0")
    assert not other.claim("GPU-0")
    holder.close()
    assert other.claim("GPU-0")


def test_gpus_are_listed_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [{"index": 0, "uuid": "GPU-a", "free_bytes": GIB, "total_bytes": 2 * GIB}]
    monkeypatch.setattr(gpu_choice, "_LIST", f"print({json.dumps(json.dumps(listed))})")
    assert list_gpus() == [ListedGpu(index=0, uuid="GPU-a", free_bytes=GIB, total_bytes=2 * GIB)]


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("print('[]')", "torch sees no GPU on this host: check driver and torch build, or use --device cpu"),
        ("raise ImportError('no torch')", "torch cannot list the GPUs of this host: ImportError: no torch"),
    ],
)
def test_a_host_without_gpus_is_refused(script: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_choice, "_LIST", script)
    with pytest.raises(NoFreeGpu, match=reason):
        list_gpus()


@pytest.mark.full
def test_this_host_is_listed_as_torch_sees_it() -> None:
    import torch

    if torch.cuda.is_available():
        assert [gpu.index for gpu in list_gpus()] == list(range(torch.cuda.device_count()))
    else:
        with pytest.raises(NoFreeGpu, match="torch sees no GPU"):
            list_gpus()
