"""Embeddings of n-grams are those of transformers, whole and in chunks, of rows within the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextPLELayer

from checkpoint.ngram_config import parse_ngrams
from checkpoint.ngrams import NgramEmbedding
from stage_worker.model.kernels import PLAIN
from stage_worker.model.layer_weights import NgramWeights
from stage_worker.model.ngrams import NgramLookup, ngram_features, tokens_before
from stage_worker.model.operations import NgramFunction, TorchOperations
from stage_worker.model.state_rows import HostStates, StateRows
from stage_worker.model.step_layout import KvWrites, LayerStates, StepLayout

HIDDEN, STREAMS, SEPARATOR, NUM_STATES = 24, 3, 7, 5
TOKENS = [5, 7, 250_000, 1, 2, 7, 7, 9, 248_000, 3, 11, 7, 12, 13, 14, 240_000, 16, 17]
"""Separators come at once, in a row, and after one, two and more other tokens."""


@pytest.fixture(scope="module")
def layer() -> Qwen4ExpTextPLELayer:
    """The second one of a model, for n-grams of up to four tokens."""
    config = Qwen4ExpTextConfig(
        hidden_size=HIDDEN,
        vocab_size=251_000,
        num_hidden_layers=4,
        hc_count=STREAMS,
        ple_layer_ids=[1, 2],
        ple_conv_kernel_size=3,
        ple_embed_dim=36,
        ngram_size=4,
        heads_per_ngram=3,
        ngram_vocab_size_base=1000,
        eos_token_id=SEPARATOR,
    )
    torch.manual_seed(0)
    found = Qwen4ExpTextPLELayer(config, layer_idx=1, ple_layer_index=1).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.normal_()
    return found


@pytest.fixture(scope="module")
def plan(layer: Qwen4ExpTextPLELayer) -> NgramEmbedding:
    raw = {
        "hidden_size": HIDDEN,
        "vocab_size": 251_000,
        "ple_layer_ids": [1, 2],
        "ple_conv_kernel_size": 3,
        "ple_embed_dim": 36,
        "ngram_size": 4,
        "heads_per_ngram": 3,
        "ngram_vocab_size_base": 1000,
        "eos_token_id": SEPARATOR,
    }
    return parse_ngrams(raw, (True,) * 4, num_streams=STREAMS, eps=1e-6)[1]


def weights_of(layer: Qwen4ExpTextPLELayer, **changes: Tensor) -> NgramWeights:
    embedding = layer.ple_embedding
    tensors: dict[str, Any] = {
        "multipliers": embedding.layer_multipliers,
        "sizes": embedding.ngram_heads_vocab_sizes,
        "offsets": embedding.ngram_heads_offsets,
        "table": embedding.ngram_embedding.weight.detach(),
        "key": layer.key_proj.weight.detach(),
        "value": layer.value_proj.weight.detach(),
        "key_norm": layer.norm_key.weight.detach(),
        "stream_norm": layer.norm_query.weight.detach(),
        "conv_norm": layer.norm_conv.weight.detach(),
        "conv": layer.conv1d.weight.detach(),
    }
    return NgramWeights(**(tensors | changes))


def features_of(plan: NgramEmbedding, weights: NgramWeights) -> NgramFunction:
    return ngram_features(plan, weights, TorchOperations(), PLAIN)


def states(plan: NgramEmbedding) -> list[Tensor]:
    """Parts of a layer's state; the first two, of its mixer, are not read."""
    return [torch.empty(0)] * 2 + [torch.zeros(NUM_STATES, *part.shape) for part in plan.state_parts]


def memory_of(parts: list[Tensor], tokens: list[int], rows: StateRows) -> LayerStates:
    nothing = torch.zeros(0, dtype=torch.int64)
    step = StepLayout(
        num_tokens=len(tokens),
        positions=nothing,
        kernels=PLAIN,
        rotary={},
        writes=KvWrites(rows=None, slots=nothing, by_row=nothing, highest_slot=-1, begun=None),
        prefill_rows=(),
        views={},
        states=rows,
        token_ids=torch.tensor(tokens),
    )
    return LayerStates(step, parts)


def rows_of(*slices: tuple[int, int]) -> StateRows:
    """Of slices of (tokens, slot), one after the other."""
    lengths, slots = ([pair[place] for pair in slices] for place in (0, 1))
    return HostStates.of(lengths, slots, by_triton=False).rows.make(torch.from_numpy)


def test_sizes_are_those_of_transformers(layer: Qwen4ExpTextPLELayer, plan: NgramEmbedding) -> None:
    assert (plan.num_rows, plan.head_dim) == tuple(layer.ple_embedding.ngram_embedding.weight.shape)
    assert plan.reach == layer.short_conv_state_len


def test_rows_are_those_of_transformers(layer: Qwen4ExpTextPLELayer, plan: NgramEmbedding) -> None:
    tokens = torch.tensor(TOKENS)
    expected = layer.ple_embedding(tokens[None], None)[0]
    before = tokens_before(tokens, rows_of((len(TOKENS), 2)), states(plan)[3], SEPARATOR)
    assert torch.equal(NgramLookup(plan, weights_of(layer))(tokens, before), expected)


@pytest.mark.parametrize("lengths", [(18,), (1,) * 18, (2, 1, 3, 5, 1, 6), (1, 17)])
def test_chunks_and_decodes_continue_from_their_state(
    layer: Qwen4ExpTextPLELayer, plan: NgramEmbedding, lengths: tuple[int, ...]
) -> None:
    """Beside another sequence, whose state is in another slot; padding rows stay as they are."""
    streams = torch.randn(len(TOKENS), plan.channels)
    with torch.no_grad():
        expected = streams + layer(streams[None], torch.tensor([TOKENS]), None)[0]
    features, parts, begin = features_of(plan, weights_of(layer)), states(plan), 0
    for length in lengths:
        rows = torch.cat(
            (torch.randn(1, plan.channels), streams[begin:][:length], torch.ones(2, plan.channels))
        )
        tokens = [7, *TOKENS[begin:][:length]]
        found = features(rows, memory_of(parts, tokens, rows_of((1, 0), (length, 3))))
        torch.testing.assert_close(found[1:-2], expected[begin:][:length])
        assert torch.equal(found[-2:], rows[-2:])
        begin += length
    assert not parts[2][[1, 2, 4]].any() and not parts[3][[1, 2, 4]].any()
    assert (parts[3][3] + SEPARATOR).tolist() == TOKENS[-3:]


def test_hashes_that_choose_rows_outside_of_the_table_are_refused(
    layer: Qwen4ExpTextPLELayer, plan: NgramEmbedding
) -> None:
    weights = weights_of(layer)
    for changes in (
        {"offsets": weights.offsets + plan.num_rows},
        {"offsets": weights.offsets - 1},
        {"sizes": weights.sizes * 2**40},
        {"sizes": weights.sizes * 0},
    ):
        with pytest.raises(ValueError, match=f"exceed their table of {plan.num_rows} rows"):
            features_of(plan, weights_of(layer, **changes))
