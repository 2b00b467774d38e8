"""What a coordinator is started with."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.sdk.trace.sampling import Sampler

from checkpoint import DType
from checkpoint.config_fields import MAX_INT, MAX_LAYERS
from coordinator.mock_model import parse_mock_model
from coordinator.recovery.policy import DEFAULT_POLICY, RecoveryPolicy
from telemetry.logs import DEFAULT_LOGS, LogSettings
from telemetry.settings import NO_SETTINGS, TelemetrySettings
from telemetry.span_recorder import ratio_sampler
from wire.addresses import parse_address
from wire.tensors import check_can_carry, parse_wire_dtype

DEFAULT_TRACE_BYTES = 64 * 1024 * 1024
DTYPES = ("bf16", "f16", "f32")
MIN_TOKEN_LENGTH = 16
_LIMITS = {
    "num_stages": MAX_LAYERS,
    "block_size": 2**16,
    "max_step_tokens": 2**20,
    "max_step_sequences": 2**16,
    "queue_size": 10**6,
    "max_sequence_tokens": MAX_INT,
    "max_kv_tokens": 2**40,
    "max_client_requests": 10**6,
    "max_unread_tokens": MAX_INT,
    "steps_in_flight": 2**12,
    "trace_store": 10**6,
    "trace_bytes": 2**50,
}
"""Largest values: what is above was mistyped, and some of it would be allocated."""
_METADATA_KEY = re.compile(r"[a-z0-9_.-]+(?<!-bin)")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Validated when it is made; raises ValueError with the numbers.

    `None` stands for: the built-in model (`model_directory`), a split that balances the stages (`layers`),
    the checkpoint's dtype, hidden states that travel as they are computed (`wire_dtype`), the model's own
    limit (`max_sequence_tokens`), as many KV tokens as the memory of the workers holds (`max_kv_tokens`), no
    bound on one client's requests, and clients that are told apart by their address (`client_key`, else a key
    of their calls' metadata). A request is cancelled when its reader is `max_unread_tokens` behind. Waiting
    for `priority_age_s` is worth one class of priority. Without `prefix_cache`, requests share no KV blocks.
    `mock_model`, such as "layers=64", is served by mock
    stages in the place of a model. `steps_in_flight` None lets measured times decide. Prefill may make
    decodes take up to `max_decode_slowdown` times as long as they would alone. Plans of a model with
    weights are checked before they serve unless `self_check` is False, and again when the cluster is idle
    and the last check was `self_check_interval_s` ago; 0: not again. References and
    hashes of weights are kept in `cache_directory`, if given.

    With a `journal`, requests survive the coordinator: the next one with the same file goes on with them, and
    waits `reattach_timeout_s` for the clients of those that nobody asked to keep.

    A worker sends a heartbeat every `heartbeat_s` and is lost after `lease_s` without. Requests wait for
    `recovery_timeout_s` for a pipeline; whoever has to leave finishes what runs within `drain_timeout_s`.

    The dashboard is served on `http` (HOST:PORT), or not at all. Callers with the operator `token` may cancel
    any request and drain workers, over gRPC and HTTP. Without one the coordinator makes a fresh one and keeps
    it in a file in `token_directory` while it runs; without that too, nobody may.

    Of the requests whose callers have not decided about it, `trace_sample` (0 to 1) are traced; None leaves
    that to `telemetry`, which is what OpenTelemetry's variables say. The newest traces are kept in memory,
    `trace_store` and `trace_bytes` at most.
    """

    model_directory: Path | None
    listen: str
    num_stages: int
    layers: tuple[int, ...] | None
    dtype: str | None
    block_size: int
    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int | None
    max_kv_tokens: int | None
    queue_size: int
    max_client_requests: int | None = None
    client_key: str | None = None
    max_unread_tokens: int = 4096
    prefix_cache: bool = True
    priority_age_s: float = 10.0
    steps_in_flight: int | None = None
    max_decode_slowdown: float = 1.3
    mock_model: str | None = None
    journal: Path | None = None
    reattach_timeout_s: float = 60.0
    wire_dtype: str | None = None
    heartbeat_s: float = DEFAULT_POLICY.heartbeat_interval_s
    lease_s: float = DEFAULT_POLICY.lease_s
    recovery_timeout_s: float = DEFAULT_POLICY.recovery_timeout_s
    drain_timeout_s: float = DEFAULT_POLICY.drain_timeout_s
    self_check: bool | None = None
    self_check_interval_s: float = 600.0
    cache_directory: Path | None = None
    http: str | None = None
    token: str | None = field(default=None, repr=False)
    token_directory: Path | None = None
    trace_sample: float | None = None
    trace_store: int = 512
    trace_bytes: int = DEFAULT_TRACE_BYTES
    telemetry: TelemetrySettings = NO_SETTINGS
    logs: LogSettings = DEFAULT_LOGS

    @property
    def sampler(self) -> Sampler:
        """Which requests are traced: `trace_sample` of those whose callers have not decided, or what the
        environment says, or all.
        """
        if self.trace_sample is None and self.telemetry.sampler is not None:
            return self.telemetry.sampler
        return ratio_sampler(1.0 if self.trace_sample is None else self.trace_sample)

    @property
    def recovery_policy(self) -> RecoveryPolicy:
        """Raises ValueError for times that do not fit each other."""
        return RecoveryPolicy(
            heartbeat_interval_s=self.heartbeat_s,
            lease_s=self.lease_s,
            recovery_timeout_s=self.recovery_timeout_s,
            drain_timeout_s=self.drain_timeout_s,
        )

    def __post_init__(self) -> None:
        parse_address(self.listen)
        if self.http is not None:
            parse_address(self.http)
        if self.token is not None:
            _check_token(self.token)
        for name, limit in _LIMITS.items():
            _check_count(name, getattr(self, name), limit)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(DTYPES)}")
        if self.wire_dtype is not None:
            self._check_wire_dtype(self.wire_dtype)
        if self.client_key is not None and not _METADATA_KEY.fullmatch(self.client_key):
            raise ValueError(
                f"client_key {self.client_key!r} is no metadata key: use a-z, 0-9, '-', '_', '.'"
            )
        if not 0 < self.priority_age_s < math.inf:
            raise ValueError(f"priority_age_s is {self.priority_age_s:g}, but must be positive and finite")
        if not 0 < self.reattach_timeout_s < math.inf:
            raise ValueError(
                f"reattach_timeout_s is {self.reattach_timeout_s:g}, but must be positive and finite"
            )
        if not 0 <= self.self_check_interval_s < math.inf:
            raise ValueError(
                f"self_check_interval_s is {self.self_check_interval_s:g}, but must be finite and at least 0"
            )
        if self.trace_sample is not None and not 0 <= self.trace_sample <= 1:
            raise ValueError(f"trace_sample is {self.trace_sample:g}, but must be from 0 to 1")
        if not 1 < self.max_decode_slowdown < math.inf:
            raise ValueError(
                f"max_decode_slowdown is {self.max_decode_slowdown:g}, but must be above 1 and finite"
            )
        if self.mock_model is not None:
            parse_mock_model(self.mock_model)
            if self.self_check:
                raise ValueError("--self-check needs weights to check: not together with --mock-model")
            if self.model_directory is not None:
                raise ValueError("--mock-model is served in the place of a model: not together with --model")
        _ = self.recovery_policy
        self._check_layers()
        self._check_step_tokens()

    def _check_wire_dtype(self, name: str) -> None:
        wire_dtype = parse_wire_dtype(name)
        if self.num_stages == 1:
            raise ValueError(f"wire_dtype {name} is for hidden states between stages, but there is one stage")
        if self.dtype is not None:
            check_can_carry(wire_dtype, DType.from_name(self.dtype))

    @property
    def wants_self_check(self) -> bool:
        """Plans are checked before they serve."""
        return self.mock_model is None if self.self_check is None else self.self_check

    def _check_layers(self) -> None:
        if self.layers is None:
            return
        split = ",".join(map(str, self.layers))
        if len(self.layers) != self.num_stages:
            raise ValueError(
                f"layers {split} are for {len(self.layers)} stages, but there are {self.num_stages}"
            )
        if min(self.layers) < 1:
            raise ValueError(f"layers {split} leave a stage without layers")

    def _check_step_tokens(self) -> None:
        if self.max_step_tokens < self.block_size:
            # A prefill chunk that is not the last one ends on a block boundary.
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} is less than one block of {self.block_size} tokens"
            )


def _check_token(token: str) -> None:
    if len(token) < MIN_TOKEN_LENGTH or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ValueError(
            f"the operator token has {len(token)} characters, but must have at least {MIN_TOKEN_LENGTH}, "
            "all of them printable ASCII without spaces"
        )


def _check_count(name: str, value: int | None, limit: int) -> None:
    if value is not None and value < 1:
        raise ValueError(f"{name} is {value}, but must be at least 1")
    if value is not None and value > limit:
        raise ValueError(f"{name} is {value}, the limit is {limit}")
