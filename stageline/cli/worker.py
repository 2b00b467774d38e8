"""`stageline worker`: one stage worker in this process."""

import os
from typing import Annotated

import typer

from stage_worker.backends.contract import KernelChoice
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.config import WorkerConfig, parse_cpu_set, pin_to
from stageline.cli import options
from stageline.version import VERSION
from telemetry.logs import LogFormat, LogLevel, LogSettings
from telemetry.settings import read_environment
from wire.tensors import parse_wire_dtype
from wire.user_files import user_cache_directory


def worker(
    coordinator: options.Coordinator = options.DEFAULT_ADDRESS,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda or cuda:N.")] = "cpu",
    memory: options.Memory = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Stable name, unique in the cluster, e.g. gpu-a.")
    ] = None,
    listen: options.WorkerListen = None,
    advertise: options.Advertise = None,
    model: options.WorkerModel = None,
    threads: options.Threads = None,
    mock: options.Mock = None,
    cpu_set: options.CpuSet = None,
    wire_dtype: options.WireDtype = None,
    kernels: options.Kernels = KernelChoice.AUTO,
    step_timeout: options.StepTimeout = 30.0,
    log_format: options.LogFormat = LogFormat.CONSOLE,
    log_level: options.LogLevel = LogLevel.INFO,
) -> int:
    """Join a coordinator, and run the stage that it assigns until it is ended.

    With --mock it is a mock stage: real messages and real KV accounting, but nothing is computed.
    """
    config = options.build_config(
        lambda: WorkerConfig(
            coordinator=coordinator,
            device=device,
            memory_bytes=memory,
            name=name,
            listen=listen,
            advertise=advertise,
            model_directory=model,
            num_threads=threads,
            mock=None if mock is None else MockSpec.parse(mock),
            cpu_set=None if cpu_set is None else parse_cpu_set(cpu_set),
            wire_dtype=None if wire_dtype is None else parse_wire_dtype(wire_dtype),
            kernels=kernels,
            cache_directory=user_cache_directory(os.environ),
            step_timeout_s=step_timeout,
            telemetry=read_environment(os.environ, version=VERSION),
            logs=LogSettings(format=log_format, level=log_level),
        )
    )
    if config.cpu_set is not None:
        pin_to(config.cpu_set)  # before torch makes its threads
    from stage_worker.server import run  # imported late: it loads torch

    return run(config)
