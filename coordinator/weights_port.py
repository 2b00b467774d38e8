"""Serves the coordinator's directory to workers without it, and the list of workers that hold weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from checkpoint.directory import files_directory, headers_of
from checkpoint.pins import Pins, pins_of_directory
from coordinator.model import ServedModel
from web.connection_limits import FOR_WEIGHTS
from web.process_port import ProcessPort
from weights.peers import PeerAddress
from weights.serving import DirectoryFiles, HeldRegistry, WeightsApplication, yield_to_others
from wire.addresses import Address
from wire.peer_secrets import RefusedPeers
from wire.transport import Transport

log = logging.getLogger(__name__)


class CoordinatorWeightsPort:
    """Serves from `start` to `stop`."""

    def __init__(
        self,
        model: ServedModel,
        address: Address,
        peers: Callable[[], list[PeerAddress]],
        *,
        transport: Transport,
        deny_list: Path | None,
        refused: RefusedPeers,
    ) -> None:
        """`peers` returns the workers that hold weights; it is called in the thread of the port.

        Raises OSError, and CheckpointError for a directory that has changed.
        """
        registry = HeldRegistry()
        self.pins: Pins | None = None
        """The version of the directory; None for a model that workers fetch from a source."""
        if model.has_weights_here and model.directory is not None:
            tensors = headers_of(model.directory).tensors
            held = DirectoryFiles(files_directory(model.directory), tensors, model.fingerprint)
            self.pins = pins_of_directory(model.directory_for_workers, held.files, model.fingerprint)
            registry.put(held)

        def tracker(fingerprint: str) -> list[PeerAddress] | None:
            return peers() if fingerprint == model.fingerprint else None

        self._application = WeightsApplication(registry, tracker)
        self._port = ProcessPort(
            self._application,
            address,
            name="weights",
            limits=FOR_WEIGHTS,
            transport=transport,
            deny_list=deny_list,
            refused=refused,
            on_start=yield_to_others,
        )

    @property
    def address(self) -> Address:
        return self._port.address

    def start(self) -> None:
        """Raises OSError with one line if the address cannot be bound."""
        self._port.start()
        log.info("serving weights at %s", self.address)

    def stop(self) -> None:
        """Close every connection."""
        self._application.close()
        self._port.stop()
