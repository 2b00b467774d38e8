"""Families without a row are served by transformers' layers, or refused by the name of what prevents it."""

from __future__ import annotations

import functools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import Blueprint, Checkpoint, CheckpointError, DType, UnsupportedModel, WeightFormat
from checkpoint.implementation import Implementation
from stage_worker.backends.backend import LoadedStage, StageLoadError
from stage_worker.backends.contract import KernelChoice, KernelsUnavailable
from stage_worker.loading.stage_loader import WorkerResources, load_stage
from stage_worker.model.parts import LoadedParts
from tests.checkpoints import edit_config, load_reference, make_checkpoint
from tests.integration.stage_bench import new_assignment
from tests.local_pipeline import LocalPipeline, Request
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import greedy_tokens
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)
from transformers_stage import probe as probing
from transformers_stage.stage import TransformersStage

NUM_LAYERS = 4
NUM_TOKENS = 24
_WINDOWS = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "helium": {},
    "ministral": _WINDOWS,
    "gemma": {"tie_word_embeddings": True},
}
"""Without a row: plain, with windows in some layers, tied with scaled embeddings."""


def make(directory: Path, family: str, **settings: Any) -> Path:
    """A checkpoint of a family without a row, whose tokens change."""
    given = {"num_layers": NUM_LAYERS, "initializer_range": 0.3, "pad_token_id": None, "seed": 3}
    return make_checkpoint(directory, family, **(given | FAMILIES.get(family, {}) | settings))


@pytest.fixture(scope="module")
def helium(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("helium") / "model", "helium")


@pytest.mark.matrix(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers(family: str, tmp_path: Path) -> None:
    """With chunks, preemption (few blocks), and prefix hits (a later prompt has the beginning of another)."""
    directory = make(tmp_path, family)
    assert not Checkpoint.open(directory).config.has_row
    long, short, other = (sequence.tokens for sequence in random_sequences([70, 1, 23]))
    prompts = [long, short, other, [*long[:40], *other]]
    expected = [greedy_tokens(directory, prompt)[:NUM_TOKENS] for prompt in prompts]
    assert len(set(expected[0])) > 8, "a degenerate model proves nothing"
    for cut in ((NUM_LAYERS,), (1, 2, 1)):
        pipeline = LocalPipeline(
            directory,
            cut,
            block_size=8,
            max_step_tokens=24,
            num_blocks=24,
            stage_type=TransformersStage,
        )
        run = pipeline.serve([Request(prompt=prompt, max_tokens=NUM_TOKENS) for prompt in prompts])
        assert run.tokens == expected, cut
        assert any(sequence.restart_count for sequence in run.sequences), "no preemption"
        later = Request(prompt=prompts[3], max_tokens=NUM_TOKENS, arrives_at=12)
        run = pipeline.serve([Request(prompt=long, max_tokens=NUM_TOKENS), later])
        assert run.tokens == [expected[0], expected[3]], cut
        assert run.num_prefill_tokens == len(long) + len(later.prompt) - 40, "no prefix hits"


@pytest.mark.parametrize("family", ["helium", "llama"])
@pytest.mark.parametrize("cuts", [(), (2,)])
def test_a_stored_head_is_used_where_the_config_ties_it(
    family: str, cuts: tuple[int, ...], tmp_path: Path
) -> None:
    directory = make(tmp_path, family, tie_word_embeddings=False)
    edit_config(directory, tie_word_embeddings=True)
    (sequence,) = random_sequences([24])
    pipeline = Pipeline(Checkpoint.open(directory), cuts, stage_type=TransformersStage)
    (logits,) = compute_in_chunks(pipeline, [sequence], [9])
    expected = reference_logits(load_reference(directory), sequence.tokens)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_bfloat16_logits_are_close_to_transformers(tmp_path: Path) -> None:
    directory = make(tmp_path, "helium", dtype="bfloat16", initializer_range=0.08)
    (sequence,) = random_sequences([33])
    pipeline = Pipeline(Checkpoint.open(directory), (2,), stage_type=TransformersStage)
    (logits,) = compute_in_chunks(pipeline, [sequence], [16])
    expected = reference_logits(load_reference(directory), sequence.tokens).float()
    assert float((logits - expected).square().mean().sqrt() / expected.std()) < 0.06


class CountedBytes:
    """Progress of a load."""

    def __init__(self) -> None:
        self.expected = self.read = 0

    def expect(self, num_bytes: int) -> None:
        self.expected += num_bytes

    def advance(self, num_bytes: int) -> None:
        self.read += num_bytes


def new_stage(config: Blueprint, begin: int, end: int, **options: Any) -> TransformersStage:
    return TransformersStage(
        config,
        layer_begin=begin,
        layer_end=end,
        has_embeddings=begin == 0,
        has_head=end == config.num_layers,
        **{"dtype": DType.F32} | options,
    )


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_reads_its_tensors_and_no_others(is_tied: bool, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make(tmp_path, "helium", tie_word_embeddings=is_tied))
    sizes = {name: entry.num_bytes for name, entry in checkpoint.tensors.items()}
    matrix = sizes["model.embed_tokens.weight"]
    read, held = [], []
    for begin, end in ((0, 1), (1, 3), (3, 4)):
        stage, progress, asked = new_stage(checkpoint.config, begin, end), CountedBytes(), list[str]()
        stage.load(checkpoint, progress=progress, prepare=asked.extend)
        layers = sum(
            size
            for name, size in sizes.items()
            if ".layers." in name and begin <= int(name.split(".")[2]) < end
        )
        ends = matrix if begin == 0 else 0
        if end == NUM_LAYERS:
            ends += matrix + sizes["model.norm.weight"]
        assert progress.read == progress.expected == layers + ends == stage.weight_bytes
        read.append(progress.read)
        held.append(held_bytes(stage))
        assert sum(sizes[name] for name in asked) == progress.read
    assert held == read
    assert sum(read) == sum(sizes.values()) + (matrix if is_tied else 0)


def held_bytes(stage: TransformersStage) -> int:
    """Bytes of all parameters of a stage, none of which may be left on the meta device."""
    model, lists = stage._loaded()
    model.place_layers(lists.computing)
    parameters = {id(parameter): parameter for parameter in model.causal.parameters()}
    assert {parameter.device.type for parameter in parameters.values()} == {"cpu"}
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())


