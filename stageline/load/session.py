"""One load from the first question to the last token."""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from stageline.client import Client
from stageline.load.arrivals import Arrivals
from stageline.load.driver import Driver
from stageline.load.metrics import Limits
from stageline.load.plan import LoadSpec, PlannedRequest, check_fits, make_plan
from stageline.load.target import Target
from stageline_rpc.v1 import inference_pb2


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadConfig:
    """A load, the cluster that it is for, and what counts as good. Raises ValueError."""

    coordinator: str
    spec: LoadSpec
    limits: Limits
    max_concurrency: int | None = None
    num_warmups: int = 0
    temperature: float = 0.0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"a concurrency of at most {self.max_concurrency} lets nothing through")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"a temperature of {self.temperature:g} is not at least 0 and finite")
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"a timeout of {self.timeout_s:g} s is not above 0 and finite")


class WarmupFailed(Exception):
    """A request that was sent before the load has failed; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedLoad:
    """A load, and a connection to the cluster that it is for."""

    config: LoadConfig
    model: inference_pb2.GetModelResponse
    client: Client

    def check_fits(self, plan: Sequence[PlannedRequest]) -> None:
        """Raises ValueError when a request of the plan, or of the warm-up, is longer than may be."""
        for each in (plan, make_plan(_warmup_spec(self.config)) if self.config.num_warmups else ()):
            check_fits(each, self.model.max_sequence_tokens)

    async def warm_up(self) -> None:
        """Sends the requests that are not counted, all at once; what they cache, the load does not find.

        Raises WarmupFailed.
        """
        if not self.config.num_warmups:
            return
        spec = _warmup_spec(self.config)
        records = (await self._driver(spec).run(make_plan(spec))).records
        failed = [record for record in records if record.has_failed]
        if failed:
            why = f"{failed[0].status}: {failed[0].error}"
            raise WarmupFailed(f"{len(failed)} of {len(records)} warm-up requests failed: {why}")

    def driver(self) -> Driver:
        """Drives the load, once."""
        return self._driver(self.config.spec)

    def _driver(self, spec: LoadSpec) -> Driver:
        target = Target(
            self.client,
            spec,
            vocab_size=self.model.vocab_size,
            temperature=self.config.temperature,
            timeout_s=self.config.timeout_s,
        )
        return Driver(target.prepare, max_concurrency=self.config.max_concurrency)


@asynccontextmanager
async def prepared(config: LoadConfig) -> AsyncIterator[PreparedLoad]:
    """Connects, and asks which model is served."""
    async with Client(config.coordinator) as client:
        yield PreparedLoad(config=config, model=await client.model(), client=client)


def _warmup_spec(config: LoadConfig) -> LoadSpec:
    return replace(
        config.spec,
        arrivals=Arrivals(rate_per_s=math.inf),
        num_requests=config.num_warmups,
        duration_s=None,
    )
