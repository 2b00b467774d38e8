"""Gated DeltaNet served: chunks of any size, snapshots, forks and restarts give the same tokens."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DeltaLayout, GatedDelta, UnsupportedModel, parse_config
from checkpoint.blueprint import Implementation
from kvcache import CopyState, LiveState, SavedState, SlotChange
from kvcache.state_store import StateStore
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.gated_delta import delta_chunk
from tests.families import config_of, make_family
from tests.local_pipeline import LocalPipeline, Request, Run
from tests.unit.stage_worker.model.test_families import greedy_tokens
from tests.unit.stage_worker.model.test_parity import random_sequences
from wire.errors import StepFault, StepFaultKind
from wire.steps import Prefill, Step

NUM_TOKENS = 12


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("delta") / "model", "qwen3_5_text")


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random_sequences([45])[0].tokens


@pytest.fixture(scope="module")
def expected(directory: Path, prompt: list[int]) -> list[int]:
    return greedy_tokens(directory, prompt)[:NUM_TOKENS]


def inputs(num_tokens: int, num_heads: int = 3) -> tuple[Tensor, ...]:
    """Queries, keys, values, strengths, decays and a state, float64."""
    torch.manual_seed(0)
    query, key = (torch.randn(num_tokens, num_heads, 6, dtype=torch.float64) for _ in range(2))
    value = torch.randn(num_tokens, num_heads, 5, dtype=torch.float64)
    strength = torch.rand(num_tokens, num_heads, dtype=torch.float64)
    decay = -torch.rand(num_tokens, num_heads, dtype=torch.float64)
    state = torch.randn(num_heads, 6, 5, dtype=torch.float64)
    return query, key / key.norm(dim=-1, keepdim=True), value, strength, decay, state


@pytest.mark.parametrize("sizes", [(40,), (1,) * 40, (7, 13, 20), (39, 1)])
def test_a_chunk_equals_its_tokens_one_by_one(sizes: tuple[int, ...]) -> None:
    query, key, value, strength, decay, state = inputs(40)
    expected, kept = [], state.clone()
    for token in range(40):
        kept = kept * decay[token].exp()[:, None, None]
        error = (value[token] - (kept * key[token][..., None]).sum(1)) * strength[token][:, None]
        kept = kept + key[token][..., None] * error[:, None]
        expected.append((kept * query[token][..., None]).sum(1))
    parts = zip(*(x.split(sizes) for x in (query, key, value, strength, decay)), strict=True)
    found = [delta_chunk(*part, state) for part in parts]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected))
    torch.testing.assert_close(state, kept)


def test_a_strong_decay_does_not_overflow() -> None:
    query, key, value, strength, _, state = (x.float() for x in inputs(64))
    output = delta_chunk(query, key, value, strength, torch.full((64, 3), -500.0), state)
    assert bool(output.isfinite().all()) and bool(state.isfinite().all())


@pytest.mark.parametrize("max_step_tokens", [1, 2, 3])
def test_chunks_shorter_than_the_convolution(
    directory: Path, prompt: list[int], expected: list[int], max_step_tokens: int
) -> None:
    pipeline = LocalPipeline(
        directory,
        (1, 1, 1, 1, 1),
        block_size=1,
        max_step_tokens=max_step_tokens,
        num_blocks=200,
        num_states=40,
    )
    assert pipeline.generate([prompt], max_tokens=NUM_TOKENS) == [expected]


def first_positions(run_steps: list[Step], run: Run) -> list[int]:
    """Where the prefill of each sequence begins."""
    found: dict[Any, int] = {}
    for step in run_steps:
        for part in step.slices:
            if isinstance(part.inference_step, Prefill):
                found.setdefault(part.sequence, part.first_position)
    return [found[sequence.key] for sequence in run.sequences]


def test_prefix_hits_begin_at_snapshots_and_nowhere_else(
    directory: Path, prompt: list[int], expected: list[int]
) -> None:
    """A fork (the same prompt), a prompt that leaves it between snapshots, and one before the first."""
    pipeline = LocalPipeline(
        directory, (2, 3), block_size=4, max_step_tokens=64, num_states=16, grid_tokens=16
    )
    steps: list[Step] = []
    pipeline.on_step = lambda step, run: steps.append(step)
    others = [[*prompt[:31], 1, 2], [*prompt[:15], 3]]
    requests = [Request(prompt=prompt, max_tokens=NUM_TOKENS)]
    requests += [Request(prompt=tokens, max_tokens=NUM_TOKENS, arrives_at=40) for tokens in (prompt, *others)]
    run = pipeline.serve(requests)
    assert run.tokens[:2] == [expected, expected]
    assert run.tokens[2:] == [greedy_tokens(directory, tokens)[:NUM_TOKENS] for tokens in others]
    assert first_positions(steps, run) == [0, 44, 16, 0]


def test_a_wrong_snapshot_would_change_the_tokens(
    directory: Path, prompt: list[int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the test above would see if a copy were left out."""
    pipeline = LocalPipeline(directory, (5,), block_size=4, grid_tokens=16)
    change = StateStore.change
    monkeypatch.setattr(
        StateStore,
        "change",
        lambda store, changes: change(store, [SlotChange(one.target, None) for one in changes]),
    )
    requests = [Request(prompt=prompt, max_tokens=NUM_TOKENS, arrives_at=at) for at in (0, 40)]
    first, second = pipeline.serve(requests).tokens
    assert first == expected != second


