"""Weights in an object store: S3 and compatible ones, Google Cloud Storage. Needs the library obstore."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from checkpoint.pins import PinnedFile
from weights.errors import LibraryMissing, SourceChanged, SourceError, SourceRefused, SourceUnavailable
from weights.location import RemoteModel
from weights.source import RangeBody, WeightSource

if TYPE_CHECKING:
    import obstore
    from obstore.store import ObjectStore

_CHUNK_BYTES = 1024 * 1024
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_ENDPOINT = re.compile(r"https?://[\w.\[\]:-]+(/[\w./~-]*)?", re.ASCII)


class StoreSource(WeightSource):
    """A prefix of a bucket. Credentials, region and endpoint come from the environment, such as AWS_*."""

    location: RemoteModel

    def __init__(self, location: RemoteModel) -> None:
        """Raises LibraryMissing, and SourceRefused for an environment that is no configuration."""
        try:
            import obstore
            from obstore.store import from_url
        except ImportError:
            raise LibraryMissing(
                f"{location} needs the library obstore: pip install 'obstore>=0.8,<1'"
            ) from None
        self.location = location
        self._library = obstore
        _check_endpoints()
        try:
            # The transfer retries, and goes on where a range broke off. Client options given here would
            # replace the environment's.
            self._store: ObjectStore = from_url(location.folder_address, retry_config={"max_retries": 0})
        except Exception as error:
            raise SourceRefused(f"{location} cannot be opened: {_kind(error)}") from error

    def find(self, names: Iterable[str]) -> dict[str, PinnedFile]:
        found: dict[str, PinnedFile] = {}
        for name in names:
            try:
                meta = self._library.head(self._store, name)
            except FileNotFoundError:
                continue
            except Exception as error:
                raise self._explained(name, error) from error
            if not (tag := meta["e_tag"]):
                raise SourceRefused(f"{self.where(name)} has no ETag, so a change would not be noticed")
            found[name] = PinnedFile(name=name, size_bytes=meta["size"], validator=tag)
        return found

    def open(self, file: PinnedFile, begin: int, end: int) -> RangeBody:
        try:
            result = self._library.get(
                self._store, file.name, options={"range": (begin, end), "if_match": file.validator}
            )
            chunks: Iterator[bytes] = iter(result.stream(min_chunk_size=_CHUNK_BYTES))
        except Exception as error:
            raise self._explained(file.name, error) from error
        if result.range != (begin, end):
            raise SourceUnavailable(f"{self.where(file.name)} answered bytes {result.range}")
        return _StoreBody(chunks, self.where(file.name))

    def close(self) -> None:
        """The library owns the connections."""

    def abort(self) -> None:
        """The library cannot: a request ends with its timeout."""

    def _explained(self, name: str, error: Exception) -> SourceError:
        """Texts of the library have addresses and responses, so only its kinds of errors are passed on."""
        where, errors = self.where(name), self._library.exceptions
        if isinstance(error, errors.PreconditionError):
            return SourceChanged(f"{where} has changed since the model was opened")
        if isinstance(error, FileNotFoundError):
            return SourceRefused(f"{where} no longer exists")
        if isinstance(error, (errors.PermissionDeniedError, errors.UnauthenticatedError)):
            return SourceRefused(f"{where} refused access: check the credentials in the environment")
        return SourceUnavailable(
            f"{where} does not respond: {_kind(error)}; endpoint, region and credentials are those of the "
            "environment (docs/weights.md)"
        )


def _check_endpoints() -> None:
    """The library reads these variables, and panics on those that are no address. Raises SourceRefused."""
    for name in _ENDPOINTS:
        if (text := os.environ.get(name)) is not None and _ENDPOINT.fullmatch(text) is None:
            raise SourceRefused(f"{name} in the environment is not https://HOST[:PORT] or http://HOST[:PORT]")


class _StoreBody(RangeBody):
    def __init__(self, chunks: Iterator[bytes | obstore.Bytes], shown: str) -> None:
        self._chunks, self._shown = chunks, shown
        self._rest = memoryview(b"")

    def read_some(self, view: memoryview) -> int:
        if not self._rest:
            self._rest = self._next()
        taken = self._rest[: len(view)]
        view[: len(taken)] = taken
        self._rest = self._rest[len(taken) :]
        return len(taken)

    def _next(self) -> memoryview:
        try:
            return memoryview(next(self._chunks))
        except StopIteration:
            raise SourceUnavailable(f"{self._shown} ended early") from None
        except Exception as error:
            raise SourceUnavailable(f"{self._shown} broke off: {_kind(error)}") from error

    def close(self) -> None:
        self._chunks = iter(())


def _kind(error: Exception) -> str:
    return type(error).__name__
