"""Opens a remote checkpoint: where it is, at which version, and its config and headers on this host."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint import Checkpoint
from checkpoint.directory import headers_of
from checkpoint.gguf.files import checkpoint_in
from checkpoint.headers import Headers
from checkpoint.pins import Pins
from weights.location import RemoteModel, SourceKind
from weights.manifest import MANIFEST_FILE, Manifest, parse_manifest, read_manifest
from weights.metadata import fetch_metadata, pin, read_small
from weights.source import WeightSource

SOURCES_FOLDER = "sources"
"""In the user's cache directory: config, headers and tokenizers of remote models, without weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteCheckpoint:
    """A checkpoint without weights on this host, where they are, and what proves them (None: nothing)."""

    checkpoint: Checkpoint
    headers: Headers
    source: WeightSource
    pins: Pins
    manifest: Manifest | None


def open_source(location: RemoteModel) -> WeightSource:
    """Open the source of a remote model, which requests nothing unless it has to find its revision.

    Raises SourceError.
    """
    match location.kind:
        case SourceKind.HUB:
            from weights.hub_source import HubSource  # imported late: the library takes a second

            return HubSource(location)
        case SourceKind.S3 | SourceKind.GCS:
            from weights.store_source import StoreSource  # an optional library

            return StoreSource(location)
        case SourceKind.HTTPS | SourceKind.HTTP:
            from weights.http_source import HttpSource

            return HttpSource(location)


def open_remote(
    location: RemoteModel, cache_directory: Path, *, manifest: Path | None = None
) -> RemoteCheckpoint:
    """Fetch config, tokenizer and headers of the newest version, unless this host has them.

    The manifest is the file `manifest`, else the one in the source's folder, if there is one. Raises
    SourceError, CheckpointError and BadManifest.
    """
    with closing(open_source(location)) as source:
        pins = pin(source)
        proof = _source_manifest(source) if manifest is None else read_manifest(manifest)
        if proof is not None:
            pins = replace(pins, manifest_sha256=proof.digest)
        path = _fetched(source, pins, cache_directory)
    headers = headers_of(path)
    if proof is not None:
        proof.check(headers, pins.source)
    checkpoint = Checkpoint.open(path, pins=pins)
    return RemoteCheckpoint(checkpoint=checkpoint, headers=headers, source=source, pins=pins, manifest=proof)


def fetch_files(location: RemoteModel, cache_directory: Path) -> Path:
    """Fetch config, tokenizer and headers; return their directory or GGUF file, whatever model it has.

    Raises SourceError and CheckpointError.
    """
    with closing(open_source(location)) as source:
        return _fetched(source, pin(source), cache_directory)


def _fetched(source: WeightSource, pins: Pins, cache_directory: Path) -> Path:
    folder = cache_directory / SOURCES_FOLDER / pins.key
    return checkpoint_in(fetch_metadata(source, pins, folder, has_text=True))


def _source_manifest(source: WeightSource) -> Manifest | None:
    """None beside a GGUF file, which may be one of several models in its folder."""
    if isinstance(source.location, RemoteModel) and source.location.file:
        return None
    if (file := source.find([MANIFEST_FILE]).get(MANIFEST_FILE)) is None:
        return None
    return parse_manifest(read_small(source, file), source.where(MANIFEST_FILE))
