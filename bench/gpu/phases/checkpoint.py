"""Writes the model of the run, with weights made on the device, for all phases that load one."""

from __future__ import annotations

import shutil
import time

import torch

from bench.gpu.model import ELEMENT_BYTES, dtype_of, geometry_of, shapes_of, write_checkpoint
from bench.gpu.phase import Recorder
from bench.harness.figure import NotMeasured


async def measure(recorder: Recorder) -> None:
    """Raises NotMeasured without room for the files."""
    order = recorder.order
    geometry, dtype = geometry_of(is_quick=order.is_quick), dtype_of(order.device)
    shapes = shapes_of(geometry).values()
    needed = sum(torch.Size(shape).numel() for shape in shapes) * ELEMENT_BYTES[dtype]
    free = shutil.disk_usage(order.work).free
    if needed > 0.9 * free:
        raise NotMeasured(f"the checkpoint takes {needed} bytes, {order.work} has {free} free: see --work")
    began_s = time.perf_counter()
    num_bytes = write_checkpoint(order.model, geometry, torch.device(order.device), dtype)
    took_s = time.perf_counter() - began_s
    recorder.figure(
        "writing the checkpoint", num_bytes / took_s / 1e9, "GB/s", details={"bytes": float(num_bytes)}
    )
