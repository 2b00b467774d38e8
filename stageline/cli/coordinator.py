"""`stageline coordinator`: one coordinator in this process."""

import os
from typing import Annotated

import typer

from coordinator.config import DEFAULT_TRACE_BYTES, CoordinatorConfig
from stageline.cli import options
from stageline.version import VERSION
from telemetry.logs import LogFormat, LogLevel, LogSettings
from telemetry.settings import read_environment
from wire.user_files import user_cache_directory


def coordinator(
    stages: Annotated[
        int, typer.Option(metavar="N", min=1, help="Stages to cut the model into; as many workers must join.")
    ],
    listen: options.Listen = options.DEFAULT_ADDRESS,
    model: options.Model = None,
    layers: options.Layers = None,
    dtype: options.Dtype = None,
    wire_dtype: options.WireDtype = None,
    block_size: options.BlockSize = 16,
    max_step_tokens: options.MaxStepTokens = 512,
    max_step_sequences: options.MaxStepSequences = 64,
    max_model_len: options.MaxModelLen = None,
    kv_tokens: options.KvTokens = None,
    prefix_cache: options.PrefixCache = True,
    queue_size: options.QueueSize = 256,
    max_client_requests: options.MaxClientRequests = None,
    client_key: options.ClientKey = None,
    max_unread_tokens: options.MaxUnreadTokens = 4096,
    priority_age: options.PriorityAge = 10.0,
    steps_in_flight: options.StepsInFlight = None,
    max_decode_slowdown: options.MaxDecodeSlowdown = 1.3,
    heartbeat: options.Heartbeat = 0.5,
    lease: options.Lease = 2.0,
    recovery_timeout: options.RecoveryTimeout = 30.0,
    drain_timeout: options.DrainTimeout = 30.0,
    mock_model: options.MockModel = None,
    self_check: options.SelfCheck = None,
    self_check_interval: options.SelfCheckInterval = 600.0,
    journal: options.Journal = None,
    reattach_timeout: options.ReattachTimeout = 60.0,
    http: options.Http = None,
    no_http: options.NoHttp = False,
    token_file: options.TokenFile = None,
    trace_sample: options.TraceSample = None,
    trace_store: options.TraceStore = 512,
    trace_bytes: options.TraceBytes = None,
    log_format: options.LogFormat = LogFormat.CONSOLE,
    log_level: options.LogLevel = LogLevel.INFO,
) -> int:
    """Plan the stages, and serve clients and workers until it is ended."""
    config = options.build_config(
        lambda: CoordinatorConfig(
            model_directory=model,
            listen=listen,
            num_stages=stages,
            layers=options.parse_layers(layers),
            dtype=dtype,
            wire_dtype=wire_dtype,
            block_size=block_size,
            max_step_tokens=max_step_tokens,
            max_step_sequences=max_step_sequences,
            max_sequence_tokens=max_model_len,
            max_kv_tokens=kv_tokens,
            prefix_cache=prefix_cache,
            queue_size=queue_size,
            max_client_requests=max_client_requests,
            client_key=client_key,
            max_unread_tokens=max_unread_tokens,
            priority_age_s=priority_age,
            steps_in_flight=steps_in_flight,
            max_decode_slowdown=max_decode_slowdown,
            heartbeat_s=heartbeat,
            lease_s=lease,
            recovery_timeout_s=recovery_timeout,
            drain_timeout_s=drain_timeout,
            mock_model=mock_model,
            self_check=self_check,
            self_check_interval_s=self_check_interval,
            cache_directory=user_cache_directory(os.environ),
            journal=journal,
            reattach_timeout_s=reattach_timeout,
            http=options.http_address(http, options.DEFAULT_HTTP, is_off=no_http),
            token=options.read_token(token_file),
            token_directory=options.default_token_directory(),
            trace_sample=trace_sample,
            trace_store=trace_store,
            trace_bytes=trace_bytes or DEFAULT_TRACE_BYTES,
            telemetry=read_environment(os.environ, version=VERSION),
            logs=LogSettings(format=log_format, level=log_level),
        )
    )
    from coordinator.server import run  # imported late: the other commands need none of it

    return run(config)


def flags_of(config: CoordinatorConfig) -> tuple[str, ...]:
    """The flags that give another coordinator this config.

    They do not say where it listens (`http` neither), stages, model, and the token.
    """
    values = {
        "--layers": None if config.layers is None else ",".join(map(str, config.layers)),
        "--dtype": config.dtype,
        "--wire-dtype": config.wire_dtype,
        "--block-size": config.block_size,
        "--max-step-tokens": config.max_step_tokens,
        "--max-step-sequences": config.max_step_sequences,
        "--max-model-len": config.max_sequence_tokens,
        "--kv-tokens": config.max_kv_tokens,
        "--queue-size": config.queue_size,
        "--max-client-requests": config.max_client_requests,
        "--client-key": config.client_key,
        "--max-unread-tokens": config.max_unread_tokens,
        "--priority-age": config.priority_age_s,
        "--steps-in-flight": config.steps_in_flight,
        "--max-decode-slowdown": config.max_decode_slowdown,
        "--mock-model": config.mock_model,
        "--heartbeat": config.heartbeat_s,
        "--lease": config.lease_s,
        "--recovery-timeout": config.recovery_timeout_s,
        "--drain-timeout": config.drain_timeout_s,
        "--self-check-interval": config.self_check_interval_s,
        "--journal": config.journal,
        "--reattach-timeout": config.reattach_timeout_s,
        "--trace-sample": config.trace_sample,
        "--trace-store": config.trace_store,
        "--trace-bytes": f"{config.trace_bytes}B",
    }
    given = [part for flag, value in values.items() if value is not None for part in (flag, str(value))]
    if not config.prefix_cache:
        given.append("--no-prefix-cache")
    if config.self_check is not None:
        given.append("--self-check" if config.self_check else "--no-self-check")
    return (*given, *config.logs.flags)
