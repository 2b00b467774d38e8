"""Kernels of attention to chosen blocks compute what torch's operators compute: keys of blocks to a rounding
of their means, exactly the same choice of the same keys and queries, and attention to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from checkpoint import Attention, Norm, RopeConfig
from checkpoint.block_indexer import BlockIndexer
from checkpoint.blueprint import NormKind
from checkpoint.names import TensorRole
from kvcache.pages import IndexKeys, KvPages
from stage_worker.model import choice_work
from stage_worker.model.attention_views import ViewRules
from stage_worker.model.block_indexer import mask_of_others
from stage_worker.model.block_work import BlockChoices
from stage_worker.model.choice_work import ChoiceGroup
from stage_worker.model.decoder_layer import GroupedAttention
from stage_worker.model.indexer import IndexQueries
from stage_worker.model.kernels import BY_TRITON, PRODUCTS, Kernels
from stage_worker.model.layer_weights import AttentionWeights, LayerWeights
from stage_worker.model.norms import NormWeights, row_norm
from stage_worker.model.operations import operations
from stage_worker.model.rope import Rope, Rotary, rotate_
from stage_worker.model.step_layout import LayerKv, StepArrays, StepLayout
from stage_worker.model.triton_kernels import block_keys as kernels
from stage_worker.model.triton_kernels import choices
from stage_worker.validation import SliceLayout
from tests.kernels.interpreted.paged import random
from tests.step_layouts import layout_by

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
HIDDEN, TOP = 40, 4
ROLES = (TensorRole.INDEX_Q_NORM, TensorRole.INDEX_K_NORM)
NAN = float("nan")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three levels of a choice from 20 blocks."""
    monkeypatch.setattr(choices, "CHOICE_PART", 8)


def mixer_of(size: int) -> Attention:
    indexer = BlockIndexer(num_heads=3, head_dim=24, block_size=size, top_blocks=TOP, norm_eps=1e-5)
    rope = RopeConfig(theta=10_000.0, width=16)
    return Attention(num_heads=6, num_kv_heads=2, head_dim=32, rope=rope, scale=0.2, indexer=indexer)


