"""Weights on the Hugging Face hub, or on a mirror named by HF_ENDPOINT."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from urllib.parse import quote

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling

from checkpoint.pins import PinnedFile
from weights.errors import SourceError, SourceRefused, SourceUnavailable
from weights.http_source import NO_HEADERS, Headers, HttpRanges
from weights.location import RemoteModel
from weights.source import TIMEOUT_S, RangeBody, WeightSource

_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_GIVES_ACCESS = "give an HF_TOKEN with access to it"


class HubSource(WeightSource):
    """A repository at one commit. The token is huggingface_hub's: HF_TOKEN, or `hf auth login`."""

    location: RemoteModel

    def __init__(self, location: RemoteModel, *, timeout_s: float = TIMEOUT_S) -> None:
        """Resolve the revision to its commit, which needs no request for a commit. Raises SourceError."""
        self._timeout_s = timeout_s
        self._listed: dict[str, RepoSibling] | None = None
        self.location = location
        if not _COMMIT.fullmatch(location.revision):
            self.location = replace(location, revision=self._list())
        self._ranges = HttpRanges(credentials=_credentials, timeout_s=timeout_s)

    def find(self, names: Iterable[str]) -> dict[str, PinnedFile]:
        if self._listed is None:
            self._list()
        listed = self._listed or {}
        paths = {name: f"{self.location.folder}{name}" for name in names}
        return {name: _pinned(name, listed[path]) for name, path in paths.items() if path in listed}

    def open(self, file: PinnedFile, begin: int, end: int) -> RangeBody:
        location = self.location
        path = quote(f"{location.folder}{file.name}")
        url = f"{constants.ENDPOINT}/{location.path}/resolve/{location.revision}/{path}"
        return self._ranges.open(url, file, begin, end, pins_url=True)

    def close(self) -> None:
        self._ranges.close()

    def abort(self) -> None:
        self._ranges.abort()

    def _list(self) -> str:
        """List the files; return the commit."""
        location = self.location
        try:
            found = HfApi(endpoint=constants.ENDPOINT).model_info(
                location.path,
                revision=location.revision or None,
                files_metadata=True,
                timeout=self._timeout_s,
            )
        except Exception as error:
            raise _explained(location, error) from error
        if not found.sha or found.siblings is None:
            raise SourceRefused(f"{location}: the hub names no commit or no files")
        self._listed = {file.rfilename: file for file in found.siblings}
        return found.sha


def _credentials() -> Headers:
    token = get_token()
    return NO_HEADERS if token is None else {"Authorization": f"Bearer {token}"}


def _pinned(name: str, file: RepoSibling) -> PinnedFile:
    """Large files are known by the SHA-256 of their content, others by git's hash."""
    validator = file.blob_id if file.lfs is None else file.lfs.sha256
    size_bytes = file.size if file.lfs is None else file.lfs.size
    if size_bytes is None or not validator:
        raise SourceRefused(f"the hub tells no size or hash of {file.rfilename}")
    return PinnedFile(name=name, size_bytes=size_bytes, validator=validator)


def _explained(location: RemoteModel, error: Exception) -> SourceError:
    """The library's texts are long, and may have addresses with signatures."""
    match error:
        case GatedRepoError():
            return SourceRefused(f"{location} is for users who have accepted its terms: {_GIVES_ACCESS}")
        case RevisionNotFoundError():
            return SourceRefused(f"{location}: the repository has no such revision")
        case RepositoryNotFoundError():
            return SourceRefused(f"{location} does not exist, or is private: {_GIVES_ACCESS}")
        case HFValidationError():
            return SourceRefused(f"{location} is not the name of a repository")
        case OfflineModeIsEnabled():
            return SourceRefused(f"{location} cannot be opened: HF_HUB_OFFLINE is set")
        case HfHubHTTPError() if (status := error.response.status_code) < 500 and status != 429:
            return SourceRefused(f"{location}: the hub answered {status}")
    problem = f"{location}: {constants.ENDPOINT} does not respond: {type(error).__name__}"
    return SourceUnavailable(f"{problem}; check the network and HF_ENDPOINT, or give a directory")
