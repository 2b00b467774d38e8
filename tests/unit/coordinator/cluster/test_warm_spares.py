"""Spare workers that are asked to fetch layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from coordinator.cluster.warm_spares import WarmSpares


@pytest.mark.parametrize("has_source", [True, False], ids=["source", "no source"])
@pytest.mark.parametrize("warm_bytes", [0, 1 << 30], ids=["cold", "warm"])
@pytest.mark.parametrize("is_mock", [False, True], ids=["computes", "mock"])
def test_a_worker_is_asked_that_can_fetch_or_keep_layers(
    has_source: bool, warm_bytes: int, is_mock: bool
) -> None:
    """A mock of a real checkpoint has no weights, and would only log that."""
    unused: Any = None
    model: Any = SimpleNamespace(pins=None, shared=object() if has_source else None)
    spares = WarmSpares(unused, unused, unused, model, is_enabled=True)
    identity = SimpleNamespace(is_mock=is_mock, warm_spare_bytes=warm_bytes)
    connection: Any = SimpleNamespace(identity=identity)
    assert spares._is_asked(connection) is (not is_mock and (has_source or warm_bytes > 0))
