"""Every family computes what transformers computes, and each field of its plan matters.

`make test` has some, `make test-full` those with every kind of block and four others each day, `make
test-models` all.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, combinations, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import (
    Blueprint,
    Checkpoint,
    CheckpointError,
    Compressed,
    DType,
    Experts,
    Mixer,
    parse_config,
    verify_tensors,
)
from checkpoint.blueprint import RouterScore
from checkpoint.catalog import BF16_SPREAD, NUM_CUTS
from stage_worker.loading.reference import StreamedModel
from stage_worker.model import block_indexer, experts, indexer, joined_attention, latent_attention
from tests.checkpoints import load_reference
from tests.families import (
    BLOCK_KINDS,
    FAMILIES,
    QUICK_FAMILIES,
    block_kinds,
    config_of,
    families_of,
    make_family,
    mutations,
    refused,
)
from tests.local_pipeline import LocalPipeline
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)

CUTS = [(5,), (1, 4), (2, 3), (4, 1), (1, 2, 2), (1, 1, 1, 1, 1)]
NUM_TOKENS = 48
assert len(CUTS) == NUM_CUTS, "`stageline models` tells the number"


def params() -> Iterator[Any]:
    for name in families_of(datetime.date.today()):
        is_chosen = name in QUICK_FAMILIES or "STAGELINE_TEST_FAMILIES" in os.environ
        yield name if is_chosen else pytest.param(name, marks=pytest.mark.full)


@pytest.fixture(scope="module", params=params())
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Checkpoint]:
    directory = make_family(tmp_path_factory.mktemp(request.param) / "model", request.param)
    return request.param, Checkpoint.open(directory)


def spread_of(found: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the standard deviation of `expected`."""
    return float((found - expected).abs().max() / expected.std())


