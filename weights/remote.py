"""Opens a remote checkpoint: where it is, at which version, and its config and headers on this host."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from checkpoint import Checkpoint
from checkpoint.pins import Pins
from weights.location import RemoteModel, SourceKind
from weights.metadata import fetch_metadata, pin
from weights.source import WeightSource

SOURCES_FOLDER = "sources"
"""In the user's cache directory: config, headers and tokenizers of remote models, without weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A checkpoint without weights on this host, and where they are."""

    checkpoint: Checkpoint
    source: WeightSource
    pins: Pins


def open_source(location: RemoteModel) -> WeightSource:
    """Open the source of a remote model, without a file of it unless it has to find its revision."""
    match location.scheme:
        case SourceKind.HUB:
            from weights.hub_source import HubSource  # imported late: the library takes a second

            return HubSource(location)
        case SourceKind.S3 | SourceKind.GCS:
            from weights.store_source import StoreSource  # an optional library

            return StoreSource(location)
        case SourceKind.HTTPS | SourceKind.HTTP:
            from weights.http_source import HttpSource

            return HttpSource(location)


def open_remote(location: RemoteModel, cache_directory: Path) -> RemoteCheckpoint:
    """Fetch config, tokenizer and headers of the newest version, unless this host has them.

    Raises SourceError and CheckpointError.
    """
    with closing(open_source(location)) as source:
        pins = pin(source)
        folder = cache_directory / SOURCES_FOLDER / pins.key
        directory = fetch_metadata(source, pins, folder, has_text=True)
        return RemoteCheckpoint(checkpoint=Checkpoint.open(directory, pins=pins), source=source, pins=pins)
