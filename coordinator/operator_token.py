"""The operator token of a coordinator started without one, in a file for commands on this machine."""

import secrets
from pathlib import Path

from wire.secret_files import token_path, write_secret


class TokenFile:
    """A fresh token, which `write` puts where commands look for it. Without a directory there is none."""

    def __init__(self, directory: Path | None) -> None:
        self.token = secrets.token_urlsafe(32) if directory is not None else None
        self._directory = directory
        self._path: Path | None = None

    def write(self, address: str) -> None:
        """Names the file after the address that the coordinator listens on. Raises OSError."""
        if self._directory is not None and self.token is not None:
            self._path = token_path(self._directory, address)
            write_secret(self._path, self.token)

    def remove(self) -> None:
        """Unless another coordinator has the address now, and its own token in the file."""
        if self._path is None or self.token is None:
            return
        try:
            if self._path.read_text(encoding="ascii").strip() == self.token:
                self._path.unlink()
        except (OSError, UnicodeDecodeError):
            return  # it is gone already
