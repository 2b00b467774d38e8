"""Sparse attention: the choice on given scores, and the ways in which slices attend to chosen tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Blueprint, Checkpoint, DType, Latent, ScaledDType, cached_bytes_per_token
from kvcache.pages import KvPages
from stage_worker.assignment import Assignment
from stage_worker.loading.stage_loader import new_pages
from stage_worker.model import indexer, latent_attention
from stage_worker.model.indexer import IndexQueries, chosen_tokens
from tests.families import make_family
from tests.unit.stage_worker.model.pipeline import Pipeline, Running
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)
from wire.ids import StageRole

TOP_K = 24
ALLOWED = 2e-4
"""Of the spread: float32 sums of builds of torch differ by up to 1.1e-4 in random weights of Hy4."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("sparse") / "model", "deepseek_v32")


def with_top_k(checkpoint: Checkpoint, count: int | None) -> Checkpoint:
    """`checkpoint` with another `Latent.top_k` in all layers."""
    layers = []
    for layer in checkpoint.config.layers:
        assert isinstance(layer.mixer, Latent)
        layers.append(replace(layer, mixer=replace(layer.mixer, top_k=count)))
    return replace(checkpoint, config=replace(checkpoint.config, layers=tuple(layers)))


def highest_first(row: list[float], count: int) -> list[int]:
    """The straightforward choice: by score, then by position."""
    return sorted(sorted(range(len(row)), key=lambda place: (-row[place], place))[:count])


