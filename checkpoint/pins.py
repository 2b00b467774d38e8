"""What a remote checkpoint was when it was opened: its files, and what proves that they are unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from checkpoint.errors import BadHeader, CheckpointNotFound
from checkpoint.files import FileIdentity
from checkpoint.headers import is_beside

MAX_TEXT = 1024
"""Maximum characters of a source, a name or a validator."""
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedFile:
    """A file of a source; `validator` is its ETag, modification time or hash, and names one content."""

    name: str
    size_bytes: int
    validator: str

    def __post_init__(self) -> None:
        if not is_beside(self.name) or max(len(self.name), len(self.validator)) > MAX_TEXT:
            raise BadHeader(f"a checkpoint has the file {self.name!r:.200}, not a file beside its config")
        if self.size_bytes < 0 or not self.validator:
            raise BadHeader(f"file {self.name} has {self.size_bytes} bytes and validator {self.validator!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """A source at one version. Equal pins are equal bytes if the source's validators are right.

    `source` has no credentials. `manifest_sha256` identifies the hashes of all tensors; "" without them.
    `sampled_values` come from the coordinator's directory, where that is the source.
    """

    source: str
    files: tuple[PinnedFile, ...]
    manifest_sha256: str = ""
    sampled_values: int | None = None

    def __post_init__(self) -> None:
        if self.manifest_sha256 and not _SHA256.fullmatch(self.manifest_sha256):
            raise BadHeader(f"a manifest has the SHA-256 {self.manifest_sha256!r:.80}, not 64 hex digits")

    @property
    def values_digest(self) -> int:
        """Stands for the sampled values of a directory in a fingerprint.

        XXH3-64 over the manifest's hash, or else over name, size and validator of each file with weights.
        """
        if self.sampled_values is not None:
            return self.sampled_values
        files = [[file.name, file.size_bytes, file.validator] for file in self.files if _has_weights(file)]
        known = self.manifest_sha256 or sorted(files)
        return xxhash.xxh3_64_intdigest(json.dumps(known, separators=(",", ":")).encode())

    @property
    def key(self) -> str:
        """Name of a folder for this source at this version."""
        files = sorted([file.name, file.size_bytes, file.validator] for file in self.files)
        proof = self.manifest_sha256 or self.sampled_values or ""
        digest = xxhash.xxh3_128_hexdigest(json.dumps([files, proof]).encode())
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.source.rsplit("/", 1)[-1])[:60].strip("-.")
        return f"{name or 'model'}-{digest}"

    @property
    def is_of_coordinator(self) -> bool:
        """Whether the source is the coordinator's directory."""
        return self.sampled_values is not None

    def file(self, name: str) -> PinnedFile:
        """Raises CheckpointNotFound for a name that is not pinned."""
        for file in self.files:
            if file.name == name:
                return file
        raise CheckpointNotFound(f"{self.source} has no file {name}")

    def identities(self, names: Iterable[str]) -> tuple[FileIdentity, ...]:
        """Identities of the files with these names, which do not change while their holes are filled."""
        found = {file.name: file for file in self.files}
        return tuple(
            FileIdentity(name=name, status=_status(found[name]) if name in found else None) for name in names
        )


def pins_of_directory(directory: str, files: Iterable[FileIdentity], fingerprint: str) -> Pins:
    """Pins of a local checkpoint for hosts without it. `files` are all files, `fingerprint` is its own."""
    pinned = []
    for file in files:
        if file.status is None:
            raise CheckpointNotFound(f"{directory} has no file {file.name}")
        digest = xxhash.xxh3_64_hexdigest(json.dumps(file.status).encode())
        pinned.append(PinnedFile(name=file.name, size_bytes=file.status[2], validator=digest))
    values = int(fingerprint.rpartition("-")[2], 16)
    return Pins(source=directory, files=tuple(pinned), sampled_values=values)


def _has_weights(file: PinnedFile) -> bool:
    return file.name.endswith((".safetensors", ".gguf"))


def _status(file: PinnedFile) -> tuple[int, int, int, int]:
    return 0, xxhash.xxh3_64_intdigest(file.validator.encode()), file.size_bytes, 0
