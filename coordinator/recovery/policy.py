"""Every threshold, limit and wait of the coordinator's failure handling, with its unit and reason."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """Names end in their unit: `_s` is seconds, `_tokens` tokens; the rest are counts and ratios.

    The tolerances of the self-check are not here: they are measured properties of number formats and stand
    beside the arithmetic that uses them (`coordinator.recovery.self_check_verdict`).

    Raises:
        ValueError: a value is not positive and finite, or two of them contradict each other.
    """

    # Silent workers

    heartbeat_interval_s: float = 0.5
    """Interval of worker heartbeats. The failure detector checks twice per interval."""
    lease_s: float = 2.0
    """Silence after which a worker is lost. Three lost heartbeats are tolerated."""
    loading_lease_s: float = 10.0
    """Lease of a worker that loads LAST: the tokenizer may hold the interpreter for seconds."""
    max_late_checks: int = 4
    """Maximum consecutive checks to skip because they are late: heartbeats may be unread."""
    steady_window_s: float = 30.0
    """Half-life of counted losses; after this time without a loss or an ended epoch they are forgotten."""

    # Overdue steps

    min_step_timeout_s: float = 2.0
    """Minimum step timeout: longer than a pause of a host."""
    step_slowdown: float = 8.0
    """Step timeout as a multiple of the predicted time, scaled by the usual measured : predicted ratio."""
    step_ratio_quantile: float = 0.99
    """Quantile of the measured : predicted ratios that is the usual one; ignores 1 % of outliers."""
    step_ratio_window: int = 512
    """Number of recent steps in the quantile."""
    first_step_timeout_s: float = 10.0
    """Minimum step timeout before the first measured step."""
    first_step_warmups: float = 8.0
    """Step timeout before the first measured step, as a multiple of the warm-up time of all stages."""

    # Epochs

    epoch_timeout_s: float = 10.0
    """Maximum time to connect all stages of an epoch; then the epoch is started again."""
    connect_timeout_s: float = 5.0
    """Maximum time until FIRST accepts the stream of steps."""
    hello_timeout_s: float = 10.0
    """Maximum time to the first message of a worker's stream; frees connections of silent streams."""
    report_grace_s: float = 0.2
    """Delay between a broken stream and the end of its epoch. The cause (the fault of a stage that closes its
    streams, or a lost worker) arrives on another connection and must be known first.
    """
    first_epoch_delay_s: float = 0.1
    """Pause before an epoch if the previous one had no result; doubles with each further one."""
    max_epoch_delay_s: float = 2.0
    """Maximum pause before an epoch: bounds the wait after the cause is gone."""

    # Joining, lost and failing workers

    max_stages: int = 1
    """Number of stages up to which each worker that joins adds one; without effect below the configured."""

    rejoin_grace_s: float = 0.5
    """Time for a lost worker to rejoin before its layers move to others. Enough for a broken connection; a
    restarted process takes longer, and the others serve meanwhile.
    """
    coordinator_rejoin_s: float = 1.0
    """Time for workers to rejoin a restarted coordinator before it plans without the missing ones."""
    tolerated_losses: int = 1
    """Losses above the median of the other workers without a hold: one is chance."""
    first_hold_s: float = 0.5
    """Hold before a worker with more losses is used again; doubles with each further loss."""
    max_hold_s: float = 30.0
    """Maximum hold: after `steady_window_s` losses are forgotten anyway."""
    max_remembered_losses: int = 8
    """Maximum lost workers in the status."""
    max_failed_loads: int = 2
    """Failed loads after which a worker is quarantined: the second one is no accident."""
    max_hop_failures: int = 2
    """Consecutive epochs in which a worker is not reached, after which the plan avoids it."""
    max_non_finite_steps: int = 2
    """Steps with non-finite values, not all of one request, after which the plan avoids the worker."""
    non_finite_window: int = 8
    """Number of recent non-finite steps per worker that are compared."""
    max_plan_candidates: int = 64
    """Maximum sets of workers to try per number of stages after a failed self-check: takes milliseconds."""

    # Requests

    recovery_timeout_s: float = 30.0
    """Maximum wait of requests for a serving pipeline; then they fail."""
    drain_timeout_s: float = 30.0
    """Maximum time to finish running requests when a worker or the coordinator drains."""
    max_step_retries: int = 2
    """Maximum retries of a request after rejected steps; in the last one it runs alone."""
    forgiving_tokens: int = 16
    """Generated tokens after which a request's rejected steps are forgotten."""
    max_deaths_alone: int = 2
    """Workers lost while a request runs alone, after which it fails: the first may be chance."""
    max_unrelated_deaths: int = 2
    """Maximum additional losses granted to a request when workers are also lost without it."""
    max_breaks_alone: int = 3
    """Broken streams while a request runs alone, after which it fails, if other requests progress."""
    max_breaks: int = 3
    """Consecutive broken epochs without a token, after which the sequences of their steps are isolated."""
    sweep_interval_s: float = 1.0
    """Interval of sweeps for expired requests."""
    journal_retry_s: float = 0.5
    """Pause before the second retry of a journal write; doubles with each further one."""
    max_journal_retry_s: float = 5.0
    """Maximum pause between journal retries: bounds the delay after disk space was freed."""

    # Checks of what workers compute

    weights_idle_s: float = 1.0
    """Idle time before weights are hashed: hashing competes with steps for memory bandwidth."""
    reference_wait_s: float = 120.0
    """Maximum wait for the reference of a self-check: enough to read 140 GB at 1.2 GB/s."""
    reference_timeout_s: float = 3600.0
    """Maximum time for one worker to compute a reference; a late reference is used in the next check."""
    check_answer_timeout_s: float = 30.0
    """Step timeout in the first check of a plan: kernels may be cold."""
    check_states_timeout_s: float = 5.0
    """Maximum time to collect the hidden states of all stages after a check."""

    # End of the process

    stop_grace_s: float = 2.0
    """Maximum time to end open calls when the coordinator stops."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} is {getattr(self, field.name)}, must be in (0, inf)")
        if self.lease_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"a lease of {self.lease_s} s is less than two heartbeats of {self.heartbeat_interval_s} s"
            )
        if self.step_ratio_quantile > 1:
            raise ValueError(f"step_ratio_quantile is {self.step_ratio_quantile}, must be in (0, 1]")


DEFAULT_POLICY = RecoveryPolicy()
