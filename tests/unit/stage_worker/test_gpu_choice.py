"""The choice of a free GPU, with listings that a process prints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from stage_worker.backends import gpu_choice
from stage_worker.backends.gpu_choice import (
    GpuClaims,
    ListedGpu,
    NoFreeGpu,
    choose_gpu,
    gpus_of_host,
    list_gpus,
    warn_of_unused_gpus,
)

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


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def pci(slot: int, vendor: str, kind: str) -> dict[str, str]:
    device = f"sys/bus/pci/devices/0000:{slot:02x}:00.0"
    return {f"{device}/vendor": f"{vendor}\n", f"{device}/class": f"{kind}\n"}


def kfd(*gpu_ids: int) -> dict[str, str]:
    nodes = "sys/class/kfd/kfd/topology/nodes"
    return {"dev/kfd": ""} | {
        f"{nodes}/{index}/gpu_id": f"{gpu_id}\n" for index, gpu_id in enumerate(gpu_ids)
    }


HOSTS = {
    "none": ({}, ""),
    "device files": ({"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}, 2),
    "driver": ({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: x\n"}, 1),
    "bus": (pci(1, "0x10de", "0x030200") | pci(2, "0x10de", "0x030000") | pci(3, "0x10de", "0x020700"), 2),
    "each way": (pci(1, "0x10de", "0x030200") | {"dev/nvidia0": ""}, 1),
    "other cards": (
        pci(1, "0x1a03", "0x030000") | pci(2, "0x8086", "0x030000") | pci(3, "0x1002", "0x030000"),
        "",
    ),
    "amd": (kfd(0, 0, 4711, 4712), "2 AMD GPUs"),
    "amd without nodes": (kfd(), "1 AMD GPU"),
    "amd without gpus": (kfd(0), ""),
    "amd without driver": (pci(1, "0x1002", "0x120000") | pci(2, "0x1002", "0x038000"), "2 AMD GPUs"),
    "both": ({"dev/nvidia0": "", **kfd(0, 5)}, "1 NVIDIA GPU and 1 AMD GPU"),
}


@pytest.mark.parametrize(("files", "expected"), HOSTS.values(), ids=HOSTS)
def test_gpus_are_found_without_torch(
    files: dict[str, str], expected: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    write(tmp_path, files)
    if isinstance(expected, int):
        expected = f"{expected} NVIDIA GPU{'s' if expected > 1 else ''}"
    assert gpus_of_host(tmp_path) == expected


def fake_smi(directory: Path, script: str) -> None:
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo 'GPU 0: NVIDIA H100 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-b)'", "2 NVIDIA GPUs"),
        ("echo 'NVIDIA-SMI has failed: make sure that the driver is running'; exit 9", ""),
    ],
    ids=["lists", "fails"],
)
def test_nvidia_smi_is_asked_where_the_kernel_shows_none(
    script: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    fake_smi(tmp_path, script)
    assert gpus_of_host(tmp_path) == expected
    write(tmp_path, kfd(0, 5))
    assert gpus_of_host(tmp_path) == "1 AMD GPU"


def test_unused_gpus_are_a_warning_with_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    warn_of_unused_gpus(tmp_path)
    assert caplog.messages == []
    write(tmp_path, {"dev/nvidia0": ""})
    warn_of_unused_gpus(tmp_path)
    (message,) = caplog.messages
    assert message.startswith("this worker computes on the CPU")
    assert "the host has 1 NVIDIA GPU: start it with --device auto" in message
