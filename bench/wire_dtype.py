"""What smaller hidden states between stages cost in exactness, and save in bytes.

    python -m bench.wire_dtype [--quick] [--json FILE]

Three stages in this process, in bfloat16: the built-in model with prompts of its kind, and the model of
`bench.llama_88m`, which has random weights, with random tokens. Each prompt is continued greedily as
computed; then the same tokens go through the stages once per wire dtype:

* hop: root mean square of what one hop changes in its hidden states, against that of the hidden states;
* LAST: how far hidden states into LAST are from those as computed, in the same measure, both hops together;
* logits: root mean square of the change of logits, against their standard deviation;
* same token: share of generated positions where the most likely token is the same for the same tokens before;
* run: share of the generated tokens before the first that differs, when the pipeline goes on by itself.

"in f32" is how far the same model in float32 is from that in bfloat16. Times are of one thread's processor,
for to_wire and from_wire, per MiB of hidden states in bfloat16, 768 wide.
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

from bench.llama_88m import make_checkpoint
from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint, DType
from kvcache.pages import KvPages
from stage_worker.backends.tensor_views import from_wire, to_wire
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.validation import SliceLayout
from wire.tensors import ScaledDType, WireDType, payload_bytes

WIRE_DTYPES: tuple[WireDType, ...] = (DType.BF16, *ScaledDType)
NUM_STAGES = 3
BLOCK_SIZE = 16
WIDTH = 768
CPU = torch.device("cpu")
PROMPTS = (
    "Once upon a time",
    "Tell me a story about a dog.",
    "The little girl went to the forest and",
    "What is the capital of France?",
    "One day, a boy found a red ball",
    "There was a big bear who",
    "Why is the sky blue?",
    "The cat and the bird",
)


@dataclass(frozen=True, slots=True)
class Pass:
    """Hidden states into MIDDLE and LAST as they were sent and as they came, and logits, of all tokens."""

    sent: tuple[Tensor, ...]
    came: tuple[Tensor, ...]
    logits: Tensor


class Chain:
    """Three stages one after another, with pages for one sequence."""

    def __init__(self, directory: Path, *, max_tokens: int, dtype: DType = DType.BF16) -> None:
        checkpoint = Checkpoint.open(directory)
        config = checkpoint.config
        self.vocab_size = config.vocab_size
        per_stage = config.num_layers // NUM_STAGES
        self._dtype = TORCH_DTYPES[dtype]
        self._num_blocks = -(-max_tokens // BLOCK_SIZE)
        self._stages = [
            DecoderStage(
                config,
                layer_begin=stage * per_stage,
                layer_end=(stage + 1) * per_stage,
                has_embeddings=stage == 0,
                has_head=stage == NUM_STAGES - 1,
                dtype=dtype,
            )
            for stage in range(NUM_STAGES)
        ]
        for stage in self._stages:
            stage.load(checkpoint)
        self._pages = [
            KvPages(
                num_layers=per_stage,
                num_blocks=self._num_blocks,
                block_size=BLOCK_SIZE,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                dtype=self._dtype,
                device=CPU,
            )
            for _ in self._stages
        ]

    def run(self, tokens: list[int], wire_dtype: WireDType, *, begin: int = 0) -> Pass:
        """`tokens` from position `begin` on, behind those that went before."""
        part = SliceLayout(
            first_position=begin, num_tokens=len(tokens), pages=range(self._num_blocks), num_valid=begin
        )
        hidden = self._stages[0].embed(torch.tensor(tokens))
        sent, came = [], []
        for stage, pages in zip(self._stages, self._pages, strict=True):
            if stage is not self._stages[0]:
                sent.append(hidden)
                hidden = from_wire(to_wire(hidden, wire_dtype), device=CPU, dtype=self._dtype)
                came.append(hidden)
            hidden = stage.forward(hidden, stage.layout([part], block_size=BLOCK_SIZE), pages)
        return Pass(tuple(sent), tuple(came), self._stages[-1].logits(hidden))

    def greedy(self, prompt: list[int], wire_dtype: WireDType, count: int) -> list[int]:
        """The `count` tokens that follow `prompt`."""
        tokens, begin = list(prompt), 0
        while len(tokens) < len(prompt) + count:
            logits = self.run(tokens[begin:], wire_dtype, begin=begin).logits
            begin = len(tokens)
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(prompt) :]


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def compare(run: Pass, exact: Pass, num_prompt_tokens: int) -> dict[str, float]:
    """`run` against `exact`, over the tokens that were generated."""
    hops = [
        rms(came.float() - sent.float()) / rms(sent) for sent, came in zip(run.sent, run.came, strict=True)
    ]
    into_last, wanted = run.came[-1], exact.came[-1]
    ours, theirs = run.logits[num_prompt_tokens - 1 :], exact.logits[num_prompt_tokens - 1 :]
    return {
        "hop": statistics.fmean(hops),
        "LAST": rms(into_last.float() - wanted.float()) / rms(wanted),
        "logits": rms(ours - theirs) / float(theirs.std()),
        "same token": float((ours.argmax(1) == theirs.argmax(1)).double().mean()),
    }


def equal_share(tokens: list[int], others: list[int]) -> float:
    pairs = zip(tokens, others, strict=True)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(tokens)) / len(tokens)


def measure_model(directory: Path, prompts: list[list[int]], count: int) -> dict[str, dict[str, float]]:
    """Means over the prompts, by what travels."""
    max_tokens = max(map(len, prompts)) + count
    chain = Chain(directory, max_tokens=max_tokens)
    in_f32 = Chain(directory, max_tokens=max_tokens, dtype=DType.F32)
    found: dict[str, list[dict[str, float]]] = {}
    for prompt in prompts:
        generated = chain.greedy(prompt, DType.BF16, count)
        tokens = prompt + generated[:-1]
        exact = chain.run(tokens, DType.BF16)
        finer = compare(in_f32.run(tokens, DType.F32), exact, len(prompt))
        found.setdefault("in f32", []).append(finer)
        for wire_dtype in WIRE_DTYPES:
            figures = compare(chain.run(tokens, wire_dtype), exact, len(prompt))
            figures["run"] = equal_share(chain.greedy(prompt, wire_dtype, count), generated)
            found.setdefault(wire_dtype.value, []).append(figures)
    return {
        name: {key: round(statistics.fmean(each[key] for each in rows), 5) for key in rows[0]}
        for name, rows in found.items()
    }


def _cost_us(work: Callable[[], object], num_rounds: int) -> float:
    work()
    times = []
    for _ in range(num_rounds):
        started = time.thread_time()
        for _ in range(10):
            work()
        times.append((time.thread_time() - started) / 10)
    return statistics.median(times) * 1e6


def measure_times(num_rounds: int) -> dict[str, dict[str, float]]:
    """Bytes against bfloat16, and microseconds per MiB of bfloat16, by rows and wire dtype."""
    found = {}
    for num_rows in (1, 16, 512):
        hidden = torch.randn(num_rows, WIDTH).bfloat16()
        mebibytes = payload_bytes(DType.BF16, hidden.shape) / 2**20
        for wire_dtype in WIRE_DTYPES:
            view = to_wire(hidden, wire_dtype)
            write_us = _cost_us(lambda: to_wire(hidden, wire_dtype), num_rounds)  # noqa: B023
            read_us = _cost_us(lambda: from_wire(view, device=CPU, dtype=torch.bfloat16), num_rounds)  # noqa: B023
            found[f"{num_rows} rows, {wire_dtype.value}"] = {
                "bytes": round(view.size_bytes / payload_bytes(DType.BF16, hidden.shape), 4),
                "encode us": round(write_us, 1),
                "decode us": round(read_us, 1),
                "encode us/MiB": round(write_us / mebibytes),
                "decode us/MiB": round(read_us / mebibytes),
            }
    return found


def _builtin_prompts() -> list[list[int]]:
    from tokenizers import Tokenizer  # imported late: it is not needed for the rest

    tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in PROMPTS]


def _random_prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(vocab_size, (len(PROMPTS), 32), generator=generator).tolist()


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two prompts and few rounds: does it run?")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_prompts, count, num_rounds = (2, 8, 3) if arguments.quick else (len(PROMPTS), 64, 30)
    with tempfile.TemporaryDirectory() as directory:
        random_model = make_checkpoint(Path(directory))
        figures = {
            "built-in": measure_model(MODEL_DIRECTORY, _builtin_prompts()[:num_prompts], count),
            "random 88M": measure_model(random_model, _random_prompts(8192)[:num_prompts], count),
            "times": measure_times(num_rounds),
        }
    for name, rows in figures.items():
        print(name)
        for row, values in rows.items():
            print(f"  {row:16s}" + "".join(f"{key:>16s} {value:<10g}" for key, value in values.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
