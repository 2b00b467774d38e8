"""A GPU worker prepares its process once, and every thread that uses the device."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from stage_worker.backends.mock_backend import MockBackend
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.backends.torch_backend import TorchBackend
from stage_worker.backends.torch_device import check_memory
from stage_worker.config import MemoryTooLarge, WorkerConfig

CUDA = torch.device("cuda", 1)


async def test_cudnn_attention_is_off_and_every_thread_has_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched: list[bool] = []
    threads: dict[str, torch.device] = {}
    monkeypatch.setattr("stage_worker.backends.torch_backend.parse_device", lambda text: CUDA)
    monkeypatch.setattr("stage_worker.backends.torch_device.total_memory_bytes", lambda device: 1 << 30)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", switched.append)
    monkeypatch.setattr(
        torch.cuda,
        "set_device",
        lambda device: threads.__setitem__(threading.current_thread().name, device),
    )
    config = WorkerConfig(
        coordinator="127.0.0.1:1",
        device="cuda:1",
        memory_bytes=1 << 30,
        name=None,
        listen=None,
        advertise=None,
        model_directory=None,
        num_threads=None,
    )
    backend = TorchBackend(config)
    ident = await backend._thread.run(threading.get_ident)
    assert ident != threading.get_ident()
    assert switched == [False]
    assert threads == {threading.current_thread().name: CUDA, "stage-compute": CUDA}
    assert backend.stop(timeout_s=10)


@pytest.mark.parametrize("device", [torch.device("cpu"), CUDA])
def test_no_more_memory_than_the_device_has_is_accepted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = SimpleNamespace(total_memory=8 << 30, total=8 << 30)
    monkeypatch.setattr("stage_worker.backends.torch_device.psutil.virtual_memory", lambda: total)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: total)
    check_memory(8 << 30, device)
    text = (
        rf"--memory is {9 << 30} bytes \(9.0 GiB\), device {device} has {8 << 30} \(8.0 GiB\): lower --memory"
    )
    with pytest.raises(MemoryTooLarge, match=text):
        check_memory(9 << 30, device)


async def test_a_mock_stage_has_the_memory_that_it_is_given() -> None:
    assert MockBackend(MockSpec.parse("step=1ms"), memory_bytes=1 << 49).memory_bytes == 1 << 49
