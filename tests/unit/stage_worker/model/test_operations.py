"""Norms, rotation, gates and attention of one query, against their formulas written out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from checkpoint import Attention, Checkpoint, Norm
from stage_worker.model.attention_views import ViewRules
from stage_worker.model.decoder_layer import attend
from stage_worker.model.kernels import ALL_COMPILED, PLAIN, Kernels
from stage_worker.model.norms import NormWeights, rms_norm
from stage_worker.model.operations import Operations, attend_prompt, operations
from stage_worker.model.rope import Rope, Rotary, rotate_
from stage_worker.model.step_layout import LayerKv, StepArrays, StepLayout
from stage_worker.validation import SliceLayout
from tests.checkpoints import make_checkpoint
from tests.step_layouts import layout_by
from tests.unit.stage_worker.model.kernel_choices import CHOICES, IN_PLACE, PRODUCTS, skip_unless_possible
from tests.unit.stage_worker.model.pipeline import NanPages

DTYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, BLOCK = 6, 2, 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_checkpoint(tmp_path_factory.mktemp("m"), "llama", num_layers=1, head_dim=32))


@pytest.fixture
def native(checkpoint: Checkpoint) -> Operations:
    skip_unless_possible(IN_PLACE, checkpoint.config)
    return operations(IN_PLACE)


def _rope(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Rope:
    mixer = checkpoint.config.layers[0].mixer
    return Rope(mixer.rope, mixer.head_dim, dtype, device)


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def differs_by_roundings(found: Tensor, expected: Tensor, *, share: float) -> bool:
    """bfloat16 values are equal but for a share of them, which differ by one step of the last bit."""
    different = found != expected
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-6)
    return float(different.float().mean()) <= share


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 48), (7, 768), (3, 5, 64)])
def test_the_norm_equals_transformers_bit_by_bit(size: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*size, dtype=dtype), random(size[-1], dtype=dtype, seed=1)
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), weight * (wide * scale).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_equals_transformers_bit_by_bit(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    positions = torch.tensor([0, 3, 700, 16_383, 20_000])
    cos, sin = _rope(checkpoint, dtype, torch.device("cpu")).cos_sin(positions, end=20_001)
    angles = positions[:, None] * (1.0 / 10_000.0 ** (torch.arange(0, 32, 2) / 32))
    doubled = torch.cat((angles, angles), dim=-1)[:, None]
    plain_cos, plain_sin = doubled.cos().to(dtype), doubled.sin().to(dtype)
    x = random(5, HEADS, 32, dtype=dtype)
    first, second = x.chunk(2, dim=-1)
    expected = x * plain_cos + torch.cat((-second, first), dim=-1) * plain_sin
    rotate_(x, cos, sin)
    assert torch.equal(x, expected)


def test_cached_angles_equal_computed_ones(checkpoint: Checkpoint) -> None:
    rope = _rope(checkpoint, torch.bfloat16, torch.device("cpu"))
    alone = [rope.cos_sin(torch.tensor([position]), end=position + 1) for position in (5, 900, 40_000)]
    both = rope.cos_sin(torch.tensor([5, 900, 40_000]), end=40_001)
    for together, single in zip(both, zip(*alone, strict=True), strict=True):
        assert torch.equal(together, torch.cat(single))


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("width", [16, 768])
def test_the_compiled_norm_rounds_where_the_plain_one_does(rows: int, width: int, native: Operations) -> None:
    x, weight = random(rows, width, dtype=torch.bfloat16), random(width, dtype=torch.bfloat16, seed=1)
    found = native.norm(Norm(eps=1e-5), NormWeights(weight, None))(x)
    assert differs_by_roundings(found, rms_norm(x, weight, 1e-5), share=0.01)


def test_the_compiled_gate_rounds_where_the_plain_one_does(native: Operations) -> None:
    both = random(6, 2 * 112, dtype=torch.bfloat16) * 8
    both[0, :8] = torch.tensor([0.0, -0.0, 100.0, -100.0, 3e38, -3e38, 1e-30, -90.0])
    assert differs_by_roundings(native.gate(both), operations(PLAIN).gate(both), share=0.01)
    both[1, 3] = float("nan")
    assert native.gate(both).isnan().nonzero().tolist() == [[1, 3]]


def layout(
    checkpoint: Checkpoint, kernels: Kernels, slices: list[SliceLayout], window: int | None
) -> StepLayout:
    device, mixer = torch.device("cpu"), checkpoint.config.layers[0].mixer
    arrays = StepArrays.build(
        slices,
        windows=[window],
        rules=ViewRules(
            device=device, block_size=BLOCK, dtype=torch.bfloat16, kernels=kernels, max_keys=1 << 20
        ),
    )
    return layout_by(arrays, {Rotary.of(mixer): Rope(mixer.rope, mixer.head_dim, torch.bfloat16, device)})


def mixer_of(head_dim: int, window: int | None = None) -> Attention:
    return Attention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        rope=None,
        scale=head_dim**-0.5,
        window=window,
    )


def test_compiled_rotation_and_writes_equal_torch_bit_by_bit(
    native: Operations, checkpoint: Checkpoint
) -> None:
    slices = [
        SliceLayout(first_position=6, num_tokens=4, pages=(3, 1), num_valid=8),
        SliceLayout(first_position=17, num_tokens=1, pages=(5, 2, 0)),
        SliceLayout(first_position=0, num_tokens=3, pages=(6,)),
    ]
    step = layout(checkpoint, IN_PLACE, slices, None)
    heads = random(8, HEADS + 2 * KV_HEADS, 32, dtype=torch.bfloat16)
    stores, turned = [], []
    for chosen in (native, operations(PLAIN)):
        pages, mine = NanPages(2, 8, BLOCK, KV_HEADS, 32, torch.bfloat16), heads.clone()
        chosen.rotate_and_write(mine, HEADS, *step.rotary.values(), LayerKv(step, pages, 1))
        stores.append(pages.contents())
        turned.append(mine)
    assert torch.equal(*turned)
    assert torch.equal(stores[0].isnan(), stores[1].isnan())
    assert torch.equal(*(store.nan_to_num() for store in stores))
    assert int((~stores[0].isnan()).sum()) == 6 * 2 * KV_HEADS * 32


WITH_SINKS = "products with sinks"


def sinks_of(choice: str) -> Tensor | None:
    """One that takes all, one that takes nothing, and some between."""
    return torch.tensor([0.0, 30.0, -30.0, 1.0, 3.0, 6.0]) if choice == WITH_SINKS else None


def attention_by_formula(query: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None) -> Tensor:
    """float64 [heads, head_dim] of one query [heads, head_dim] over [s, kv_heads, head_dim]."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,shd->hs", query.double(), keys) / math.sqrt(query.shape[-1])
    sink = torch.zeros(HEADS) if sinks is None else sinks.double().exp()
    weights = scores.exp() / (scores.exp().sum(-1) + sink)[:, None]
    return torch.einsum("hs,shd->hd", weights, values)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 11, 100])
