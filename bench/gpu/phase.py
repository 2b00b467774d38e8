"""A phase: what it is asked, and the rows that it writes as it measures them.

python -m bench.gpu.phase ORDER      runs one phase in this process; ORDER is JSON

A phase has a process of its own, so that a device that fails or hangs does not affect the others. Its rows
are lines of a file: what it measured before its deadline counts.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from bench.gpu.rows import Row, encode
from bench.gpu.targets import target_of
from bench.harness.figure import Better, NotMeasured

MODEL_FOLDER = "model"
RATES_KIND, ROW_KIND, FACTS_KIND = "rates", "row", "facts"
NEEDS_CUDA = "needs a CUDA device, the run is on {device}"

_FOLDERS = ("work", "logs", "rows_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What a phase is asked. `deadline_s` is on the machine's monotonic clock.

    `work` is a folder for large files of the run, `logs` one for what is kept, `rows_file` takes the results;
    `rates` are those that the phase `hardware` measured, by the names of `bench.gpu.rates.Rates`.
    """

    phase: str
    device: str
    is_quick: bool
    deadline_s: float
    work: Path
    logs: Path
    rows_file: Path
    rates: Mapping[str, float] = field(default_factory=dict)

    def encoded(self) -> str:
        return json.dumps({**asdict(self), **{name: str(getattr(self, name)) for name in _FOLDERS}})

    @classmethod
    def decoded(cls, text: str) -> Order:
        values = json.loads(text)
        return cls(**{**values, **{name: Path(values[name]) for name in _FOLDERS}})

    @property
    def is_cuda(self) -> bool:
        return self.device != "cpu"

    @property
    def model(self) -> Path:
        """Directory of the checkpoint of the run."""
        return self.work / MODEL_FOLDER


class Recorder:
    """Writes the rows of one phase."""

    def __init__(self, order: Order, file: TextIO) -> None:
        self.order = order
        self._file = file

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.order.deadline_s - time.monotonic()

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        bound: float | None = None,
        better: Better = Better.HIGHER,
        details: Mapping[str, float | str] | None = None,
    ) -> None:
        """Write a measured figure, with its target if it has one, which are not for the sizes of --quick."""
        self._write_row(
            Row(
                phase=self.order.phase,
                name=name,
                unit=unit,
                value=value,
                bound=bound,
                target=None if self.order.is_quick else target_of(name),
                better=better,
                details=details or {},
            )
        )

    def not_measured(self, name: str, unit: str, reason: str, *, better: Better = Better.HIGHER) -> None:
        """Write why a figure is missing."""
        self._write_row(
            Row(
                phase=self.order.phase,
                name=name,
                unit=unit,
                target=target_of(name),
                better=better,
                reason=reason,
            )
        )

    def rates(self, rates: Mapping[str, float]) -> None:
        """Write rates of the hardware, which bound the figures of later phases."""
        self._write(RATES_KIND, dict(rates))

    def facts(self, device: str, versions: Mapping[str, str]) -> None:
        """Write name of the device, and versions."""
        self._write(FACTS_KIND, {"device": device, "versions": dict(versions)})

    def _write_row(self, row: Row) -> None:
        self._write(ROW_KIND, encode(row))

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        self._file.flush()


Measure = Callable[[Recorder], Awaitable[None]]


def needs_cuda(order: Order) -> str:
    """The reason of a figure that a CPU does not have."""
    return NEEDS_CUDA.format(device=order.device)


def run(order: Order) -> int:
    """Run a phase; the last line on standard error has the reason of a failure."""
    with order.rows_file.open("a") as file:
        try:
            measure: Measure = import_module(f"bench.gpu.phases.{order.phase}").measure
            asyncio.run(_measured(measure, Recorder(order, file)))
        except ModuleNotFoundError as error:
            print(f"missing package: {error.name}", file=sys.stderr)
            return 1
        except NotMeasured as error:
            print(error, file=sys.stderr)
            return 1
    return 0


async def _measured(measure: Measure, recorder: Recorder) -> None:
    await measure(recorder)


if __name__ == "__main__":
    sys.exit(run(Order.decoded(sys.argv[1])))
