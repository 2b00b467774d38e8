"""Latent attention: absorbed and expanded give the same rows, and pages hold one latent per token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoint import Checkpoint, DType, Latent, ScaledDType, UnsupportedModel, WeightFormat
from checkpoint import kv_bytes_per_token as bytes_per_token
from kvcache.pages import KvPages
from stage_worker.assignment import Assignment
from stage_worker.loading.reference import StreamedModel
from stage_worker.loading.stage_pages import new_pages
from stage_worker.model import latent_attention
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.latent_attention import LatentAttention, is_expanded
from stage_worker.model.step_layout import LayerKv
from stage_worker.validation import SliceLayout
from tests.families import make_family
from tests.step_layouts import layout_for
from tests.unit.stage_worker.model.pipeline import NanPages
from wire.ids import StageRole

BLOCK = 8
NUM_BLOCKS = 24


@pytest.fixture(scope="module", params=["deepseek_v2", "mistral4"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Without and with latents of queries."""
    return Checkpoint.open(make_family(tmp_path_factory.mktemp(request.param) / "model", request.param))


def mixer_of(checkpoint: Checkpoint) -> Latent:
    mixer = checkpoint.config.layers[0].mixer
    assert isinstance(mixer, Latent)
    return mixer


class Layer:
    """The first layer's attention, and its pages with the rows of 104 random tokens in shuffled blocks."""

    def __init__(self, checkpoint: Checkpoint, dtype: DType = DType.F32) -> None:
        config = checkpoint.config
        self.stage = DecoderStage(
            config, layer_begin=0, layer_end=1, has_embeddings=False, has_head=False, dtype=dtype
        )
        self.stage.load(checkpoint)
        shape = config.page_shape(None)
        self.pages = NanPages.of(shape, 1, NUM_BLOCKS, BLOCK, self.stage.torch_dtype)
        generator = torch.Generator().manual_seed(2)
        self.table = torch.randperm(NUM_BLOCKS, generator=generator)[:14].tolist()
        self.rows = torch.randn(110, config.hidden_size, generator=generator).to(self.stage.torch_dtype)
        self.mixed((0, 104))  # whole blocks: the rest stays NaN

    def mixed(self, *ranges: tuple[int, int]) -> Tensor:
        """Rows for the tokens [begin, end) of each slice; slices share the sequence."""
        slices = [
            SliceLayout(first_position=begin, num_tokens=end - begin, pages=self.table, num_valid=begin)
            for begin, end in ranges
        ]
        layout = layout_for(self.stage, slices, block_size=BLOCK)
        (layer,) = self.stage._loaded().layers
        assert isinstance(layer._mix, LatentAttention)
        given = torch.cat([self.rows[begin:end] for begin, end in ranges])
        with torch.inference_mode():
            return layer._mix(given, LayerKv(layout, self.pages, 0))


SLICES = [(0, 40), (30, 33), (60, 100), (97, 99), (50, 51), (7, 8), (99, 100)]


