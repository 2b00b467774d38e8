"""One stage worker per GPU of this host, as `stageline worker --device cuda:all` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deploy import parent_death_signal
from deploy.process import RestartPolicy
from stage_worker.backends.gpu_choice import ListedGpu
from stage_worker.config import WorkerConfig
from telemetry.service_manager import UNSUPERVISED, VARIABLES, NotifySettings, supervised
from wire.addresses import Address, parse_address
from wire.condition import Condition
from wire.exit_codes import ExitCode
from wire.flags import OFF

log = logging.getLogger(__name__)

# -P: the folder that the user happens to stand in must not shadow our packages.
_STAGELINE = (sys.executable, "-P", "-m", "stageline")


def worker_configs(config: WorkerConfig, gpus: Sequence[ListedGpu]) -> dict[str, WorkerConfig]:
    """The config of each GPU's worker by its name. Given ports are the first worker's; the next have the
    ports after them. A directory of certificates, and one of fetched weights, has one directory per name.
    """
    name = config.name or socket.gethostname()
    return {f"{name}-{gpu.index}": _of_gpu(config, gpu, f"{name}-{gpu.index}") for gpu in gpus}


def _of_gpu(config: WorkerConfig, gpu: ListedGpu, name: str) -> WorkerConfig:
    transport, audit_log, cache = config.transport, config.logs.audit_log, config.weights_directory
    if transport.tls_directory is not None:
        transport = replace(transport, tls_directory=transport.tls_directory / name)
    return replace(
        config,
        name=name,
        device=gpu.device,
        listen=_later_port(config.listen, gpu.index),
        advertise=_later_port(config.advertise, gpu.index),
        health_listen=_later_port(config.health_listen, gpu.index),
        payload_listen=_later_port(config.payload_listen, gpu.index),
        payload_advertise=_later_port(config.payload_advertise, gpu.index),
        weights_listen=_later_port(config.weights_listen, gpu.index),
        weights_advertise=_later_port(config.weights_advertise, gpu.index),
        weights_directory=None if cache is None else cache / name,
        transport=transport,
        logs=replace(config.logs, audit_log=None if audit_log is None else _of_name(audit_log, name)),
    )


def _later_port(address: str | None, number: int) -> str | None:
    if address is None or address == OFF:
        return address
    first = parse_address(address)
    return str(first) if first.port == 0 else str(Address(first.host, first.port + number))


def _of_name(path: Path, name: str) -> Path:
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


class GpuWorkers:
    """Runs a process per command line until all have ended; restarts those that a signal or the device ended.

    One that ends does not stop the others. SIGTERM and SIGINT go to each of them. For a service manager they
    are one service, which is ready when all processes have started: it hears of this process alone.
    """

    def __init__(self, commands: Mapping[str, Sequence[str]], notify: NotifySettings = UNSUPERVISED) -> None:
        """`commands` are the words after the program, by the name of the worker."""
        self._commands, self._notify = commands, notify
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._signal = signal.SIGTERM

    async def run(self) -> int:
        """Return the exit code of the first worker that failed, or 0."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number)
        try:
            async with supervised(self._notify, self._condition):
                codes = await asyncio.gather(*(self._keep(name) for name in self._commands))
        finally:
            for process in self._running.values():
                process.kill()
        return next((code for code in codes if code != ExitCode.DONE), ExitCode.DONE)

    def _condition(self) -> Condition:
        text = f"{len(self._running)} of {len(self._commands)} workers run"
        is_ready = len(self._running) == len(self._commands)
        return Condition(text, is_ready=is_ready, is_stopping=self._stopping.is_set())

    async def _keep(self, name: str) -> int:
        policy = RestartPolicy()
        while True:
            code = await self._run_once(name)
            if self._stopping.is_set() or not policy.is_unexpected(code):
                return code
            delay_s = policy.next_delay_s(asyncio.get_running_loop().time())
            if delay_s is None:
                log.error("worker %s ended too often, the other workers go on: exit code %d", name, code)
                return code
            log.warning("worker %s ended, starting again in %g s: exit code %d", name, delay_s, code)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)
                return ExitCode.DONE

    async def _run_once(self, name: str) -> int:
        with_death_signal = (sys.executable, "-I", "-S", parent_death_signal.__file__, str(os.getpid()))
        process = await asyncio.create_subprocess_exec(
            *with_death_signal,
            *_STAGELINE,
            *self._commands[name],
            stdin=asyncio.subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name not in VARIABLES},
            # A Ctrl-C in the terminal is for this process, which passes it on once.
            start_new_session=True,
        )
        self._running[name] = process
        if self._stopping.is_set():  # while the process was made
            process.send_signal(self._signal)
        try:
            return await process.wait()
        finally:
            if process.returncode is not None:
                del self._running[name]

    def _stop(self, number: signal.Signals) -> None:
        self._signal = number
        self._stopping.set()
        for process in self._running.values():
            if process.returncode is None:
                process.send_signal(number)
