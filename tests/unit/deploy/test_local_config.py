from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import LocalClusterConfig
from deploy.commands import commands
from deploy.local_config import dialled_address
from wire.host_memory import available_memory_bytes
from wire.sizes import parse_size


def _line(config: LocalClusterConfig, name: str = "coordinator") -> list[str]:
    return next(list(command.argv) for command in commands(config.run().spec) if command.name == name)


def _value(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def test_the_default_number_of_stages_is_the_number_of_workers() -> None:
    assert _value(_line(LocalClusterConfig(num_workers=4)), "--stages") == "4"
    assert _value(_line(LocalClusterConfig(num_workers=4, num_stages=3)), "--stages") == "3"


def test_extra_arguments_are_passed_to_their_process() -> None:
    config = LocalClusterConfig(
        num_workers=2,
        model=Path("/models/m"),
        coordinator_arguments=("--dtype", "f32"),
        worker_arguments=(("--x", "1"), ("--x", "2")),
    )
    assert _value(_line(config), "--model") == "/models/m"
    assert _line(config)[-2:] == ["--dtype", "f32"]
    assert _line(config, "worker-1")[-2:] == ["--x", "2"]
    assert "--model" not in _line(config, "worker-1")


def test_workers_on_the_cpu_share_six_tenths_of_free_memory() -> None:
    line = _line(LocalClusterConfig(num_workers=4), "worker-0")
    share = parse_size(_value(line, "--memory"))
    assert share == pytest.approx(available_memory_bytes() * 0.6 / 4, rel=0.1)
    assert int(_value(line, "--threads")) >= 1


def test_given_memory_and_threads_are_for_each_worker() -> None:
    line = _line(LocalClusterConfig(memory_bytes=1000, num_threads=3), "worker-2")
    assert _value(line, "--memory") == "1000B"
    assert _value(line, "--threads") == "3"
    assert _value(line, "--name") == "worker-2"


def test_workers_are_pinned_to_separate_cores_if_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {2, 3, 5, 6, 7})

    def cpu_sets(num_workers: int, **options: Any) -> list[str | None]:
        config = LocalClusterConfig(num_workers=num_workers, **options)
        lines = [_line(config, f"worker-{worker}") for worker in range(num_workers)]
        return [_value(line, "--cpu-set") if "--cpu-set" in line else None for line in lines]

    assert cpu_sets(2) == ["2,3", "5,6"]
    assert cpu_sets(5) == ["2", "3", "5", "6", "7"]
    assert cpu_sets(6) == [None] * 6
    assert cpu_sets(2, num_threads=1) == ["2,3", "5,6"]
    assert cpu_sets(2, num_threads=3) == [None, None]
    assert cpu_sets(2, pins_workers=False) == [None, None]
    assert cpu_sets(2, devices=("cpu", "cuda:0")) == ["2,3", None]


def test_a_gpu_of_its_own_needs_no_memory_limit_and_a_shared_one_does() -> None:
    config = LocalClusterConfig(num_workers=2, devices=("cuda:0", "cuda:1"))
    assert "--memory" not in _line(config, "worker-1")
    assert _value(_line(config, "worker-1"), "--device") == "cuda:1"
    with pytest.raises(ValueError, match="2 workers share cuda:0"):
        LocalClusterConfig(num_workers=2, devices=("cuda:0",))
    LocalClusterConfig(num_workers=2, devices=("cuda:0",), memory_bytes=2**30)


def test_no_more_memory_than_this_host_has_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.local_config.psutil.virtual_memory", lambda: SimpleNamespace(total=8 * 2**30))
    LocalClusterConfig(num_workers=2, memory_bytes=4 * 2**30)
    LocalClusterConfig(num_workers=2, devices=("cpu", "cuda:0"), memory_bytes=8 * 2**30)
    LocalClusterConfig(num_workers=2, mocks=("step=1ms",), memory_bytes=2**40)
    with pytest.raises(ValueError, match=r"5.0 GiB for each of 2 workers on the CPU, 10.0 GiB in all, but "):
        LocalClusterConfig(num_workers=2, memory_bytes=5 * 2**30)


def test_numbers_that_do_not_match_are_rejected() -> None:
    with pytest.raises(ValueError, match="0 workers"):
        LocalClusterConfig(num_workers=0)
    with pytest.raises(ValueError, match="2 devices for 3 workers"):
        LocalClusterConfig(devices=("cpu", "cpu"))
    with pytest.raises(ValueError, match="arguments of 1 workers for 3"):
        LocalClusterConfig(worker_arguments=((),))
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        LocalClusterConfig(listen="here")


@pytest.mark.parametrize(
    ("listening", "dialled"),
    [("0.0.0.0:5", "127.0.0.1:5"), ("[::]:5", "[::1]:5"), ("10.0.0.7:5", "10.0.0.7:5")],
)
def test_a_listening_address_is_converted_to_a_dialable_one(listening: str, dialled: str) -> None:
    assert dialled_address(listening) == dialled
