"""The bound of loading reads each byte once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from bench.gpu import raw_reads
from stage_worker.model.weight_reads import DEVICE_WINDOW_BYTES


@pytest.mark.parametrize("num_bytes", [1, 5 * DEVICE_WINDOW_BYTES + 3, 1 << 40])
def test_every_byte_is_read_once_by_one_of_the_readers(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "weights"
    size = 6 * DEVICE_WINDOW_BYTES + 1
    with file.open("wb") as target:
        target.truncate(size)
    parts: list[tuple[int, int]] = []
    lock = threading.Lock()
    preadv = os.preadv

    def noted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        found = preadv(descriptor, buffers, offset)
        with lock:
            parts.append((offset, found))
        return found

    monkeypatch.setattr(raw_reads.os, "preadv", noted)
    assert raw_reads.bytes_per_s(file, num_bytes, torch.device("cpu")) > 0
    end = 0
    for offset, length in sorted(parts):
        assert offset == end
        end += length
    assert end == min(num_bytes, size)