def test_absorbed_equals_expanded(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, found = Layer(checkpoint), []
    for choice in (True, False):
        monkeypatch.setattr(latent_attention, "is_expanded", lambda *_, choice=choice: choice)
        found.append(layer.mixed(*SLICES))
    expanded, absorbed = found
    assert not torch.equal(expanded, absorbed), "one way twice"
    assert float((expanded - absorbed).abs().max() / expanded.std()) < 1e-5


def test_a_query_alone_equals_the_same_query_in_a_prompt(checkpoint: Checkpoint) -> None:
    """Decodes are absorbed, and read what prompts have written."""
    layer = Layer(checkpoint)
    whole = layer.mixed((0, 100))
    alone = layer.mixed(*((position, position + 1) for position in (0, 7, 8, 50, 99)))
    assert float((alone - whole[[0, 7, 8, 50, 99]]).abs().max() / whole.std()) < 1e-5


@pytest.mark.parametrize("num_heads", [1, 3])
def test_keys_of_a_few_heads_at_a_time_give_the_same_rows(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_heads: int
) -> None:
    layer, mixer = Layer(checkpoint), mixer_of(checkpoint)
    monkeypatch.setattr(latent_attention, "is_expanded", lambda *_: True)
    expected = layer.mixed((40, 90))
    elements = num_heads * 90 * (mixer.query_dim + mixer.value_dim)
    monkeypatch.setattr(latent_attention, "EXPANDED_ELEMENTS", elements)
    torch.testing.assert_close(layer.mixed((40, 90)), expected)


def test_bfloat16_of_both_ways_is_near_float32(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round the projection of queries or keys, weights, and mixed latents or values."""
    exact = Layer(checkpoint).mixed(*SLICES)
    layer = Layer(checkpoint, DType.BF16)
    for choice in (True, False):
        monkeypatch.setattr(latent_attention, "is_expanded", lambda *_, choice=choice: choice)
        difference = layer.mixed(*SLICES).float() - exact
        assert float(difference.square().mean().sqrt() / exact.std()) < 0.03


def multiplications(mixer: Latent, num_queries: int, num_keys: int) -> dict[bool, float]:
    """Per head, of expanding and of absorbing; each query sees the keys before it and half of the slice's."""
    pairs = num_queries * (num_keys - num_queries) + num_queries * num_queries / 2
    to_values, to_keys = mixer.kv_rank * mixer.value_dim, mixer.kv_rank * mixer.nope_dim
    return {
        True: num_keys * (to_keys + to_values) + pairs * (mixer.query_dim + mixer.value_dim),
        False: num_queries * (to_keys + to_values) + pairs * (2 * mixer.kv_rank + mixer.rope_dim),
    }


@pytest.mark.parametrize("num_keys", [2, 64, 1000, 32_768])
def test_a_slice_takes_the_way_with_fewer_multiplications(checkpoint: Checkpoint, num_keys: int) -> None:
    large = replace(mixer_of(checkpoint), kv_rank=512, nope_dim=128, rope_dim=64, value_dim=128)
    chosen = set()
    for mixer in (mixer_of(checkpoint), large):
        for num_queries in {2, 16, 100, 170, 180, 1000, num_keys} & set(range(num_keys + 1)):
            costs = multiplications(mixer, num_queries, num_keys)
            choice = is_expanded(mixer, num_queries, num_keys)
            assert costs[choice] == min(costs.values())
            chosen.add(choice)
    assert chosen == {True} if num_keys == 2 else {True, False}


def assignment(checkpoint: Checkpoint, kv_dtype: ScaledDType | None, dtype: DType = DType.BF16) -> Assignment:
    return Assignment(
        plan_id=1,
        stage=0,
        num_stages=1,
        role=StageRole.ONLY,
        layer_begin=0,
        layer_end=checkpoint.config.num_layers,
        model_directory=str(checkpoint.directory),
        fingerprint=checkpoint.fingerprint,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=16,
        num_blocks=3,
        max_step_tokens=64,
        max_step_sequences=4,
        max_sequence_tokens=48,
    )


@pytest.mark.parametrize(
    ("kv_dtype", "token_bytes"), [(None, 576 * 2), (ScaledDType.I8, 576 + 4), (ScaledDType.F8_E4M3, 576 + 4)]
)
def test_pages_have_576_numbers_a_token(
    kv_dtype: ScaledDType | None, token_bytes: int, checkpoint: Checkpoint
) -> None:
    """In memory what the plan counts, with the sizes of DeepSeek V3."""
    config = checkpoint.config
    large = replace(mixer_of(checkpoint), kv_rank=512, rope_dim=64)
    config = replace(config, layers=tuple(replace(layer, mixer=large) for layer in config.layers))
    assert large.page_shape.num_elements == 576
    assert bytes_per_token(large, kv_dtype or DType.BF16) == token_bytes
    pages = new_pages(assignment(checkpoint, kv_dtype), config, torch.device("cpu"))
    assert isinstance(pages, KvPages)
    assert pages.size_bytes == config.num_layers * 3 * 16 * token_bytes
    assert pages.store(0).shape == (3, 1, 1, 16, 576)


@pytest.mark.parametrize("kv_dtype", ScaledDType)
@pytest.mark.parametrize("family", ["deepseek_v2", "mistral4"])
def test_rows_of_8_bits_are_rounded_as_in_the_reference_of_self_checks(
    family: str, kv_dtype: ScaledDType, tmp_path: Path
) -> None:
    """Without experts: the reference may choose others than a stage, where rounding decides."""
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", family, first_k_dense_replace=99))
    config, tokens = checkpoint.config, list(range(3, 36))
    stage = DecoderStage(
        config,
        layer_begin=0,
        layer_end=config.num_layers,
        has_embeddings=True,
        has_head=True,
        dtype=DType.F32,
    )
    stage.load(checkpoint)
    pages = new_pages(assignment(checkpoint, kv_dtype, DType.F32), config, torch.device("cpu"))
    layout = layout_for(stage, [SliceLayout(first_position=0, num_tokens=33, pages=(2, 0, 1))], block_size=16)
    found = stage.logits(stage.forward(stage.embed(torch.tensor(tokens)), layout, pages))
    model = StreamedModel(checkpoint, DType.F32, kv_dtype=kv_dtype)
    with torch.inference_mode():
        *_, hidden = model.hidden_states([tokens])
        exact, rounded, _ = torch.cat([block for _, block in model.logits(hidden)], dim=-1)
    # The rounded copy has 19 bits elsewhere, which moves some rows of pages to the next value of 8 bits.
    assert float((found - rounded).norm()) < 0.3 * float((exact - rounded).norm())


@pytest.mark.parametrize("weights", WeightFormat)
def test_quantize_is_refused_by_name(weights: WeightFormat, tmp_path: Path) -> None:
    """Dense in all layers: the experts are not what is refused."""
    directory = make_family(tmp_path / "model", "deepseek_v3", first_k_dense_replace=5)
    with pytest.raises(UnsupportedModel, match="'deepseek_v3' has latent attention, which --quantize"):
        Checkpoint.open(directory).with_weights(weights)