@pytest.mark.parametrize("count", [1, 5, 31, 32])
def test_the_highest_scores_are_chosen_and_the_first_of_equal_ones(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    scores = torch.randint(-3, 4, (64, 32), generator=generator).float()
    found = chosen_tokens(scores, count, ())
    assert found.dtype is torch.int32
    assert found.tolist() == [highest_first(row, count) for row in scores.tolist()]


def test_hidden_keys_come_after_all_others() -> None:
    scores = torch.tensor([[9.0, 1.0, 8.0, 2.0, math.nan], [9.0, -1.0, 8.0, -2.0, 7.0]])
    hidden = ((2, torch.tensor([[-math.inf, 0.0, -math.inf]])), (0, torch.tensor([[0.0], [-math.inf]])))
    assert chosen_tokens(scores, 2, hidden).tolist() == [[0, 3], [1, 3]]
    assert chosen_tokens(scores, 3, hidden).tolist() == [[0, 1, 3], [0, 1, 3]]


def test_a_score_that_is_no_number_is_chosen() -> None:
    scores = torch.tensor([[3.0, math.nan, 1.0, 9.0], [math.nan] * 4])
    assert chosen_tokens(scores, 2, ()).tolist() == [[1, 3], [0, 1]]


@pytest.mark.parametrize("elements", [1, 200, 1 << 22])
def test_scores_are_weighted_sums_over_heads(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a few heads at a time, with keys of one sequence or of several."""
    monkeypatch.setattr(indexer, "INDEX_ELEMENTS", elements)
    heads, weights, keys = torch.randn(3, 4, 8), torch.randn(3, 4), torch.randn(3, 7, 8)
    queries = IndexQueries(heads, weights)
    for own in (keys, keys[:1]):
        expected = torch.zeros(3, 7)
        for query in range(3):
            for key in range(7):
                products = heads[query] @ own[query if len(own) > 1 else 0, key]
                expected[query, key] = (weights[query] * products.clamp(min=0)).sum()
        torch.testing.assert_close(queries.scores(own), expected)


def logits_of(checkpoint: Checkpoint, lengths: list[int], chunks: list[int]) -> list[Tensor]:
    return compute_in_chunks(Pipeline(checkpoint, (2,)), random_sequences(lengths), chunks)


def test_sparse_equals_dense_up_to_top_k_tokens(directory: Path) -> None:
    """Bit by bit: nothing is chosen, and nothing is masked."""
    checkpoint = Checkpoint.open(directory)
    dense, sparse = (logits_of(with_top_k(checkpoint, count), [TOP_K, 9], [7, 5]) for count in (None, TOP_K))
    assert all(map(torch.equal, dense, sparse))
    longer = [logits_of(with_top_k(checkpoint, count), [TOP_K + 9], [7]) for count in (None, TOP_K)]
    assert float((longer[0][0] - longer[1][0]).abs().max() / longer[0][0].std()) > 0.1


def test_a_choice_of_all_tokens_equals_dense_attention(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathered latents and masks give the sums of dense attention, in another order."""
    checkpoint = with_top_k(Checkpoint.open(directory), 8)
    dense = logits_of(with_top_k(checkpoint, None), [30, 9], [7, 5, 1])

    def all_tokens(scores: Tensor, count: int, hidden: object) -> Tensor:
        return torch.arange(scores.shape[1], dtype=torch.int32).expand(scores.shape)

    monkeypatch.setattr(latent_attention, "chosen_tokens", all_tokens)
    for expected, found in zip(dense, logits_of(checkpoint, [30, 9], [7, 5, 1]), strict=True):
        assert float((found - expected).abs().max() / expected.std()) < 1e-4


@pytest.mark.parametrize("is_way", [True, False])
def test_decodes_equal_a_whole_prompt_either_way(
    directory: Path, monkeypatch: pytest.MonkeyPatch, is_way: bool
) -> None:
    """Prompts attend by masks, to expanded keys or to latents; decodes gather latents."""
    checkpoint = Checkpoint.open(directory)
    monkeypatch.setattr(latent_attention, "is_expanded", lambda *_: is_way)
    (whole,) = logits_of(checkpoint, [60], [60])
    (chunked,) = logits_of(checkpoint, [60], [13, 1, 1, 1, 7])
    assert float((whole - chunked).abs().max() / whole.std()) < 1e-4


def test_a_step_of_short_and_long_sequences_pads_without_changing_tokens(directory: Path) -> None:
    """Decodes share a view: the shorter one's padding is never chosen before its own tokens."""
    checkpoint = Checkpoint.open(directory)
    sequences = random_sequences([50, 10])
    pipeline = Pipeline(checkpoint)
    pipeline.step([(sequence, len(sequence.tokens) - 1) for sequence in sequences])
    together = pipeline.step([(sequence, 1) for sequence in sequences])
    for sequence, found in zip(sequences, together, strict=True):
        alone, pipeline = Running(sequence.tokens), Pipeline(checkpoint)
        pipeline.step([(alone, len(alone.tokens) - 1)])
        (expected,) = pipeline.step([(alone, 1)])
        assert float((found - expected).abs().max() / expected.std()) < 1e-4


@pytest.mark.parametrize("family", ["glm_moe_dsa", "hy_v4"])
def test_layers_without_an_indexer_use_the_choice_of_the_last_one_with_one(
    tmp_path: Path, family: str
) -> None:
    """Of GLM-5.2's pattern, with two layers in a row that share; transformers computes the same."""
    from tests.checkpoints import load_reference

    types = ["full", "full", "shared", "shared", "full"]
    path = make_family(tmp_path / "model", family, indexer_types=types)
    checkpoint = Checkpoint.open(path)
    assert checkpoint.config.legal_cuts == {1, 4}
    reference = load_reference(path)
    sequences = random_sequences([61, 34])
    for sequence, found in zip(
        sequences, compute_in_chunks(Pipeline(checkpoint, (1, 4)), sequences, [7, 5, 1]), strict=True
    ):
        expected = reference_logits(reference, sequence.tokens)
        assert float((found - expected).abs().max() / expected.std()) < ALLOWED


def assignment(checkpoint: Checkpoint, kv_dtype: ScaledDType | None) -> Assignment:
    return Assignment(
        plan_id=1,
        stage=1,
        num_stages=3,
        role=StageRole.MIDDLE,
        layer_begin=1,
        layer_end=4,
        model_directory=str(checkpoint.directory),
        fingerprint=checkpoint.fingerprint,
        dtype=DType.BF16,
        kv_dtype=kv_dtype,
        block_size=16,
        num_blocks=3,
        max_step_tokens=64,
        max_step_sequences=4,
        max_sequence_tokens=48,
    )


@pytest.mark.parametrize("kv_dtype", [None, *ScaledDType])
def test_pages_take_the_bytes_that_a_plan_counts(tmp_path: Path, kv_dtype: ScaledDType | None) -> None:
    """Keys of indexers in the run dtype, of the layers that have one: here 1 and 3."""
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", "glm_moe_dsa"))
    config: Blueprint = checkpoint.config
    pages = new_pages(assignment(checkpoint, kv_dtype), config, torch.device("cpu"))
    assert isinstance(pages, KvPages)
    sizes = [cached_bytes_per_token(layer.mixer, DType.BF16, kv_dtype) for layer in config.layers[1:4]]
    assert sizes[0] - sizes[1] == 2 * 16
    assert pages.size_bytes == 3 * 16 * sum(sizes)


@pytest.mark.parametrize("kv_dtype", ScaledDType)
def test_latents_of_8_bits_are_gathered_token_by_token_as_by_page(
    tmp_path: Path, kv_dtype: ScaledDType
) -> None:
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", "deepseek_v32"))
    pages = new_pages(assignment(checkpoint, kv_dtype), checkpoint.config, torch.device("cpu"))
    assert isinstance(pages, KvPages)
    written = torch.randn(48, 1, pages.head_dim).bfloat16()
    pages.write(2, written, torch.randperm(48))
    (by_page,) = (part.clone() for part in pages.gather(2, torch.tensor([[2, 0, 1]])))
    slots = torch.tensor([[33, 5], [47, 16]])
    by_page = by_page[0, 0].view(3, 16, -1)[[1, 2, 0]].reshape(48, -1)
    assert torch.equal(pages.gather_latents(2, slots), by_page[slots])
