"""Every kernel compiles for each architecture, without spills and within its shared memory, and multiplies on
tensor cores, float32 in three parts.

Kernels are those that operations start for shapes of known models: launches are recorded, not run.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import mangle_type

from checkpoint import GatedDelta, KimiDelta, Mamba2, Norm, RopeConfig, ScaledDType
from checkpoint.blueprint import Activation, ClampedSwiGlu, NormKind
from checkpoint.compressed import Compressor
from checkpoint.held import HeldBytes, HeldNibbles
from checkpoint.ngrams import NgramEmbedding
from checkpoint.recurrent import Recurrent
from checkpoint.streams import GatedConnection, HyperConnection, WeightedCollapse
from stage_worker.model import block_work
from stage_worker.model.attention_work import MERGE_FIELDS, AttentionWork, HostWork, queries_per_item
from stage_worker.model.choice_work import BLOCK_FIELDS, ROW_FIELDS, ChoiceGroup
from stage_worker.model.compressed_work import JOINED_FIELDS, JoinedWork, SequencePages
from stage_worker.model.decode_rows import NO_DECODES, DecodeRows
from stage_worker.model.held_matrices import ByteMatrix, NibbleMatrix
from stage_worker.model.kernels import PLAIN
from stage_worker.model.kimi_delta import BatchedGates
from stage_worker.model.layer_weights import DeltaWeights, KimiDeltaWeights, MambaWeights, NgramWeights
from stage_worker.model.norms import NormWeights
from stage_worker.model.operations import StateFunction
from stage_worker.model.state_rows import SEQUENCE_FIELDS, StateRows
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.triton_kernels import attention as attention_kernels
from stage_worker.model.triton_kernels import (
    block_keys,
    choices,
    gates,
    heads,
    last_rotation,
    launch,
    sampling,
)
from stage_worker.model.triton_kernels import compressed_attention as compressed_kernels
from stage_worker.model.triton_kernels import wire_rows as wire
from stage_worker.model.triton_kernels.attention import attend
from stage_worker.model.triton_kernels.byte_products import byte_expert_products, byte_product
from stage_worker.model.triton_kernels.compressed_attention import attend_joined
from stage_worker.model.triton_kernels.experts import expert_products
from stage_worker.model.triton_kernels.ngrams import FusedNgrams
from stage_worker.model.triton_kernels.nibble_products import nibble_expert_products, nibble_product
from stage_worker.model.triton_kernels.norms import KernelNorm
from stage_worker.model.triton_kernels.operations import TritonOperations
from stage_worker.model.triton_kernels.payload_sums import checksum
from stage_worker.model.triton_kernels.pooling import Pooling, pool
from stage_worker.model.triton_kernels.recurrent import FusedChannelDelta, FusedDelta, FusedScan
from stage_worker.model.triton_kernels.row_products import row_product
from stage_worker.validation import SliceLayout

pytestmark = pytest.mark.kernels

KIB = 1024
SHARED_BYTES = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99, 121: 99}
"""KiB of one block. Source: CUDA C++ Programming Guide, technical specifications per compute capability."""

HOPPER = 90
SPILLING_ON_HOPPER = ("phi3-prompt",)
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
V4_ROPE = RopeConfig(width=64, is_interleaved=True)
"""Of DeepSeek V4."""
new = partial(torch.empty, device="meta")


def work(*, is_decode: bool, group: int, row_width: int, dtype: torch.dtype) -> AttentionWork:
    """One sequence of 1,000 tokens."""
    pages = tuple(range(64))
    item = SliceLayout(
        first_position=999 if is_decode else 900, num_tokens=1 if is_decode else 100, pages=pages
    )
    made = HostWork.of(
        DecodeRows.of([item]) if is_decode else NO_DECODES,
        np.zeros(int(is_decode), np.int64),
        [] if is_decode else [item],
        [] if is_decode else [0],
        window=None,
        block_size=16,
        queries_per_item=queries_per_item(group, row_width, dtype.itemsize),
    )
    return made.on_device(torch.from_numpy(made.array))


def attention(
    heads: int,
    kv_heads: int,
    width: int,
    dtype: torch.dtype,
    *,
    is_decode: bool,
    tail: int = 0,
    are_shared: bool = False,
    element: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Keys with a `tail`, and those that `are_shared`, are values, too."""
    row_width, parts = width + tail, 1 if tail or are_shared else 2
    pages = new((100, parts, kv_heads, 16, row_width), dtype=element or dtype)
    attend(
        new((100, heads, row_width), dtype=dtype),
        new((100, heads, width), dtype=dtype),
        work(is_decode=is_decode, group=heads // kv_heads, row_width=row_width, dtype=dtype),
        pages,
        scale=0.1,
        page_scales=None if element is None else new(pages.shape[:-1], dtype=F32),
        **options,
    )


def compressed(
    heads: int,
    dtype: torch.dtype,
    *,
    ratio: int = 4,
    top_k: int | None = None,
    is_decode: bool,
    element: torch.dtype | None = None,
) -> None:
    """Through a window of 128 tokens, in pages of 16, with rows of 512 elements."""
    is_single = is_decode or top_k is not None
    joined = JoinedWork(
        items=new((100, JOINED_FIELDS), dtype=torch.int32),
        merges=new((64, MERGE_FIELDS), dtype=torch.int32),
        num_partial=200,
        num_queries=1 if is_single else queries_per_item(heads, 512, dtype.itemsize),
        has_longer=not is_decode,
    )
    pages = SequencePages(table=new(1000, dtype=torch.int32), firsts=new((64, 2), dtype=torch.int32))
    keys = new((100, 1, 1, 16, 512), dtype=element or dtype)
    attend_joined(
        *(new((100, heads, 512), dtype=dtype), new((100, heads, 512), dtype=dtype), joined, keys, pages),
        *(new((100, max(1, 16 // ratio), 512), dtype=dtype), pages),
        ratio=ratio,
        scale=0.1,
        window=128,
        sinks=new(heads, dtype=F32),
        key_scales=None if element is None else new(keys.shape[:-1], dtype=F32),
        chosen=None if top_k is None else new((100, top_k), dtype=torch.int32),
    )


def head_step(
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    has_norm: bool = False,
    element: torch.dtype | None = None,
) -> None:
    norm = heads.HeadNorm(
        weights=new((2, head_dim), dtype=dtype), eps=1e-6, rounds_first=True, is_after_rotation=False
    )
    pages = new((100, 2, kv_heads, 16, head_dim), dtype=element or dtype)
    heads.rotate_and_write(
        new((128, num_heads + 2 * kv_heads, head_dim), dtype=dtype),
        num_heads,
        new((128, 1, head_dim), dtype=dtype),
        new((128, 1, head_dim), dtype=dtype),
        new(128, dtype=torch.int64),
        pages,
        plan=heads.HeadPlan(norm=norm if has_norm else None, value_eps=1e-6 if has_norm else None),
        page_scales=None if element is None else new(pages.shape[:-1], dtype=F32),
    )


def chosen_group(num_queries: int, longest: int) -> ChoiceGroup:
    return ChoiceGroup(
        span=(0, num_queries),
        queries=None,
        table=new(1000, dtype=torch.int32),
        blocks=new((num_queries, BLOCK_FIELDS), dtype=torch.int32),
        rows=new((num_queries, ROW_FIELDS), dtype=torch.int32),
        attention=work(is_decode=True, group=128, row_width=576, dtype=BF16),
        num_scores=num_queries * longest,
        longest=longest,
    )


def chosen_entries(dtype: torch.dtype) -> None:
    """Of 262,144 entries of 4 tokens, which takes three levels; a block has 4."""
    group = chosen_group(64, 262_144)
    queries, pages = new((64, 64, 128), dtype=dtype), new((100, 4, 128), dtype=dtype)
    scores = choices.score(queries, new((64, 64), dtype=F32), group, pages, ratio=4)
    choices.choose(scores, group, 1024)


def last_rotations(
    num_heads: int, dtype: torch.dtype, *, pending: int = 0, element: torch.dtype | None = None
) -> None:
    """Of queries and keys, of the output's heads, and of an indexer's queries."""
    cos, slots = new((128, 1, 64), dtype=dtype), new(128, dtype=torch.int64)
    queries, keys = new((128, num_heads, 512), dtype=dtype), new((128, 512), dtype=dtype)
    pages = new((100, 1, 1, 16, 512), dtype=element or dtype)
    last_rotation.norm_and_write(
        *(queries, keys, cos, cos, slots, pages),
        rope=V4_ROPE,
        weight=new(512, dtype=F32),
        eps=1e-6,
        page_scales=None if element is None else new((100, 1, 1, 16), dtype=F32),
        pending=new((128, pending), dtype=dtype) if pending else None,
        pending_rows=new((100, 16, pending), dtype=dtype) if pending else None,
    )
    last_rotation.rotate_last(queries, cos, cos, rope=V4_ROPE, is_back=True)
    last_rotation.rotate_last(new((128, 64, 128), dtype=dtype), cos, cos, rope=V4_ROPE)


def pooled_entries(plan: Compressor, dtype: torch.dtype) -> None:
    """In blocks of 16 tokens, with keys of entries beside them if they overlap."""
    parts, widths, first = (2, [512, 128], 0) if plan.has_overlap else (1, [512], 0)
    pending = new((100, 16, 2 * parts * sum(widths)), dtype=dtype)
    sources, cos = new((20, plan.span), dtype=torch.int64), new((20, 1, 64), dtype=dtype)
    for width in widths:
        bias = new((plan.ratio, parts * width), dtype=F32)
        pooling = Pooling(
            plan=plan, first=first, bias=bias, weight=new(width, dtype=F32), eps=1e-6, rope=V4_ROPE
        )
        first += 2 * bias.shape[1]
        rows = new((100, plan.rows_per_block(16), width), dtype=dtype)
        pool(pooling, pending, sources, None, cos, cos, new(20, dtype=torch.int64), rows)


def chosen_tokens(num_heads: int, dtype: torch.dtype, *, first: int = 0, top_k: int = 2048) -> None:
    """Of 163,840 tokens, which takes three levels."""
    group = chosen_group(64, 163_840)
    queries, keys = new((64, num_heads, 128), dtype=dtype), new((64, 128), dtype=dtype)
    pages, slots = new((100, 16, 128), dtype=dtype), new(64, dtype=torch.int64)
    table = new((64, 1, 64), dtype=dtype)
    for given in (queries, None):
        choices.rotate_and_write_keys(given, keys, table, table, slots, pages, first=first)
    scores = choices.score(queries, new((64, num_heads), dtype=F32), group, pages)
    choices.choose(scores, group, top_k)


def chosen_blocks(dtype: torch.dtype, *, num_heads: int, size: int, top_blocks: int, longest: int) -> None:
    """Of up to `longest` blocks of `size` tokens."""
    table = new((64, 1, 128), dtype=dtype)
    norm = KernelNorm(NormKind.RMS_OFFSET, 1e-6, new(128, dtype=F32))
    projected, pages = new((64, (num_heads + 1) * 128), dtype=dtype), new((100, 16, 128), dtype=dtype)
    slots, queries = new(64, dtype=torch.int64), None
    for has_queries in (False, True):
        queries = block_keys.write_keys(
            projected, num_heads, norm, table, table, slots, pages, has_queries=has_queries
        )
    assert queries is not None
    blocks = block_work.SequenceBlocks(
        sequences=new((8, block_work.SEQUENCE_FIELDS), dtype=torch.int32),
        table=new(1000, dtype=torch.int32),
        num_blocks=8 * longest,
        longest=longest,
    )
    keys = block_keys.block_keys(pages, blocks, size, norm, table, table)
    group = replace(chosen_group(64, longest), table=None)
    scores = choices.score(queries, None, group, keys[:, None], ratio=size)
    choices.choose(scores, group, top_blocks, has_last=True)


def norms(width: int, kind: NormKind, dtype: torch.dtype) -> None:
    operations = TritonOperations()
    norm = operations.norm(Norm(kind=kind, eps=1e-5), NormWeights(new(width, dtype=dtype), None))
    norm(new((128, width), dtype=dtype))
    for rows in (None, new(64, dtype=torch.int64)):
        operations.final_norm(new((128, width), dtype=dtype), rows, norm)
    operations.add_and_norm(new((128, width), dtype=dtype), new((128, width), dtype=dtype), None, 1.0, norm)
    operations.add_and_norm(new((128, width), dtype=dtype), new((128, width), dtype=dtype), norm, 0.5, norm)


def gate(activation: Activation | ClampedSwiGlu, dtype: torch.dtype) -> None:
    gates.gate(new((128, 28672), dtype=dtype), activation)


def experts(num_rows: int, dtype: torch.dtype, *, has_bias: bool = False) -> None:
    biases = new((128, 1536), dtype=dtype) if has_bias else None
    matrices, counts = new((128, 1536, 2048), dtype=dtype), new(128, dtype=torch.int64)
    expert_products(new((num_rows, 2048), dtype=dtype), counts, matrices, biases)


def row(num_rows: int, num_columns: int, dtype: torch.dtype) -> None:
    bias = None if num_rows % 4 == 0 else new(num_rows, dtype=dtype)
    x, matrix = new((1, num_columns), dtype=dtype), new((num_rows, num_columns), dtype=dtype)
    row_product(x, matrix, bias)
    row_product(x, matrix, bias, new((1, num_rows), dtype=dtype))


ROW_COUNTS = {"decode": 8, "decodes": 24, "prompt": 512}


def nibbles(num_rows: int, dtype: torch.dtype, *, group: int, experts: int = 1, **parts: torch.dtype) -> None:
    """`parts` are dtypes of optional tensors of a matrix of 4 bits; `floats` is that of scales of E2M1."""
    plan = HeldNibbles(
        rows=experts * (5760 if experts > 1 else 28672),
        columns=2880 if experts > 1 and group <= 64 else 4096,
        group=group,
        experts=experts,
        has_zeros="zeros" in parts,
        has_order="order" in parts,
        is_float="floats" in parts,
        has_exponents=parts.get("floats") is torch.uint8,
    )
    of_groups = (plan.num_groups, plan.rows)
    matrix = NibbleMatrix(
        plan=plan,
        codes=new((plan.rows, plan.row_bytes), dtype=torch.uint8),
        scales=new(of_groups, dtype=parts.get("floats", parts.get("offsets", F32))),
        zeros=new(of_groups, dtype=parts["zeros"]) if "zeros" in parts else None,
        offsets=new(of_groups, dtype=parts["offsets"]) if "offsets" in parts else None,
        order=new((experts, plan.columns), dtype=parts["order"]) if "order" in parts else None,
    )
    x = new((num_rows, plan.columns), dtype=dtype)
    if experts > 1:
        biases = new((experts, 5760), dtype=dtype) if "floats" in parts else None
        nibble_expert_products(x, new(experts, dtype=torch.int64), matrix, biases)
    else:
        nibble_product(x, matrix, None, new((num_rows, 28672), dtype=dtype))


def octets(
    num_rows: int, dtype: torch.dtype, *, height: int, width: int, is_fp8: bool, experts: int = 1
) -> None:
    plan = HeldBytes(
        rows=experts * 4096,
        columns=7168 if experts > 1 else 14336,
        height=height,
        width=width,
        is_fp8=is_fp8,
        experts=experts,
    )
    matrix = ByteMatrix(
        plan=plan,
        codes=new((plan.rows, plan.columns), dtype=torch.uint8),
        scales=new((plan.num_blocks, plan.num_row_blocks), dtype=F32),
    )
    if experts > 1:
        x = new((num_rows, plan.columns), dtype=dtype)
        byte_expert_products(x, new(experts, dtype=torch.int64), matrix)
        return
    bias = new(plan.rows, dtype=dtype)
    byte_product(new((num_rows, plan.columns), dtype=dtype), matrix, bias, None)


def wire_rows(scaled: ScaledDType, dtype: torch.dtype) -> None:
    payload = wire.scale_rows(new((128, 8192), dtype=dtype), scaled)
    wire.unscale_rows(payload, scaled, (128, 8192), dtype)


def payload_sums(num_words: int, first: int) -> None:
    checksum(new(num_words, dtype=torch.int32), first)


def _held_cases() -> dict[str, Callable[[], None]]:
    gptq = partial(nibbles, group=128, zeros=torch.uint8, order=torch.int32)
    fp8 = partial(octets, height=128, width=128, is_fp8=True)
    cases: dict[str, Callable[[], None]] = {}
    for phase, num_rows in ROW_COUNTS.items():
        for name, dtype in DTYPES.items():
            cases[f"gptq-{phase}-{name}"] = partial(gptq, num_rows, dtype)
            cases[f"fp8-blocks-{phase}-{name}"] = partial(fp8, num_rows, dtype)
            for form, (group, scales) in {"mxfp4": (32, torch.uint8), "nvfp4": (16, F32)}.items():
                cases[f"{form}-{phase}-{name}"] = partial(
                    nibbles, num_rows, dtype, group=group, floats=scales
                )
        for name, case in {
            "int4": partial(nibbles, group=128),
            "quantize-int4": partial(nibbles, group=32, offsets=BF16),
            "fp8-rows": partial(octets, height=1, width=0, is_fp8=True),
            "int8-rows": partial(octets, height=1, width=0, is_fp8=False),
        }.items():
            cases[f"{name}-{phase}"] = partial(case, num_rows, BF16)
    return cases | _held_expert_cases()


EXPERT_ROW_COUNTS = {"decode": 64, "decodes": 4096, "prompt": 65536}
"""Rows that choose 128 experts, for each of the tiles."""


def _held_expert_cases() -> dict[str, Callable[[], None]]:
    forms: dict[str, Callable[..., None]] = {
        "mxfp4": partial(nibbles, group=32, floats=torch.uint8),
        "nvfp4": partial(nibbles, group=16, floats=F32),
        "gptq": partial(nibbles, group=128, zeros=torch.uint8, order=torch.int32),
        "quantize-int4": partial(nibbles, group=32, offsets=BF16),
        "fp8-blocks": partial(octets, height=128, width=128, is_fp8=True),
        "int8-rows": partial(octets, height=1, width=0, is_fp8=False),
    }
    wide = ("mxfp4", "fp8-blocks")
    cases: dict[str, Callable[[], None]] = {}
    for phase, num_rows in EXPERT_ROW_COUNTS.items():
        for form, case in forms.items():
            for name, dtype in DTYPES.items():
                if dtype is BF16 or form in wide:
                    key = f"experts-{form}-{phase}-{name}"
                    cases[key] = partial(case, num_rows, dtype, experts=128)
    return cases


DTYPES = {"bf16": BF16, "f16": F16, "f32": F32}


def sampled(vocab_size: int, *, is_edited: bool = False, is_greedy: bool = False) -> None:
    logits = new((64, vocab_size), dtype=F32)
    scores = new((64, vocab_size), dtype=F32) if is_edited else logits
    reals, top_k = new((4, 64), dtype=torch.float64), new(64, dtype=torch.int64)
    if is_greedy:
        sampling.choose(logits, scores, None, None)
    else:
        sampling.choose(logits, scores, reals, top_k)


def recurrent(mixer: Recurrent, dtype: torch.dtype, *, has_longer: bool) -> None:
    numbers = new(mixer.num_heads, dtype=F32)
    conv = new((mixer.conv_size, 1, mixer.kernel_size), dtype=dtype)
    unused: Any = None
    if isinstance(mixer, GatedDelta):
        norm = new(mixer.value_dim, dtype=dtype)
        delta = DeltaWeights(input=unused, conv=conv, decay=numbers, dt_bias=numbers, norm=norm)
        function: StateFunction = FusedDelta(mixer, delta)
        width = mixer.conv_size + mixer.o_size + 2 * mixer.num_heads
    elif isinstance(mixer, KimiDelta):
        up, norm = new((mixer.q_size, mixer.rank), dtype=dtype), new(mixer.head_dim, dtype=dtype)
        ups: dict[str, Any] = {"decay_up": up, "gate_up": up, "dt_bias": new(mixer.q_size, dtype=F32)}
        kimi = KimiDeltaWeights(**ups, input=unused, conv=conv, decay=numbers, norm=norm)
        function = FusedChannelDelta(mixer, kimi, BatchedGates(up, up))
        width = mixer.conv_size + mixer.num_heads + 2 * mixer.rank
    else:
        bias, norm = new(mixer.conv_size, dtype=dtype), new(mixer.o_size, dtype=dtype)
        given: dict[str, Any] = {"input": unused, "input_bias": None, "conv": conv, "conv_bias": bias}
        mamba = MambaWeights(**given, decay=numbers, dt_bias=numbers, skip=numbers, norm=norm)
        function, width = FusedScan(mixer, mamba), mixer.in_size
    parts = [new((100, *part.shape), dtype=F32 if part.is_wide else dtype) for part in mixer.state_parts]
    rows = StateRows(has_longer=has_longer, sequences=new((64, SEQUENCE_FIELDS), dtype=torch.int32))
    step: Any = SimpleNamespace(states=rows, num_tokens=128)
    function(new((128, width), dtype=dtype), LayerStates(step, parts))


DEEPSEEK_V4 = HyperConnection(num_streams=4, norm_eps=1e-6, gate_eps=1e-6, mixing_rounds=20)
HY_V4 = HyperConnection(num_streams=4, norm_eps=1e-5, gate_eps=1e-6, write_eps=1e-6)
QWEN3_8 = GatedConnection(num_streams=4, rank=320, norm_eps=1e-6)
COLLAPSE = WeightedCollapse(num_streams=4, norm_eps=1e-6, gate_eps=1e-6)


StreamPlan = HyperConnection | GatedConnection | WeightedCollapse


def streams_of(plan: StreamPlan, hidden_size: int, dtype: torch.dtype) -> None:
    operations = TritonOperations()
    of_plan = F32 if plan.is_wide else dtype
    tensors = {kind: new(shape, dtype=of_plan) for kind, shape in plan.shapes(hidden_size).items()}
    streams, result = new((128, 4 * hidden_size), dtype=dtype), new((128, hidden_size), dtype=dtype)
    if isinstance(plan, WeightedCollapse):
        operations.collapse(plan, tensors)(streams)
        return
    norm = None
    if isinstance(plan, HyperConnection):
        norm = operations.norm(Norm(eps=1e-6), NormWeights(new(hidden_size, dtype=dtype), None))
    _, weights = operations.connection(plan, tensors, norm)(streams)
    operations.written(streams, result, weights)


def _stream_cases() -> dict[str, Callable[[], None]]:
    plans: dict[str, tuple[StreamPlan, int]] = {
        "v4-flash": (DEEPSEEK_V4, 4096),
        "v4-pro": (DEEPSEEK_V4, 7168),
        "hy4": (HY_V4, 4096),
        "qwen3_8": (QWEN3_8, 2560),
        "collapsed-v4-pro": (COLLAPSE, 7168),
    }
    return {
        f"streams-{family}-{name}": partial(streams_of, *plan, dtype)
        for family, plan in plans.items()
        for name, dtype in DTYPES.items()
    }


QWEN3_5 = GatedDelta(num_heads=32, num_key_heads=16, key_dim=128, value_dim=128, kernel_size=4, norm_eps=1e-6)
GRANITE_4 = Mamba2(
    num_heads=128, head_dim=64, num_head_groups=1, state_size=128, kernel_size=4, norm_eps=1e-5
)
FALCON_H1 = Mamba2(
    num_heads=32, head_dim=128, num_head_groups=2, state_size=256, kernel_size=4, norm_eps=1e-5
)
KIMI_LINEAR = KimiDelta(num_heads=32, head_dim=128, rank=128, kernel_size=4, norm_eps=1e-5)
STATE_MIXERS: dict[str, Recurrent] = {
    "qwen3_5": QWEN3_5,
    "granite4": GRANITE_4,
    "nemotron_h": replace(GRANITE_4, num_head_groups=8),
    "falcon_h1": FALCON_H1,
    "kimi_linear": KIMI_LINEAR,
}


QWEN4_NGRAMS = NgramEmbedding(
    size=3,
    heads_per_size=8,
    head_dim=160,
    num_rows=320_001_536,
    num_shards=128,
    kernel_size=4,
    separator=248_044,
    hidden_size=2560,
    num_streams=4,
    norm_eps=1e-6,
)


def ngrams(plan: NgramEmbedding, dtype: torch.dtype, *, has_longer: bool) -> None:
    """The layer's addition to the streams; its products are torch's."""
    numbers = {
        name: new(size, dtype=torch.int64)
        for name, size in (("multipliers", plan.size), ("sizes", plan.num_heads), ("offsets", plan.num_heads))
    }
    norms = {name: new(plan.channels, dtype=dtype) for name in ("key_norm", "stream_norm", "conv_norm")}
    weights = NgramWeights(
        **numbers,
        **norms,
        table=new((plan.num_rows, plan.head_dim), dtype=dtype),
        key=new((plan.channels, plan.width), dtype=dtype),
        value=new((plan.hidden_size, plan.width), dtype=dtype),
        conv=new((plan.channels, 1, plan.kernel_size), dtype=dtype),
    )
    own = [new((100, *part.shape), dtype=F32 if part.is_wide else dtype) for part in plan.state_parts]
    rows = StateRows(has_longer=has_longer, sequences=new((64, SEQUENCE_FIELDS), dtype=torch.int32))
    step: Any = SimpleNamespace(states=rows, num_tokens=128, token_ids=new(128, dtype=torch.int64))
    memory = LayerStates(step, [new(0, dtype=dtype), new(0, dtype=F32), *own])
    FusedNgrams(plan, weights, PLAIN)(new((128, plan.channels), dtype=dtype), memory)


def _ngram_cases() -> dict[str, Callable[[], None]]:
    return {
        f"ngrams-{phase}-{name}": partial(ngrams, QWEN4_NGRAMS, dtype, has_longer=phase == "chunks")
        for phase in ("decodes", "chunks")
        for name, dtype in DTYPES.items()
    }


def _state_cases() -> dict[str, Callable[[], None]]:
    return {
        f"{family}-{phase}-{name}": partial(recurrent, mixer, dtype, has_longer=phase == "chunks")
        for family, mixer in STATE_MIXERS.items()
        for phase in ("decodes", "chunks")
        for name, dtype in DTYPES.items()
    }


def _cases() -> dict[str, Callable[[], None]]:
    cases: dict[str, Callable[[], None]] = {}
    for is_decode, phase in ((True, "decode"), (False, "prompt")):
        for name, dtype in (("bf16", BF16), ("f16", F16), ("f32", F32)):
            cases[f"llama-{phase}-{name}"] = partial(attention, 32, 8, 128, dtype, is_decode=is_decode)
        cases[f"gpt_oss-{phase}"] = partial(
            attention, 64, 8, 64, BF16, is_decode=is_decode, window=128, sinks=new(64, dtype=F32)
        )
        cases[f"gemma2-{phase}"] = partial(
            attention, 8, 4, 256, BF16, is_decode=is_decode, window=4096, softcap=50.0
        )
        cases[f"phi3-{phase}"] = partial(attention, 32, 32, 96, BF16, is_decode=is_decode)
        for element in (torch.float8_e4m3fn, torch.int8):
            name = str(element).removeprefix("torch.")
            cases[f"llama-{phase}-{name}"] = partial(
                attention, 32, 8, 128, BF16, is_decode=is_decode, element=element
            )
    for name, dtype in (("bf16", BF16), ("f16", F16), ("f32", F32)):
        if dtype is not F32:
            latents = partial(attention, 128, 1, 512, dtype, is_decode=True, tail=64)
            cases[f"latents-{name}"] = latents
            cases[f"chosen-latents-{name}"] = partial(latents, chosen=new((100, 2048), dtype=torch.int32))
            cases[f"choices-{name}"] = partial(chosen_tokens, 64, dtype)
            cases[f"choices-of-entries-{name}"] = partial(chosen_entries, dtype)
        cases[f"chosen-blocks-{name}"] = partial(
            attention, 24, 2, 256, dtype, is_decode=True, chosen=new((100, 513), dtype=torch.int32), unit=4
        )
        cases[f"choices-blocks-{name}"] = partial(
            chosen_blocks, dtype, num_heads=4, size=4, top_blocks=512, longest=65_536
        )
        cases[f"heads-{name}"] = partial(head_step, 32, 8, 128, dtype)
        cases[f"norms-{name}"] = partial(norms, 8192, NormKind.RMS, dtype)
        cases[f"gate-{name}"] = partial(gate, Activation.SILU, dtype)
        cases[f"experts-{name}"] = partial(experts, 4096, dtype)
    for name, dtype in (("bf16", BF16), ("f16", F16)):
        cases[f"row-{name}"] = partial(row, 28672, 4096, dtype)
        cases[f"odd-row-{name}"] = partial(row, 50_257, 2880, dtype)
    for element in (torch.float8_e4m3fn, torch.int8):
        name = str(element).removeprefix("torch.")
        cases[f"chosen-latents-{name}"] = partial(
            latents, element=element, chosen=new((100, 2048), dtype=torch.int32)
        )
        blocks = partial(attention, 24, 2, 256, BF16, is_decode=True, unit=4)
        cases[f"chosen-blocks-{name}"] = partial(
            blocks, element=element, chosen=new((100, 513), dtype=torch.int32)
        )
        cases[f"last-rotations-{name}"] = partial(last_rotations, 64, BF16, pending=1024, element=element)
    cases["choices-long-blocks"] = partial(
        chosen_blocks, BF16, num_heads=16, size=64, top_blocks=32, longest=4096
    )
    for name, dtype in DTYPES.items():
        cases[f"last-rotations-{name}"] = partial(last_rotations, 128, dtype, pending=2560)
        cases[f"pooling-overlap-{name}"] = partial(
            pooled_entries, Compressor(ratio=4, has_overlap=True), dtype
        )
        cases[f"pooling-{name}"] = partial(pooled_entries, Compressor(ratio=128), dtype)
    cases["last-rotations-without-entries"] = partial(last_rotations, 64, BF16)
    cases["choices-few-heads"] = partial(chosen_tokens, 32, BF16, first=64, top_k=1000)
    cases["experts-many-rows"] = partial(experts, 65536, BF16)
    cases["experts-with-biases"] = partial(experts, 4096, BF16, has_bias=True)
    cases["heads-qk-norm-fp8"] = partial(
        head_step, 8, 4, 256, BF16, has_norm=True, element=torch.float8_e4m3fn
    )
    cases["heads-qk-norm-int8"] = partial(head_step, 64, 4, 128, BF16, has_norm=True, element=torch.int8)
    for kind in NormKind:
        cases[f"norms-{kind.name.lower()}"] = partial(norms, 4096, kind, BF16)
    for activation in (Activation.GELU, Activation.GELU_TANH):
        cases[f"gate-{activation.value}"] = partial(gate, activation, BF16)
    for scaled in ScaledDType:
        for name, dtype in DTYPES.items():
            cases[f"wire-{scaled.value}-{name}"] = partial(wire_rows, scaled, dtype)
    cases["payload-sums"] = partial(payload_sums, 1 << 22, 0)
    for vocab_size in (257, 4096, 32_000, 50_257, 128_256, 262_144):
        cases[f"sampled-{vocab_size}"] = partial(sampled, vocab_size)
    cases["sampled-edited"] = partial(sampled, 151_936, is_edited=True)
    cases["sampled-greedy"] = partial(sampled, 151_936, is_greedy=True)
    cases["gate-clamped"] = partial(gate, ClampedSwiGlu(alpha=1.7, limit=7.0), BF16)
    cases["gate-clamped-silu"] = partial(gate, ClampedSwiGlu(alpha=1.0, limit=7.0, offset=0.0), BF16)
    return cases


def _compressed_cases() -> dict[str, Callable[[], None]]:
    """DeepSeek V4 Flash has 64 heads and chooses 512 entries, V4 Pro 128 and 1,024."""
    cases: dict[str, Callable[[], None]] = {}
    for is_decode, phase in ((True, "decode"), (False, "prompt")):
        case = partial(compressed, 64, is_decode=is_decode)
        for name, dtype in (("bf16", BF16), ("f16", F16)):
            cases[f"compressed-chosen-{phase}-{name}"] = partial(case, dtype, top_k=512)
        cases[f"compressed-128-{phase}"] = partial(case, BF16, ratio=128)
        cases[f"compressed-128-{phase}-fp8"] = partial(case, BF16, ratio=128, element=torch.float8_e4m3fn)
        cases[f"compressed-128-{phase}-int8"] = partial(case, BF16, ratio=128, element=torch.int8)
        cases[f"compressed-chosen-{phase}-int8"] = partial(case, BF16, top_k=512, element=torch.int8)
        window = partial(attention, 64, 1, 512, BF16, is_decode=is_decode, are_shared=True, window=128)
        window = partial(window, sinks=new(64, dtype=F32))
        kind = "decode" if is_decode else "chunk"  # of 32 rows a program
        cases[f"compressed-window-{kind}"] = window
        cases[f"compressed-window-{kind}-fp8"] = partial(window, element=torch.float8_e4m3fn)
        cases[f"compressed-window-{kind}-int8"] = partial(window, element=torch.int8)
        of_pro = partial(compressed, 128, BF16, is_decode=is_decode)
        cases[f"compressed-chosen-{phase}-128-heads"] = partial(of_pro, top_k=1024)
    return cases


CASES = _cases() | _held_cases() | _state_cases() | _ngram_cases() | _stream_cases() | _compressed_cases()

_TYPES = {
    BF16: "*bf16",
    F16: "*fp16",
    F32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Recorded:
    launched: launch.Launch
    arguments: tuple[Any, ...]

    def source(self) -> ASTSource:
        """As Triton specialises it: pointers and multiples of 16 are known to be such, 1 is a constant."""
        kernel = self.launched.kernel
        signature, constants, attributes = {}, {}, {}
        given = dict(zip(kernel.arg_names, self.arguments, strict=False)) | dict(self.launched.constants)
        for index, name in enumerate(kernel.arg_names):
            value = given[name]
            parameter = kernel.params[index]
            is_general = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
            kind = "constexpr" if name in self.launched.constants else _type_of(value, is_general=is_general)
            signature[name] = kind
            if kind == "constexpr":
                constants[index,] = value
            elif not is_general and (
                isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)
            ):
                attributes[index,] = [["tt.divisibility", 16]]
        made = GluonASTSource if kernel.is_gluon() else ASTSource
        return made(kernel, signature, constants, attributes)


def _type_of(value: Any, *, is_general: bool) -> str:
    if value is None or (isinstance(value, int) and value == 1 and not is_general):
        return "constexpr"
    if isinstance(value, Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return str(mangle_type(value))
    return "i32" if isinstance(value, int) else "fp32"


@pytest.mark.parametrize("capability", SHARED_BYTES, ids=lambda capability: f"sm_{capability}")
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_without_spills(
    case: str, capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kernel.cubin"
    for compiled in compiled_kernels(case, capability, monkeypatch):
        assert compiled.metadata.shared <= SHARED_BYTES[capability] * KIB
        file.write_bytes(compiled.asm["cubin"])
        assert _local_bytes(file) <= _most_local_bytes(case, capability), compiled.metadata.name
        check_products(case, capability, _products(compiled), _tensor_cores(file))


def compiled_kernels(case: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[CompiledKernel]:
    """Each of the kernels that `case` starts, for a GPU of `capability`."""
    recorded: list[Recorded] = []
    monkeypatch.setattr(
        launch.Launch, "__call__", lambda launched, *arguments: recorded.append(Recorded(launched, arguments))
    )
    monkeypatch.setattr(attention_kernels, "is_hopper", lambda device: capability == HOPPER)
    monkeypatch.setattr(compressed_kernels, "has_long_tiles", lambda device: capability in ASYNCHRONOUS)
    CASES[case]()
    assert recorded
    for one in recorded:
        options = {"num_warps": one.launched.num_warps, "num_stages": one.launched.num_stages}
        yield triton.compile(one.source(), GPUTarget("cuda", capability, 32), options)


def test_softmax_of_prompts_on_hopper_is_computed_beside_products(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The assembler may move a wait for a product of matrices before the exponentials."""
    file = tmp_path / "kernel.cubin"
    (compiled,) = compiled_kernels("llama-prompt-bf16", HOPPER, monkeypatch)
    file.write_bytes(compiled.asm["cubin"])
    machine_code = _dumped("-sass", file)
    assert "UTMALDG" in machine_code
    between = re.findall(r"gsb0, 0x1 ;(.*?)gsb0, 0x0 ;", machine_code, re.DOTALL)
    assert len(between) == 4, "loops over masked and other tiles, of two groups of warps"
    assert all(part.count("MUFU.EX2") >= 64 for part in between)


def _most_local_bytes(case: str, capability: int) -> int:
    """No spills; but Hopper takes prompts in the fastest tile, whose few spills cost less than a smaller one:
    358 against 317 TFLOP/s for 2,048 queries behind 30,720 on an H200.
    """
    return 256 if capability == HOPPER and case in SPILLING_ON_HOPPER else 0


class Product(NamedTuple):
    """Precision and dtype of the operands of a product of matrices."""

    precision: str
    dtype: str


ASYNCHRONOUS = {90: "HGMMA", 100: "UTCHMMA"}
"""Products of bf16 and f16 that read their operands from shared memory, by several warps."""
WITH_LONG_TILES = re.compile(r"(?!.*-f32|compressed.*int8|compressed.*fp8).*-prompt.*|experts-many-rows")
"""Cases whose tiles have the 64 rows that these need."""
_DOT = re.compile(r"tt\.dot [^:]*?(?:inputPrecision = (\w+) )?: tensor<[0-9x]+x(\w+)>")
_GROUP_DOT = re.compile(r"warp_group_dot ()[^>]*?memdesc<[0-9x]+x(\w+),")


def _products(compiled: CompiledKernel) -> list[Product]:
    """Kernels of Gluon have no code for all GPUs."""
    is_general = "ttir" in compiled.asm
    found = _DOT.findall(compiled.asm["ttir"]) if is_general else _GROUP_DOT.findall(compiled.asm["ttgir"])
    return [Product(*one) for one in found]


def check_products(case: str, capability: int, products: Sequence[Product], found: set[str]) -> None:
    """A kernel has `products` exactly if it has instructions `found` of tensor cores.

    Products of float32 have three parts of tf32: one alone would keep 10 bits.
    """
    assert bool(found) == bool(products), f"{products} by {found or 'no tensor cores'}"
    assert all(one.precision == "tf32x3" for one in products if one.dtype == "f32"), products
    if products and WITH_LONG_TILES.fullmatch(case) and capability in ASYNCHRONOUS:
        assert ASYNCHRONOUS[capability] in found, found


@pytest.mark.parametrize(
    ("products", "found"),
    [
        ([Product("", "bf16")], set()),
        ([], {"HMMA"}),
        ([Product("tf32", "f32")], {"HGMMA"}),
        ([Product("", "f16")], {"HMMA"}),
    ],
    ids=["no tensor cores", "no products", "one part", "synchronous"],
)
def test_products_on_other_units_than_expected_are_found(products: list[Product], found: set[str]) -> None:
    with pytest.raises(AssertionError):
        check_products("llama-prompt-f16", 90, products, found)


_USAGE = re.compile(r"STACK:(\d+).*?LOCAL:(\d+)")
_TENSOR_CORE = re.compile(r"\b([A-Z]+MMA)\b")


def _local_bytes(cubin: Path) -> int:
    """Local memory and stack of one thread: where registers are spilled to."""
    printed = _dumped("-res-usage", cubin)
    found = _USAGE.search(printed)
    assert found is not None, printed
    return int(found[1]) + int(found[2])


def _tensor_cores(cubin: Path) -> set[str]:
    """Instructions of tensor cores in the machine code."""
    return set(_TENSOR_CORE.findall(_dumped("-sass", cubin)))


def _dumped(option: str, cubin: Path) -> str:
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, option, cubin], capture_output=True, text=True, check=True).stdout


def test_prompts_on_hopper_do_without_a_gluon_of_another_form(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[str] = []
    monkeypatch.setattr(
        launch.Launch, "__call__", lambda launched, *_: started.append(launched.kernel.fn.__name__)
    )
    monkeypatch.setattr(attention_kernels, "is_hopper", lambda device: True)
    monkeypatch.setattr(attention_kernels, "_HOPPER_ATTENTION", "stage_worker.model.triton_kernels.missing")
    attention_kernels.hopper_attention.cache_clear()
    for _ in range(2):
        CASES["llama-prompt-bf16"]()
    attention_kernels.hopper_attention.cache_clear()
    assert started == ["attend_kernel"] * 2
    assert [record.message for record in caplog.records] == [
        "prompts on Hopper take the slower kernel of other GPUs: "
        "No module named 'stage_worker.model.triton_kernels.missing'"
    ]