def slices_of(size: int) -> list[tuple[int, int]]:
    """(position of the first query, number of queries), around the first position `limit` - 1 that chooses:
    decodes, and chunks that begin before it or end after it, or both.
    """
    limit = (TOP + 1) * size
    singles = [2, limit - 2, limit - 1, limit + size // 2, 4 * limit + 1]
    return [*((first, 1) for first in singles), (0, 6), (limit - 4, 7), (limit - 3, 2), (2 * limit, 3)]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Slices of sequences in pages of `page` tokens, in a step for `size` tokens of a block."""

    size: int
    page: int
    dtype: torch.dtype = torch.float32

    @property
    def mixer(self) -> Attention:
        return mixer_of(self.size)

    @property
    def slices(self) -> list[SliceLayout]:
        """With pages in the reverse order of all."""
        sizes = slices_of(self.size)
        counts = [-(-(first + count) // self.page) for first, count in sizes]
        free = list(range(sum(counts)))
        return [
            SliceLayout(first_position=first, num_tokens=count, pages=[free.pop() for _ in range(pages)])
            for (first, count), pages in zip(sizes, counts, strict=True)
        ]

    @property
    def num_pages(self) -> int:
        return sum(len(item.pages) for item in self.slices)

    def layout(self, by: Kernels) -> StepLayout:
        rules = ViewRules(
            block_size=self.page,
            device=CPU,
            dtype=self.dtype,
            kernels=by,
            max_keys=1 << 20,
            queries_per_item=4,
            indexer=self.mixer.indexer if by.are_triton else None,
        )
        ropes = {
            rotary: Rope(rotary.rope, rotary.head_dim, self.dtype, CPU)
            for rotary in Rotary.all_of(self.mixer)
        }
        return layout_by(StepArrays.build(self.slices, windows=(None,), rules=rules), ropes)

    def slots(self, item: SliceLayout, end: int) -> Tensor:
        """Slots of the positions below `end`."""
        pages, places = np.divmod(np.arange(end), self.page)
        return torch.from_numpy(np.array(item.pages)[pages] * self.page + places)

    def histories(self, width: int, rest: float) -> Tensor:
        """Pages [num_pages, page, width] with random rows of the tokens before each slice, else `rest`."""
        rows = torch.full((self.num_pages * self.page, width), rest, dtype=self.dtype)
        for number, item in enumerate(self.slices):
            slots = self.slots(item, item.first_position)
            rows[slots] = random(len(slots), width, dtype=self.dtype, seed=50 + number)
        return rows.view(self.num_pages, self.page, width)

    def kv(self, by: Kernels) -> LayerKv:
        """What follows a history is not a number where kernels compute: they must not read it."""
        mixer, rest = self.mixer, NAN if by.are_triton else 0.0
        same: dict[str, Any] = {"num_blocks": self.num_pages, "block_size": self.page, "dtype": self.dtype}
        index = IndexKeys(widths=[mixer.index_width], device=CPU, **same)
        index.store(0).copy_(self.histories(mixer.index_width, rest))
        pages = KvPages(
            num_layers=1, num_kv_heads=2, head_dim=mixer.head_dim, device=CPU, index=index, **same
        )
        given = self.histories(4 * mixer.head_dim, rest).view(self.num_pages, self.page, 2, 2, -1)
        pages.store(0).copy_(given.permute(0, 2, 3, 1, 4))
        return LayerKv(self.layout(by), pages, 0)


CASES = [Case(size=size, page=page) for size, page in ((3, 4), (8, 4), (8, 64), (16, 16), (64, 16))]


def attention(case: Case, by: Kernels, kv: LayerKv) -> Tensor:
    """Output of a layer with random weights, and one row after those of the step."""
    mixer = replace(case.mixer, has_output_gate=True)
    rows = 2 * mixer.q_size + 2 * mixer.kv_size
    assert mixer.indexer is not None
    weights = AttentionWeights(
        qkv=random(rows, HIDDEN, dtype=case.dtype),
        qkv_bias=None,
        sinks=None,
        index=random(mixer.indexer.num_rows, HIDDEN, dtype=case.dtype, seed=1),
    )
    norms = {role: NormWeights(random(24, dtype=case.dtype, seed=2) * 0.1, None) for role in ROLES}
    of_layer = LayerWeights(norms=norms, mixer=weights, o=None, o_bias=None, feed_forward=None)
    layer = GroupedAttention(mixer, of_layer, operations(by), by)
    return layer(random(kv.step.num_tokens + 1, HIDDEN, dtype=case.dtype, seed=3), kv)


@pytest.mark.parametrize("split", [16, 512])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_to_chosen_blocks_equals_that_of_torch(
    case: Case, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 to 1e-5 of the spread, keys whole or in parts; written keys of the indexer are the same."""
    monkeypatch.setattr(choice_work, "KEY_SPLIT", split)
    expected_kv, kv = case.kv(PRODUCTS), case.kv(BY_TRITON)
    expected, found = attention(case, PRODUCTS, expected_kv), attention(case, BY_TRITON, kv)
    assert float((found - expected).abs().max() / expected.std()) < 1e-5
    assert not found[-1].any()
    for item in case.slices:
        slots = case.slots(item, item.end_position)
        pages = [of_layer.index.store(0).flatten(0, 1)[slots] for of_layer in (kv, expected_kv)]
        torch.testing.assert_close(*pages, rtol=0, atol=1e-5)


def choices_of(case: Case) -> tuple[BlockChoices, StepLayout]:
    layout = case.layout(BY_TRITON)
    found = layout.views[None].block_choices
    assert found is not None
    return found, layout


def choosing(case: Case) -> list[SliceLayout]:
    """In the order of `SequenceBlocks`: all one-token slices, and the longer ones that choose."""
    limit = (TOP + 1) * case.size
    return [item for item in case.slices if item.num_tokens == 1 or item.end_position >= limit]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys_of_blocks_are_means_normed_and_rotated(case: Case, dtype: torch.dtype) -> None:
    """To a rounding of their means. Of whole blocks only: others may have tokens that are not numbers."""
    case = replace(case, dtype=dtype)
    found_choices, layout = choices_of(case)
    blocks, plan = found_choices.blocks, case.mixer.indexer
    assert plan is not None
    lengths = [item.end_position for item in case.slices]
    keys = [random(length, 24, dtype=dtype, seed=number) for number, length in enumerate(lengths)]
    pages = torch.full((case.num_pages, case.page, 24), NAN, dtype=dtype)
    for item, own in zip(case.slices, keys, strict=True):
        pages.flatten(0, 1)[case.slots(item, len(own))] = own
    norm = Norm(kind=NormKind.RMS_OFFSET, eps=plan.norm_eps)
    weights = NormWeights(random(24, dtype=dtype, seed=90) * 0.1, None)
    table = layout.rotary[Rotary.of_blocks(case.mixer)]
    given = operations(BY_TRITON).norm(norm, weights)
    found = kernels.block_keys(pages, blocks, case.size, given, table.cos, table.sin)  # type: ignore[arg-type]
    step = 1e-6 if dtype is torch.float32 else 2**-7
    of_sequences = zip(blocks.sequences.tolist(), choosing(case), strict=True)
    for (_, num_blocks, place), item in of_sequences:
        own = keys[case.slices.index(item)][: num_blocks * case.size].view(num_blocks, case.size, 24)
        assert num_blocks == item.end_position // case.size <= blocks.longest
        expected = row_norm(norm, weights)(own.float().mean(1).to(dtype))
        rotate_(expected, table.cos[:num_blocks, 0], table.sin[:num_blocks, 0])
        largest = float(expected.abs().max()) if num_blocks else 0.0
        torch.testing.assert_close(found[place : place + num_blocks], expected, rtol=0, atol=step * largest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_are_normed_and_rotated_and_keys_written_as_they_are(dtype: torch.dtype) -> None:
    """Keys bit by bit, without queries, too; a row without a slot is not written."""
    projected = random(5, 4 * 24 + 3, dtype=dtype)[:, 1:97]
    cos, sin = (random(5, 1, 24, dtype=dtype, seed=seed) for seed in (1, 2))
    slots = torch.tensor([7, -1, 0, 31, 5])
    norm = Norm(kind=NormKind.RMS_OFFSET, eps=1e-5)
    weights = NormWeights(random(24, dtype=dtype, seed=3), None)
    given: Any = operations(BY_TRITON).norm(norm, weights)
    expected = row_norm(norm, weights)(projected[:, :72].reshape(5, 3, 24))
    step = 2**-7 if dtype is torch.bfloat16 else 1e-5
    rotate_(expected, cos, sin)
    for has_queries in (True, False):
        pages = torch.full((4, 8, 24), NAN, dtype=dtype)
        found = kernels.write_keys(projected, 3, given, cos, sin, slots, pages, has_queries=has_queries)
        assert torch.equal(pages.flatten(0, 1)[slots[slots >= 0]], projected[slots >= 0, 72:])
        assert int(pages.flatten(0, 1).isnan().any(1).sum()) == 28
        assert (found is not None) == has_queries
        if found is not None:
            torch.testing.assert_close(found, expected, rtol=step, atol=1e-6)


def queries_of(case: Case, choice: BlockChoices) -> Iterator[tuple[ChoiceGroup, int, int, SliceLayout, int]]:
    """Group, row in it, row in the step, slice and position of each query in a group."""
    rows = [(item, position) for item in case.slices for position in _positions(item)]
    for group in choice.groups:
        own = range(*group.span) if group.queries is None else group.queries.tolist()
        assert len(own) == len(group.rows)
        for index, row in enumerate(own):
            yield group, index, row, *rows[row]


def _positions(item: SliceLayout) -> range:
    return range(item.first_position, item.end_position)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_choice_of_blocks_is_that_of_torch(case: Case) -> None:
    """Most blocks of a sequence have the score of another one, of which the first is chosen."""
    found_choices, layout = choices_of(case)
    plan = case.mixer.indexer
    assert plan is not None
    generator = torch.Generator().manual_seed(case.size)
    keys = torch.randint(-1, 2, (found_choices.blocks.num_blocks, 24), generator=generator).float()
    keys[:, 2:] = 0.0
    queries = torch.randint(-1, 2, (layout.num_tokens, 3, 24), generator=generator).float()
    firsts = [item.pages[0] for item in choosing(case)]
    places = dict(zip(firsts, found_choices.blocks.sequences.tolist(), strict=True))
    chosen = {}
    for group in found_choices.groups:
        scores = choices.score(queries, None, group, keys[:, None], ratio=case.size)
        chosen[id(group)] = choices.choose(scores, group, TOP, has_last=True)
    num_queries = 0
    for group, index, row, item, position in queries_of(case, found_choices):
        _, num_blocks, place = places[item.pages[0]]
        heads = queries[row : row + 1]
        mask = mask_of_others(
            plan,
            IndexQueries(heads, torch.ones(1, 3)),
            keys[None, place : place + max(num_blocks, TOP)],
            torch.tensor([position]),
            max(item.end_position, TOP * case.size),
        )
        expected = [token for token in range(position + 1) if mask[0, token] == 0]
        num_read = sum(
            end - begin for first, _, _, begin, end, _, _ in group.attention.items.tolist() if first == index
        )
        blocks = chosen[id(group)][index].tolist()
        found = [blocks[key // case.size] * case.size + key % case.size for key in range(num_read)]
        assert found == expected, (item, position)
        num_queries += 1
    assert num_queries == sum(item.num_tokens for item in choosing(case))


def test_slices_of_few_blocks_stay_in_the_plain_work() -> None:
    """Beside a step's decodes, all of them, if one chooses."""
    case = Case(size=8, page=16)
    views = case.layout(BY_TRITON).views[None]
    assert views.work is not None and views.block_choices is not None
    plain = {row for first, count, *_ in views.work.items.tolist() for row in range(first, first + count)}
    of_choices = [row for _, _, row, _, _ in queries_of(case, views.block_choices)]
    assert sorted([*plain, *of_choices]) == list(range(sum(item.num_tokens for item in case.slices)))
    assert len(plain) == 6 + 2
    assert views.prefills == () and views.decodes == ()


def test_a_step_without_a_choice_has_a_plain_work_list_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    few: Sequence[tuple[int, int]] = [(38, 1), (5, 1), (30, 9), (0, 39)]
    monkeypatch.setattr("tests.kernels.interpreted.test_block_choices.slices_of", lambda _: few)
    views = Case(size=8, page=16).layout(BY_TRITON).views[None]
    assert views.block_choices is None and views.work is not None
    monkeypatch.setattr("tests.kernels.interpreted.test_block_choices.slices_of", lambda _: [*few, (0, 40)])
    assert Case(size=8, page=16).layout(BY_TRITON).views[None].block_choices is not None
