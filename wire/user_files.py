"""Files in the user's cache and state directories, including secrets."""

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

from certificates.private_files import read_private
from wire.addresses import Address, parse_address


class NoHomeDirectory(OSError):
    """This user has no home directory, which containers with arbitrary user ids often lack."""


MAX_BYTES, MIN_TOKEN_LENGTH = 4096, 16
_WILDCARDS = {"0.0.0.0", "::"}
_LOOPBACK = {"127.0.0.1", "::1"}


def find_state_directory(environment: Mapping[str, str]) -> Path | None:
    """Return Stageline's state directory: in $XDG_STATE_HOME, else in ~/.local/state; None without a home.

    XDG Base Directory Specification 0.8. It may not exist.
    """
    return _directory(environment, "XDG_STATE_HOME", Path(".local", "state"))


def find_cache_directory(environment: Mapping[str, str]) -> Path | None:
    """Return Stageline's cache directory: in $XDG_CACHE_HOME, else in ~/.cache; None without a home."""
    return _directory(environment, "XDG_CACHE_HOME", Path(".cache"))


def state_directory(environment: Mapping[str, str]) -> Path:
    """`find_state_directory` for what needs one. Raises NoHomeDirectory."""
    return _required(find_state_directory(environment), "XDG_STATE_HOME")


def user_cache_directory(environment: Mapping[str, str]) -> Path:
    """`find_cache_directory` for what needs one. Raises NoHomeDirectory."""
    return _required(find_cache_directory(environment), "XDG_CACHE_HOME")


def variable_of(path: str, environment: Mapping[str, str]) -> str | None:
    """Return the variable that moves a file of Stageline's own directories; None for any other file."""
    found = {
        "XDG_STATE_HOME": find_state_directory(environment),
        "XDG_CACHE_HOME": find_cache_directory(environment),
    }
    for variable, directory in found.items():
        # A parent of the directory is what cannot be made.
        if directory is not None and (
            directory in (way := Path(path), *way.parents) or way in directory.parents
        ):
            return variable
    return None


def _directory(environment: Mapping[str, str], variable: str, usual: Path) -> Path | None:
    base = environment.get(variable, "")
    if os.path.isabs(base):
        return Path(base, "stageline")
    home = environment.get("HOME", "") or _home_of_user()
    return None if home is None else Path(home) / usual / "stageline"


def _home_of_user() -> str | None:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return None


def _required(directory: Path | None, variable: str) -> Path:
    if directory is None:
        raise NoHomeDirectory(
            f"there is no home directory: HOME is not set and user id {os.getuid()} has no passwd entry: set"
            f" {variable} to a directory that this user may write to"
        )
    return directory


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