def rms_spread_of(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference, in units of the standard deviation of `expected`."""
    return float((found - expected).square().mean().sqrt() / expected.std())


def tolerance(checkpoint: Checkpoint) -> float:
    """In units of the spread. Chunks of a scan begin elsewhere than transformers'; rounding adds up over the
    tokens of a state, to 1.5e-4 with these wide weights.
    """
    return 5e-4 if checkpoint.config.is_recurrent else 1e-4


def test_logits_of_chunks_and_decodes_equal_transformers(family: tuple[str, Checkpoint]) -> None:
    _, checkpoint = family
    reference = load_reference(checkpoint.directory)
    sequences = random_sequences([61, 1, 9, 34, 16])
    found = compute_in_chunks(Pipeline(checkpoint, cuts=(1, 3)), sequences, [7, 5, 1, 11])
    for sequence, logits in zip(sequences, found, strict=True):
        expected = reference_logits(reference, sequence.tokens)
        assert expected.std() > 0.1
        assert spread_of(logits, expected) < tolerance(checkpoint)


def test_the_streamed_reference_equals_transformers(family: tuple[str, Checkpoint]) -> None:
    _, checkpoint = family
    texts = [sequence.tokens for sequence in random_sequences([40, 9])]
    model = StreamedModel(checkpoint, DType.F32)
    with torch.inference_mode():
        *_, hidden = model.hidden_states(texts)
        logits = torch.cat([block for _, block in model.logits(hidden)], dim=-1)[0]
    reference = load_reference(checkpoint.directory)
    expected = torch.cat([reference_logits(reference, text) for text in texts])
    assert spread_of(logits, expected) < tolerance(checkpoint)


def test_bfloat16_logits_are_close_to_transformers(family: tuple[str, Checkpoint], tmp_path: Path) -> None:
    name, _ = family
    directory = make_family(tmp_path, name, dtype="bfloat16", initializer_range=0.08)
    sequence = random_sequences([33])[0]
    (logits,) = compute_in_chunks(Pipeline(Checkpoint.open(directory), cuts=(3,)), [sequence], [16])
    reference = load_reference(directory)
    rounded = reference_logits(reference, sequence.tokens).float()
    exact = reference_logits(reference.float(), sequence.tokens)
    assert min(rms_spread_of(logits, rounded), rms_spread_of(logits, exact)) < BF16_SPREAD


def greedy_tokens(directory: Path, prompt: list[int]) -> list[int]:
    model = load_reference(directory)
    model.generation_config.eos_token_id = None  # type: ignore[union-attr]
    ids = torch.tensor([prompt])
    output = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
    )
    return list(output[0, len(prompt) :].tolist())


LEAST_GAP = 1e-4
"""Between the last chosen expert and the next, where products may be rounded differently."""


@contextmanager
def router_gaps_checked(checkpoint: Checkpoint) -> Iterator[None]:
    """Records gaps between scores, relative ones of a softmax, which are those of the logits."""
    gaps: list[float] = []
    routers = [
        kind.feed_forward.router for kind in checkpoint.config.kinds if isinstance(kind.feed_forward, Experts)
    ]
    is_relative = all(
        router.score is RouterScore.SOFTMAX and not router.has_choice_bias for router in routers
    )

    def recorded(ranks: Tensor, count: int) -> Tensor:
        chosen = highest(ranks, count)
        if count < ranks.shape[1]:
            best = ranks.sort(dim=-1, descending=True).values
            differences = best[:, count - 1] - best[:, count]
            gaps.extend((differences / best[:, count - 1] if is_relative else differences).tolist())
        return chosen

    highest = experts._highest
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experts, "_highest", recorded)
        yield
    assert bool(gaps) == bool(routers)
    assert min(gaps, default=1.0) > LEAST_GAP, "another rounding may choose another expert: take another seed"


def cuts_of(config: Blueprint) -> list[tuple[int, ...]]:
    """`CUTS`, or as many legal ones where a stage cannot begin with every layer."""
    legal = sorted(config.legal_cuts)
    if len(legal) == config.num_layers - 1:
        return CUTS
    fewer = chain.from_iterable(combinations(legal, count) for count in range(len(legal)))
    ends = [(0, *chosen, config.num_layers) for chosen in (*islice(fewer, NUM_CUTS - 1), tuple(legal))]
    assert len(set(ends)) == NUM_CUTS
    return [tuple(end - begin for begin, end in pairwise(bounds)) for bounds in ends]


def has_index(mixer: Mixer) -> bool:
    """Whether an indexer chooses tokens, or entries."""
    return mixer.entry_index_width > 0 if isinstance(mixer, Compressed) else mixer.index_width > 0


LEAST_INDEX_GAP = 3e-5
"""Between the scores of the last chosen token and the next, in units of the spread of a query's scores."""


@contextmanager
def index_gaps_checked(config: Blueprint) -> Iterator[None]:
    """Records gaps between scores of indexers."""
    gaps: list[float] = []

    def recorded(scores: Tensor, count: int, hidden: Any) -> Tensor:
        hidden = tuple(hidden)
        visible = scores.clone()
        for begin, mask in hidden:
            visible[:, begin : begin + mask.shape[-1]] += mask
        for row in visible:
            seen = row[row.isfinite()]
            if len(seen) > count:
                best = seen.sort(descending=True).values
                gaps.append(float((best[count - 1] - best[count]) / seen.std()))
        return choose(scores, count, hidden)

    choose = indexer.chosen_tokens
    with pytest.MonkeyPatch.context() as patch:
        for module in (latent_attention, joined_attention, block_indexer):
            patch.setattr(module, "chosen_tokens", recorded)
        yield
    assert bool(gaps) == any(has_index(kind.mixer) for kind in config.kinds)
    assert min(gaps, default=1.0) > LEAST_INDEX_GAP, "another rounding may choose another token"


@pytest.mark.matrix(1, full=12)
def test_greedy_tokens_equal_transformers_at_every_cut(family: tuple[str, Checkpoint]) -> None:
    """With chunks, prefix hits (two prompts share their beginning), and preemption (few blocks)."""
    _, checkpoint = family
    long, short, other = (sequence.tokens for sequence in random_sequences([70, 1, 23]))
    prompts = [long, short, other, [*long[:40], *other]]
    expected = [greedy_tokens(checkpoint.directory, prompt) for prompt in prompts]
    assert len(set(expected[0])) > 8, "a degenerate model proves nothing"
    # Sequences that release all but a window wait for their few blocks, and are not preempted.
    num_blocks = 8 if all(checkpoint.config.cache_windows) else 34
    for cut in cuts_of(checkpoint.config):
        pipeline = LocalPipeline(
            checkpoint.directory, cut, block_size=8, max_step_tokens=24, num_blocks=num_blocks
        )
        with router_gaps_checked(checkpoint), index_gaps_checked(checkpoint.config):
            assert pipeline.generate(prompts, max_tokens=NUM_TOKENS) == expected, cut
        run = pipeline.last_run
        assert run is not None
        was_preempted = any(sequence.restart_count for sequence in run.sequences)
        assert was_preempted or all(checkpoint.config.cache_windows), "no preemption"


@pytest.mark.matrix(1)
def test_each_field_of_the_plan_changes_the_logits(family: tuple[str, Checkpoint]) -> None:
    _, checkpoint = family
    (sequence,) = random_sequences([70])
    expected = logits_of(checkpoint, sequence.tokens)
    unseen = {}
    for mutation in mutations(checkpoint.config):
        found = logits_of(replace(checkpoint, config=mutation.blueprint), sequence.tokens)
        if (moved := spread_of(found, expected)) < 1e-2:
            unseen[mutation.field] = moved
    assert not unseen


def test_each_other_field_of_the_plan_changes_the_tensors(family: tuple[str, Checkpoint]) -> None:
    _, checkpoint = family
    assert fits(checkpoint, checkpoint.config)
    changed = list(refused(checkpoint.config))
    assert len(changed) > 15
    assert not [mutation.field for mutation in changed if fits(checkpoint, mutation.blueprint)]


def fits(checkpoint: Checkpoint, blueprint: Blueprint) -> bool:
    """Whether the checkpoint has the tensors of `blueprint`."""
    try:
        verify_tensors(blueprint, checkpoint.tensors)
    except (CheckpointError, KeyError):  # KeyError: a fused tensor would lack a part
        return False
    return True


def test_wide_routers_change_the_rounding_of_bfloat16(tmp_path: Path) -> None:
    """The only field of a computation that float32 cannot show."""
    directory = make_family(tmp_path, "glm4_moe", dtype="bfloat16", initializer_range=0.08)
    checkpoint = Checkpoint.open(directory)
    layers = []
    for layer in checkpoint.config.layers:
        inner = layer.feed_forward
        if isinstance(inner, Experts):
            assert inner.router.is_wide
            inner = replace(inner, router=replace(inner.router, is_wide=False))
        layers.append(replace(layer, feed_forward=inner))
    (sequence,) = random_sequences([33])
    narrow = replace(checkpoint, config=replace(checkpoint.config, layers=tuple(layers)))
    assert not torch.equal(logits_of(narrow, sequence.tokens), logits_of(checkpoint, sequence.tokens))


def logits_of(checkpoint: Checkpoint, tokens: list[int]) -> Tensor:
    (sequence,) = random_sequences([len(tokens)])
    sequence.tokens = tokens
    return Pipeline(checkpoint).step([(sequence, len(tokens))])[0]


@pytest.mark.full
def test_families_of_each_day_have_every_kind_of_block() -> None:
    kinds = {name: block_kinds(parse_config(config_of(name))) for name in FAMILIES}
    daily = set().union(*(kinds[name] for name in BLOCK_KINDS))
    assert {name: missing for name, found in kinds.items() if (missing := found - daily)} == {}


def test_all_families_come_by_in_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGELINE_TEST_FAMILIES", raising=False)
    day = datetime.date(2026, 1, 1)
    seen = {name for later in range(len(FAMILIES)) for name in families_of(day + datetime.timedelta(later))}
    assert seen == set(FAMILIES)
