"""What a plan and the coordinator's settings allow in one step, and in flight. Pure."""

from dataclasses import dataclass

from coordinator.planning.plan import Plan
from coordinator.scheduling.pace import SchedulerLimits

IN_FLIGHT_BYTES = 256 * 1024 * 1024
"""Hidden states of all steps in flight together, at most: where one stage is slow they all wait there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceSettings:
    """`steps_in_flight` fixes their number, which measurements decide otherwise. Prefill may make decodes
    take up to `max_decode_slowdown` times as long as alone.
    """

    steps_in_flight: int | None = None
    max_decode_slowdown: float = 1.3


def scheduler_limits(plan: Plan, settings: PaceSettings, *, hidden_size: int) -> SchedulerLimits:
    """The bounds for the scheduler while this plan serves."""
    num_stages = len(plan.stages)
    frame_bytes = plan.limits.max_step_tokens * hidden_size * plan.dtype.size_bytes
    affordable = min(4 * num_stages + 4, IN_FLIGHT_BYTES // frame_bytes)
    least = settings.steps_in_flight or num_stages
    most = settings.steps_in_flight or max(num_stages + 1, affordable)
    return SchedulerLimits(
        max_step_tokens=plan.limits.max_step_tokens,
        max_step_sequences=plan.limits.max_step_sequences,
        max_steps_in_flight=most,
        min_steps_in_flight=least,
        max_decode_slowdown=settings.max_decode_slowdown,
    )
