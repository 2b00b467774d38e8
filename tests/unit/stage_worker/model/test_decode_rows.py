"""Decodes as arrays give the layout that slices as objects give, and follow their block tables."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import Checkpoint
from kvcache import BlockTables, Deref, Destroy, FullBlock, Grow, PartialBlock, Promote, Use
from stage_worker.model.attention_views import ViewRules
from stage_worker.model.decode_rows import DecodeRows, PageMatrix
from stage_worker.model.kernels import AttentionMethod, Kernels, ProductMethod
from stage_worker.model.rope import Rope, Rotary
from stage_worker.model.step_layout import StepArrays, StepLayout
from stage_worker.validation import SliceLayout
from tests.checkpoints import make_checkpoint
from tests.step_layouts import layout_by

BLOCK = 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rope(tmp_path_factory: pytest.TempPathFactory) -> Rope:
    directory: Path = make_checkpoint(tmp_path_factory.mktemp("m"), "llama", num_layers=1)
    mixer = Checkpoint.open(directory).config.layers[0].mixer
    return Rope(mixer.rope, mixer.head_dim, torch.float32, CPU)


def kernels(decode: AttentionMethod) -> Kernels:
    return Kernels(products=ProductMethod.LINEAR, decode=decode, prefill=AttentionMethod.SDPA)


def layout(
    rope: Rope,
    slices: list[SliceLayout],
    decodes: DecodeRows | None = None,
    *,
    method: AttentionMethod = AttentionMethod.SDPA,
    window: int | None = None,
    max_keys: int = 1 << 20,
) -> StepLayout:
    columns = {} if decodes is None else {"decodes": decodes}
    arrays = StepArrays.build(
        slices,
        **columns,
        windows=[window],
        rules=ViewRules(
            device=CPU, block_size=BLOCK, dtype=torch.float32, kernels=kernels(method), max_keys=max_keys
        ),
    )
    return layout_by(arrays, {Rotary(None, 16, None): rope})


def assert_equal(one: Any, two: Any) -> None:
    """Compare layouts with all their parts."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
    elif is_dataclass(one):
        assert type(one) is type(two)
        for field in fields(one):
            assert_equal(getattr(one, field.name), getattr(two, field.name))
    elif isinstance(one, tuple | dict):
        assert len(one) == len(two)
        for key in one if isinstance(one, dict) else range(len(one)):
            assert_equal(one[key], two[key])
    else:
        assert one == two


@st.composite
def decode_slices(draw: st.DrawFn, window: int | None) -> list[SliceLayout]:
    """One-token slices on pages of their own; some have released or spare blocks."""
    slices: list[SliceLayout] = []
    for index in range(draw(st.integers(1, 5))):
        position = draw(st.integers(0, 30))
        hidden = 0 if window is None else max(0, position - window + 1) // BLOCK
        first_block = draw(st.integers(0, hidden))
        num_pages = position // BLOCK + 1 - first_block + draw(st.integers(0, 2))
        pages = [100 * index + 3 * page for page in range(num_pages)]
        slices.append(
            SliceLayout(first_position=position, num_tokens=1, pages=pages, first_block=first_block)
        )
    return slices


CHUNKS = [
    SliceLayout(first_position=4, num_tokens=6, pages=(900, 903, 906), num_valid=4),
    SliceLayout(first_position=9, num_tokens=1, pages=(910, 913, 916)),
    SliceLayout(first_position=5, num_tokens=1, pages=(920, 923), num_valid=8),
    SliceLayout(first_position=0, num_tokens=3, pages=(930,)),
]


@pytest.mark.parametrize("method", [AttentionMethod.SDPA, AttentionMethod.PRODUCTS, AttentionMethod.IN_PLACE])
@pytest.mark.parametrize("window", [None, 7])
@given(st.data())
def test_arrays_give_the_layout_of_objects(
    rope: Rope, method: AttentionMethod, window: int | None, data: st.DataObject
) -> None:
    decodes = data.draw(decode_slices(window))
    chunks = [] if window else data.draw(st.lists(st.sampled_from(CHUNKS), unique_by=id))
    setting: Any = {
        "method": method,
        "window": window,
        "max_keys": data.draw(st.sampled_from([8, 64, 1 << 20])),
    }
    by_objects = layout(rope, [*decodes, *chunks], **setting)
    assert_equal(layout(rope, chunks, DecodeRows.of(decodes), **setting), by_objects)


