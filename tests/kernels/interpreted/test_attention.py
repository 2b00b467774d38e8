"""Paged attention by a work list equals its formula: float32 to 1e-5, float16 to 2e-3, bfloat16 to 2e-2.

Errors are relative to the values, which have a spread of 1.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from stage_worker.model import attention_work
from stage_worker.model.attention_work import WorkRoom
from stage_worker.model.triton_kernels.attention import attend
from tests.kernels.interpreted.paged import Given, Paged, Shape, random

pytestmark = pytest.mark.kernels

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = {
    "gqa": Shape(),
    "one head a key": Shape(heads=3, kv_heads=3, width=128),
    "seven heads a key": Shape(heads=7, kv_heads=1, width=64),
    "twenty heads a key": Shape(heads=20, kv_heads=1, width=64),
    "80": Shape(width=80),
    "96": Shape(width=96),
    "256": Shape(width=256),
    "latents": Shape(heads=20, kv_heads=1, width=512, tail=64),
    "small latents": Shape(heads=3, kv_heads=1, width=24, tail=8),
}
MIXED = [(0, 1), (15, 1), (31, 1), (32, 1), (100, 1), (0, 2), (5, 37), (90, 17)]
SINGLES = MIXED[:5]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of keys in short sequences: the interpreter takes milliseconds for a tile."""
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 32)
    monkeypatch.setattr(attention_work, "CHUNK_SPLIT", 64)


def found_by_kernel(paged: Paged) -> Tensor:
    given, shape = paged.given, paged.given.shape
    output = torch.full((paged.num_tokens, shape.heads, shape.width), float("nan"), dtype=given.dtype)
    attend(
        paged.query,
        output,
        paged.work(),
        paged.pages,
        scale=shape.row_width**-0.5,
        window=given.window,
        softcap=given.softcap,
        sinks=given.sinks,
    )
    return output


def check(given: Given) -> None:
    paged = Paged(given)
    error = (found_by_kernel(paged).double() - paged.expected()).abs().max()
    assert float(error) < TOLERANCES[given.dtype]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_decodes_prompts_and_chunks_in_one_step(shape: str, dtype: torch.dtype) -> None:
    check(Given(shape=SHAPES[shape], slices=MIXED, dtype=dtype))


@pytest.mark.parametrize("shape", ["gqa", "latents"])
def test_decodes_alone(shape: str) -> None:
    check(Given(shape=SHAPES[shape], slices=SINGLES, dtype=torch.float32))


@pytest.mark.parametrize("window", [1, 15, 16, 40, 150])
def test_sliding_windows_of_released_pages(window: int) -> None:
    check(Given(shape=Shape(), slices=[*SINGLES, (160, 1), (5, 37)], dtype=torch.float32, window=window))


@pytest.mark.parametrize("window", [None, 25])
def test_sinks_and_limited_scores(window: int | None) -> None:
    sinks = torch.tensor([0.0, 30.0, -30.0, 2.0])
    check(Given(shape=Shape(), slices=MIXED, dtype=torch.float32, window=window, softcap=3.0, sinks=sinks))


def test_a_short_chunk_behind_a_long_history_is_merged_of_parts() -> None:
    paged = Paged(Given(shape=Shape(heads=2, kv_heads=1), slices=[(126, 5)], dtype=torch.float32))
    assert paged.work().num_partial == 5 * 3
    assert float((found_by_kernel(paged).double() - paged.expected()).abs().max()) < 1e-5


@pytest.mark.parametrize("count", [1, 2, 31, 257])
def test_steps_of_many_sequences(count: int) -> None:
    lengths = torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(count)).tolist()
    slices = [(length, 1) for length in lengths]
    check(Given(shape=Shape(heads=2, kv_heads=1, width=16), slices=slices, dtype=torch.float32))


@pytest.mark.parametrize("seed", range(6))
def test_random_steps(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=generator))

    singles = [(draw(150) - 1, 1) for _ in range(draw(4))]
    chunks = [(draw(100) - 1, 1 + draw(40)) for _ in range(draw(2))]
    kv_heads = draw(2)
    shape = Shape(heads=kv_heads * draw(9), kv_heads=kv_heads, width=8 * draw(12))
    window = draw(120) if draw(2) == 1 else None
    check(Given(shape=shape, slices=singles + chunks, dtype=torch.float32, window=window, seed=100 * seed))


def test_a_query_does_not_depend_on_other_sequences() -> None:
    """Bit by bit in float16, in steps of decodes."""
    alone = Given(shape=Shape(), slices=[(130, 1)], dtype=torch.float16)
    beside = Given(shape=Shape(), slices=[(130, 1), (3, 1), (60, 1)], dtype=torch.float16)
    single, several = Paged(alone), Paged(beside)
    several.query[0] = single.query[0]
    assert torch.equal(single.rows[0], several.rows[0])
    assert torch.equal(found_by_kernel(single)[0], found_by_kernel(several)[0])


@pytest.mark.parametrize("window", [None, 40])
def test_padding_of_a_work_list_changes_nothing(window: int | None) -> None:
    """Bit by bit; rows of the padding are zeros, also with sinks."""
    sinks = random(Shape().heads, dtype=torch.float32, seed=3)
    given = Given(shape=Shape(), slices=MIXED, dtype=torch.float32, window=window, sinks=sinks)
    paged = Paged(given)
    expected, host = found_by_kernel(paged), paged.host_work()
    num_tokens, num_padding = paged.num_tokens, 3
    room = WorkRoom(
        num_items=host.num_items + num_padding + 5,
        num_merges=host.num_merges + 4,
        num_pages=len(host.array),
        num_partial=host.num_partial + 2,
        num_queries=host.num_queries,
    )
    padded = host.padded(room, range(num_tokens, num_tokens + num_padding))
    assert padded is not None
    paged.query = torch.cat((paged.query, torch.full_like(paged.query[:num_padding], float("nan"))))
    paged.num_tokens += num_padding
    paged.host_work = lambda: padded  # type: ignore[method-assign]
    found = found_by_kernel(paged)
    assert torch.equal(found[:num_tokens], expected)
    assert not bool(found[num_tokens:].any())


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_not_a_number_stays_in_its_sequence() -> None:
    paged = Paged(Given(shape=Shape(), slices=[(40, 1), (40, 1), (7, 3)], dtype=torch.float32))
    paged.query[1] = float("nan")
    is_nan = found_by_kernel(paged).isnan().flatten(1)
    assert is_nan.all(dim=1).tolist() == [False, True, False, False, False]
    assert not bool(is_nan[[0, 2, 3, 4]].any())


@pytest.mark.parametrize("element", [torch.float8_e4m3fn, torch.int8])
def test_pages_of_8_bits(element: torch.dtype) -> None:
    from kvcache.scaled_pages import scaled_rows, unscaled_rows

    given = Given(shape=Shape(), slices=MIXED, dtype=torch.float32)
    paged = Paged(given)
    elements, scales = scaled_rows(paged.pages.nan_to_num(), element)
    paged.rows = [unscaled_rows(*scaled_rows(rows, element), element, torch.float32) for rows in paged.rows]
    output = random(paged.num_tokens, 4, 64)
    attend(
        paged.query,
        output,
        paged.work(),
        elements.view(element),
        scale=64**-0.5,
        page_scales=scales[..., 0],
    )
    assert float((output.double() - paged.expected()).abs().max()) < 1e-5
