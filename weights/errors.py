"""Errors of remote weights."""

from checkpoint.errors import CheckpointError


class SourceError(CheckpointError):
    """A source does not provide what it should; another try with it does not help."""


class SourceUnavailable(SourceError):
    """A source failed for the moment: a connection broke or stalled, or it is overloaded.

    `retry_after_s` is the source's own wish.
    """

    def __init__(self, *message: str, retry_after_s: float | None = None) -> None:
        super().__init__(*message)
        self.retry_after_s = retry_after_s


class RequestAborted(Exception):
    """`WeightSource.abort` ended the request. Not an error of the source: nothing tries again."""


class SourceRefused(SourceError):
    """The source needs other credentials, or lacks the model or a file."""


class SourceChanged(SourceError):
    """A file is not the one that was pinned when the model was opened."""


class RangesIgnored(SourceError):
    """The server answers requests for a byte range with the whole file."""


class RangeNotHeld(SourceError):
    """A process of a cluster does not have these bytes; it may have others."""


class LibraryMissing(SourceError):
    """This kind of source needs an optional library that is not installed."""


class TensorDamaged(SourceError):
    """A tensor's bytes differ from the SHA-256 in the manifest, however often they are fetched."""


class PieceDamaged(CheckpointError):
    """Bytes in a cache are not those that were written."""


class BadManifest(CheckpointError):
    """A manifest is invalid, or is of another checkpoint."""


class CacheFull(CheckpointError):
    """The weights do not fit: into --cache-size, or on the disk. The text has the numbers."""


class CacheInUse(CheckpointError):
    """Another process uses the cache directory."""
