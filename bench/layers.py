"""What a stage's step costs beside its matrix products.

    python -m bench.layers [--quick] [--json FILE]

One stage with 6 layers and the head of an 88 M-parameter Llama (hidden 768, 12 heads, 4 KV heads, ffn 2048,
vocabulary 8192; random weights) in this process, one thread, no gRPC. A step is its layout, the check of its
writes, the layers and, for decodes, the logits. Bounds are the same products alone, over the same weights:
`plain` by torch's `linear`, and `packed` as oneDNN orders weights. All take turns in every round; figures are
medians of the thread's processor time.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from bench.layer_profile import profiled
from bench.llama_88m import make_checkpoint
from checkpoint import Checkpoint, DType
from kvcache.pages import KvPages
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.kernels import PLAIN, AttentionMethod, Kernels
from stage_worker.model.layer_weights import PackedProjection
from stage_worker.validation import SliceLayout

BLOCK_SIZE, NUM_BLOCKS, CONTEXT = 16, 2048, 190
LAYERS = range(6, 12)
DECODES = (1, 2, 4, 8, 16, 32)
PREFILLS = ((1, 128, 0), (1, 512, 0), (4, 128, 0), (16, 16, 0), (1, 512, 1024))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """`num_sequences` slices of `num_tokens` each behind `history` tokens."""

    num_sequences: int
    num_tokens: int
    history: int

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == 1

    def __str__(self) -> str:
        if self.is_decode:
            return f"decode {self.num_sequences}"
        behind = f" behind {self.history}" if self.history else ""
        return f"prefill {self.num_sequences} x {self.num_tokens}{behind}"

    def slices(self, order: list[int]) -> list[SliceLayout]:
        """Pages are those of `order`, one after another."""
        width = -(-(self.history + self.num_tokens) // BLOCK_SIZE)
        return [
            SliceLayout(
                first_position=self.history,
                num_tokens=self.num_tokens,
                pages=order[index * width : (index + 1) * width],
            )
            for index in range(self.num_sequences)
        ]


class Bounds:
    """The products of the stage's layers and its head, and nothing else."""

    def __init__(self, stage: DecoderStage) -> None:
        config = stage.config
        sizes = (
            (config.q_size + 2 * config.kv_size, config.hidden_size),
            (config.hidden_size, config.q_size),
            (2 * config.intermediate_size, config.hidden_size),
            (config.hidden_size, config.intermediate_size),
        )
        self._weights = [_weight(*size) for _ in stage.layers for size in sizes]
        self._head = _weight(config.vocab_size, config.hidden_size)
        self._packed = [PackedProjection(weight, None) for weight in self._weights]
        self._packed_head = PackedProjection(self._head, None)

    def plain(self, inputs: dict[int, Tensor], *, with_head: bool) -> None:
        for weight in self._weights:
            linear(inputs[weight.shape[1]], weight)
        if with_head:
            linear(inputs[self._head.shape[1]], self._head)

    def packed(self, inputs: dict[int, Tensor], *, with_head: bool) -> None:
        for weight, packed in zip(self._weights, self._packed, strict=True):
            packed(inputs[weight.shape[1]])
        if with_head:
            self._packed_head(inputs[self._head.shape[1]])


def _weight(rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns) * 0.02).to(torch.bfloat16)


