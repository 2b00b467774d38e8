"""A GPU worker prepares its process once, and every thread that uses the device."""

from __future__ import annotations

import threading

import pytest
import torch

from stage_worker.config import WorkerConfig
from stage_worker.torch_backend import TorchBackend

CUDA = torch.device("cuda", 1)


async def test_cudnn_attention_is_off_and_every_thread_has_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switched: list[bool] = []
    threads: dict[str, torch.device] = {}
    monkeypatch.setattr("stage_worker.torch_backend.parse_device", lambda text: CUDA)
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
