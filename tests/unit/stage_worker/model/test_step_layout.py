"""Layout of a step: write slots, row groups and views; isolation of batch mates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoint import Checkpoint
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.projections import PlainProjection
from stage_worker.model.step_layout import StepLayout
from stage_worker.validation import SliceLayout
from tests.checkpoints import make_checkpoint
from tests.step_layouts import layout_for
from tests.unit.stage_worker.model.pipeline import NanPages

BLOCK = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_checkpoint(tmp_path_factory.mktemp("m"), "llama", num_layers=2))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = tmp_path_factory.mktemp("w")
    return Checkpoint.open(make_checkpoint(directory, "mistral", num_layers=2, sliding_window=6))


def make_stage(checkpoint: Checkpoint) -> DecoderStage:
    stage = DecoderStage(
        checkpoint.config,
        layer_begin=0,
        layer_end=2,
        has_embeddings=True,
        has_head=True,
        dtype=checkpoint.config.dtype,
    )
    stage.load(checkpoint)
    return stage


def make_pages() -> NanPages:
    return NanPages(2, 16, BLOCK, 2, 16)


def run(stage: DecoderStage, pages: NanPages, tokens: list[int], slices: list[SliceLayout]) -> torch.Tensor:
    hidden = stage.embed(torch.tensor(tokens))
    return stage.logits(stage.forward(hidden, layout_for(stage, slices, block_size=BLOCK), pages))


def prefill(num_tokens: int, *pages: int, first: int = 0, num_valid: int = 0) -> SliceLayout:
    return SliceLayout(first_position=first, num_tokens=num_tokens, pages=pages, num_valid=num_valid)


def layout(checkpoint: Checkpoint, *slices: SliceLayout) -> StepLayout:
    return layout_for(make_stage(checkpoint), list(slices), block_size=BLOCK)


def test_rows_and_slots_follow_the_slices(checkpoint: Checkpoint) -> None:
    step = layout(checkpoint, prefill(5, 7, 2), prefill(1, 3, 9, first=6), prefill(3, 4, 5, first=2))
    assert step.num_tokens == 9
    (decode,) = step.views[None].decodes
    assert decode.rows is not None
    assert decode.rows.tolist() == [5]
    assert step.prefill_rows == ((0, 5), (6, 9))
    assert step.writes.rows is None
    assert step.writes.slots.tolist() == [28, 29, 30, 31, 8, 38, 18, 19, 20]
    assert step.writes.begun is not None
    assert step.writes.begun.tolist() == [2, 5]


def test_valid_slots_are_not_written_again(checkpoint: Checkpoint) -> None:
    step = layout(checkpoint, prefill(6, 1, 2, num_valid=4), prefill(1, 3, first=3, num_valid=4))
    assert step.writes.rows is not None
    assert step.writes.rows.tolist() == [4, 5]
    assert step.writes.slots.tolist() == [8, 9]


def test_a_fully_cached_prompt_computes_its_last_token_without_writing(checkpoint: Checkpoint) -> None:
    stage, pages = make_stage(checkpoint), make_pages()
    tokens = [5, 9, 2, 77, 31, 8, 64, 3]
    logits = run(stage, pages, tokens, [prefill(8, 6, 1)])
    before = pages.contents()
    again = run(stage, pages, tokens[-1:], [prefill(1, 6, 1, first=7, num_valid=8)])
    torch.testing.assert_close(again, logits[-1:], atol=1e-5, rtol=0)
    assert torch.equal(pages.contents().nan_to_num(), before.nan_to_num())


def test_a_prefix_written_by_one_slice_is_read_by_another_of_the_same_step(checkpoint: Checkpoint) -> None:
    stage, tokens = make_stage(checkpoint), [5, 9, 2, 77, 31, 8]
    alone = run(stage, make_pages(), tokens, [prefill(6, 0, 1)])
    slices = [prefill(2, 3, 8, first=4, num_valid=4), prefill(4, 3)]
    together = run(stage, make_pages(), tokens[4:] + tokens[:4], slices)
    torch.testing.assert_close(together, torch.cat((alone[4:], alone[:4])), atol=1e-5, rtol=0)


def test_nan_of_a_failed_sequence_reaches_neither_batch_mates_nor_later_owners(
    checkpoint: Checkpoint,
) -> None:
    stage, pages = make_stage(checkpoint), make_pages()
    long, short = [3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2]
    expected = run(stage, make_pages(), [*short, 6], [prefill(6, 0, 1)])[5]
    run(stage, pages, long + short, [prefill(9, 4, 5, 6), prefill(5, 7, 8)])
    pages.fill(float("nan"), slice(4, 7))
    decodes = [prefill(1, 4, 5, 6, first=9), prefill(1, 7, 8, first=5)]
    logits = run(stage, pages, [6, 6], decodes)
    assert not bool(torch.isfinite(logits[0]).any())
    torch.testing.assert_close(logits[1], expected, atol=1e-5, rtol=0)
    run(stage, pages, short, [prefill(5, 6, 4)])
    reused = run(stage, pages, [6], [prefill(1, 6, 4, first=5)])
    torch.testing.assert_close(reused[0], expected, atol=1e-5, rtol=0)


def test_positions_that_no_page_holds_are_rejected_with_the_numbers(
    checkpoint: Checkpoint, windowed: Checkpoint
) -> None:
    with pytest.raises(ValueError, match="pages hold positions below 4, the slice ends at 5"):
        layout(checkpoint, prefill(5, 1))
    released = SliceLayout(first_position=12, num_tokens=1, pages=(1, 2), first_block=2)
    with pytest.raises(
        ValueError, match="pages hold positions from 8, the slice at 12 sees 0 with window None"
    ):
        layout(checkpoint, released)
    with pytest.raises(ValueError, match="pages hold positions from 8, the slice at 12 sees 7 with window 6"):
        layout(windowed, released)
    layout(windowed, SliceLayout(first_position=13, num_tokens=1, pages=(1, 2), first_block=2))
    with pytest.raises(ValueError, match="a slice of 0 tokens at 3 is impossible"):
        layout(checkpoint, prefill(0, 1, first=3))
    with pytest.raises(ValueError, match="at least one slice"):
        layout(checkpoint)


def test_a_window_gathers_only_the_blocks_it_sees(windowed: Checkpoint) -> None:
    step = layout(windowed, prefill(1, 1, 2, 3, 4, 5, first=17), prefill(1, 6, first=2))
    (view,) = step.views[6].decodes
    assert view.rows is None
    assert view.pages.tolist() == [[4, 5], [6, 6]]
    assert view.mask is not None
    assert (view.mask[0, :, 0] == 0).nonzero().tolist() == [[0, i] for i in range(6)] + [
        [1, i] for i in range(3)
    ]


def test_one_long_sequence_does_not_make_the_others_gather_as_much(checkpoint: Checkpoint) -> None:
    held = (8000, 20, 3000, 900, 1100, 1, 4500, 700)
    step = layout(checkpoint, *(prefill(1, *range(n), first=n * BLOCK - 1) for n in held), prefill(2, 0))
    views = step.views[None].decodes
    assert all(view.rows is not None for view in views)
    grouped = [(view.rows.tolist(), view.pages.shape[1]) for view in views if view.rows is not None]
    assert grouped == [([0], 8000), ([6], 4500), ([2], 3000), ([3, 4, 7], 1100), ([1, 5], 20)]
    assert (
        layout(checkpoint, prefill(1, *range(256), first=1000), prefill(1, 0)).views[None].decodes[0].rows
        is None
    )


def test_sequences_of_different_groups_compute_what_each_does_alone(checkpoint: Checkpoint) -> None:
    stage, pages = make_stage(checkpoint), NanPages(2, 400, BLOCK, 2, 16)
    long, short = [i % 128 for i in range(1199)], [2, 7, 1, 8, 2]
    run(stage, pages, long, [prefill(1199, *range(300))])
    run(stage, pages, short, [prefill(5, 300, 301)])
    slices = [prefill(1, 300, 301, first=5), prefill(1, *range(300), first=1199)]
    alone = [run(stage, pages, [6], [item]) for item in slices]
    assert len(layout_for(stage, slices, block_size=BLOCK).views[None].decodes) == 2
    torch.testing.assert_close(run(stage, pages, [6, 6], slices), torch.cat(alone), atol=1e-5, rtol=0)


def test_wrong_hidden_states_and_token_ids_are_rejected_with_the_numbers(checkpoint: Checkpoint) -> None:
    stage, pages = make_stage(checkpoint), make_pages()
    step = layout_for(stage, [prefill(3, 0)], block_size=BLOCK)
    for wrong in (torch.zeros(2, 64), torch.zeros(3, 63), torch.zeros(3, 64, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"the step needs \(3, 64\) torch\.float32"):
            stage.forward(wrong, step, pages)
    for ids in ([0, 128], [-1, 5]):
        with pytest.raises(ValueError, match="for a vocabulary of 128"):
            stage.embed(torch.tensor(ids))


def test_a_checkpoint_of_another_config_is_not_loaded(checkpoint: Checkpoint, windowed: Checkpoint) -> None:
    stage = make_stage(checkpoint)
    with pytest.raises(ValueError, match="has another config than this stage"):
        stage.load(windowed)


def test_a_tied_head_shares_the_storage_of_the_embeddings(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_layers=2, tie_word_embeddings=True)
    weights = make_stage(Checkpoint.open(directory))._loaded()
    assert isinstance(weights.head, PlainProjection)
    assert weights.head.weight is weights.embeddings