@pytest.mark.parametrize("choice", [*CHOICES, WITH_SINKS])
def test_attention_of_one_query_equals_the_formula(
    choice: str, window: int | None, head_dim: int, checkpoint: Checkpoint
) -> None:
    kernels = CHOICES.get(choice, PRODUCTS)
    skip_unless_possible(kernels, checkpoint.config)
    lengths = [1, 8, 9, 16, 33, 150, 260]
    blocks = iter(torch.randperm(128, generator=torch.Generator().manual_seed(4)).tolist())
    tables = [[next(blocks) for _ in range(-(-length // BLOCK))] for length in lengths]
    pages = NanPages(1, 128, BLOCK, KV_HEADS, head_dim, torch.bfloat16)
    slices, contents = [], []
    for index, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        slices.append(SliceLayout(first_position=length - 1, num_tokens=1, pages=table))
        tokens = random(length, 2 * KV_HEADS, head_dim, dtype=torch.bfloat16, seed=index)
        tokens[:, :KV_HEADS] *= 3  # scores of several units, which rounding to bfloat16 would spoil
        contents.append(tokens)
        pages.clear(torch.tensor(table[-1:]))
        slots = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)]
        pages.write(0, tokens, torch.tensor(slots))
    query = random(len(lengths), HEADS, head_dim, dtype=torch.bfloat16, seed=99)
    output = torch.full_like(query, float("nan"))
    step = layout(checkpoint, kernels, slices, window)
    for view in step.views[window].decodes:
        mixer, kv = mixer_of(head_dim, window), LayerKv(step, pages, 0)
        operations(kernels).decode(query, output, view, mixer, kv, sinks_of(choice))
    expected = torch.stack(
        [
            attention_by_formula(
                query[i],
                tokens[-(window or len(tokens)) :, :KV_HEADS],
                tokens[-(window or len(tokens)) :, KV_HEADS:],
                sinks_of(choice),
            )
            for i, tokens in enumerate(contents)
        ]
    )
    error = (output.double() - expected).abs()
    assert float(error.max()) < 0.02
    assert float(error.square().mean().sqrt()) < 0.003


PROMPTS = [(0, 2), (0, 5), (0, 130), (16, 3), (61, 13), (200, 70), (263, 64)]
"""First position and number of queries: less than a tile, whole panels of keys and parts of them."""


@pytest.mark.matrix(12, full=36)
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("window", [None, 11, 100])
@pytest.mark.parametrize("choice", [*CHOICES, WITH_SINKS])
def test_attention_of_several_queries_equals_the_formula(
    choice: str, window: int | None, head_dim: int, checkpoint: Checkpoint
) -> None:
    kernels = CHOICES.get(choice, PRODUCTS)
    skip_unless_possible(kernels, checkpoint.config)
    blocks = iter(torch.randperm(256, generator=torch.Generator().manual_seed(4)).tolist())
    pages = NanPages(1, 256, BLOCK, KV_HEADS, head_dim, torch.bfloat16)
    slices, contents = [], []
    for index, (first, count) in enumerate(PROMPTS):
        table = tuple(next(blocks) for _ in range(-(-(first + count) // BLOCK)))
        slices.append(SliceLayout(first_position=first, num_tokens=count, pages=table))
        tokens = random(first + count, 2 * KV_HEADS, head_dim, dtype=torch.bfloat16, seed=index)
        tokens[:, :KV_HEADS] *= 3
        contents.append(tokens)
        pages.clear(torch.tensor(table[-1:]))
        slots = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(first + count)]
        pages.write(0, tokens, torch.tensor(slots))
    num_tokens = sum(count for _, count in PROMPTS)
    # Rows of queries, keys and values, as the projection returns them.
    heads = random(num_tokens, HEADS + 2 * KV_HEADS, head_dim, dtype=torch.bfloat16, seed=99)
    heads[:, HEADS:] = torch.cat([x[first:] for x, (first, _) in zip(contents, PROMPTS, strict=True)])
    output = torch.full((num_tokens, HEADS, head_dim), float("nan"), dtype=torch.bfloat16)
    step = layout(checkpoint, kernels, slices, window)
    attend(
        *(heads[:, :HEADS], heads, output),
        operations=operations(kernels),
        mixer=mixer_of(head_dim, window),
        kv=LayerKv(step, pages, 0),
        sinks=sinks_of(choice),
    )
    expected = []
    for (first, count), tokens in zip(PROMPTS, contents, strict=True):
        for position in range(first, first + count):
            seen = tokens[max(0, position + 1 - (window or position + 1)) : position + 1]
            query = heads[len(expected), :HEADS]
            keys, values = seen[:, :KV_HEADS], seen[:, KV_HEADS:]
            expected.append(attention_by_formula(query, keys, values, sinks_of(choice)))
    error = (output.double() - torch.stack(expected)).abs()
    assert float(error.max()) < 0.03
    assert float(error.square().mean().sqrt()) < 0.004


def test_chosen_rows_of_a_mixed_step_are_filled_and_no_others(
    native: Operations, checkpoint: Checkpoint
) -> None:
    pages = NanPages(1, 8, BLOCK, KV_HEADS, 32, torch.bfloat16)
    pages.fill(1.0)
    slices = [
        SliceLayout(first_position=0, num_tokens=2, pages=(0,)),
        SliceLayout(first_position=9, num_tokens=1, pages=(1, 2)),
        SliceLayout(first_position=3, num_tokens=1, pages=(3,)),
    ]
    step = layout(checkpoint, IN_PLACE, slices, None)
    output = torch.zeros(4, HEADS, 32, dtype=torch.bfloat16)
    (view,) = step.views[None].decodes
    query = random(4, HEADS, 32, dtype=torch.bfloat16)
    native.decode(query, output, view, mixer_of(32), LayerKv(step, pages, 0))
    assert output[:2].eq(0).all()
    torch.testing.assert_close(output[2:], torch.ones(2, HEADS, 32, dtype=torch.bfloat16), rtol=2**-7, atol=0)


def test_pages_and_slots_that_do_not_exist_are_not_touched(
    native: Operations, checkpoint: Checkpoint
) -> None:
    pages = NanPages(1, 8, BLOCK, KV_HEADS, 32, torch.bfloat16)
    step = layout(checkpoint, IN_PLACE, [SliceLayout(first_position=9, num_tokens=1, pages=(1, 8))], None)
    kv = LayerKv(step, pages, 0)
    heads = random(1, HEADS + 2 * KV_HEADS, 32, dtype=torch.bfloat16)
    with pytest.raises(IndexError, match="slot 65"):
        native.rotate_and_write(heads, HEADS, *step.rotary.values(), kv)
    (view,) = step.views[None].decodes
    with pytest.raises(IndexError, match="page 8 needed, 8 available"):
        native.decode(heads[:, :HEADS], heads[:, :HEADS].clone(), view, mixer_of(32), kv)
    later = SliceLayout(first_position=14, num_tokens=2, pages=(1, 8))
    step = layout(checkpoint, ALL_COMPILED, [later], None)
    kv = LayerKv(step, pages, 0)
    heads = random(2, HEADS + 2 * KV_HEADS, 32, dtype=torch.bfloat16)
    query, fresh = heads[:, :HEADS], heads[:, HEADS:]
    with pytest.raises(IndexError, match="page 8 needed, 8 available"):
        attend_prompt(query, fresh, query.clone(), step.views[None].prefills[0], mixer_of(32), kv)
