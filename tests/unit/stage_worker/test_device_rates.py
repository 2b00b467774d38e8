"""What a worker measures of its device, and when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stage_worker.backends import torch_backend, torch_device
from stage_worker.backends.mock_spec import MockSpec
from stage_worker.backends.torch_backend import TorchBackend
from stage_worker.backends.torch_device import best_rate, measure_rates
from stage_worker.config import WorkerConfig
from stage_worker.server import Worker
from wire.device_rates import DeviceRates, RateSource

H100 = DeviceRates.parse("3350:800")


class Clock:
    """Each run takes the next of `times`, the last one again and again."""

    def __init__(self, *times: float) -> None:
        self.times, self.now_s, self.num_runs = list(times), 0.0, 0

    def run(self) -> None:
        self.num_runs += 1
        self.now_s += self.times.pop(0) if len(self.times) > 1 else self.times[0]

    def read(self) -> float:
        return self.now_s


@pytest.mark.parametrize(
    ("times", "fastest_s", "num_runs"),
    [((9.0, 0.2, 0.1, 0.3, 0.5), 0.1, 5), ((0.01, 2.0), 2.0, 2), ((0.5, 0.25), 0.25, 5)],
)
def test_the_fastest_run_within_the_budget_counts_but_not_the_first(
    times: tuple[float, ...], fastest_s: float, num_runs: int
) -> None:
    clock = Clock(*times)
    rate = best_rate(clock.run, lambda: None, amount=10.0, clock=clock.read, budget_s=1.0)
    assert rate == pytest.approx(10.0 / fastest_s)
    assert clock.num_runs == num_runs


def test_a_run_ends_when_the_device_has_ended_it() -> None:
    clock = Clock(0.0)
    rate = best_rate(clock.run, Clock.run.__get__(waits := Clock(0.5)), amount=1.0, clock=waits.read)
    assert rate == 2.0


def test_a_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "_COPIED_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(torch_device, "_PRODUCT_SIZE", {"cpu": 64})
    monkeypatch.setattr(best_rate, "__kwdefaults__", {**(best_rate.__kwdefaults__ or {}), "budget_s": 0.01})
    rates = measure_rates(torch.device("cpu"))
    assert 1e7 < rates.bytes_per_s < 1e13
    assert 1e6 < rates.operations_per_s < 1e16


@pytest.mark.parametrize(
    ("rate", "expected", "num_measured"),
    [(RateSource.AUTO, None, 0), (RateSource.NONE, None, 0), (H100, None, 0), (RateSource.MEASURE, H100, 1)],
)
async def test_a_cpu_is_measured_only_if_asked(
    rate: RateSource | DeviceRates,
    expected: DeviceRates | None,
    num_measured: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    measured: list[torch.device] = []
    monkeypatch.setattr(torch_backend, "measure_rates", lambda device: measured.append(device) or H100)
    backend = TorchBackend(WorkerConfig(device_rate=rate, state_directory=tmp_path))
    assert backend.device.rates == expected
    assert len(measured) == num_measured
    assert backend.stop(timeout_s=5)


async def test_a_failed_measurement_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(device: torch.device) -> DeviceRates:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(torch_backend, "measure_rates", fail)
    with pytest.raises(ValueError, match=r"speed of cpu was not measured \(CUDA out of memory\)"):
        TorchBackend(WorkerConfig(device_rate=RateSource.MEASURE, state_directory=tmp_path))


@pytest.mark.parametrize(("rate", "told"), [(H100, (3_350 * 10**9, 800 * 10**12)), (RateSource.AUTO, None)])
async def test_a_mock_tells_the_rates_that_it_is_given(
    rate: RateSource | DeviceRates, told: tuple[int, int] | None
) -> None:
    hello = Worker(mock_config(rate))._hello()
    found = (hello.rates.bytes_per_second, hello.rates.operations_per_second)
    assert (found if hello.HasField("rates") else None) == told


def test_a_mock_measures_nothing() -> None:
    with pytest.raises(ValueError, match="--mock cannot be used with --device-rate measure"):
        mock_config(RateSource.MEASURE)


def mock_config(rate: RateSource | DeviceRates) -> WorkerConfig:
    return WorkerConfig(mock=MockSpec.parse("step=1ms"), device_rate=rate)
