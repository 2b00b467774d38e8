"""Files in the user's cache and state directories, including secrets."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from certificates.private_files import read_private
from wire.addresses import Address, parse_address


def user_cache_directory(environment: Mapping[str, str]) -> Path:
    """Return Stageline's cache directory (XDG Base Directory Specification 0.8); it may not exist."""
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    home = Path(environment.get("HOME", "") or "/")
    return (base if base.is_absolute() else home / ".cache") / "stageline"


MAX_BYTES, MIN_TOKEN_LENGTH = 4096, 16
_WILDCARDS = {"0.0.0.0", "::"}
_LOOPBACK = {"127.0.0.1", "::1"}


def state_directory(environment: Mapping[str, str]) -> Path:
    """Return Stageline's state directory: in $XDG_STATE_HOME, else in ~/.local/state."""
    home = environment.get("XDG_STATE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    return base / "stageline"


def token_path(directory: Path, address: str) -> Path:
    """Return the token file in `directory` for the coordinator at `address`."""
    where = parse_address(address)
    host = "127.0.0.1" if where.host == "localhost" else where.host
    return directory / f"{host.replace(':', '.')}_{where.port}"


def token_paths(directory: Path, address: str) -> list[Path]:
    """Return the files that may hold the token of the coordinator at `address`.

    A loopback address also reaches a coordinator that listens on all interfaces.
    """
    where = parse_address(address)
    paths = [token_path(directory, address)]
    if where.host == "localhost" or where.host in _LOOPBACK:
        paths += [token_path(directory, str(Address(host, where.port))) for host in sorted(_WILDCARDS)]
    return paths


def write_secret(path: Path, secret: str) -> None:
    """Create or replace `path` with mode 0600, in a directory with mode 0700. Raises OSError."""
    from checkpoint.files import replace_file  # imported late: most commands write no secret

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    replace_file(path, f"{secret}\n")


def read_secret(path: Path) -> str:
    """Read the secret in `path`. Raises OSError; PermissionError if other users may read the file."""
    return read_private(path, max_bytes=MAX_BYTES).decode("ascii", "replace").strip()


def check_token(token: str) -> None:
    """Raises ValueError for an operator token that is short or has other characters than printable ASCII."""
    if len(token) < MIN_TOKEN_LENGTH or not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ValueError(
            f"the operator token has {len(token)} characters, but must have at least {MIN_TOKEN_LENGTH}, "
            "all of them printable ASCII without spaces"
        )
