"""The waits of the cluster, in one place."""

import math
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """All in seconds.

    A worker's heartbeats come every `heartbeat_interval_s`; after `lease_s` of silence it is lost, or after
    `loading_lease_s` while it loads the last stage, whose tokenizer may keep its interpreter for seconds. A
    lost one may come back within `return_grace_s` before its layers are shared out among the others. Who is
    to leave finishes what runs within `drain_timeout_s`, where nobody can take its place. An epoch that is
    not connected after `epoch_timeout_s` is started again. Requests wait `recovery_timeout_s` for a pipeline,
    then fail. A stream that breaks ends its epoch after `report_grace_s`, so that the cause, which comes on
    another connection, can come first: the report of a stage that refuses a step and so ends its streams, or
    the end of a worker. What has outlived its time is swept every `sweep_interval_s`. Weights are
    hashed after `weights_idle_s` without a step.
    """

    heartbeat_interval_s: float = 0.5
    lease_s: float = 2.0
    loading_lease_s: float = 10.0
    return_grace_s: float = 0.5
    drain_timeout_s: float = 30.0
    epoch_timeout_s: float = 10.0
    recovery_timeout_s: float = 30.0
    report_grace_s: float = 0.2
    sweep_interval_s: float = 1.0
    weights_idle_s: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ValueError(f"{field.name} must be positive and finite, got {getattr(self, field.name)}")
        if self.lease_s < 2 * self.heartbeat_interval_s:
            raise ValueError(
                f"a lease of {self.lease_s} s is less than two heartbeats of {self.heartbeat_interval_s} s"
            )
