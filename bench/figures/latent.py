"""Latent attention of one layer, decoding on one core: against its products alone, and against its bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.harness.figure import Better, Figure, Round, of_rounds
from bench.harness.group import Setting
from checkpoint import Latent, Norm, RopeConfig
from checkpoint.names import TensorRole
from kvcache.pages import KvPages
from stage_worker.model.attention_views import ViewRules
from stage_worker.model.kernels import AttentionMethod, Kernels, ProductMethod
from stage_worker.model.latent_attention import LatentAttention
from stage_worker.model.layer_weights import LatentWeights
from stage_worker.model.norms import NormWeights
from stage_worker.model.projections import project
from stage_worker.model.rope import Rope, Rotary
from stage_worker.model.step_layout import LayerKv, StepArrays, StepLayout
from stage_worker.validation import SliceLayout
from tests.step_layouts import layout_by

HIDDEN = 2048
MIXER = Latent(
    num_heads=16,
    query_rank=None,
    kv_rank=512,
    nope_dim=128,
    rope_dim=64,
    value_dim=128,
    rope=RopeConfig(is_interleaved=True),
    scale=192**-0.5,
    norm=Norm(eps=1e-6),
)
"""Of DeepSeek V2 Lite."""
CASES = ((1, 256), (1, 4096), (8, 1024), (8, 4096))
"""Sequences and their lengths."""
BLOCK_SIZE = 64
MAX_KEYS = 8 * 1024 * 1024 // (2 * MIXER.page_shape.width)
TARGETS = {"products alone": 2.5}
CPU, BF16 = torch.device("cpu"), torch.bfloat16
KERNELS = Kernels(
    products=ProductMethod.ONEDNN, decode=AttentionMethod.PRODUCTS, prefill=AttentionMethod.PRODUCTS
)
"""What stages choose on a CPU with products of bfloat16."""

HOW = {
    "products alone": "CPU time of queries, latents and attention : its products alone, each once",
    "its bytes": "CPU time of queries, latents and attention : a sum over as many bytes as it reads",
}


@torch.inference_mode()
async def measure(setting: Setting) -> list[Figure]:
    """Measure on one thread, in rounds of all cases."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weights = _Weights()
    figures = []
    for num_sequences, length in CASES[: 2 if setting.is_quick else None]:
        case = _Case(weights, num_sequences, length)
        times = [_times_ms(case) for _ in range(setting.rounds(15, 3))]
        setting.say(f"{num_sequences} x {length}: {statistics.median(one.layer for one in times):.2f} ms")
        figures += _figures(case, times)
    return figures


@dataclass(frozen=True, slots=True)
class _Times:
    """Milliseconds of CPU time in one round."""

    layer: float
    products: float
    reading: float


class _Weights:
    """Random weights of a layer, the layer, and its projections alone."""

    def __init__(self) -> None:
        weights = LatentWeights(
            query_down=None,
            query_down_bias=None,
            query=_random(MIXER.q_size, HIDDEN),
            latent=_random(MIXER.page_shape.width, HIDDEN),
            latent_bias=None,
            keys=_random(MIXER.num_heads, MIXER.nope_dim, MIXER.kv_rank),
            values=_random(MIXER.num_heads, MIXER.value_dim, MIXER.kv_rank),
        )
        norms = {TensorRole.KV_LATENT_NORM: NormWeights(torch.ones(MIXER.kv_rank, dtype=BF16), None)}
        self.layer = LatentAttention(MIXER, weights, norms, KERNELS)
        matrices = (weights.query, weights.latent)
        self.projections = [project(matrix, None, KERNELS.layer_products) for matrix in matrices]
        self.to_keys = _random(MIXER.num_heads, MIXER.nope_dim, MIXER.kv_rank)
        self.to_values = _random(MIXER.num_heads, MIXER.kv_rank, MIXER.value_dim)
        held = [one for one in (*matrices, weights.keys, weights.values) if isinstance(one, Tensor)]
        assert len(held) == 4, "in bfloat16, as drawn"
        self.num_bytes = sum(2 * matrix.numel() for matrix in held)


class _Case:
    """A step of one token of each of some sequences, whose pages are full of random latents."""

    def __init__(self, weights: _Weights, num_sequences: int, length: int) -> None:
        self.name = f"{num_sequences} x {length} tokens"
        self._weights = weights
        self._x = _random(num_sequences, HIDDEN)
        shape = MIXER.page_shape
        num_pages = length // BLOCK_SIZE
        pages = KvPages(
            num_layers=1,
            num_blocks=num_sequences * num_pages,
            block_size=BLOCK_SIZE,
            num_kv_heads=shape.heads,
            head_dim=shape.width,
            num_parts=shape.parts,
            dtype=BF16,
            device=CPU,
        )
        pages.store(0).normal_()
        self._kv = LayerKv(_layout(num_sequences, length, num_pages), pages, 0)
        self._rows = _random(num_sequences, length, shape.width)
        self._heads = _random(num_sequences, MIXER.num_heads, shape.width)
        self._shares = _random(num_sequences, MIXER.num_heads, length)
        self.num_bytes = weights.num_bytes + 2 * self._rows.numel()
        self._memory = torch.zeros(self.num_bytes // 8, dtype=torch.int64)

    def compute(self) -> None:
        self._weights.layer(self._x, self._kv)

    def multiply(self) -> None:
        """Products of the case, without gathers, rotation, norm and softmax."""
        weights, by_head = self._weights, self._heads.transpose(0, 1)
        for projection in weights.projections:
            projection(self._x)
        torch.bmm(by_head[..., : MIXER.nope_dim], weights.to_keys)
        torch.bmm(self._heads, self._rows.transpose(1, 2))
        torch.bmm(self._shares, self._rows)
        torch.bmm(by_head[..., : MIXER.kv_rank], weights.to_values)

    def read(self) -> None:
        self._memory.sum()


def _layout(num_sequences: int, length: int, num_pages: int) -> StepLayout:
    """Each sequence computes its last token."""
    slices = [
        SliceLayout(
            first_position=length - 1,
            num_tokens=1,
            pages=tuple(range(number * num_pages, (number + 1) * num_pages)),
            num_valid=length - 1,
        )
        for number in range(num_sequences)
    ]
    arrays = StepArrays.build(
        slices,
        windows={None},
        rules=ViewRules(device=CPU, block_size=BLOCK_SIZE, dtype=BF16, kernels=KERNELS, max_keys=MAX_KEYS),
    )
    return layout_by(arrays, {Rotary.of(MIXER): Rope(MIXER.rope, MIXER.rope_dim, BF16, CPU)})


def _random(*shape: int) -> Tensor:
    return (0.05 * torch.randn(shape)).to(BF16)


def _times_ms(case: _Case) -> _Times:
    return _Times(*(_cpu_ms(work) for work in (case.compute, case.multiply, case.read)))


def _cpu_ms(work: Callable[[], None]) -> float:
    work()
    started_s = time.thread_time()
    work()
    return 1e3 * (time.thread_time() - started_s)


def _figures(case: _Case, times: list[_Times]) -> list[Figure]:
    details = {"megabytes": case.num_bytes / 1e6}
    rounds = {
        "products alone": [Round(one.layer, one.products) for one in times],
        "its bytes": [Round(one.layer, one.reading) for one in times],
    }
    return [
        of_rounds(
            f"latent attention, {case.name} : {bound}",
            found,
            unit="ms",
            better=Better.LOWER,
            how=HOW[bound],
            target=TARGETS.get(bound),
            noise=0.2,
            details=details,
        )
        for bound, found in rounds.items()
    ]