def test_parts_in_memory_are_dropped(helium: Path) -> None:
    checkpoint, parts = Checkpoint.open(helium), LoadedParts()
    parts.embeddings = torch.zeros(1)
    new_stage(checkpoint.config, 0, 2).load(checkpoint, parts=parts)
    assert parts.embeddings is None
    assert parts.origin is not None


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("stablelm", {}, "does not use transformers' attention interface"),
        ("falcon_h1", {}, "layers keep recurrent state"),
        ("gpt_neox", {}, "layer 0 keeps 4 heads of 16, its config says 2 of 16"),
        ("helium", {"sliding_window": 9}, "layer 0 has window None, its config says 9"),
    ],
)
def test_families_that_cannot_be_served_are_refused_by_name(
    family: str, settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    directory = make(tmp_path, family, num_layers=2, **settings)
    with pytest.raises(CheckpointError, match=f"model type '{family}' cannot be served .*{named}"):
        Pipeline(Checkpoint.open(directory), stage_type=TransformersStage)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    make(tmp_path, "helium", num_layers=2)
    (tmp_path / "modeling_own.py").write_text("raise SystemExit('was run')\n")
    own = {"AutoConfig": "modeling_own.Config", "AutoModelForCausalLM": "modeling_own.Model"}
    edit_config(tmp_path, model_type="own_family", auto_map=own)
    with pytest.raises(UnsupportedModel, match=r"'own_family' has no native .* 'auto_map' names is never"):
        Pipeline(Checkpoint.open(tmp_path), stage_type=TransformersStage)


def test_tensors_that_transformers_does_not_know_are_named(tmp_path: Path) -> None:
    make(tmp_path, "helium", num_layers=2)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"model.layers.1.mlp.extra.weight": torch.zeros(2)}, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has model\.layers\.1\.mlp\.extra\.weight, unknown to"):
        Pipeline(Checkpoint.open(tmp_path), stage_type=TransformersStage)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        Pipeline(Checkpoint.open(tmp_path), stage_type=TransformersStage)


