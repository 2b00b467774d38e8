"""Configuration of a coordinator."""

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from opentelemetry.sdk.trace.sampling import Sampler

from checkpoint import DType, ScaledDType, WeightFormat
from checkpoint.config_fields import MAX_INT, MAX_LAYERS
from checkpoint.implementation import AUTO, IMPLEMENTATIONS
from coordinator.mock_model import parse_mock_model
from coordinator.recovery.policy import DEFAULT_POLICY, RecoveryPolicy
from coordinator.scheduler.policy import DEFAULT_ITL_TARGET_S
from telemetry.logs import DEFAULT_LOGS, LogSettings
from telemetry.service_manager import UNSUPERVISED, NotifySettings
from telemetry.settings import NO_SETTINGS, TelemetrySettings
from telemetry.span_recorder import ratio_sampler
from weights.location import ModelLocation, model_location
from wire.addresses import DEFAULT_ADDRESS
from wire.flags import (
    OFF,
    Flag,
    check_limits,
    existing_file,
    file_path,
    files,
    listen_address,
    listen_address_or_off,
    peer_addresses,
)
from wire.sizes import MAX_BYTES, exact_size, parse_size
from wire.tensors import HopRoute, check_can_carry, parse_wire_dtype
from wire.transport import PLAIN_SETTINGS, TransportSettings, is_loopback, tls_directory
from wire.user_files import check_token

DTYPES = ("bf16", "f16", "f32")
_METADATA_KEY = re.compile(r"[a-z0-9_.-]+(?<!-bin)")