def test_a_lost_epoch_restarts_from_the_tokens(
    directory: Path, prompt: list[int], expected: list[int]
) -> None:
    """Stages begin an epoch with whatever the slots held, and with other slots in use."""
    pipeline = LocalPipeline(directory, (1, 4), block_size=4, grid_tokens=16)
    pipeline.generate([random_sequences([30])[0].tokens, [5, 6, 7]], max_tokens=5)
    assert pipeline.generate([prompt], max_tokens=NUM_TOKENS) == [expected]


def test_a_state_of_another_position_is_a_fault(directory: Path, prompt: list[int]) -> None:
    pipeline = LocalPipeline(directory, (5,), block_size=4, max_step_tokens=16, grid_tokens=16)
    seen: list[StepFault] = []

    def falsify(step: Step, run: Run) -> None:
        """The second chunk follows a save that names another position."""
        for entry in step.signals:
            if isinstance(entry.signal, CopyState):
                entry.signal.position += 4

    pipeline.on_step = falsify
    with pytest.raises(StepFault) as fault:
        pipeline.generate([prompt], max_tokens=2)
    seen.append(fault.value)
    assert seen[0].kind is StepFaultKind.KV_SIGNAL
    assert re.search("has seen 16 tokens", seen[0].message)


def test_a_save_that_a_stage_does_not_make_is_a_divergence(directory: Path, prompt: list[int]) -> None:
    pipeline = LocalPipeline(directory, (5,), block_size=4, max_step_tokens=16, grid_tokens=16)

    def falsify(step: Step, run: Run) -> None:
        step.signals = tuple(
            entry
            for entry in step.signals
            if not (isinstance(entry.signal, CopyState) and isinstance(entry.signal.target, SavedState))
        )

    pipeline.on_step = falsify
    with pytest.raises(StepFault) as fault:
        pipeline.generate([prompt], max_tokens=2)
    assert fault.value.kind is StepFaultKind.KV_DIVERGENCE


def test_a_store_copies_and_zeroes_whole_slots() -> None:
    store = StateStore(
        num_layers=2, num_states=3, parts=[((2,), torch.bfloat16), ((3, 4), torch.float32)], device="cpu"
    )
    for layer in range(2):
        for part in store.layer(layer):
            part[0] = layer + 1
    store.change([SlotChange(2, 0), SlotChange(0, None)])
    for layer in range(2):
        for part in store.layer(layer):
            assert part[2].unique().tolist() == [layer + 1]
            assert not part[0].any() and not part[1].any()
    assert store.size_bytes == 2 * 3 * (2 * 2 + 3 * 4 * 4)
    with pytest.raises(ValueError, match="at least 1"):
        StateStore(num_layers=0, num_states=3, parts=[], device="cpu")


def test_recurrent_layers_are_refused_on_other_devices(directory: Path) -> None:
    with pytest.raises(ValueError, match="recurrent layers, which are not computed on meta"):
        DecoderStage(
            Checkpoint.open(directory).config,
            layer_begin=0,
            layer_end=5,
            has_embeddings=True,
            has_head=True,
            dtype=Checkpoint.open(directory).config.dtype,
            device="meta",
        )


def test_the_transformers_backend_refuses_recurrent_states(directory: Path) -> None:
    with pytest.raises(UnsupportedModel, match="has recurrent states"):
        Implementation.choose("transformers", Checkpoint.open(directory).config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["linear_attention"] * 5}, "all 5 layers are recurrent"),
        ({"layer_types": ["conv"] * 5}, r"layer_types\[0\]' = 'conv' is not supported"),
        ({"linear_num_value_heads": 5}, "5 is not a multiple of linear_num_key_heads 2"),
        ({"linear_conv_kernel_dim": 1}, "the minimum is 2"),
        ({"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "states are summed in float32"),
    ],
)
def test_impossible_configs_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((UnsupportedModel, ValueError), match=message):
        parse_config(config_of("qwen3_5_text") | changes)


def test_every_fourth_layer_has_full_attention_by_default() -> None:
    raw = config_of("qwen3_5_text") | {"layer_types": None, "num_hidden_layers": 8}
    kinds = [isinstance(layer.mixer, GatedDelta) for layer in parse_config(raw).layers]
    assert kinds == [True, True, True, False] * 2
    every_second = parse_config(raw | {"full_attention_interval": 2})
    assert [isinstance(layer.mixer, GatedDelta) for layer in every_second.layers] == [True, False] * 4


def test_layers_with_equal_states_are_one_kind() -> None:
    plan = GatedDelta(num_heads=4, num_key_heads=2, key_dim=8, value_dim=8, kernel_size=4, norm_eps=1e-6)
    assert plan.state_parts[0].shape == (2 * 16 + 32, 3)
    assert plan.state_parts[1].shape == (4, 8, 8) and plan.state_parts[1].is_wide
    assert replace(plan, layout=DeltaLayout(is_grouped=True)) != plan
    assert LiveState(1) != SavedState(1)
