"""Run with `python -O`: serves from mocks that deliver results twice, and prints the client outcomes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.scheduler import Scheduler
from stageline.client.client import Client
from stageline.client.errors import StagelineError
from tests.integration.test_mock_cluster import mock_cluster
from wire.steps import StepResult

MAX_TOKENS = 4


def count_ends_twice() -> None:
    """The planted defect: the last token of a choice is delivered again."""
    complete = Scheduler.complete

    def doubled(self: Scheduler, result: StepResult, now_s: float) -> Sequence[SequenceUpdate]:
        updates = complete(self, result, now_s)
        return [update for update in updates for _ in range(1 if update.finish_reason is None else 2)]

    Scheduler.complete = doubled  # type: ignore[method-assign, assignment]


async def outcome(client: Client, *, n: int) -> str:
    """The number of tokens of every choice, or the reason of the error."""
    counts = dict.fromkeys(range(n), 0)
    try:
        async for output in client.generate([1, 2, 3], max_tokens=MAX_TOKENS, n=n):
            counts[output.choice] += len(output.token_ids)
    except StagelineError as error:
        return error.reason
    return " ".join(map(str, counts.values()))


async def main() -> None:
    async with mock_cluster(2) as cluster, Client(cluster.address) as client:
        sound = await outcome(client, n=2)
        before = Scheduler.complete
        count_ends_twice()
        broken = await outcome(client, n=2)
        Scheduler.complete = before  # type: ignore[method-assign]
        after = await outcome(client, n=2)
    print(json.dumps({"asserts": __debug__, "sound": sound, "broken": broken, "after": after}))


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    asyncio.run(main())
