"""Where a user's cache is."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.user_cache import user_cache_directory


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOME": "/home/a"}, "/home/a/.cache/stageline"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/var/c"}, "/var/c/stageline"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, "/home/a/.cache/stageline"),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": ""}, "/home/a/.cache/stageline"),
    ],
)
def test_the_cache_is_where_the_specification_says(environment: dict[str, str], expected: str) -> None:
    assert user_cache_directory(environment) == Path(expected)
