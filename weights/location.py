"""What `--model` accepts: a directory, or the address of a remote checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from urllib.parse import urlsplit

from checkpoint.gguf.files import is_gguf, model_name
from wire.flags import checkpoint_directory

_REMOTE = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.ASCII | re.DOTALL)
_HUB = re.compile(
    r"(?P<path>[\w.-]+/[\w.-]+?)(?:/(?P<file>[\w./+-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII | re.IGNORECASE,
)
_PATH = re.compile(r"[!-~]+", re.ASCII)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts of addresses that may be http://."""


class SourceKind(Enum):
    """Kinds of sources."""

    HUB = "hf"
    HTTPS = "https"
    HTTP = "http"
    S3 = "s3"
    GCS = "gs"


_SCHEMES = {scheme.value: scheme for scheme in SourceKind}
_EXAMPLES = (
    "write a directory, hf://ORG/NAME[@REVISION], https://HOST/PATH, s3://BUCKET/PATH or gs://BUCKET/PATH, "
    "or a GGUF file, as in hf://ORG/NAME/FILE.gguf[@REVISION] and https://HOST/PATH/FILE.gguf"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """Address of a remote checkpoint, without credentials. `path` has no scheme, and no slash at its end."""

    kind: SourceKind
    path: str
    """A folder with files, or a hub's repository."""
    revision: str = ""
    """Of a hub's repository; "" for its main branch, and for other sources."""
    folder: str = ""
    """Of a hub's repository, with a slash at its end; "" for the files at its top, and for other sources."""
    file: str = ""
    """First file of a GGUF model in the folder; "" for a Hugging Face checkpoint."""

    def __str__(self) -> str:
        return self.address_of(self.file) if self.file else f"{self._base}{self._at_revision}"

    def address_of(self, name: str) -> str:
        """Address of a file in the folder."""
        return f"{self._base}/{self.folder}{name}{self._at_revision}"

    @property
    def folder_address(self) -> str:
        """Address of the folder, of a source without revisions."""
        return self._base

    @property
    def name(self) -> str:
        return model_name(Path(self.file)) if self.file else self.path.rsplit("/", 1)[-1]

    @property
    def _base(self) -> str:
        return f"{self.kind.value}://{self.path}"

    @property
    def _at_revision(self) -> str:
        return f"@{self.revision}" if self.revision else ""


ModelLocation = Path | RemoteModel


def model_location(text: str) -> ModelLocation:
    """Parse the value of `--model`: an absolute path, or an address. Raises ValueError."""
    if (found := _REMOTE.fullmatch(text)) is None:
        return checkpoint_directory(text)
    scheme, rest = _SCHEMES.get(found["scheme"]), found["rest"]
    if scheme is None:
        raise ValueError(f"{found['scheme']}:// is not the address of a model: {_EXAMPLES}")
    if scheme is SourceKind.HUB:
        return _hub(rest)
    return _with_path(scheme, rest)


def is_remote(text: str) -> bool:
    """Whether a text is an address rather than a path."""
    return _REMOTE.fullmatch(text) is not None


def remote_model(text: str) -> RemoteModel:
    """Parse the address of a remote checkpoint. Raises ValueError."""
    location = model_location(text) if is_remote(text) else None
    if not isinstance(location, RemoteModel):
        raise ValueError(f"{text!r:.200} is not the address of a remote model: {_EXAMPLES}")
    return location


def _hub(rest: str) -> RemoteModel:
    if (found := _HUB.fullmatch(rest)) is None:
        raise ValueError(f"hf://{rest} is not hf://ORG/NAME[@REVISION] or hf://ORG/NAME/FILE.gguf[@REVISION]")
    folder, slash, file = (found["file"] or "").rpartition("/")
    if ".." in folder.split("/"):
        raise ValueError(f"hf://{rest} leads out of the repository")
    if is_gguf(Path(found["revision"] or "")):
        raise ValueError(
            f"hf://{rest} has its revision before the file: write hf://ORG/NAME/FILE.gguf@REVISION"
        )
    return RemoteModel(
        kind=SourceKind.HUB,
        path=found["path"],
        revision=found["revision"] or "",
        folder=folder + slash,
        file=file,
    )


def _with_path(scheme: SourceKind, rest: str) -> RemoteModel:
    """An address that shows its credentials in lists of processes and logs is refused, and not repeated."""
    parts = urlsplit(f"{scheme.value}://{rest}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"the {scheme.value}:// address of a model has a user, a query or a fragment: addresses are "
            "logged, so credentials belong into the environment or ~/.netrc (docs/weights.md)"
        )
    path = rest.rstrip("/")
    has_port = _valid_port(parts.netloc, scheme)
    if not parts.hostname or not has_port or not _PATH.fullmatch(path) or ".." in path.split("/"):
        raise ValueError(f"{scheme.value}://{rest} is not the address of a model: {_EXAMPLES}")
    if scheme is SourceKind.HTTP and parts.hostname not in LOOPBACK:
        raise ValueError(
            f"http://{rest} sends weights in plain text, which anyone on the way can change: use https://"
        )
    folder, _, file = path.rpartition("/")
    if not folder or not is_gguf(Path(file)):
        return RemoteModel(kind=scheme, path=path)
    return RemoteModel(kind=scheme, path=folder, file=file)


def _valid_port(netloc: str, scheme: SourceKind) -> bool:
    if scheme in (SourceKind.S3, SourceKind.GCS):
        return ":" not in netloc
    try:
        return urlsplit(f"//{netloc}").port != 0
    except ValueError:
        return False