def parse_layers(text: str) -> tuple[int, ...]:
    """Layers of each stage, as in 10,12,10. Raises ValueError."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--layers {text!r} is not a list of numbers such as 10,12,10") from None


_model = partial(Flag, panel="Model and stages")
_batching = partial(Flag, panel="Batching and KV cache")
_admission = partial(Flag, panel="Admission")
_failures = partial(Flag, panel="Failures and restarts")
_serving = partial(Flag, panel="Addresses and access")
_certificates = partial(Flag, panel="Certificates")
_traces = partial(Flag, panel="Traces")


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of a coordinator, with the flags that set them. Raises ValueError with the numbers.

    The upper limits reject mistyped values, which could otherwise be allocated.
    """

    num_stages: Annotated[
        int,
        _model("--stages", "N", "Stages of the pipeline; as many workers must join", min=1, max=MAX_LAYERS),
    ]
    max_stages: Annotated[
        int | None,
        _model(
            "--max-stages",
            "N",
            "Stages that the pipeline grows to while it serves, by one for each worker that joins",
            unset="--stages: such workers are spares",
            min=1,
            max=MAX_LAYERS,
        ),
    ] = None
    model: Annotated[
        ModelLocation | None,
        _model(
            "--model",
            "DIR|FILE|URL",
            "GGUF file, or Hugging Face checkpoint with safetensors: a path, hf://ORG/NAME[@REVISION], "
            "https://HOST/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH; of a GGUF file, "
            "hf://ORG/NAME/FILE.gguf[@REVISION] or https://HOST/PATH/FILE.gguf",
            unset="the built-in model",
            parse=model_location,
        ),
    ] = None
    weights_manifest: Annotated[
        Path | None,
        _model(
            "--weights-manifest",
            "FILE",
            "Hashes of a remote model's tensors, made by `stageline weights index`",
            unset="stageline.manifest.json beside the weights, if it is there",
            parse=existing_file,
        ),
    ] = None
    layers: Annotated[
        tuple[int, ...] | None,
        _model(
            "--layers",
            "N,N,...",
            "Layers of each stage",
            unset="balanced",
            parse=parse_layers,
            format=lambda layers: ",".join(map(str, layers)),
        ),
    ] = None
    orders_by_links: Annotated[
        bool,
        _model(
            "--link-order",
            None,
            "Put workers into the order with the shortest steps on the measured links, not of their names",
        ),
    ] = True
    dtype: Annotated[
        str | None,
        _model("--dtype", "bf16|f16|f32", "Dtype of weights and compute", unset="the checkpoint's"),
    ] = None
    implementation: Annotated[
        str,
        _model(
            "--implementation",
            "auto|native|transformers",
            "Code that computes layers; auto: transformers' where Stageline has none, slower and less tested",
        ),
    ] = AUTO
    quantize: Annotated[
        str | None,
        _model(
            "--quantize",
            "int8|int4",
            "Hold the matrices of layers in fewer bits; smaller and less exact",
            unset="in the run dtype",
        ),
    ] = None
    kv_dtype: Annotated[
        str | None,
        _model(
            "--kv-dtype",
            "fp8|int8",
            "Dtype of keys and values in the cache; half the memory and less exact",
            unset="the run dtype",
        ),
    ] = None
    wire_dtype: Annotated[
        str | None,
        _model(
            "--wire-dtype",
            "bf16|fp8|int8",
            "Dtype of hidden states between stages; smaller and less exact",
            unset="as computed",
        ),
    ] = None
    hidden_states: Annotated[
        HopRoute,
        _model(
            "--hidden-states",
            None,
            "Ways of hidden states between stages; auto: shared memory and payload connections where workers "
            "offer them; grpc: chunks on the gRPC streams only, whatever flags the workers have",
        ),
    ] = HopRoute.AUTO
    mock_model: Annotated[
        str | None,
        _model(
            "--mock-model",
            "SHAPE",
            "Serve a model without weights on mock stages, as in layers=64,hidden=1024",
        ),
    ] = None
    self_check: Annotated[
        bool | None,
        _model(
            "--self-check",
            None,
            "Compare results with a reference before serving and when idle",
            unset="on, off for mock models",
        ),
    ] = None
    self_check_interval_s: Annotated[
        float,
        _model(
            "--self-check-interval", "SECONDS", "Interval of self-checks while idle; 0 disables them", min=0
        ),
    ] = 600.0

    block_size: Annotated[int, _batching("--block-size", "N", "Tokens per KV block", min=1, max=2**16)] = 16
    max_step_tokens: Annotated[
        int,
        _batching(
            "--max-step-tokens",
            "N",
            "Maximum tokens per step; longer prompts are split into chunks",
            min=1,
            max=2**20,
        ),
    ] = 512
    max_step_sequences: Annotated[
        int, _batching("--max-step-sequences", "N", "Maximum sequences per step", min=1, max=2**16)
    ] = 64
    max_sequence_tokens: Annotated[
        int | None,
        _batching(
            "--max-model-len",
            "N",
            "Maximum tokens of a sequence, prompt and output; chooses the rotary factors of longrope models",
            unset="max_position_embeddings of the model",
            min=1,
            max=MAX_INT,
        ),
    ] = None
    max_kv_tokens: Annotated[
        int | None,
        _batching(
            "--kv-tokens",
            "N",
            "Maximum tokens in the KV cache",
            unset="what fits in the workers' memory",
            min=1,
            max=2**40,
        ),
    ] = None
    prefix_cache: Annotated[
        bool, _batching("--prefix-cache", None, "Share KV blocks of equal prefixes between requests")
    ] = True
    public_prefixes: Annotated[
        tuple[Path, ...] | None,
        _batching(
            "--public-prefix",
            "FILE,FILE,...",
            "Prompts whose KV blocks all tenants share: a text, or .json with token ids",
            unset="none",
            parse=files,
            format=lambda paths: ",".join(map(str, paths)),
        ),
    ] = None
    steps_in_flight: Annotated[
        int | None,
        _batching(
            "--steps-in-flight", "N", "Steps in flight", unset="chosen from measured times", min=1, max=2**12
        ),
    ] = None
    itl_target_s: Annotated[
        float,
        _batching(
            "--itl-target",
            "SECONDS",
            "Target for the time between two tokens of a request while other prompts are computed",
            above=0,
            max=60,
        ),
    ] = DEFAULT_ITL_TARGET_S
    max_decode_slowdown: Annotated[
        float | None,
        _batching(
            "--max-decode-slowdown",
            "X",
            "Maximum mean slowdown of decode steps by prefill chunks, instead of --itl-target",
            unset="none",
            above=1,
        ),
    ] = None

    queue_size: Annotated[
        int,
        _admission(
            "--queue-size",
            "N",
            "Maximum waiting sequences; a request with n choices has n",
            min=1,
            max=10**6,
        ),
    ] = 256
    max_client_requests: Annotated[
        int | None,
        _admission(
            "--max-client-requests",
            "N",
            "Maximum live sequences per client",
            unset="unlimited",
            min=1,
            max=10**6,
        ),
    ] = None
    client_key: Annotated[
        str | None,
        _admission("--client-key", "KEY", "gRPC metadata key that identifies a client", unset="its address"),
    ] = None
    max_unread_tokens: Annotated[
        int,
        _admission(
            "--max-unread-tokens",
            "N",
            "Maximum unread tokens of a request before it is cancelled",
            min=1,
            max=MAX_INT,
        ),
    ] = 4096
    priority_age_s: Annotated[
        float, _admission("--priority-age", "SECONDS", "Waiting time worth one priority class", above=0)
    ] = 10.0

    heartbeat_s: Annotated[
        float, _failures("--heartbeat", "SECONDS", "Worker heartbeat interval", above=0)
    ] = DEFAULT_POLICY.heartbeat_interval_s
    lease_s: Annotated[
        float, _failures("--lease", "SECONDS", "Silence after which a worker is lost", above=0)
    ] = DEFAULT_POLICY.lease_s
    recovery_timeout_s: Annotated[
        float, _failures("--recovery-timeout", "SECONDS", "Maximum wait of requests for a pipeline", above=0)
    ] = DEFAULT_POLICY.recovery_timeout_s
    drain_timeout_s: Annotated[
        float,
        _failures(
            "--drain-timeout", "SECONDS", "Maximum time to finish running requests before exit", above=0
        ),
    ] = DEFAULT_POLICY.drain_timeout_s
    journal: Annotated[
        Path | None,
        _failures(
            "--journal",
            "PATH",
            "Journal file; accepted requests survive a restart. Created if missing",
            unset="none",
            parse=file_path,
        ),
    ] = None
    reattach_timeout_s: Annotated[
        float,
        _failures(
            "--reattach-timeout",
            "SECONDS",
            "Wait of journalled requests for their clients after a restart",
            above=0,
        ),
    ] = 60.0

    listen: Annotated[
        str,
        _serving("--listen", "HOST:PORT", "Listen address; port 0 takes a free port", parse=listen_address),
    ] = DEFAULT_ADDRESS
    reflection: Annotated[
        bool, _serving("--reflection", None, "Describe the gRPC services to clients that ask")
    ] = True
    http: Annotated[
        str | None,
        _serving(
            "--http",
            "HOST:PORT",
            "Address of the dashboard and /metrics; port 0 takes a free port",
            parse=listen_address,
            off="--no-http",
        ),
    ] = "127.0.0.1:7481"
    health_listen: Annotated[
        str | None,
        _serving(
            "--health-listen",
            "HOST:PORT",
            "Plain HTTP address of /healthz and /readyz, for probes without certificates",
            unset="none",
            parse=listen_address,
        ),
    ] = None
    weights_listen: Annotated[
        str | None,
        _serving(
            "--weights-listen",
            "ADDR:PORT|off",
            "Listen address for workers without the directory of --model, which fetch its weights, and for "
            "other coordinators",
            unset="a free port of the listen address, for a model in a directory",
            parse=listen_address_or_off,
        ),
    ] = None
    prefetch: Annotated[
        bool,
        _failures(
            "--prefetch",
            None,
            "Let workers without a stage fetch the layers that they would get by the loss of another worker",
        ),
    ] = True
    weights_peers: Annotated[
        tuple[str, ...] | None,
        _serving(
            "--weights-peers",
            "HOST:PORT,...",
            "The --weights-listen addresses of other coordinators of the model, whose workers are asked for "
            "weights before the source",
            unset="none",
            parse=peer_addresses,
            format=",".join,
        ),
    ] = None
    token_file: Annotated[
        Path | None,
        _serving(
            "--token-file",
            "FILE",
            "File of mode 0600 with the operator token, which drain and cancelling any request need",
            unset="a new token for commands on this host",
            parse=file_path,
        ),
    ] = None
    keys_file: Annotated[
        Path | None,
        _serving(
            "--keys-file",
            "FILE",
            "File of API keys, made with `stageline keys`; the dashboard then needs a key of role viewer or "
            "operator",
            unset="no keys",
            parse=existing_file,
        ),
    ] = None
    enroll_listen: Annotated[
        str | None,
        _certificates(
            "--enroll-listen",
            "HOST:PORT",
            "HTTPS address at which workers with a join token get their certificates",
            unset="none",
            parse=listen_address,
        ),
    ] = None
    authority: Annotated[
        Path | None,
        _certificates(
            "--ca-dir",
            "DIR",
            "Directory of the authority that signs them, which `stageline certs ca` made",
            unset="none",
            parse=tls_directory,
        ),
    ] = None
    join_tokens: Annotated[
        Path | None,
        _certificates(
            "--tokens-file",
            "FILE",
            "File of join tokens, which `stageline token create` writes; read for each request",
            unset="none",
            parse=file_path,
        ),
    ] = None
    token: str | None = field(default=None, repr=False)
    """The operator token in `token_file`."""
    token_directory: Path | None = None
    """Directory for a new token while the coordinator runs; without it, no caller is an operator."""
    cache_directory: Path | None = None
    """Directory of references and weight hashes, if they are to be kept."""

    trace_sample: Annotated[
        float | None,
        _traces(
            "--trace-sample",
            "RATIO",
            "Share of requests to trace, 0 to 1",
            unset="OTEL_TRACES_SAMPLER, else all",
            min=0,
            max=1,
        ),
    ] = None
    trace_store: Annotated[
        int, _traces("--trace-store", "COUNT", "Maximum traces in memory", min=1, max=10**6)
    ] = 512
    trace_bytes: Annotated[
        int,
        _traces(
            "--trace-bytes",
            "SIZE",
            "Maximum memory of traces",
            min=1,
            max=MAX_BYTES,
            parse=parse_size,
            format=exact_size,
        ),
    ] = 64 * 2**20
    transport: TransportSettings = PLAIN_SETTINGS
    telemetry: TelemetrySettings = NO_SETTINGS
    notify: NotifySettings = UNSUPERVISED
    logs: LogSettings = DEFAULT_LOGS

    @property
    def sampler(self) -> Sampler:
        """Decides which requests are traced, unless their callers have decided."""
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
            max_stages=self.most_stages,
        )

    def __post_init__(self) -> None:
        self.transport.check_listen("--listen", self.listen)
        if self.weights_listen not in (None, OFF):
            self.transport.check_listen("--weights-listen", self.weights_listen)
        if self.http is not None:
            self.transport.check_listen("--http", self.http)
        if self.token is not None:
            check_token(self.token)
        self._check_login()
        check_limits(self)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.wire_dtype is not None:
            self._check_wire_dtype(self.wire_dtype)
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"--implementation {self.implementation!r} is not one of {', '.join(IMPLEMENTATIONS)}"
            )
        if self.quantize is not None:
            WeightFormat.from_name(self.quantize)
        if self.kv_dtype is not None:
            ScaledDType.from_name(self.kv_dtype)
        if self.client_key is not None and not _METADATA_KEY.fullmatch(self.client_key):
            raise ValueError(
                f"client_key {self.client_key!r} is not a metadata key: use a-z, 0-9, '-', '_', '.'"
            )
        if self.mock_model is not None:
            parse_mock_model(self.mock_model)
            self._check_mock()
        _ = self.recovery_policy
        self._check_layers()
        self._check_step_tokens()

    def _check_mock(self) -> None:
        """Refuse what a mock model has no weights for."""
        if self.model is not None:
            raise ValueError("--mock-model replaces the model: it cannot be used with --model")
        needs = {
            "--self-check needs weights": self.self_check,
            "--weights-manifest needs weights": self.weights_manifest,
            "--quantize needs weights": self.quantize,
            "--implementation needs weights": self.implementation != AUTO,
            "--kv-dtype needs keys and values": self.kv_dtype,
        }
        for need, value in needs.items():
            if value:
                raise ValueError(f"{need}: it cannot be used with --mock-model")

    @property
    def needs_login(self) -> bool:
        """Whether the dashboard is for users with a key or the operator token only."""
        if self.http is None or self.keys_file is not None:
            return self.keys_file is not None
        return not (self.transport.insecure or is_loopback(self.http))

    def _check_login(self) -> None:
        if self.http is None and self.keys_file is not None:
            raise ValueError("--keys-file is for the dashboard: it cannot be used with --no-http")
        if self.needs_login and self.keys_file is None and self.token is None and self.token_file is None:
            raise ValueError(
                f"--http {self.http} can be reached from other hosts, and nobody could log in: give "
                "--keys-file FILE with keys of role viewer or operator, or --token-file FILE, or --no-http"
            )

    def check_enrolment(self) -> None:
        """Raises ValueError for an `enroll_listen` without what it needs."""
        needed = {
            "--tls-dir": self.transport.tls_directory,
            "--ca-dir": self.authority,
            "--tokens-file": self.join_tokens,
        }
        missing = [flag for flag, value in needed.items() if value is None]
        if self.enroll_listen is not None and missing:
            raise ValueError(f"--enroll-listen needs {' and '.join(missing)}")

    def _check_wire_dtype(self, name: str) -> None:
        wire_dtype = parse_wire_dtype(name)
        if self.most_stages == 1:
            raise ValueError(f"wire_dtype {name} is for hidden states between stages, but there is one stage")
        if self.dtype is not None:
            check_can_carry(wire_dtype, DType.from_name(self.dtype))

    @property
    def wants_self_check(self) -> bool:
        return self.mock_model is None if self.self_check is None else self.self_check

    @property
    def most_stages(self) -> int:
        """Stages to which the pipeline may grow."""
        return self.max_stages or self.num_stages

    def _check_layers(self) -> None:
        if self.most_stages < self.num_stages:
            raise ValueError(f"max_stages {self.max_stages} is less than stages, {self.num_stages}")
        if self.layers is None:
            return
        split = ",".join(map(str, self.layers))
        if len(self.layers) != self.most_stages:
            counts = f"are for {len(self.layers)} stages, but there are {self.most_stages}"
            raise ValueError(f"layers {split} {counts}: give one number for each stage")
        if min(self.layers) < 1:
            raise ValueError(f"layers {split} leave a stage without layers")

    def _check_step_tokens(self) -> None:
        if self.max_step_tokens < self.block_size:
            # A prefill chunk that is not the last one ends on a block boundary.
            raise ValueError(
                f"max_step_tokens {self.max_step_tokens} is less than one block of {self.block_size} tokens"
            )
