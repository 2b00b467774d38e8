"""Compressed attention: entries do not depend on chunks, blocks, prefix hits, forks or preemption."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import Checkpoint, Compressed, DType, ScaledDType, cached_bytes_per_token
from checkpoint import entry_bytes_per_block as entry_bytes
from kvcache.layer_rows import RowKind
from kvcache.pages import PageGroups
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import StageLoadError
from stage_worker.loading.stage_pages import kv_bytes_of, new_pages
from stage_worker.model.compressed_attention import group_products
from stage_worker.model.joined_attention import JoinedSoftmax
from stage_worker.model.kernels import ProductMethod
from stage_worker.model.layer_weights import allocate_layer
from stage_worker.model.weights import load_tensors
from tests.checkpoints import edit_config, load_reference
from tests.families import make_family
from tests.local_pipeline import LocalPipeline, Request
from tests.quantized import fp8, mxfp4_of_deepseek, stored, write_safetensors
from tests.unit.stage_worker.model.pipeline import Pipeline, Running
from tests.unit.stage_worker.model.test_families import greedy_tokens
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)
from wire.ids import StageRole

RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("compressed") / "model", "deepseek_v4")


def spread_of(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.matrix(1)
@pytest.mark.parametrize(
    ("block_size", "chunks"), [(1, [2, 1, 3]), (2, [17, 5]), (4, [1]), (8, [3, 1, 2]), (16, [2, 3])]
)
def test_logits_depend_neither_on_blocks_nor_on_chunks(
    directory: Path, block_size: int, chunks: list[int]
) -> None:
    """Blocks shorter than entries, and longer ones; pages are NaN until they are written."""
    checkpoint, reference = Checkpoint.open(directory), load_reference(directory)
    sequences = random_sequences([29, 8, 1])
    pipeline = Pipeline(checkpoint, cuts=(2,), block_size=block_size)
    for sequence, found in zip(sequences, compute_in_chunks(pipeline, sequences, chunks), strict=True):
        assert spread_of(found, reference_logits(reference, sequence.tokens)) < 1e-4


def prompts(lengths: Sequence[int]) -> list[list[int]]:
    return [sequence.tokens for sequence in random_sequences(lengths)]


@cache
def greedy(directory: Path, prompt: tuple[int, ...]) -> list[int]:
    return greedy_tokens(directory, list(prompt))


def expected_of(directory: Path, given: Sequence[list[int]], count: int) -> list[list[int]]:
    """The first `count` tokens that transformers generates."""
    return [greedy(directory, tuple(prompt))[:count] for prompt in given]


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize(("cut", "max_step_tokens"), [((5,), 3), ((1, 1, 1, 1, 1), 2)])
def test_chunks_of_one_to_three_tokens_and_preemption(
    directory: Path, cut: tuple[int, ...], max_step_tokens: int
) -> None:
    given = prompts([37, 22, 30])
    sizes = {"block_size": 2, "max_step_tokens": max_step_tokens, "num_blocks": 32}
    pipeline = LocalPipeline(directory, cut, **sizes)
    assert pipeline.generate(given, max_tokens=12) == expected_of(directory, given, 12)
    assert pipeline.last_run is not None
    assert any(sequence.restart_count for sequence in pipeline.last_run.sequences), "no preemption"


@pytest.mark.matrix(1)
@pytest.mark.parametrize("shared", [16, 18, 22])
def test_prefix_hits_begin_within_and_between_entries(directory: Path, shared: int) -> None:
    """The second request computes only what follows the shared blocks of 2 tokens."""
    long, other = prompts([40, 9])
    second = [*long[:shared], *other]
    requests = [Request(prompt=long, max_tokens=8), Request(prompt=second, max_tokens=8, arrives_at=99)]
    pipeline = LocalPipeline(directory, (2, 3), block_size=2, max_step_tokens=16)
    run = pipeline.serve(requests)
    assert run.tokens == expected_of(directory, [long, second], 8)
    assert run.num_prefill_tokens == len(long) + len(second) - shared


def test_forks_continue_alike(directory: Path) -> None:
    """Choices of one prompt, which share its blocks."""
    (prompt,) = prompts([21])
    requests = [Request(prompt=prompt, max_tokens=10, choice=choice) for choice in range(3)]
    run = LocalPipeline(directory, (3, 2), block_size=4, max_step_tokens=8).serve(requests)
    assert run.tokens == expected_of(directory, [prompt], 10) * 3


@pytest.mark.parametrize("kv_dtype", ScaledDType)
def test_keys_of_8_bits_do_not_depend_on_chunks(directory: Path, kv_dtype: ScaledDType) -> None:
    given = prompts([40, 13])
    found = [
        LocalPipeline(directory, (2, 3), block_size=8, max_step_tokens=size, kv_dtype=kv_dtype).generate(
            given, max_tokens=6
        )
        for size in (64, 9)
    ]
    assert found[0] == found[1]


def test_a_step_of_decodes_of_different_lengths_equals_each_alone(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    sequences = random_sequences([50, 3, 23, 9])
    pipeline = Pipeline(checkpoint)
    pipeline.step([(one, len(one.tokens) - 1) for one in sequences])
    for one, found in zip(sequences, pipeline.step([(one, 1) for one in sequences]), strict=True):
        alone, other = Running(one.tokens), Pipeline(checkpoint)
        other.step([(alone, len(alone.tokens) - 1)])
        assert spread_of(found, other.step([(alone, 1)])[0]) < 1e-4


def test_parts_of_keys_are_joined_as_one_softmax() -> None:
    sinks, scores, values = torch.randn(3), torch.randn(4, 3, 12), torch.randn(4, 12, 5)
    softmax = JoinedSoftmax(sinks, 4, 5)
    softmax.add(slice(None), scores[..., :7].clone(), values[:, :7])
    softmax.add(torch.tensor([2, 0]), scores[[2, 0], :, 7:].clone(), values[[2, 0], 7:])
    hidden = torch.full((2, 3, 5), -torch.inf)
    softmax.add(torch.tensor([1, 3]), hidden, values[:1, 7:])
    seen = scores.clone()
    seen[[1, 3], :, 7:] = -torch.inf
    weights = torch.cat((seen, sinks[:, None].expand(4, 3, 1)), -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(softmax.mixed(), weights @ values)


def test_products_of_all_groups_at_once_equal_those_of_each(directory: Path) -> None:
    mixer = Checkpoint.open(directory).config.layers[0].mixer
    assert isinstance(mixer, Compressed)
    weights, mixed = torch.randn(mixer.o_size, mixer.group_size), torch.randn(7, mixer.q_size)
    found = []
    for products in (ProductMethod.TRITON_ROWS, ProductMethod.LINEAR):
        output = torch.full((9, mixer.o_size), torch.nan)
        group_products(mixer, weights, products)(mixed, output[:7])
        found.append(output)
    assert bool(found[0][7:].isnan().all())
    torch.testing.assert_close(*(output[:7] for output in found))


def assignment(checkpoint: Checkpoint, **changes: Any) -> Assignment:
    given = Assignment(
        plan_id=1,
        stage=1,
        num_stages=3,
        role=StageRole.MIDDLE,
        layer_begin=1,
        layer_end=4,
        model_directory=str(checkpoint.directory),
        fingerprint=checkpoint.fingerprint,
        dtype=DType.BF16,
        block_size=16,
        num_blocks=9,
        other_num_blocks=(5,),
        max_step_tokens=64,
        max_step_sequences=4,
        max_sequence_tokens=48,
    )
    return replace(given, **changes)


@pytest.mark.parametrize("kv_dtype", [None, *ScaledDType])
def test_pages_take_the_bytes_that_a_plan_counts(directory: Path, kv_dtype: ScaledDType | None) -> None:
    checkpoint = Checkpoint.open(directory)
    given = assignment(checkpoint, kv_dtype=kv_dtype)
    pages = new_pages(given, checkpoint.config, torch.device("cpu"))
    assert isinstance(pages, PageGroups)
    mixers = [layer.mixer for layer in checkpoint.config.layers[1:4]]
    keys = sum(cached_bytes_per_token(mixer, DType.BF16, kv_dtype) for mixer in mixers)
    entries = sum(entry_bytes(mixer, 16, DType.BF16) for mixer in mixers)
    assert [group.size_bytes for group in pages.groups] == [9 * entries, 5 * 16 * keys]
    assert kv_bytes_of(given, checkpoint.config) == 9 * entries + 5 * 16 * keys


def test_a_stage_of_windows_alone_has_no_entries(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    first = assignment(checkpoint, role=StageRole.FIRST, stage=0, layer_begin=0, layer_end=1)
    pages = new_pages(first, checkpoint.config, torch.device("cpu"))
    assert len(pages.groups) == 1 and not pages.groups[0].rows


def test_blocks_that_entries_do_not_fit_are_refused(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    with pytest.raises(StageLoadError, match="blocks of 6 tokens and entries of"):
        new_pages(assignment(checkpoint, block_size=6), checkpoint.config, torch.device("cpu"))


def test_begun_blocks_are_cleared_in_all_rows(directory: Path) -> None:
    """A NaN of a failed sequence would hide in what no mask can: 0 * NaN is NaN."""
    checkpoint = Checkpoint.open(directory)
    pipeline = Pipeline(checkpoint)
    pipeline.fill(float("nan"))
    (sequence,) = random_sequences([5])
    (found,) = pipeline.step([(sequence, 5)])
    assert found.isfinite().all()
    rows = pipeline.pages[0].groups[0].rows[RowKind.ENTRY]
    assert rows.gather(1, torch.tensor([sequence.pages[:1]])).isfinite().all()


def test_a_table_with_an_expert_that_does_not_exist_is_refused(directory: Path, tmp_path: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.ffn.gate.tid2eid"][7, 1] = 16
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    with pytest.raises(ValueError, match=r"has experts 0\.\.16 of 16"):
        Pipeline(Checkpoint.open(tmp_path))


def published(directory: Path, target: Path, **config: Any) -> dict[str, Tensor]:
    """The tensors of `directory` under the names of DeepSeek's own code, with a layer for speculation."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        name = name.removeprefix("model.").replace("embed_tokens", "embed").replace("hc_head.hc_", "hc_head_")
        renamed[re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name)] = tensor
    renamed["mtp.0.attn.wq_a.weight"] = torch.zeros(3, 3)
    target.mkdir()
    (target / "config.json").write_text((directory / "config.json").read_text())
    edit_config(target, **config)
    return renamed


