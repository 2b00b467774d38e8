"""Settings of serving, and step size limits of a plan, reduced after a stage ran out of memory. Pure."""

from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.planner.plan import Plan
from coordinator.scheduler.policy import DEFAULT_ITL_TARGET_S, SchedulerLimits

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
    without a stage fetch the layers that they would get by the loss of another worker.
    """

    batching: BatchingOptions = DEFAULT_BATCHING
    prefix_caching: bool = True
    cache_directory: Path | None = None
    weights_peers: tuple[str, ...] = ()
    prefetch: bool = True


def scheduler_limits(plan: Plan, options: BatchingOptions, *, boundary_bytes: int) -> SchedulerLimits:
    """Limits of the scheduler while this plan serves a model with `Blueprint.boundary_bytes`."""
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
    )


class MemoryLimits:
    """Step limits that are halved each time a stage runs out of memory, until the next plan."""

    def __init__(self) -> None:
        self._plan_id = 0
        self._max_tokens: int | None = None
        self._max_sequences: int | None = None
        self._stage = 0

    def begin_plan(self, plan_id: int) -> None:
        """Reset the limits if `plan_id` is another plan."""
        if plan_id != self._plan_id:
            self._plan_id = plan_id
            self._max_tokens = self._max_sequences = None

    def record_out_of_memory(
        self, stage: int, limits: SchedulerLimits, *, num_tokens: int, num_sequences: int, block_size: int
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
        self._max_tokens, self._max_sequences, self._stage = new_tokens, new_sequences, stage
        return True

    def apply(self, limits: SchedulerLimits) -> SchedulerLimits:
        """Reduce the plan's `limits`."""
        if self._max_tokens is None or self._max_sequences is None:
            return limits
        return replace(
            limits,
            max_step_tokens=min(limits.max_step_tokens, self._max_tokens),
            max_step_sequences=min(limits.max_step_sequences, self._max_sequences),
        )

    @property
    def text(self) -> str:
        """The current limits and their reason; empty without a reduction."""
        if self._max_tokens is None:
            return ""
        return (
            f"steps are limited to {self._max_tokens} tokens and {self._max_sequences} sequences, "
            f"because stage {self._stage} ran out of memory"
        )