def choices(stage: DecoderStage) -> dict[str, Kernels]:
    """The ways to compute, the plainest first; the last is what the stage chooses by itself."""
    products = AttentionMethod.PRODUCTS
    offered = {
        "plain": PLAIN,
        "packed": Kernels(packs_weights=True, decode=AttentionMethod.SDPA, prefill=AttentionMethod.SDPA),
        "packed, products": Kernels(packs_weights=True, decode=products, prefill=products),
        "chosen": stage.kernels,
    }
    return {
        name: kernels for name, kernels in offered.items() if name == "chosen" or kernels != stage.kernels
    }


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(rounds + 1):
        for name, call in calls.items():
            started = time.thread_time()
            call()
            if index:
                times[name].append((time.thread_time() - started) * 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


class Bench:
    """The stage in every way to compute it, over the same pages."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        def stage(kernels: Kernels | None) -> DecoderStage:
            made = DecoderStage(
                checkpoint.config,
                layer_begin=LAYERS.start,
                layer_end=LAYERS.stop,
                has_embeddings=False,
                has_head=True,
                dtype=DType.BF16,
                kernels=kernels,
            )
            made.load(checkpoint)
            return made

        config = checkpoint.config
        self.stages = {name: stage(kernels) for name, kernels in choices(stage(None)).items()}
        self.bounds = Bounds(self.stages["chosen"])
        self.pages = KvPages(
            num_layers=len(LAYERS),
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=torch.bfloat16,
            device="cpu",
        )
        self.pages.clear(torch.arange(NUM_BLOCKS))
        self._order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0)).tolist()

    def step(self, stage: DecoderStage, work: Work) -> Callable[[], object]:
        slices = work.slices(self._order)
        hidden = torch.randn(work.num_sequences * work.num_tokens, stage.config.hidden_size)
        hidden = hidden.to(torch.bfloat16)

        def run() -> object:
            layout = stage.layout(slices, block_size=BLOCK_SIZE)
            slots = layout.writes.slots
            shape = (len(slots), stage.config.num_kv_heads, stage.config.head_dim)
            self.pages.validate_write(slots, shape=shape, dtype=torch.bfloat16, device=stage.device)
            computed = stage.forward(hidden, layout, self.pages)
            return stage.logits(computed) if work.is_decode else computed

        return run

    def row(self, work: Work, rounds: int) -> dict[str, float]:
        """Milliseconds of the bounds and of the step in every way."""
        config, num_rows = self.stages["chosen"].config, work.num_sequences * work.num_tokens
        inputs = {
            width: torch.randn(num_rows, width).to(torch.bfloat16)
            for width in (config.hidden_size, config.intermediate_size)
        }
        calls: dict[str, Callable[[], object]] = {
            "products, plain": lambda: self.bounds.plain(inputs, with_head=work.is_decode),
            "products, packed": lambda: self.bounds.packed(inputs, with_head=work.is_decode),
        }
        calls |= {f"step, {name}": self.step(stage, work) for name, stage in self.stages.items()}
        return measure(calls, rounds)

    def layout_us(self, num_sequences: int, rounds: int) -> float:
        stage = self.stages["chosen"]
        slices = Work(num_sequences=num_sequences, num_tokens=1, history=CONTEXT).slices(self._order)
        return 1e3 * measure({"": lambda: stage.layout(slices, block_size=BLOCK_SIZE)}, rounds)[""]


def print_steps(rows: dict[str, dict[str, float]]) -> None:
    names = list(next(iter(rows.values())))
    print("| milliseconds | " + " | ".join(names) + " | chosen : plain | chosen : packed |")
    print("|---" * (len(names) + 3) + "|")
    for work, row in rows.items():
        ratios = [row["step, chosen"] / row[f"products, {name}"] for name in ("plain", "packed")]
        cells = [f"{row[name]:.2f}" for name in names] + [f"{ratio:.2f}" for ratio in ratios]
        print(f"| {work} | " + " | ".join(cells) + " |")


def print_profile(rows: dict[str, dict[str, float]]) -> None:
    parts = list(next(iter(rows.values())))
    print("\n| milliseconds | " + " | ".join(parts) + " |")
    print("|---" * (len(parts) + 1) + "|")
    for work, row in rows.items():
        print(f"| {work} | " + " | ".join(f"{row[part]:.2f}" for part in parts) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("bench/results/layers.json"))
    options = parser.parse_args()
    rounds = 5 if options.quick else 25
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        bench = Bench(Checkpoint.open(make_checkpoint(Path(directory))))
        chosen = bench.stages["chosen"]
        print(f"chosen: {chosen.kernels}\n")
        works = [Work(num_sequences=n, num_tokens=1, history=CONTEXT) for n in DECODES]
        works += [Work(num_sequences=n, num_tokens=tokens, history=h) for n, tokens, h in PREFILLS]
        steps = {str(w): bench.row(w, rounds if w.is_decode else max(3, rounds // 4)) for w in works}
        print_steps(steps)
        profiles = {str(w): profiled(chosen, bench.step(chosen, w), rounds) for w in works}
        print_profile(profiles)
        layouts = {n: bench.layout_us(n, 50) for n in DECODES}
        print("\nlayout of a decode step, us: " + ", ".join(f"{n}: {us:.0f}" for n, us in layouts.items()))
    report = {"kernels": str(chosen.kernels), "steps_ms": steps, "profile_ms": profiles, "layout_us": layouts}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