@pytest.mark.parametrize(
    ("item", "window"),
    [
        (SliceLayout(first_position=12, num_tokens=1, pages=(1, 2, 3)), None),
        (SliceLayout(first_position=12, num_tokens=1, pages=(1, 2), first_block=2), None),
        (SliceLayout(first_position=12, num_tokens=1, pages=(1, 2), first_block=2), 6),
        (SliceLayout(first_position=3, num_tokens=1, pages=(1, 2), first_block=1), 2),
    ],
)
def test_pages_that_lack_positions_are_rejected_as_for_objects(
    rope: Rope, item: SliceLayout, window: int | None
) -> None:
    fine = SliceLayout(first_position=1, num_tokens=1, pages=(5,))
    with pytest.raises(ValueError, match=r"^(pages hold|a slice)") as by_object:
        layout(rope, [fine, item], window=window)
    with pytest.raises(ValueError, match=f"^{re.escape(str(by_object.value))}$"):
        layout(rope, [], DecodeRows.of([fine, item]), window=window)


def test_a_step_without_slices_has_no_layout(rope: Rope) -> None:
    with pytest.raises(ValueError, match="at least one slice"):
        layout(rope, [], DecodeRows.of([]))


def rows_of(tables: BlockTables, matrix: PageMatrix, names: str) -> None:
    """Compare the rows with the tables."""
    rows = matrix.rows(range(len(names)))
    assert rows.positions.tolist() == list(range(len(names)))
    for row, name in enumerate(names):
        table = tables.table(name)
        assert rows.num_pages[row] == len(table.pages)
        assert rows.pages[row, : len(table.pages)].tolist() == table.pages == tables.pages(name)
        assert rows.first_blocks[row] == table.first_block


def test_rows_follow_every_change_of_a_block_table() -> None:
    tables = BlockTables(64, block_size=BLOCK)
    tables.apply("a", Use(tuple(FullBlock(name) for name in range(1, 4)), (1, 2, 3)))
    tables.apply("a", Use((PartialBlock(1),)))
    tables.apply("b", Use((FullBlock(1), FullBlock(50), FullBlock(9)), (1, 50, 9)))
    matrix = PageMatrix([tables.table("a"), tables.table("b")])
    rows_of(tables, matrix, "ab")
    for number in range(1, 8):
        name = 9 if number == 1 else 100 + number  # the first one merges with the block of the other
        tables.grow("a", Grow(number, name, 3, number, number + 1))
        rows_of(tables, matrix, "ab")
    tables.apply("a", Promote(PartialBlock(8), 50, 3, 50))
    rows_of(tables, matrix, "ab")
    for signal in (Deref(FullBlock(1)), Destroy(FullBlock(50)), Deref(FullBlock(9))):
        tables.apply("b", signal)
        rows_of(tables, matrix, "ab")
    tables.apply("b", Use((FullBlock(60),), (60,)))
    rows_of(tables, matrix, "ab")


def test_only_rows_of_changed_tables_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = BlockTables(64, block_size=BLOCK)
    for number, name in enumerate("abc"):
        tables.apply(name, Use((FullBlock(number),), (number,)))
        tables.apply(name, Use((PartialBlock(number),)))
    matrix = PageMatrix([tables.table(name) for name in "abc"])
    copied: list[int] = []
    copy = PageMatrix._copy
    monkeypatch.setattr(
        PageMatrix, "_copy", lambda self, row, table: (copied.append(row), copy(self, row, table))
    )
    matrix.rows((5, 5, 5))
    assert copied == [0, 1, 2]
    matrix.rows((6, 6, 6))
    assert copied == [0, 1, 2]
    tables.grow("b", Grow(1, 70, 1, 70, 71))
    matrix.rows((7, 7, 7))
    assert copied == [0, 1, 2, 1]
