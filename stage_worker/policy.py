"""Every wait of a worker for other processes, with its unit and reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPolicy:
    """Values are seconds, except those whose names say otherwise."""

    welcome_timeout_s: float = 10.0
    """Maximum time until the coordinator welcomes a worker that dialled it."""
    first_rejoin_delay_s: float = 0.1
    """Pause before a worker dials the coordinator again; doubles with each failure."""
    max_rejoin_delay_s: float = 0.5
    """Maximum pause before a worker dials the coordinator again."""
    loading_timeout_s: float = 120.0
    """Maximum time for other workers to load the layers of a leaving worker, beyond the drain timeout."""
    dial_timeout_s: float = 5.0
    """Maximum time until the next stage accepts a stream; then the hop is reported."""
    payload_grace_s: float = 0.2
    """Maximum time until the next stage, which closed the payload connection, ends the stream too."""
    hello_timeout_s: float = 10.0
    """Maximum time to the first message of a stream from the stage before."""
    epoch_wait_s: float = 10.0
    """Maximum wait of a stream from the stage before for its epoch to begin on this stage."""
    load_again_s: float = 30.0
    """Wait before the worker joins again after the source of its weights did not respond, or its cache had no
    room.
    """
    max_ahead_bytes: int = 256 * 1024 * 1024
    """Maximum size of the steps that wait for their hidden states on a stage: 16 messages of maximum size.
    More is a fault of kind UNDECODABLE.
    """
    mask_wait_s: float = 0.01
    """Maximum wait per step for grammar masks. Rows whose masks are not ready are sampled later, and the
    others of the step do not wait for them.
    """
    mask_limit_s: float = 30.0
    """Maximum time until the mask of a late row is ready; then its sequence fails."""
    idle_check_interval_s: float = 1.0
    """Interval of KV integrity checks while no step arrives."""
    stop_grace_s: float = 0.5
    """Maximum time for running calls and the running step at exit."""
    report_timeout_s: float = 1.0
    """Maximum time to send a device fault before exit."""


WORKER_POLICY = WorkerPolicy()
