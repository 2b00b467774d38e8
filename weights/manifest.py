"""SHA-256 of every tensor of a checkpoint, and references of self-checks: made once, used by all clusters."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from checkpoint.files import open_regular, parse_json_object, replace_file
from checkpoint.headers import Headers, TensorEntry
from checkpoint.pins import Pins
from weights.errors import BadManifest, SourceUnavailable
from weights.pieces import DEFAULT_TRANSFER, TransferPolicy
from weights.source import WeightSource
from wire.reference import Reference, decode_references, encode_references

log = logging.getLogger(__name__)

MANIFEST_FILE = "stageline.manifest.json"
"""Beside the weights at a source."""
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
NUM_READERS = 8
_FORMAT = 1
_SELF_CHECK = "self_check"
_READ_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Manifest:
    """SHA-256 (32 bytes) of the bytes of each tensor in its file, by name.

    `references` are outputs of the self-check's texts with these tensors, by `reference_key`.
    """

    sha256s: Mapping[str, bytes]
    references: Mapping[str, Reference] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 in hex of the names in order, each with its hash. References do not count."""
        return sha256("".join(_lines(self.sha256s)).encode()).hexdigest()

    def check(self, headers: Headers, source: str) -> None:
        """Raises BadManifest unless it has the tensors of the checkpoint, and no others."""
        for text, names in (
            ("lacks", headers.tensors.keys() - self.sha256s.keys()),
            ("has", self.sha256s.keys() - headers.tensors.keys()),
        ):
            if names:
                raise BadManifest(
                    f"the manifest of {source} {text} {len(names)} tensors, such as {min(names)}: "
                    "make it again with `stageline weights index`"
                )

    def text(self) -> str:
        """As a file."""
        hashes = {name: digest.hex() for name, digest in sorted(self.sha256s.items())}
        check = {_SELF_CHECK: encode_references(self.references)} if self.references else {}
        return json.dumps({"format": _FORMAT, "sha256": hashes, **check}, indent=0)


def _lines(sha256s: Mapping[str, bytes]) -> Iterator[str]:
    for name, digest in sorted(sha256s.items()):
        yield f"{digest.hex()} {json.dumps(name)}\n"


def parse_manifest(text: bytes, source: str) -> Manifest:
    """Raises BadManifest."""
    found = parse_json_object(text, source, BadManifest)
    hashes = found.get("sha256")
    if found.get("format") != _FORMAT or not isinstance(hashes, dict) or not hashes:
        raise BadManifest(f"{source} is not a manifest of format {_FORMAT}")
    try:
        sha256s = {name: bytes.fromhex(digest) for name, digest in hashes.items()}
    except (TypeError, ValueError):
        raise BadManifest(f"{source} has hashes that are not hexadecimal") from None
    if any(len(digest) != 32 for digest in sha256s.values()):
        raise BadManifest(f"{source} has hashes that are not SHA-256")
    return Manifest(sha256s, _references(found.get(_SELF_CHECK), source))


def _references(found: object, source: str) -> dict[str, Reference]:
    if found is None:
        return {}
    try:
        if not isinstance(found, dict):
            raise ValueError(f"a JSON {type(found).__name__}")
        references = decode_references(found)
    except ValueError as error:
        raise BadManifest(f"{source} has invalid references of the self-check: {error}") from error
    if not references:
        log.warning(
            "%s has no reference for this version's self-check: make it again with `stageline weights index`",
            source,
        )
    return references


def read_manifest(path: Path) -> Manifest:
    """Raises BadManifest and CheckpointError."""
    with open_regular(path) as file:
        text = file.read(MAX_MANIFEST_BYTES + 1)
    if len(text) > MAX_MANIFEST_BYTES:
        raise BadManifest(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
    return parse_manifest(text, str(path))


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace the file whole. Raises OSError."""
    replace_file(path, manifest.text())
    path.chmod(0o644)


Advance = Callable[[int], None]
"""Called with the number of bytes hashed, by several threads."""


def index_directory(directory: Path, headers: Headers, advance: Advance) -> Manifest:
    """Hash the tensors of a directory. Raises CheckpointError and OSError."""

    def hash_one(entry: TensorEntry) -> bytes:
        state = sha256()
        with open_regular(directory / entry.file) as file:
            file.seek(entry.begin)
            left = entry.num_bytes
            while left:
                data = file.read(min(_READ_BYTES, left))
                if not data:
                    raise BadManifest(f"{directory / entry.file} ended {left} bytes before its tensors")
                state.update(data)
                left -= len(data)
                advance(len(data))
        return state.digest()

    return _index(headers, hash_one)


def index_source(
    source: WeightSource,
    pins: Pins,
    headers: Headers,
    advance: Advance,
    policy: TransferPolicy = DEFAULT_TRANSFER,
) -> Manifest:
    """Hash the tensors of a source, all of which are read once and not kept. Raises SourceError."""

    def hash_one(entry: TensorEntry) -> bytes:
        state, position, num_failures = sha256(), entry.begin, 0
        buffer = memoryview(bytearray(_READ_BYTES))
        while position < entry.end:
            before = position
            try:
                with source.open(pins.file(entry.file), position, entry.end) as body:
                    while position < entry.end:
                        count = body.read_some(buffer[: min(_READ_BYTES, entry.end - position)])
                        state.update(buffer[:count])
                        position += count
                        advance(count)
            except SourceUnavailable as error:
                num_failures = 1 if position > before else num_failures + 1
                if num_failures > MAX_FAILURES:
                    raise
                wait_s = policy.wait_after_s(error.retry_after_s, num_failures)
                log.warning("%s: trying again in %.1f s", error, wait_s)
                time.sleep(wait_s)
        return state.digest()

    return _index(headers, hash_one)


MAX_FAILURES = 8
"""Of one tensor in a row, without a byte."""


def _index(headers: Headers, hash_one: Callable[[TensorEntry], bytes]) -> Manifest:
    names = sorted(
        headers.tensors, key=lambda name: (headers.tensors[name].file, headers.tensors[name].begin)
    )
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights-index") as pool:
        digests = pool.map(hash_one, (headers.tensors[name] for name in names))
        return Manifest(dict(zip(names, digests, strict=True)))
