"""Step size limits of a plan, reduced after a stage ran out of memory. Pure."""

from dataclasses import dataclass, replace

from coordinator.planner.plan import Plan
from coordinator.scheduler.policy import DEFAULT_MAX_DECODE_SLOWDOWN, SchedulerLimits

IN_FLIGHT_BYTES = 256 * 1024 * 1024
"""Hidden states of all steps in flight together, at most: where one stage is slow they all wait there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingOptions:
    """Options of the batching policy.

    `steps_in_flight` fixes the pipeline depth; None chooses it from measured times. `max_decode_slowdown` is
    the maximum mean slowdown of decode steps by prefill chunks.
    """

    steps_in_flight: int | None = None
    max_decode_slowdown: float = DEFAULT_MAX_DECODE_SLOWDOWN


DEFAULT_BATCHING = BatchingOptions()


def scheduler_limits(plan: Plan, options: BatchingOptions, *, hidden_size: int) -> SchedulerLimits:
    """The bounds for the scheduler while this plan serves."""
    num_stages = len(plan.stages)
    frame_bytes = plan.limits.max_step_tokens * hidden_size * plan.dtype.size_bytes
    max_depth = min(4 * num_stages + 4, IN_FLIGHT_BYTES // frame_bytes)
    return SchedulerLimits(
        max_step_tokens=plan.limits.max_step_tokens,
        max_step_sequences=plan.limits.max_step_sequences,
        max_steps_in_flight=options.steps_in_flight or max(num_stages + 1, max_depth),
        min_steps_in_flight=options.steps_in_flight or num_stages,
        max_decode_slowdown=options.max_decode_slowdown,
    )


class MemoryLimits:
    """Halved with each step that did not fit, until another plan has another share of memory."""

    def __init__(self) -> None:
        self._plan_id = 0
        self._max_tokens: int | None = None
        self._max_sequences: int | None = None
        self._stage = 0

    def begin_plan(self, plan_id: int) -> None:
        """Forgets the limits if this is another plan."""
        if plan_id != self._plan_id:
            self._plan_id = plan_id
            self._max_tokens = self._max_sequences = None

    def note_out_of_memory(
        self, stage: int, limits: SchedulerLimits, *, num_tokens: int, num_sequences: int, block_size: int
    ) -> bool:
        """A step of so many tokens and sequences did not fit on `stage`, under the plan's own `limits`. False
        if steps cannot become smaller: one block, or one sequence.
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
        """The plan's `limits`, or less."""
        if self._max_tokens is None or self._max_sequences is None:
            return limits
        return replace(
            limits,
            max_step_tokens=min(limits.max_step_tokens, self._max_tokens),
            max_step_sequences=min(limits.max_step_sequences, self._max_sequences),
        )

    @property
    def text(self) -> str:
        """What holds now and why; empty where steps are as large as the plan allows."""
        if self._max_tokens is None:
            return ""
        return (
            f"steps are limited to {self._max_tokens} tokens and {self._max_sequences} sequences, "
            f"because stage {self._stage} ran out of memory"
        )
