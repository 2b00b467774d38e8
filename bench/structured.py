"""What structured output costs: tables, compiling, masks, replay, and what applying a mask takes from a step.

python -m bench.structured [--json FILE] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.structured_cases import Case, cases
from checkpoint.grammar_tokenizer import GrammarTokenizer
from stage_worker.sampling.grammar_masks import GrammarMasks
from text.grammars import GrammarCompiler, GrammarKind
from wire.ids import SequenceKey, new_request_id
from wire.steps import GrammarSpec, StartRecord, StepSampling

RESULTS = Path(__file__).parent / "results" / "structured.json"
EOS = 0
REPLAY_TOKENS = 500


@dataclass(frozen=True, slots=True)
class CaseResult:
    """`compile` is the coordinator's, with the first mask; `build` is the stage's, which makes a matcher."""

    what: str
    num_tokens: int
    compile_ms: float
    build_ms: float
    mask_us_mean: float
    mask_us_p99: float
    consume_us_mean: float
    replay_500_ms: float | None


def train(directory: Path, vocab_size: int) -> Tokenizer:
    """A byte-level BPE over the Python files that are installed here."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sources(vocab_size * 500), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def _sources(max_characters: int) -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        text = path.read_text(errors="ignore")[:400_000]
        max_characters -= len(text)
        if max_characters < 0:
            return
        yield text


def milliseconds(work: Callable[[], object], rounds: int) -> float:
    """Median on the clock."""
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3


def measure_case(
    case: Case, compiler: GrammarCompiler, tables: GrammarTokenizer, hf: Tokenizer, rounds: int
) -> CaseResult:
    spec = compiler.compile(case.kind, case.texts)
    tokens = hf.encode(case.output).ids
    matcher = tables.matcher(spec.definition)
    mask_us, consume_us = [], []
    for token in tokens:
        started = time.perf_counter_ns()
        matcher.mask()
        masked = time.perf_counter_ns()
        matcher.consume((token,))
        mask_us.append((masked - started) / 1000)
        consume_us.append((time.perf_counter_ns() - masked) / 1000)
    replayed = tokens[:REPLAY_TOKENS]
    replay_ms = milliseconds(lambda: tables.matcher(spec.definition).consume(replayed), rounds)
    return CaseResult(
        what=case.name,
        num_tokens=len(tokens),
        compile_ms=milliseconds(lambda: compiler.compile(case.kind, case.texts), rounds),
        build_ms=milliseconds(lambda: tables.matcher(spec.definition), rounds),
        mask_us_mean=statistics.mean(mask_us),
        mask_us_p99=sorted(mask_us)[int(len(mask_us) * 0.99)],
        consume_us_mean=statistics.mean(consume_us),
        replay_500_ms=replay_ms if len(replayed) == REPLAY_TOKENS else None,
    )


def measure_apply(directory: Path, vocab_size: int, spec: GrammarSpec, batch: int, rounds: int) -> float:
    """Microseconds that `apply` takes from a step when all masks are there."""
    masks = GrammarMasks(directory, vocab_size=vocab_size, eos_token_ids=(EOS,))
    rows = [(row, SequenceKey(new_request_id(), 0)) for row in range(batch)]
    for _, key in rows:
        masks.start(StartRecord(key, 1, 1, (1,), StepSampling(grammar=spec)))
    logits = torch.randn(batch, vocab_size)
    assert masks.apply(logits, rows) == {}
    result = milliseconds(lambda: masks.apply(logits, rows), rounds) * 1e3
    masks.close()
    return result


def measure_stall(tables: GrammarTokenizer, spec: GrammarSpec, token: int) -> tuple[float, float]:
    """How long, at most, a busy Python thread stands still while another one works out 50 masks, and how long
    those take, in ms.
    """
    matcher = tables.matcher(spec.definition)
    is_done = threading.Event()

    def work() -> None:
        for _ in range(50):
            matcher.mask()
            matcher.consume((token,))
        is_done.set()

    thread = threading.Thread(target=work)
    started = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while not is_done.is_set():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    thread.join()
    return longest * 1e3, (time.perf_counter() - started) * 1e3


def measure(vocab_size: int, rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        hf = train(directory, vocab_size)
        started = time.perf_counter()
        tables = GrammarTokenizer.open(directory, vocab_size=vocab_size, eos_token_ids=(EOS,))
        tables_s = time.perf_counter() - started
        compiler = GrammarCompiler(directory, vocab_size=vocab_size, eos_token_ids=(EOS,))
        results = [measure_case(case, compiler, tables, hf, rounds) for case in cases()]
        spec = compiler.compile(GrammarKind.REGEX, (r"[A-Za-z0-9 ,.\n]{1,4000}",))
        stall_ms, stalled_ms = measure_stall(tables, spec, hf.encode("the").ids[0])
        apply_us = {
            batch: measure_apply(directory, vocab_size, spec, batch, rounds * 5) for batch in (1, 16, 64)
        }
    show(vocab_size, hf.get_vocab_size(), tables_s, results, apply_us, (stall_ms, stalled_ms))
    return {
        "vocab_size": hf.get_vocab_size(),
        "tables_s": tables_s,
        "cases": [asdict(result) for result in results],
        "apply_us": apply_us,
        "longest_stall_ms": stall_ms,
        "stalled_work_ms": stalled_ms,
    }


def show(
    wanted: int,
    vocab_size: int,
    tables_s: float,
    results: list[CaseResult],
    apply_us: dict[int, float],
    stall: tuple[float, float],
) -> None:
    print(f"\nvocabulary {vocab_size:,} (of {wanted:,}): tables {tables_s:.2f} s")
    print(
        f"{'':<24}{'compile':>11}{'build':>11}{'mask, mean':>13}{'p99':>12}{'consume':>11}{'500 again':>12}"
    )
    for each in results:
        replay = "-" if each.replay_500_ms is None else f"{each.replay_500_ms:.2f} ms"
        print(
            f"{each.what:<24}{each.compile_ms:>8.2f} ms{each.build_ms:>8.2f} ms{each.mask_us_mean:>10,.0f} us"
            f"{each.mask_us_p99:>9,.0f} us{each.consume_us_mean:>8.1f} us{replay:>12}"
        )
    print("apply: " + ", ".join(f"batch {batch} {us:,.0f} us" for batch, us in apply_us.items()))
    print(
        f"50 masks of prose take {stall[1]:.0f} ms; another thread stands still for {stall[0]:.1f} ms at most"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one small vocabulary: does it run?")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sizes = (2_000,) if options.quick else (32_000, 151_936)
    report = {
        "machine": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        },
        "vocabularies": [measure(size, 3 if options.quick else 9) for size in sizes],
    }
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