def patched_layer(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Let every decoder layer of Helium compute `change(output, model's embeddings)`."""
    from transformers.models.helium import modeling_helium

    forward, outer = modeling_helium.HeliumDecoderLayer.forward, modeling_helium.HeliumModel.forward
    seen: list[Any] = []

    @functools.wraps(outer)
    def whole(self: Any, *args: Any, **keywords: Any) -> Any:
        seen[:] = [keywords.get("inputs_embeds")]
        return outer(self, *args, **keywords)

    def layer(self: Any, *args: Any, **keywords: Any) -> Any:
        return change(forward(self, *args, **keywords), seen[0])

    monkeypatch.setattr(modeling_helium.HeliumModel, "forward", whole)
    monkeypatch.setattr(modeling_helium.HeliumDecoderLayer, "forward", layer)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda output, embedded: output + output.roll(1, dims=1), "mix the tokens of a step"),
        (lambda output, embedded: output + embedded, "read the embeddings beside the hidden states"),
        (lambda output, embedded: (output, None), "layer 0 returns more than hidden states"),
    ],
)
def test_layers_that_do_more_than_a_cut_carries_are_refused(
    change: Any, named: str, helium: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched_layer(monkeypatch, change)
    with pytest.raises(UnsupportedModel, match=named):
        Pipeline(Checkpoint.open(helium), (2,), stage_type=TransformersStage)


def test_embeddings_that_depend_on_positions_are_refused(
    helium: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.helium import modeling_helium

    outer = modeling_helium.HeliumModel.forward

    @functools.wraps(outer)
    def moved(self: Any, *, input_ids: Any = None, inputs_embeds: Any = None, **keywords: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids) + keywords["position_ids"][..., None]
        return outer(self, inputs_embeds=inputs_embeds, **keywords)

    monkeypatch.setattr(modeling_helium.HeliumModel, "forward", moved)
    with pytest.raises(UnsupportedModel, match="embeddings depend on positions"):
        Pipeline(Checkpoint.open(helium), stage_type=TransformersStage)


def test_attention_with_an_unknown_keyword_is_refused(helium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_KNOWN_KEYWORDS", probing._KNOWN_KEYWORDS - {"scaling"})
    with pytest.raises(UnsupportedModel, match="layer 0: attention takes 'scaling', which"):
        Pipeline(Checkpoint.open(helium), stage_type=TransformersStage)


def test_options_of_native_layers_are_refused(helium: Path) -> None:
    config = Checkpoint.open(helium).config
    with pytest.raises(KernelsUnavailable, match="transformers computes the layers"):
        new_stage(config, 0, 1, choice=KernelChoice.COMPILED)
    with pytest.raises(UnsupportedModel, match="--quantize int8 is for native layers"):
        new_stage(config.with_weights(WeightFormat.INT8), 0, 1)


def test_config_values_that_transformers_rejects_are_named(tmp_path: Path) -> None:
    make(tmp_path, "helium", num_layers=2)
    raw = json.loads((tmp_path / "config.json").read_text())
    edit_config(tmp_path, rope_parameters=raw["rope_parameters"] | {"rope_type": "longrope"})
    with pytest.raises(UnsupportedModel, match=r"rotary embeddings of type 'longrope'|refuses the config"):
        Pipeline(Checkpoint.open(tmp_path), stage_type=TransformersStage)


def load(directory: Path, implementation: Implementation) -> LoadedStage:
    """Load the whole model as a worker does."""
    assignment = new_assignment(directory, stage=0, num_stages=1, num_layers=NUM_LAYERS)
    resources = WorkerResources(device=torch.device("cpu"), memory_bytes=1 << 40, model_directory=None)
    return load_stage(replace(assignment, implementation=implementation), resources)


def test_a_worker_without_transformers_says_what_to_install(
    helium: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers_stage.stage", None)
    advice = r"need transformers on every worker: pip install 'transformers>=5\.23,<5\.24'"
    with pytest.raises(StageLoadError, match=advice) as found:
        load(helium, Implementation.TRANSFORMERS)
    assert "\n" not in str(found.value)


def test_a_worker_does_not_compute_other_families_natively(helium: Path) -> None:
    with pytest.raises(StageLoadError, match="'helium' has no native layers"):
        load(helium, Implementation.NATIVE)


def test_a_worker_loads_and_warms_up_what_it_is_assigned(helium: Path) -> None:
    loaded = load(helium, Implementation.TRANSFORMERS)
    assert loaded.read_bytes == loaded.weight_bytes
    assert loaded.kernels == "plain"
    assert loaded.source is not None
    assert set(loaded.source.tensors) == Checkpoint.open(helium).tensors.keys()
