"""`stageline coordinator`, `stageline worker` and `stageline gateway`: one of them in this process."""

import asyncio
import os
from typing import Any

import typer

from coordinator.config import CoordinatorConfig
from gateway.config import GatewayConfig
from stage_worker.config import ALL_GPUS, WorkerConfig, pin_to
from stageline.cli.config_flags import config_parameters, file_parameters, flags_of, make_config, toml_of
from stageline.cli.options import (
    build_config,
    default_token_directory,
    notify_settings,
    read_token,
    require_torch,
    takes,
    telemetry_settings,
)
from telemetry import logs
from wire.user_files import find_cache_directory, find_state_directory


@takes(config_parameters(CoordinatorConfig), file_parameters(CoordinatorConfig))
def coordinator(context: typer.Context, **flags: Any) -> int:
    """Plan the stages, and serve clients and workers until stopped."""
    config = make_config(
        CoordinatorConfig,
        context,
        flags,
        token=read_token(flags["token_file"]),
        token_directory=None if flags["token_file"] else default_token_directory(),
        cache_directory=find_cache_directory(os.environ),
        telemetry=telemetry_settings(),
        notify=notify_settings(),
    )
    if flags["print_config"]:
        print(toml_of(config), end="")
        return 0
    from coordinator.server import run  # only this command needs it

    return run(config)


@takes(config_parameters(WorkerConfig), file_parameters(WorkerConfig))
def worker(context: typer.Context, **flags: Any) -> int:
    """Join a coordinator, and run the assigned stage until stopped.

    With --mock it is a mock stage: real messages and KV accounting, no computation.
    """
    config = make_config(
        WorkerConfig,
        context,
        flags,
        cache_directory=find_cache_directory(os.environ),
        state_directory=find_state_directory(os.environ),
        telemetry=telemetry_settings(),
        notify=notify_settings(),
    )
    if flags["print_config"]:
        print(toml_of(config), end="")
        return 0
    if config.mock is None:
        require_torch("a worker")
    if config.device == ALL_GPUS:
        return _worker_per_gpu(config)
    if config.cpu_set is not None:
        pin_to(config.cpu_set)  # before torch creates its threads
    from stage_worker.server import run  # loads torch

    return run(config)


def _worker_per_gpu(config: WorkerConfig) -> int:
    from deploy.gpu_workers import GpuWorkers, worker_configs  # only this device needs it
    from stage_worker.backends.gpu_choice import list_gpus

    logs.configure(config.logs, "worker", worker=config.name)
    configs = build_config(lambda: worker_configs(config, list_gpus()))
    commands = {name: ("worker", *flags_of(each)) for name, each in configs.items()}
    return asyncio.run(GpuWorkers(commands, config.notify).run())


@takes(config_parameters(GatewayConfig), file_parameters(GatewayConfig))
def gateway(context: typer.Context, **flags: Any) -> int:
    """Serve OpenAI's HTTP API over a coordinator until stopped. Any number per coordinator."""
    config = make_config(
        GatewayConfig,
        context,
        flags,
        cache_directory=find_cache_directory(os.environ),
        telemetry=telemetry_settings(),
        notify=notify_settings(),
    )
    if flags["print_config"]:
        print(toml_of(config), end="")
        return 0
    from gateway.server import run  # loads FastAPI

    return run(config)