def test_published_names_are_read(directory: Path, tmp_path: Path) -> None:
    tensors = published(directory, tmp_path / "model")
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path / "model")
    (sequence,) = random_sequences([20])
    found = compute_in_chunks(Pipeline(checkpoint), [sequence], [20])[0]
    again = Running(sequence.tokens)
    assert torch.equal(found, compute_in_chunks(Pipeline(Checkpoint.open(directory)), [again], [20])[0])


def test_experts_of_fp4_and_matrices_of_fp8_are_unpacked(tmp_path: Path) -> None:
    """Bit by bit, with the names and the dtypes of DeepSeek's checkpoints; others are plain."""
    sizes = {"hidden_size": 64, "intermediate_size": 32, "o_lora_rank": 16, "q_lora_rank": 32}
    source = make_family(tmp_path / "plain", "deepseek_v4", dtype="bfloat16", **sizes)
    config = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [16, 32]}
    tensors = published(source, tmp_path / "model", quantization_config=config, expert_dtype="fp4")
    rng, weights, written = np.random.default_rng(3), {}, {}
    is_plain = re.compile(r"compressor|weights_proj|ffn\.gate|wo_a|norm|hc_|embed|head|mtp")
    for name, tensor in tensors.items():
        if not name.endswith(".weight") or is_plain.search(name):
            dtype = {torch.int64: "I64", torch.bfloat16: "BF16", torch.float32: "F32"}[tensor.dtype]
            bits = tensor.view(torch.uint16) if dtype == "BF16" else tensor
            written[name] = stored(dtype, bits.numpy())
            continue
        write = mxfp4_of_deepseek if ".experts." in name else fp8((16, 32), scale="scale", dtype="F8_E8M0")
        parts, weights[name] = write(rng, name, *tensor.shape)
        written |= parts
    write_safetensors(tmp_path / "model" / "model.safetensors", written)
    checkpoint = Checkpoint.open(tmp_path / "model")
    assert set(checkpoint.packed) == set(weights)
    for layer in range(5):
        _, places = allocate_layer(checkpoint.config, layer, lambda *sizes: torch.empty(sizes))
        load_tensors(checkpoint, places)
        for name, place in places.items():
            if name in weights:
                assert isinstance(place, Tensor) and np.array_equal(place.numpy(), weights[name]), name


def test_every_kind_of_layer_is_tested(directory: Path) -> None:
    mixers = [layer.mixer for layer in Checkpoint.open(directory).config.layers]
    found = [mixer.compressor for mixer in mixers if isinstance(mixer, Compressed)]
    assert [None if one is None else one.ratio for one in found] == [None, 8, 4, 8, 4]
    assert json.loads((directory / "config.json").read_text())["compress_rates"] == RATIOS
