"""Settings of serving, and limits of steps, reduced after a stage ran out of memory. Pure."""

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from coordinator.planner.links import LinkTable
from coordinator.planner.plan import Plan, StagePlan
from coordinator.scheduler.policy import DEFAULT_ITL_TARGET_S, SchedulerLimits
from wire.ids import Incarnation
from wire.tensors import HopRoute, WireDType, payload_bytes

IN_FLIGHT_BYTES = 256 * 1024 * 1024
"""Maximum bytes of hidden states of all steps in flight, which may all wait at one slow stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions:
    """Options of `SchedulerLimits`; `steps_in_flight` None chooses the depth from measured times."""

    steps_in_flight: int | None = None
    itl_target_s: float = DEFAULT_ITL_TARGET_S
    max_decode_slowdown: float | None = None


DEFAULT_BATCHING = BatchingOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """Settings of serving epochs. `cache_directory` caches hashes of weights.

    `weights_peers` are the weights addresses of other coordinators of the model. With `prefetch`, workers
    without a stage fetch the layers that they would get by the loss of another worker. `host` is the one that
    the coordinator listens on: ways to workers there are not measured. `hop_route` applies to every hop.
    """

    batching: BatchingOptions = DEFAULT_BATCHING
    prefix_caching: bool = True
    cache_directory: Path | None = None
    weights_peers: tuple[str, ...] = ()
    prefetch: bool = True
    host: str = ""
    hop_route: HopRoute = HopRoute.AUTO


def token_transfer_us(
    plan: Plan, links: LinkTable, boundary_bytes: int, *, wire_dtype: WireDType | None
) -> tuple[float, ...]:
    """Time in microseconds that a token takes on each hop between stages with a measured rate.

    `boundary_bytes` are of a token in the run dtype; it is sent in `wire_dtype` if that is not None.
    """
    width = boundary_bytes // plan.dtype.size_bytes
    sent_bytes = payload_bytes(wire_dtype or plan.dtype, (1, width))
    workers = [stage.worker for stage in plan.stages]
    hops = [links.find(one, other) for one, other in pairwise(workers)]
    return tuple(sent_bytes / hop.bytes_per_s * 1e6 for hop in hops if hop is not None and hop.bytes_per_s)


def scheduler_limits(
    plan: Plan, options: BatchingOptions, *, boundary_bytes: int, hop_us: tuple[float, ...] = ()
) -> SchedulerLimits:
    """Limits of the scheduler while this plan serves a model with `Blueprint.boundary_bytes`.

    `hop_us`: see `SchedulerLimits`.
    """
    num_stages = len(plan.stages)
    frame_bytes = plan.limits.max_step_tokens * boundary_bytes
    max_depth = min(4 * num_stages + 4, IN_FLIGHT_BYTES // frame_bytes)
    return SchedulerLimits(
        max_step_tokens=plan.limits.max_step_tokens,
        max_step_sequences=plan.limits.max_step_sequences,
        max_steps_in_flight=options.steps_in_flight or max(num_stages + 1, max_depth),
        min_steps_in_flight=options.steps_in_flight or num_stages,
        itl_target_s=options.itl_target_s,
        max_decode_slowdown=options.max_decode_slowdown,
        hop_us=hop_us,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduced:
    """Limits with which a worker has memory for its steps, found with `num_layers` layers on `stage`."""

    max_tokens: int
    max_sequences: int
    stage: int
    num_layers: int


class MemoryLimits:
    """Step limits that are halved each time a stage runs out of memory.

    They apply while the worker stays joined with a stage of at least as many layers. A plan without such a
    stage begins with steps of full size; one after the loss of another worker does not run out of memory
    again.
    """

    def __init__(self) -> None:
        self._plan_id = 0
        self._reduced: dict[Incarnation, _Reduced] = {}
        self._earlier: dict[Incarnation, _Reduced] = {}

    def begin_stage(self, plan_id: int, incarnation: Incarnation, stage: StagePlan) -> None:
        """Begin a stage of plan `plan_id` on a worker; limits of workers without one end with a new plan."""
        if plan_id != self._plan_id:
            self._plan_id = plan_id
            self._earlier, self._reduced = self._reduced, {}
        found = self._earlier.get(incarnation)
        if found is not None and stage.num_layers >= found.num_layers:
            self._reduced[incarnation] = replace(found, stage=stage.stage)

    def record_out_of_memory(
        self,
        incarnation: Incarnation,
        stage: StagePlan,
        limits: SchedulerLimits,
        *,
        num_tokens: int,
        num_sequences: int,
        block_size: int,
    ) -> bool:
        """Halve the limits after a step of `num_tokens` and `num_sequences` did not fit on `stage`.

        `limits` are the plan's. Returns False if steps cannot become smaller than one block and one
        sequence.
        """
        old = self.apply(limits)
        half_tokens = max(block_size, min(num_tokens, old.max_step_tokens) // 2 // block_size * block_size)
        half_sequences = max(1, min(num_sequences, old.max_step_sequences) // 2)
        new_tokens = min(old.max_step_tokens, half_tokens)
        new_sequences = min(old.max_step_sequences, half_sequences)
        if (new_tokens, new_sequences) == (old.max_step_tokens, old.max_step_sequences):
            return False
        self._reduced[incarnation] = _Reduced(
            max_tokens=new_tokens,
            max_sequences=new_sequences,
            stage=stage.stage,
            num_layers=stage.num_layers,
        )
        return True

    def apply(self, limits: SchedulerLimits) -> SchedulerLimits:
        """Reduce the plan's `limits`."""
        if (least := self._least) is None:
            return limits
        return replace(
            limits,
            max_step_tokens=min(limits.max_step_tokens, least.max_tokens),
            max_step_sequences=min(limits.max_step_sequences, least.max_sequences),
        )

    @property
    def text(self) -> str:
        """The current limits and their reason; empty without a reduction."""
        if (least := self._least) is None:
            return ""
        return (
            f"steps are limited to {least.max_tokens} tokens and {least.max_sequences} sequences, "
            f"because stage {least.stage} ran out of memory"
        )

    @property
    def _least(self) -> _Reduced | None:
        """The limits of all stages together, with the stage of the fewest tokens."""
        if not self._reduced:
            return None
        found = min(self._reduced.values(), key=lambda reduced: reduced.max_tokens)
        return replace(found, max_sequences=min(one.max_sequences for one in self._reduced.values()))
