"""A GPU worker prepares its process once, and every thread that uses the device."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stage_worker.backends import torch_device
from stage_worker.backends.contract import KernelChoice
from stage_worker.backends.gpu_choice import GpuClaims
from stage_worker.backends.mock_backend import MockBackend
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.backends.torch_backend import CPU, TorchBackend
from stage_worker.backends.torch_device import CudaMeter, check_memory, describe_gpu, move_near
from stage_worker.config import MemoryTooLarge, WorkerConfig
from stage_worker.model.kernels import has_triton_kernels
from wire.device_rates import DeviceRates
from wire.gpu import DeviceMemory, Gpu

CUDA = torch.device("cuda", 1)
UUID = "0f8a6e32-6b0c-4d5e-9a52-6a6f0c2b1d11"
GIB = 1 << 30
AUTO = KernelChoice.AUTO


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """A GPU that torch describes, with 8 of 80 GiB in use, on the PCI bus of a folder."""
    properties = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        uuid=UUID,
        major=9,
        minor=0,
        total_memory=80 * GIB,
        pci_domain_id=0,
        pci_bus_id=0xA3,
        pci_device_id=0,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (72 * GIB, 80 * GIB))
    monkeypatch.setattr(torch_device, "PCI_DEVICES", tmp_path)
    (tmp_path / "0000:a3:00.0").mkdir()
    return properties


async def test_cudnn_attention_is_off_a_gpu_is_measured_and_every_thread_has_the_device(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    switched: list[bool] = []
    threads: dict[str, torch.device] = {}
    monkeypatch.setattr("stage_worker.backends.torch_backend.parse_device", lambda text: CUDA)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: threads.__setitem__(threading.current_thread().name, device),
    )
    rates, measured = DeviceRates.parse("3350:800"), list[str]()
    backends = "stage_worker.backends.torch_backend"
    monkeypatch.setattr(f"{backends}.free_memory", lambda device: None)
    monkeypatch.setattr(
        f"{backends}.measure_rates",
        lambda device: measured.append(threading.current_thread().name) or rates,
    )
    config = WorkerConfig(device="cuda:1", memory_bytes=GIB, state_directory=tmp_path)
    backend = TorchBackend(config)
    assert (backend.device.rates, measured) == (rates, ["device-rates"])
    ident = await backend._thread.run(threading.get_ident)
    assert ident != threading.get_ident()
    assert switched == [False]
    backend._steps.drain()
    names = (threading.current_thread().name, "stage-compute", "stage-completion", "hop-memory", *measured)
    assert threads == dict.fromkeys(names, CUDA)
    other = GpuClaims(tmp_path / "gpus")
    assert not other.claim(f"GPU-{UUID}")
    assert backend.stop(timeout_s=10)
    assert other.claim(f"GPU-{UUID}")
    other.close()


def test_no_more_memory_than_a_host_has_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    total = SimpleNamespace(total=8 * GIB)
    monkeypatch.setattr("stage_worker.backends.torch_device.psutil.virtual_memory", lambda: total)
    check_memory(8 * GIB, CPU)
    text = rf"--memory is {9 * GIB} bytes \(9.0 GiB\), device cpu has {8 * GIB} \(8.0 GiB\): lower --memory"
    with pytest.raises(MemoryTooLarge, match=text):
        check_memory(9 * GIB, CPU)


@pytest.mark.usefixtures("gpu")
def test_no_more_memory_than_is_free_on_a_gpu_is_accepted() -> None:
    check_memory(72 * GIB, CUDA)
    text = (
        rf"--memory is {73 * GIB} bytes \(73.0 GiB\), device cuda:1 has {72 * GIB} \(72.0 GiB\) of "
        f"{80 * GIB} free: other processes use the rest: lower --memory or omit it"
    )
    with pytest.raises(MemoryTooLarge, match=text):
        check_memory(73 * GIB, CUDA)


DRIVERS = {
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:16 UTC 2025": "580.95.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (x@y)": "570.124.06",
    "no version": "",
}


@pytest.mark.parametrize(("text", "version"), DRIVERS.items())
@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_described(text: str, version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(text)
    (pattern, *_) = torch_device._DRIVER_FILES.values()
    monkeypatch.setattr(torch_device, "_DRIVER_FILES", {tmp_path / "version": pattern})
    assert describe_gpu(CUDA) == Gpu(
        model="NVIDIA H100 80GB HBM3",
        uuid=f"GPU-{UUID}",
        compute_capability="9.0",
        memory_bytes=80 * GIB,
        driver=version,
    )


def test_the_memory_of_a_gpu_is_read_from_the_allocator_and_the_driver(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, name in enumerate(("memory_allocated", "memory_reserved", "max_memory_allocated"), start=1):
        monkeypatch.setattr(torch.cuda, name, lambda device, size=number * GIB: size)
    restarted: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", restarted.append)
    meter = CudaMeter(CUDA)
    assert meter.read() == DeviceMemory(
        allocated_bytes=GIB, reserved_bytes=2 * GIB, free_bytes=72 * GIB, peak_bytes=3 * GIB
    )
    meter.restart_peak()
    assert restarted == [CUDA]


def test_a_cpu_has_no_device_memory(tmp_path: Path) -> None:
    assert TorchBackend(WorkerConfig(state_directory=tmp_path)).gpu_memory is None


@pytest.mark.parametrize(
    ("kernels", "capability", "in_place"),
    [
        (KernelChoice.AUTO, (9, 0), True),
        (KernelChoice.PLAIN, (9, 0), False),
        (KernelChoice.AUTO, (7, 5), False),
    ],
)
def test_kernels_decide_whether_a_gpu_reads_pages_in_place(
    kernels: KernelChoice, capability: tuple[int, int], *, in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert has_triton_kernels(kernels, CUDA) is in_place
    assert not has_triton_kernels(kernels, CPU)


@pytest.mark.usefixtures("gpu")
def test_a_worker_keeps_to_the_cpus_near_its_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(torch_device, "pin_to", pinned.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 8, 64})
    file = tmp_path / "0000:a3:00.0" / "local_cpulist"
    move_near(CUDA)  # the system does not say
    for listed, expected in (("0-1,8-9\n", (0, 1, 8)), ("16-31\n", None), ("\n", None)):
        file.write_text(listed)
        move_near(CUDA)
        assert pinned == ([] if expected is None else [expected])
        pinned.clear()


async def test_a_mock_stage_has_the_memory_that_it_is_given() -> None:
    assert MockBackend(MockSpec.parse("step=1ms"), memory_bytes=1 << 49).device.memory_bytes == 1 << 49
