"""Cost of a journal per step, in microseconds on the event loop.

python -m bench.journal [--directory DIR] [--steps 2000]

"step" is all of `Durability.add_step`: entries made of the scheduler's progress, JSON, and the commit, with
checkpoints as in a coordinator. "power" is the same with `synchronous = FULL`, which waits for the disk.
"cpu" is the processor time of the event loop's thread; the longest step shows the effect of a checkpoint on
steps at the same time. Steps come every 5 ms. The figures depend on the disk of DIR.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from coordinator.engine.durability import Durability
from coordinator.journal.database import ServedIdentity
from coordinator.journal.journal import Journal
from coordinator.journal.records import AcceptedRequest
from coordinator.recovery.policy import DEFAULT_POLICY
from coordinator.scheduler.batch import SequenceUpdate
from coordinator.scheduler.sequence import QueueOrder, Sequence
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import TokenLogprobs

SCORES = TokenLogprobs(12345, -1.2345678806304932, 1, tuple((rank, -1.0 - rank / 7) for rank in range(5)))
SWEEP_EVERY = 50
PAUSE_S = 0.005


def steps_us(
    directory: Path, *, num_sequences: int, has_logprobs: bool, synchronous: str, num: int
) -> list[tuple[float, float]]:
    """Wall and CPU time of `num` steps with one token of each sequence."""
    journal = Journal(
        directory / f"{num_sequences}-{has_logprobs}-{synchronous}.db", ServedIdentity("f" * 32, "bf16")
    )
    journal._connection.execute(f"PRAGMA synchronous = {synchronous}")
    durability = Durability(journal, policy=DEFAULT_POLICY)
    progress = [_progress(journal, has_logprobs=has_logprobs) for _ in range(num_sequences)]
    times = []
    for step in range(num):
        started, started_cpu = time.perf_counter(), time.thread_time()
        durability.add_step(progress)
        times.append(((time.perf_counter() - started) * 1e6, (time.thread_time() - started_cpu) * 1e6))
        time.sleep(PAUSE_S)
        if step % SWEEP_EVERY == 0:
            journal.trim()
    durability.suspend()
    return times


def _progress(journal: Journal, *, has_logprobs: bool) -> SequenceUpdate:
    key = SequenceKey(new_request_id(), 0)
    journal.accept(
        AcceptedRequest(
            request_id=key.request_id,
            message=b"",
            prompt=(1,) * 128,
            bad_words=(),
            grammar=None,
            client="bench",
            arrived_at=0.0,
            deadline_at=None,
        )
    )
    sequence = Sequence(
        key,
        (1,),
        max_tokens=10,
        sampling=StepSampling(),
        stop_token_ids=frozenset(),
        order=QueueOrder(0.0, 0),
    )
    return SequenceUpdate(sequence, 12345, SCORES if has_logprobs else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    print(f"{'us per step':<34} {'median':>8} {'cpu':>8} {'p99':>8} {'longest':>8}")
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for synchronous, name in (("NORMAL", "step"), ("FULL", "power")):
            for num_sequences in (16, 256):
                for has_logprobs in (False, True):
                    times = steps_us(
                        Path(directory),
                        num_sequences=num_sequences,
                        has_logprobs=has_logprobs,
                        synchronous=synchronous,
                        num=options.steps,
                    )
                    what = f"{name}, {num_sequences} sequences{', 5 logprobs' if has_logprobs else ''}"
                    walls, computed = zip(*times, strict=True)
                    p99 = statistics.quantiles(walls, n=100)[98]
                    print(
                        f"{what:<34} {statistics.median(walls):>8.0f} {statistics.median(computed):>8.0f} "
                        f"{p99:>8.0f} {max(walls):>8.0f}"
                    )


if __name__ == "__main__":
    main()
