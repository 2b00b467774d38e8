"""The worker process: from its configuration to its exit status."""

import asyncio
import gc
import logging
import os
import signal
import sys
from typing import NoReturn

import uvloop

from stage_worker.config import MemoryTooLarge, WorkerConfig
from stage_worker.control import JoinRefused
from stage_worker.device_errors import DEVICE_FAILED_EXIT_CODE, DeviceError
from stage_worker.worker import Worker
from telemetry import logs
from wire.file_limit import raise_file_limit
from wire.reasons import error_line, reason_of

log = logging.getLogger(__name__)

BAD_FLAG_EXIT_CODE = 2
"""Exit code of every command whose flags are wrong."""


def run(config: WorkerConfig) -> int:
    """Runs a worker until it is asked to end (0), cannot go on (1), or its device has failed (3); it does not
    start where the device has less memory than it is given (2). One line on stderr says why, except for 0.
    """
    logs.configure(config.logs, "worker", worker=config.name)
    raise_file_limit()
    return uvloop.run(_main(config))


async def _main(config: WorkerConfig) -> int:
    try:
        worker = Worker(config)
        await worker.start()
    except MemoryTooLarge as error:
        logs.say_last(config.logs, error_line("USAGE", str(error)))
        return BAD_FLAG_EXIT_CODE
    except (ValueError, OSError) as error:
        return _fail(config, error)
    logs.configure(config.logs, "worker", worker=worker.name)
    # What is here now stays: looking through it again and again would hold up steps for tens of milliseconds.
    gc.freeze()
    task = asyncio.create_task(worker.run())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _leave, worker, task)
    loop.add_signal_handler(signal.SIGINT, _stop_on, "SIGINT", task)
    print(f"stageline worker {worker.name} listening on {worker.listen_address}", flush=True)
    failure: JoinRefused | None = None
    try:
        await task
    except asyncio.CancelledError:
        pass
    except JoinRefused as error:
        failure = error
    except DeviceError as error:
        _fail(config, error)
        # Neither a hung thread nor the device's library is to be waited for.
        _exit_at_once(DEVICE_FAILED_EXIT_CODE)
    is_stopped = await worker.stop()
    status = 0 if failure is None else _fail(config, failure)
    if not is_stopped:
        # A large step or tensor is still under way, and the interpreter must not wait for it.
        _exit_at_once(status)
    return status


def _leave(worker: Worker, task: "asyncio.Task[None]") -> None:
    """Hands the layers over first. A second SIGTERM does not wait for that, and nothing takes for ever."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, _stop_on, "SIGTERM", task)
    if not worker.ask_to_leave():
        _stop_on("SIGTERM", task)
        return
    log.info("SIGTERM: handing over; a second one does not wait")
    timeout_s = worker.leave_timeout_s
    loop.call_later(timeout_s, _stop_on, f"no leave within {timeout_s:g} s", task)


def _stop_on(name: str, task: "asyncio.Task[None]") -> None:
    log.info("%s: ending", name)
    task.cancel()


def _exit_at_once(status: int) -> NoReturn:
    sys.stdout.flush()
    logging.shutdown()
    os._exit(status)


def _fail(config: WorkerConfig, error: Exception) -> int:
    logs.say_last(config.logs, error_line(reason_of(error), str(error)))
    return 1
