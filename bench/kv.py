"""Cost of the KV cache: accounting, pages, and savings of prefix sharing.

python -m bench.kv [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.kv_prefix import PrefixResult, measure_prefix_sharing
from coordinator.scheduler.kv_manager import KvCacheManager
from coordinator.scheduler.sequence import QueueOrder, Sequence
from kvcache.pages import KvPages
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling

BLOCK_SIZE = 64
NUM_SEQUENCES = 256
PROMPT_TOKENS = 4096
RESULTS = Path(__file__).parent / "results" / "kv.json"


@dataclass(frozen=True, slots=True)
class Line:
    """Medians of wall time and CPU time; CPU time excludes neighbours on the machine. `limit_us` is its
    limit.
    """

    what: str
    clock_us: float
    cpu_us: float
    limit_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """CPU time over the limit."""
        return self.cpu_us / self.limit_us if self.limit_us else None


class Stopwatch:
    """Collects times of one kind of work."""

    def __init__(self) -> None:
        self._clock_us: list[float] = []
        self._cpu_us: list[float] = []

    def time(self, work: Callable[[], object]) -> None:
        clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
        work()
        cpu_end, clock_end = time.thread_time_ns(), time.perf_counter_ns()
        self._clock_us.append((clock_end - clock) / 1000)
        self._cpu_us.append((cpu_end - cpu) / 1000)

    def line(self, what: str, limit_us: float | None = None) -> Line:
        return Line(what, statistics.median(self._clock_us), statistics.median(self._cpu_us), limit_us)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second of one page operation and of a plain copy of the same bytes."""

    what: str
    gb_per_s: float
    copy_gb_per_s: float

    @property
    def ratio(self) -> float:
        return self.gb_per_s / self.copy_gb_per_s


def new_sequence(tokens: tuple[int, ...]) -> Sequence:
    return Sequence(
        SequenceKey(new_request_id(), 0),
        tokens,
        max_tokens=4096,
        sampling=StepSampling(temperature=0.0, top_k=0, top_p=1.0, seed=0),
        stop_token_ids=frozenset(),
        order=QueueOrder(0.0, 0),
    )


def decoding(num_tokens: int) -> tuple[KvCacheManager, list[Sequence]]:
    """A manager with 256 different sequences of a length."""
    log = KvCacheManager(num_blocks=NUM_SEQUENCES * 80, block_size=BLOCK_SIZE)
    running = []
    for index in range(NUM_SEQUENCES):
        sequence = new_sequence((index, *range(num_tokens - 1)))
        active = log.plan(sequence).active
        log.allocate(sequence.key, active, num_tokens)
        sequence.begin_prefill(active, num_cached_tokens=0)
        sequence.take_chunk(num_tokens)
        running.append(sequence)
    log.take_pending()
    log.take_events()
    return log, running


def decode_step(log: KvCacheManager, running: list[Sequence]) -> Callable[[], None]:
    """Slots for the newest token of each sequence, and the frame's signals and digest."""

    def step() -> None:
        needy = Sequence.without_slot(running)
        for sequence in log.grow(needy) if needy else ():
            log.append(sequence)
        log.take_pending()
        log.take_grows()
        log.take_events()
        assert log.digest

    return step


