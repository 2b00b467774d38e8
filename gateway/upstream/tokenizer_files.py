"""The tokenizer's files, fetched from a coordinator into a directory that can be used again."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc

from gateway.upstream.contract import UpstreamFailure
from stageline_rpc.v1 import inference_pb2
from text.generation_defaults import read_generation_defaults
from text.tokenizer_files import (
    MAX_BYTES,
    files_digest,
    has_vocabulary,
    is_tokenizer_file,
)

log = logging.getLogger(__name__)


class TokenizerFiles:
    """A directory per set of files, named by its digest, in a cache or a temporary directory."""

    def __init__(self, cache_directory: Path | None) -> None:
        self._temporary = None if cache_directory else tempfile.mkdtemp(prefix="stageline-tokenizer-")
        self._root = cache_directory or Path(self._temporary or "")
        self._current: Path | None = None
        self._defaults: dict[Path, dict[str, float]] = {}

    @property
    def directory(self) -> Path | None:
        """The current files; None for a model without tokenizer."""
        return self._current if self._current is not None and has_vocabulary(self._current) else None

    @property
    def generation_config(self) -> dict[str, float]:
        """Read once for each set of files.

        Raises UpstreamFailure for values that no coordinator serves with.
        """
        if self._current is None:
            return {}
        if self._current not in self._defaults:
            try:
                self._defaults[self._current] = read_generation_defaults(self._current)
            except ValueError as error:
                raise _broken(f"a wrong file: {error}") from error
        return self._defaults[self._current]

    @property
    def known_sha256(self) -> str:
        """Digest of the current files; empty without any."""
        return "" if self._current is None else self._current.name

    def use(self, sha256: str) -> bool:
        """Use files that were stored before; whether there are any."""
        directory = self._root / sha256
        if is_stored := directory.is_dir():
            self._current = directory
        return is_stored

    def store(self, sha256: str, files: Mapping[str, bytes]) -> None:
        """Store files whole, and use them; in a temporary directory if the cache cannot be written.

        Raises ValueError if their digest is another one, and OSError.
        """
        if files_digest(files) != sha256:
            raise ValueError(f"the tokenizer's files do not have the digest {sha256}")
        try:
            self._write(sha256, files)
        except OSError as error:
            if self._temporary is not None:
                raise
            log.warning("cannot cache the tokenizer, it will be fetched at each start: %s", error)
            self._temporary = tempfile.mkdtemp(prefix="stageline-tokenizer-")
            self._root = Path(self._temporary)
            self._write(sha256, files)

    def _write(self, sha256: str, files: Mapping[str, bytes]) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=self._root))
        try:
            for name, content in files.items():
                path = fresh / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
        except OSError:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        try:
            fresh.rename(self._root / sha256)
        except OSError:
            shutil.rmtree(fresh)  # another gateway was faster
        self._current = self._root / sha256

    def close(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)


async def fetch_tokenizer(stub: Any, files: TokenizerFiles, *, timeout_s: float) -> None:
    """Fetch the files, unless they are stored. Raises AioRpcError, and UpstreamFailure for absurd files."""
    request = inference_pb2.GetTokenizerRequest(known_sha256=files.known_sha256)
    call = stub.GetTokenizer(request, timeout=timeout_s)
    responses = aiter(call)
    if (listed := await anext(responses, None)) is None:
        raise _broken("no list of files")
    if files.use(listed.files.sha256):
        call.cancel()
        return
    contents = await _contents(listed.files, responses)
    try:
        files.store(listed.files.sha256, contents)
    except ValueError as error:
        raise _broken(str(error)) from error


async def _contents(
    listed: inference_pb2.TokenizerFiles, responses: AsyncIterator[inference_pb2.GetTokenizerResponse]
) -> dict[str, bytes]:
    if sum(file.size_bytes for file in listed.files) > MAX_BYTES:
        raise _broken(f"more than {MAX_BYTES} bytes")
    for file in listed.files:
        if not is_tokenizer_file(file.name):
            raise _broken(f"file {file.name!r}")
    data = bytearray()
    async for response in responses:
        data += response.chunk
        if len(data) > MAX_BYTES:
            raise _broken(f"more than {MAX_BYTES} bytes")
    contents, begin = {}, 0
    for file in listed.files:
        contents[file.name] = bytes(data[begin : begin + file.size_bytes])
        begin += file.size_bytes
    return contents


def _broken(what: str) -> UpstreamFailure:
    return UpstreamFailure(
        f"the coordinator sent a tokenizer with {what}",
        status=grpc.StatusCode.INTERNAL,
        reason="INTERNAL_ERROR",
    )
