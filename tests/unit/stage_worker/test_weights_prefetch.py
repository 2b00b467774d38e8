"""Failures of a prefetch: named in the log and in status, and the worker goes on."""

from __future__ import annotations

import http.client
from typing import Any, cast

import pytest

from stage_worker.assignment import Prefetch
from stage_worker.backends.backend import LoadCancelled, LoadProgress, StageWeights
from stage_worker.weights_prefetch import WeightsPrefetch
from weights.errors import SourceRefused

ORDER = cast("Prefetch", object())


class Weights:
    """Fails as told, then succeeds."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.num_calls = 0

    async def prefetch(self, order: Prefetch, progress: LoadProgress) -> None:
        self.num_calls += 1
        if self.failures:
            raise self.failures.pop(0)


def prefetch_of(changes: list[Any]) -> WeightsPrefetch:
    async def on_change(reply: Any) -> None:
        changes.append(reply)

    return WeightsPrefetch(on_change)


async def begin(prefetch: WeightsPrefetch, weights: Weights) -> None:
    prefetch.start(ORDER, cast("StageWeights", weights), lambda message: None)
    assert prefetch._task is not None
    await prefetch._task


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SourceRefused("no such file"), "prefetch failed: no such file"),
        (http.client.IncompleteRead(b"x"), "prefetch failed: IncompleteRead, see the log of the worker"),
    ],
)
async def test_a_failure_is_shown_and_the_same_order_begins_again(
    caplog: pytest.LogCaptureFixture, error: Exception, shown: str
) -> None:
    changes: list[Any] = []
    weights = Weights(error)
    prefetch = prefetch_of(changes)
    await begin(prefetch, weights)
    assert prefetch.progress is not None and prefetch.progress.fetch_detail == shown
    assert "weights are not prefetched" in caplog.text and not changes
    await begin(prefetch, weights)
    assert (weights.num_calls, len(changes)) == (2, 1)
    await begin(prefetch, weights)
    assert weights.num_calls == 2, "an order that succeeded is done"


async def test_a_cancelled_prefetch_reports_nothing() -> None:
    changes: list[Any] = []
    prefetch = prefetch_of(changes)
    await begin(prefetch, Weights(LoadCancelled("a load")))
    assert not changes and prefetch.progress is not None and not prefetch.progress.fetch_detail
