"""Where a user's programs keep what can be computed again."""

from collections.abc import Mapping
from pathlib import Path


def user_cache_directory(environment: Mapping[str, str]) -> Path:
    """Stageline's directory there; it need not exist. Follows the XDG Base Directory Specification 0.8, which
    ignores relative paths.
    """
    base = Path(environment.get("XDG_CACHE_HOME", ""))
    home = Path(environment.get("HOME", "") or "/")
    return (base if base.is_absolute() else home / ".cache") / "stageline"
