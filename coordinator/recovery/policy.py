"""Every threshold, limit and wait of failure handling, with its unit and reason."""

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
    """Between two heartbeats of a worker. The detector checks twice per heartbeat."""
    lease_s: float = 2.0
    """Without a heartbeat, then the worker is lost: three heartbeats may be lost before."""
    loading_lease_s: float = 10.0
    """Lease while a worker loads LAST: building the tokenizer may hold its interpreter for seconds."""
    max_late_checks: int = 4
    """Consecutive late checks that are skipped: the coordinator was held up, so heartbeats may be unread."""
    steady_window_s: float = 30.0
    """Without a loss or an ended epoch, then losses are forgotten; with some, they count half."""

    # Overdue steps

    min_step_timeout_s: float = 2.0
    """Lower bound of the timeout of a step: pauses of a host are shorter."""
    step_slowdown: float = 8.0
    """Timeout of a step as a multiple of its predicted time, scaled by the usual ratio of the two."""
    step_ratio_quantile: float = 0.99
    """Quantile of measured to predicted time that counts as usual: one outlier in a hundred is no rule."""
    step_ratio_window: int = 512
    """Latest steps that the quantile is over."""
    first_step_timeout_s: float = 10.0
    """Lower bound of the timeout while no step was measured."""
    first_step_warmups: float = 8.0
    """Timeout while no step was measured, as a multiple of the warm-up of all stages."""

    # Epochs

    epoch_timeout_s: float = 10.0
    """For all stages to be connected after an epoch began, then it is started again."""
    connect_timeout_s: float = 5.0
    """For FIRST to accept the stream of steps."""
    hello_timeout_s: float = 10.0
    """For the first message on a stream of a worker; a stream without one takes a connection for nothing."""
    report_grace_s: float = 0.2
    """From a broken stream to the end of its epoch. The cause (the fault of a stage that closes its streams,
    or the end of a worker) arrives on another connection and must be known first.
    """
    first_epoch_delay_s: float = 0.1
    """Pause before an epoch when the last one had no result; doubles with each further one."""
    max_epoch_delay_s: float = 2.0
    """Longest such pause: a cluster that has recovered waits no longer."""

    # Lost and failing workers

    rejoin_grace_s: float = 0.5
    """For a lost worker to rejoin before its layers move to others: enough for a broken connection. A process
    that starts again takes longer, and the others serve meanwhile.
    """
    coordinator_rejoin_s: float = 1.0
    """For workers to find a restarted coordinator before it plans without the missing ones."""
    tolerated_losses: int = 1
    """Losses beyond the median of the other workers that have no consequence: one is chance."""
    first_hold_s: float = 0.5
    """Before a worker with more losses is used again; doubles with each further one."""
    max_hold_s: float = 30.0
    """Longest such hold: after `steady_window_s` the losses are forgotten anyway."""
    max_remembered_losses: int = 8
    """Lost workers that status still lists by name."""
    max_failed_loads: int = 2
    """Failed loads until a worker is quarantined: the second one is no accident."""
    max_hop_failures: int = 2
    """Consecutive epochs in which a stage does not reach the next one, before the plan avoids that worker."""
    max_non_finite_steps: int = 2
    """Steps with non-finite values, not all of one request, before the plan avoids the worker."""
    non_finite_window: int = 8
    """Latest such steps of a worker that are compared."""
    max_plan_candidates: int = 64
    """Sets of workers tried per number of stages, where a self-check has failed: the search takes
    milliseconds.
    """

    # Requests

    recovery_timeout_s: float = 30.0
    """For a pipeline that serves, then waiting requests fail."""
    drain_timeout_s: float = 30.0
    """For running requests to finish when a worker or the coordinator drains."""
    max_step_retries: int = 2
    """Times that a request is computed again after a refused step; the last time it runs alone."""
    forgiving_tokens: int = 16
    """Tokens since its last refused step after which a request is not blamed for that one."""
    max_deaths_alone: int = 2
    """Workers lost while a request runs alone, then it fails: the first may be chance."""
    max_unrelated_deaths: int = 2
    """Additional losses granted where workers are lost without the request as well."""
    max_breaks_alone: int = 3
    """Streams that break while a request runs alone, and do not while others run, then it fails."""
    max_breaks: int = 3
    """Consecutive epochs that break without a token, then the sequences in their steps are isolated."""
    sweep_interval_s: float = 1.0
    """Between two sweeps of expired requests."""
    journal_retry_s: float = 0.5
    """Before the first new attempt to write the journal; doubles with each further one."""
    max_journal_retry_s: float = 5.0
    """Longest such pause: a disk that has room again is noticed soon."""

    # Checks of what workers compute

    weights_idle_s: float = 1.0
    """Without a step, then weights are hashed: hashing competes with steps for memory bandwidth."""
    reference_wait_s: float = 120.0
    """For the reference of a self-check: a checkpoint of 140 GB is read at 1.2 GB/s."""
    reference_timeout_s: float = 3600.0
    """For one worker to compute a reference; one that is late serves the next check."""
    check_answer_timeout_s: float = 30.0
    """For the answer to each step of the first check of a plan: kernels may be cold."""
    check_states_timeout_s: float = 5.0
    """For the hidden states of all stages after a check."""

    # End of the process

    stop_grace_s: float = 2.0
    """For open calls when the coordinator stops."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} must be positive and finite, got {getattr(self, field.name)}")
        if self.lease_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"a lease of {self.lease_s} s is less than two heartbeats of {self.heartbeat_interval_s} s"
            )
        if self.step_ratio_quantile > 1:
            raise ValueError(f"step_ratio_quantile must be at most 1, got {self.step_ratio_quantile}")


DEFAULT_POLICY = RecoveryPolicy()