def measure_decode(rounds: int) -> list[Line]:
    inside, crossing = Stopwatch(), Stopwatch()
    tokens = (7,) * NUM_SEQUENCES
    for _ in range(rounds):
        log, running = decoding(BLOCK_SIZE // 2)
        step = decode_step(log, running)
        for _ in range(4 * BLOCK_SIZE):
            Sequence.accept_tokens(running, tokens)
            is_crossing = running[0].num_tokens % BLOCK_SIZE == 1
            (crossing if is_crossing else inside).time(step)
            Sequence.take_decodes(running)
    return [
        inside.line("256 sequences, one token each, no boundary", 60),
        crossing.line("256 sequences, one boundary each", 3000),
    ]


def measure_prompt(rounds: int) -> list[Line]:
    """A prompt of 4,096 tokens, with 63 of its 64 blocks cached and with none."""
    log = KvCacheManager(num_blocks=4096, block_size=BLOCK_SIZE)
    common = tuple(range(PROMPT_TOKENS - BLOCK_SIZE))
    hits, cold = Stopwatch(), Stopwatch()

    def start(prompt: tuple[int, ...], watch: Stopwatch) -> int:
        sequence = new_sequence(prompt)
        plans = []

        def work() -> None:
            plans.append(log.plan(sequence))
            assert log.can_admit(plans[0], is_alone=False)
            log.allocate(sequence.key, plans[0].active, PROMPT_TOKENS)

        watch.time(work)
        log.free(sequence.key, plans[0].active, plans[0].active.free_signals())
        log.take_pending()
        log.take_events()
        return plans[0].num_cached_tokens

    start((*common, *range(BLOCK_SIZE)), Stopwatch())
    for index in range(rounds):
        assert start((*common, *(200_000 + index for _ in range(BLOCK_SIZE))), hits) == len(common)
        # the pool is large enough to keep the common prompt between two uses
        assert start(tuple(range(index + 1, index + 1 + PROMPT_TOKENS)), cold) == 0
    return [
        hits.line("4,096-token prompt, 63 of 64 blocks hit", 1000),
        cold.line("4,096-token prompt, nothing cached"),
    ]


def measure_pages(rounds: int) -> list[Bandwidth]:
    """Gather keys and values of one layer for 4 sequences of 512 tokens, from a pool 16 times as large; write
    512 tokens.
    """
    return [result for block_size in (16, 64) for result in _pages(block_size, rounds)]


def _pages(block_size: int, rounds: int) -> list[Bandwidth]:
    num_heads, head_dim, num_tokens = 8, 128, 4 * 512
    num_pages = 16 * num_tokens // block_size
    pages = KvPages(
        num_layers=1,
        num_blocks=num_pages,
        block_size=block_size,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype=torch.bfloat16,
        device="cpu",
    )
    order = torch.randperm(num_pages)[: num_tokens // block_size].view(4, -1)
    written = torch.randn(512, 2 * num_heads, head_dim).to(torch.bfloat16)
    slots = torch.randperm(num_tokens)[:512]
    token_bytes = 2 * num_heads * head_dim * 2
    source = torch.zeros(num_tokens * token_bytes // 2, dtype=torch.bfloat16)
    target = torch.zeros_like(source)
    part = 512 * token_bytes // 2
    name = f"block {block_size}"
    gather = _gb_per_s(num_tokens * token_bytes, lambda: pages.gather(0, order), rounds)
    write = _gb_per_s(512 * token_bytes, lambda: pages.write(0, written, slots), rounds)
    copy = _gb_per_s(num_tokens * token_bytes, lambda: target.copy_(source), rounds)
    fresh = _gb_per_s(num_tokens * token_bytes, source.clone, rounds)
    small = _gb_per_s(512 * token_bytes, lambda: target[:part].copy_(source[:part]), rounds)
    return [
        Bandwidth(f"gather, {name}, against a copy to new memory", gather, fresh),
        Bandwidth(f"gather, {name}, against a copy in place", gather, copy),
        Bandwidth(f"write, {name}, against a copy in place", write, small),
    ]


def _gb_per_s(num_bytes: int, work: Callable[[], object], rounds: int) -> float:
    work()
    watch = Stopwatch()
    for _ in range(rounds):
        watch.time(work)
    return num_bytes / watch.line("").cpu_us / 1000


def machine() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch_threads": torch.get_num_threads(),
    }


def show(lines: list[Line], bandwidths: list[Bandwidth], prefix: list[PrefixResult]) -> None:
    print(f"{'accounting':<52}{'wall':>14}{'CPU':>10}{'limit':>10}{'ratio':>8}")
    for line in lines:
        limit = f"{line.limit_us:,.0f} us" if line.limit_us else "-"
        ratio = f"{line.ratio:.2f}" if line.ratio else "-"
        print(f"{line.what:<52}{line.clock_us:>11,.1f} us{line.cpu_us:>7,.1f} us{limit:>10}{ratio:>8}")
    print(f"\n{'pages':<52}{'GB/s':>12}{'copy GB/s':>12}{'ratio':>18}")
    for bandwidth in bandwidths:
        print(
            f"{bandwidth.what:<52}{bandwidth.gb_per_s:>12.2f}{bandwidth.copy_gb_per_s:>12.2f}{bandwidth.ratio:>18.2f}"
        )
    titles = f"{'prefill tokens':>18}{'first token, mean':>18}{'last':>16}"
    print(f"\n{'2,000 common tokens, 32 requests':<34}{titles}")
    for result in prefix:
        print(
            f"{result.what:<34}{result.num_prefill_tokens:>18,}"
            f"{result.mean_first_token_s:>16.2f} s{result.last_first_token_s:>14.2f} s"
        )
    shared, alone = prefix
    print(
        f"{'ratio':<34}{shared.num_prefill_tokens / alone.num_prefill_tokens:>18.3f}"
        f"{shared.mean_first_token_s / alone.mean_first_token_s:>18.3f}"
        f"{shared.last_first_token_s / alone.last_first_token_s:>16.3f}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds and smaller prompts, as a smoke test"
    )
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines = measure_decode(2 if options.quick else 12) + measure_prompt(20 if options.quick else 200)
    bandwidths = measure_pages(3 if options.quick else 30)
    with tempfile.TemporaryDirectory() as directory:
        prefix = measure_prefix_sharing(Path(directory), num_common=200 if options.quick else 2000)
    show(lines, bandwidths, prefix)
    report = {
        "machine": machine(),
        "accounting": [asdict(line) | {"ratio": line.ratio} for line in lines],
        "pages": [asdict(bandwidth) | {"ratio": bandwidth.ratio} for bandwidth in bandwidths],
        "prefix_sharing": [asdict(result) for result in prefix],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
