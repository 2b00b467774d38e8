"""Cost of a token after its logits are computed: microseconds per sequence, beside a full sort of the logits.

python -m bench.sampling [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from stage_worker.sampling import Sampler
from wire.ids import SequenceKey, new_request_id
from wire.sampling import StepSampling
from wire.steps import Prefill, SliceError, StartRecord, StepSlice

HISTORY_TOKENS = 1000
VOCAB_SIZES = (32_000, 152_064)
BATCHES = (1, 16, 64)
RESULTS = Path(__file__).parent / "results" / "sampling.json"


@dataclass(frozen=True, slots=True)
class Line:
    """Medians of CPU time, which excludes neighbours on the machine; `ratio` is to one torch.sort of the
    logits.
    """

    what: str
    logits: str
    vocab_size: int
    batch: int
    us_per_sequence: float
    sort_us_per_sequence: float

    @property
    def ratio(self) -> float:
        return self.us_per_sequence / self.sort_us_per_sequence


def kinds(vocab_size: int) -> dict[str, StepSampling]:
    """Parameters to measure. History, words and biased tokens are spread over the vocabulary."""
    spread = [7 + index * (vocab_size // 100) for index in range(100)]
    penalties = StepSampling(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.1)
    everything = StepSampling(
        temperature=0.8,
        top_k=50,
        top_p=0.95,
        min_p=0.02,
        typical_p=0.95,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        presence_penalty=0.1,
        logit_bias=tuple((token, 0.5) for token in spread[:20]),
        allowed_token_ids=tuple(range(0, vocab_size, 2)),
        bad_words=tuple(zip(spread[1:], spread[:-1], strict=True)),
        min_tokens=HISTORY_TOKENS,
        min_tokens_hold_back=(2, 3),
    )
    return {
        "greedy": StepSampling(),
        "temperature": StepSampling(temperature=0.8),
        "temperature, top-p 0.95": StepSampling(temperature=0.8, top_p=0.95),
        "temperature, typical-p 0.95": StepSampling(temperature=0.8, typical_p=0.95),
        "penalties alone": penalties,
        "all filters": everything,
        "all filters but top-k": without_top_k(everything),
        "greedy, 20 log-probabilities": StepSampling(logprobs=20),
    }


def without_top_k(sampling: StepSampling) -> StepSampling:
    values = {name: getattr(sampling, name) for name in sampling.__slots__}
    return StepSampling(**(values | {"top_k": 0}))


def some_logits(shape: str, batch: int, vocab_size: int) -> Tensor:
    """Random logits.

    `peaked`: normal with ten tokens well above the others, as from language models. `flat`: normal and
    narrow, so that only top_k leaves few tokens.
    """
    generator = torch.Generator().manual_seed(batch)
    noise = torch.randn((batch, vocab_size), generator=generator)
    if shape == "flat":
        return noise * 0.5
    high = torch.randint(vocab_size, (batch, 10), generator=generator)
    return (noise * 2).scatter_(1, high, 16 + 6 * torch.rand((batch, 10), generator=generator))


def sampling_step(logits: Tensor, sampling: StepSampling) -> Callable[[], object]:
    """One step of the sampler: a token for each row, with a history of HISTORY_TOKENS tokens each."""
    batch, vocab_size = logits.shape
    sampler = Sampler(vocab_size=vocab_size, stage=0)
    generator = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(batch):
        key = SequenceKey(new_request_id(), 0)
        tokens = tuple(torch.randint(vocab_size, (HISTORY_TOKENS,), generator=generator).tolist())
        sampler.start(StartRecord(key, 0, HISTORY_TOKENS // 2, tokens, sampling))
        parts.append(StepSlice(key, 0, tokens[-1:], Prefill(HISTORY_TOKENS - 1, 1, HISTORY_TOKENS)))

    def step() -> None:
        results = sampler.choose(parts, logits)
        assert not any(isinstance(result.outcome, SliceError) for result in results)

    return step


def measure(shape: str, vocab_size: int, batch: int, *, rounds: int) -> Iterator[Line]:
    """Measure all kinds and the sort in turns, so that other load on the machine affects all of them."""
    logits = some_logits(shape, batch, vocab_size)
    works: dict[str, Callable[[], object]] = {"sort": lambda: torch.sort(logits, dim=-1, descending=True)}
    works |= {what: sampling_step(logits, sampling) for what, sampling in kinds(vocab_size).items()}
    times_us: dict[str, list[float]] = {what: [] for what in works}
    for turn in range(rounds + 1):
        for what, work in works.items():
            started = time.thread_time_ns()
            work()
            if turn:
                times_us[what].append((time.thread_time_ns() - started) / 1000 / batch)
    medians = {what: statistics.median(times) for what, times in times_us.items()}
    sort_us = medians.pop("sort")
    for what, median in medians.items():
        yield Line(what, shape, vocab_size, batch, round(median, 2), round(sort_us, 2))


def machine() -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch_threads": torch.get_num_threads(),
    }


def show(lines: list[Line]) -> None:
    for vocab_size in VOCAB_SIZES:
        for shape in ("peaked", "flat"):
            some = [line for line in lines if (line.vocab_size, line.logits) == (vocab_size, shape)]
            batches = sorted({line.batch for line in some})
            print(f"\nvocabulary {vocab_size:,}, {shape} logits: us per sequence (ratio to torch.sort)")
            print(f"{'':<30}" + "".join(f"{f'batch {batch}':>22}" for batch in batches))
            for what in dict.fromkeys(line.what for line in some):
                cells = [line for line in some if line.what == what]
                print(f"{what:<30}" + "".join(_cell(line.us_per_sequence, line.ratio) for line in cells))
            sorts = {line.batch: line.sort_us_per_sequence for line in some}
            print(f"{'torch.sort':<30}" + "".join(_cell(sorts[batch], 1.0) for batch in batches))


def _cell(us: float, ratio: float) -> str:
    return f"{us:>12,.0f} us ({ratio:.3f})".rjust(22)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="few rounds and no batch of 64, as a smoke test")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    lines: list[Line] = []
    for vocab_size in VOCAB_SIZES:
        for shape in ("peaked", "flat"):
            for batch in BATCHES[:2] if options.quick else BATCHES:
                rounds = 3 if options.quick else max(7, 60 // batch)
                lines += measure(shape, vocab_size, batch, rounds=rounds)
    show(lines)
    report = {
        "machine": machine(),
        "lines": [asdict(line) | {"ratio": round(line.ratio, 4)} for line in lines],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
