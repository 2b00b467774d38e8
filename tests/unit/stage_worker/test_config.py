"""CPU affinity of a worker, and its errors."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from stage_worker.config import WorkerConfig, check_cpu_set, parse_cpu_set

ALLOWED = sorted(os.sched_getaffinity(0))


def config(*, cpu_set: tuple[int, ...] | None, num_threads: int | None = None) -> WorkerConfig:
    return WorkerConfig(
        coordinator="127.0.0.1:1",
        device="cpu",
        memory_bytes=None,
        name=None,
        listen=None,
        advertise=None,
        model_directory=None,
        num_threads=num_threads,
        cpu_set=cpu_set,
    )


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0", (0,)), ("0-3,8", (0, 1, 2, 3, 8)), ("8,2-3,2", (2, 3, 8)), ("5-5", (5,))],
)
def test_numbers_and_ranges_are_listed_in_order(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_set(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,", "-1", "1-", "0-123456", "1 2", "\u0663"])
def test_anything_else_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="is not a list of numbers and ranges such as 0-3,8"):
        parse_cpu_set(text)


def test_missing_cpus_are_rejected_with_the_numbers() -> None:
    listed = ",".join(map(str, ALLOWED))
    with pytest.raises(ValueError, match=f"CPUs 9998,9999 are not among .* may use: {listed}$"):
        config(cpu_set=(ALLOWED[0], 9998, 9999))
    with pytest.raises(ValueError, match=f"may use: {listed}"):
        check_cpu_set(())


def test_there_is_a_thread_for_each_cpu_by_default() -> None:
    assert config(cpu_set=None).compute_threads is None
    assert config(cpu_set=tuple(ALLOWED)).compute_threads == len(ALLOWED)
    assert config(cpu_set=tuple(ALLOWED), num_threads=7).compute_threads == 7


def test_the_number_of_threads_is_limited_by_the_cpus_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert config(cpu_set=None, num_threads=16).compute_threads == 16
    with pytest.raises(
        ValueError, match=r"^--threads is 17, the limit is 16: 8 per CPU, and this host has 2"
    ):
        config(cpu_set=None, num_threads=17)


_PINNED = """
import os, threading
from stage_worker.config import pin_to
pin_to(({cpu},))
seen = []
thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
thread.start()
thread.join()
assert seen == [{{{cpu}}}], seen
import torch
assert torch.get_num_threads() == 1, torch.get_num_threads()
"""


def test_threads_that_are_started_later_keep_to_the_same_cpus() -> None:
    code = _PINNED.format(cpu=ALLOWED[-1])
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("listen", ["off", "127.0.0.2:7499", "[::1]:0"])
def test_payloads_have_a_listen_address_or_none(listen: str) -> None:
    assert replace(config(cpu_set=None), payload_listen=listen).payload_listen == listen


def test_settings_of_payloads_that_contradict_each_other_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"address 'on' is not HOST:PORT"):
        replace(config(cpu_set=None), payload_listen="on")
    with pytest.raises(
        ValueError, match=r"--payload-advertise needs a payload port: --payload-listen is off"
    ):
        replace(config(cpu_set=None), payload_listen="off", payload_advertise="gpu-a:7499")
    with pytest.raises(ValueError, match=r"--payload-min is 0"):
        replace(config(cpu_set=None), min_payload_bytes=0)
