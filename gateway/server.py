"""The gateway process: builds every part, serves, drains and stops."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from starlette.types import Receive, Scope, Send

from certificates.identity import Role
from gateway.access.visitors import Doorkeeper
from gateway.api.app import make_app
from gateway.api.call import Gateway
from gateway.config import GatewayConfig
from gateway.metrics import GatewayMetrics
from gateway.spans import GatewaySpans
from gateway.upstream.contract import UpstreamFailure
from gateway.upstream.link import CoordinatorLink, LinkPolicy
from telemetry import logs
from telemetry.service_manager import supervised
from telemetry.span_recorder import SpanRecorder, new_recorder
from telemetry.span_sinks import CoordinatorSink
from telemetry.spans import GATEWAY
from text.tokenizer import TextCodec, TokenizerError, load_text_codec
from web.api_keys import KeysFile
from web.server import HttpServer
from wire.addresses import parse_address
from wire.audit import open_audit
from wire.channels import raise_file_limit
from wire.clock import ClusterClock
from wire.condition import Condition
from wire.errors import reason_of
from wire.exit_codes import ExitCode, error_line
from wire.transport import is_loopback, open_transport

log = logging.getLogger(__name__)

INTERPRETER_SWITCH_S = 0.0005
"""How long the event loop waits for a thread that runs Python, such as a chat template; CPython has 5 ms."""
PORT_HINT = "choose another address with --listen HOST:PORT"


def run(config: GatewayConfig) -> int:
    """Serve until SIGTERM or SIGINT. Return the exit code; failures are one line on stderr."""
    logs.configure(config.logs, "gateway")
    raise_file_limit()
    sys.setswitchinterval(INTERPRETER_SWITCH_S)
    try:
        uvloop.run(_supervise(config, _read_template(config.chat_template)))
    except UpstreamFailure as error:
        logs.log_fatal(config.logs, error_line(error.reason, error.message))
        return ExitCode.FAILED
    except (TokenizerError, ValueError, OSError) as error:
        logs.log_fatal(config.logs, error_line(reason_of(error), str(error)))
        return ExitCode.FAILED
    return ExitCode.DONE


def _read_template(path: Path | None) -> str | None:
    """Raises OSError and ValueError."""
    try:
        return None if path is None else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--chat-template {path} is no UTF-8 text: byte {error.start}") from None


class GatewayServer:
    """All parts of a gateway. Until the coordinator is connected, only paths of the process are served."""

    def __init__(self, config: GatewayConfig, template: str | None) -> None:
        self._config, self._template = config, template
        self._audit = open_audit(config.logs.audit_log, "gateway")
        self._transport = open_transport(config.transport, Role.GATEWAY, self._audit)
        self._clock = ClusterClock()
        self._metrics = GatewayMetrics(num_lost_records=lambda: self._audit.num_lost)
        self._recorder: SpanRecorder | None = None
        self._is_stopping = False
        self._metrics.watch_certificate(self._transport.certificate_life)
        self._link = self._new_link()
        self._gateway = Gateway(
            config=config,
            upstream=self._link,
            codec=None,
            metrics=self._metrics,
            template=template,
            doorkeeper=self._doorkeeper(config.keys_file),
            audit=self._audit,
            is_waiting=True,
        )
        self._app = make_app(self._gateway)
        self._http = HttpServer(
            self,
            parse_address(config.listen),
            name="the gateway",
            hint=PORT_HINT,
            tls=self._transport.http_context(),
        )

    def _doorkeeper(self, keys_file: Path | None) -> Doorkeeper | None:
        """Raises KeysUnusable."""
        if keys_file is None:
            return None
        return Doorkeeper(KeysFile(keys_file, audit=self._audit), self._metrics.count_key_tokens)

    @property
    def address(self) -> str:
        """HOST:PORT where it listens."""
        return str(self._http.address)

    def condition(self) -> Condition:
        """Whether requests are served."""
        gateway = self._gateway
        if self._is_stopping:
            return Condition("draining", is_stopping=True)
        if gateway.is_draining or gateway.is_waiting or not self._link.is_connected:
            return Condition("waiting for the coordinator")
        if not self._link.is_ready:
            return Condition("waiting for the pipeline to serve")
        return Condition("serving", is_ready=True)

    async def start(self) -> None:
        """Listen, then wait for the coordinator.

        Raises OSError if the address cannot be bound, TokenizerError, and UpstreamFailure.
        """
        await self._http.start()
        self._recorder = self._open_spans()
        if self._config.keys_file is None and not is_loopback(self.address):
            log.warning("anyone who reaches %s is served: give --keys-file to ask for API keys", self.address)
        log.info("bound to %s, connecting to coordinator %s", self.address, self._config.coordinator)
        await self._connect()

    async def follow_model(self) -> None:
        """Connect again, with its tokenizer, whenever the coordinator serves another model.

        Meanwhile requests are refused. Raises like `start`.
        """
        link = self._link
        while True:
            await link.other_model.wait()  # no timeout: usually it never happens
            log.warning("coordinator %s serves another model", self._config.coordinator)
            self._app = make_app(replace(self._gateway, is_waiting=True))
            await self.drain()
            await link.stop()
            link = self._link = self._new_link()
            await self._connect()
            log.info("serving model %s of coordinator %s", link.model.name, self._config.coordinator)

    def _new_link(self) -> CoordinatorLink:
        return CoordinatorLink(
            self._config.coordinator,
            cache_directory=self._config.cache_directory,
            clock=self._clock,
            transport=self._transport,
            policy=LinkPolicy(unreachable_s=self._config.coordinator_timeout_s),
        )

    def _open_spans(self) -> SpanRecorder | None:
        """Begin to record spans, as a process that is named by its address."""
        telemetry, address, gateway = self._config.telemetry, self._http.address, self._gateway
        if telemetry.is_disabled:
            return None
        recorder = new_recorder(
            GATEWAY,
            CoordinatorSink(self._config.coordinator, self._transport),
            telemetry,
            self._clock,
            instance=f"{socket.gethostname()}:{address.port}",
        )
        recorder.start()
        gateway.metrics.watch_spans(lambda: recorder.num_dropped)
        return recorder

    def _spans(self) -> GatewaySpans | None:
        link, recorder = self._link, self._recorder
        return None if recorder is None else GatewaySpans(recorder, lambda: link.sampler)

    async def _connect(self) -> None:
        await self._link.start()
        codec = await asyncio.to_thread(_load_codec, self._link)
        if codec is not None and self._template is not None:
            _check_template(self._config, codec, self._template)
        # With the same threads, which readers of a model before may still use.
        self._gateway = replace(
            self._gateway,
            upstream=self._link,
            codec=codec,
            spans=self._spans(),
            is_draining=False,
            is_waiting=False,
        )
        self._app = make_app(self._gateway)

    async def drain(self) -> None:
        """Refuse new requests, and wait for those in progress, at most `drain_timeout_s`."""
        gateway = self._gateway
        gateway.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_timeout_s):
                await gateway.metrics.idle()

    async def leave(self) -> None:
        """Drain for good."""
        self._is_stopping = True
        await self.drain()

    async def stop(self) -> None:
        """Close every connection; what still runs is cancelled, and its client gets an error."""
        self._link.interrupt()
        await self._http.stop()
        if self._recorder is not None:
            await self._recorder.close()
        await self._link.stop()
        self._gateway.close()
        self._audit.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _load_codec(link: CoordinatorLink) -> TextCodec | None:
    if link.tokenizer_directory is None:
        return None
    return load_text_codec(link.tokenizer_directory, model_vocab_size=link.model.vocab_size)


def _check_template(config: GatewayConfig, codec: TextCodec, template: str) -> None:
    """Raises TokenizerError."""
    try:
        codec.check_template(template)
    except TokenizerError as error:
        raise TokenizerError(f"--chat-template {config.chat_template}: {error}") from None


async def _supervise(config: GatewayConfig, template: str | None) -> None:
    server = GatewayServer(config, template)
    async with supervised(config.notify, server.condition):
        await _serve(server)


async def _serve(server: GatewayServer) -> None:
    stopping, draining = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stopping.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: (stopping if draining.is_set() else draining).set())
    try:
        await _first_of(stopping.wait(), draining.wait(), server.start())
        if not (stopping.is_set() or draining.is_set()):
            # Objects made at start are permanent: scanning them in each collection would pause streams.
            gc.freeze()
            print(f"stageline gateway listening on {server.address}", flush=True)
            await _first_of(stopping.wait(), draining.wait(), server.follow_model())
        if not stopping.is_set():
            log.info("draining; send SIGTERM again to stop immediately")
            await _first_of(stopping.wait(), server.leave())
        log.info("stopping")
    finally:
        await server.stop()


async def _first_of(*waits: Coroutine[Any, Any, object]) -> None:
    """Await the first of `waits` and cancel the others. Raises its exception."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
