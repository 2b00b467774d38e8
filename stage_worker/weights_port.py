"""Serves this worker's weights to other processes of the cluster, and says which it has."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stageline_rpc.internal.v1 import join_pb2
from weights.serving import HeldRegistry, WeightsApplication, yield_to_others
from wire.addresses import Address, parse_address
from wire.audit import NO_AUDIT, AuditLog
from wire.flags import OFF
from wire.peer_secrets import RefusedPeers
from wire.transport import Transport

if TYPE_CHECKING:
    from web.server_thread import ServerThread

log = logging.getLogger(__name__)


class WeightsPort:
    """Listens from the first weights on. Used by the event loop only."""

    def __init__(
        self,
        registry: HeldRegistry,
        *,
        listen: str | None,
        advertise: str | None,
        transport: Transport,
        deny_list: Path | None,
        audit: AuditLog = NO_AUDIT,
    ) -> None:
        """`listen` is HOST:PORT, None for a free port, or "off". `advertise` is the address for others."""
        self.registry, self._listen, self._advertise = registry, listen, advertise
        self._transport, self._deny_list, self._audit = transport, deny_list, audit
        self._server: ServerThread | None = None
        self._application: WeightsApplication | None = None
        self._has_failed = False
        self.host = ""
        """Where the worker listens, and how others reach it."""
        self.advertised_host = ""

    async def describe(self) -> join_pb2.HeldWeights | None:
        """What this worker serves; None if it serves nothing."""
        if (held := self.registry.current) is None or self._listen == OFF or self._has_failed:
            return None
        if self._server is None:
            try:
                await asyncio.to_thread(self._start)
            except OSError as error:
                self._has_failed = True
                log.warning("weights are not served to other workers: %s", error)
                return None
        units = await asyncio.to_thread(held.units)
        return join_pb2.HeldWeights(
            fingerprint=held.fingerprint,
            address=self._address(),
            units=sorted(units or ()),
            is_complete=units is None,
        )

    async def stop(self) -> None:
        """Close every connection."""
        if self._server is not None and self._application is not None:
            self._application.close()
            await asyncio.to_thread(self._server.stop)
            self._server = None

    def _start(self) -> None:
        # Imported late: the HTTP server takes some 20 MB, and not every worker serves weights.
        from web.connection_limits import FOR_WEIGHTS
        from web.process_port import ProcessPort

        address = Address(self.host, 0) if self._listen is None else parse_address(self._listen)
        application = WeightsApplication(self.registry)
        port = ProcessPort(
            application,
            address,
            name="weights",
            limits=FOR_WEIGHTS,
            transport=self._transport,
            deny_list=self._deny_list,
            refused=RefusedPeers(time.monotonic, audit=self._audit),
            on_start=yield_to_others,
        )
        port.start()
        self._application, self._server = application, port
        log.info("serving weights to other workers at %s", port.address)

    def _address(self) -> str:
        assert self._server is not None
        if self._advertise is not None:
            return self._advertise
        bound = self._server.address
        is_wildcard = bound.host in ("0.0.0.0", "::") or bound.host == self.host
        return str(Address(self.advertised_host, bound.port) if is_wildcard else bound)
