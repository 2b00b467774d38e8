"""What a checkpoint answers, computed straight from its files; transformers answers the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from builtin_model import MODEL_DIRECTORY, SELF_CHECK_FILE
from checkpoint import Checkpoint, DType
from coordinator.cluster.self_check_references import read_recorded
from stage_worker import streamed_model
from stage_worker.models import TORCH_DTYPES
from stage_worker.record_reference import record
from stage_worker.reference import compute_reference
from stage_worker.reference_request import ReferenceRequest, decode_request
from stage_worker.stage_load import LoadProgress
from stage_worker.streamed_model import StreamedModel
from stageline_rpc.v1 import stage_pb2
from tests.checkpoints import load_reference, make_checkpoint
from wire.errors import HandshakeMismatch, InvalidRequest, Overloaded, StaleStream
from wire.reference import Reference, check_prompt

TOKENS = check_prompt(128)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "mistral": {"sliding_window": 3},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
}


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers and biases, where the family has any, in two files at least."""
    root = tmp_path_factory.mktemp(request.param)
    overrides = MODELS[request.param]
    return make_checkpoint(root / "model", request.param, num_layers=3, max_shard_size="100KB", **overrides)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "model", "llama", num_layers=2)


def reference_of(
    directory: Path,
    *,
    dtype: DType = DType.F32,
    tokens: tuple[int, ...] = TOKENS,
    num_top: int = 20,
    fingerprint: str | None = None,
    free_bytes: int = 1 << 30,
    progress: LoadProgress | None = None,
) -> Reference:
    request = ReferenceRequest(
        directory="",
        fingerprint=fingerprint or Checkpoint.open(directory).fingerprint,
        dtype=dtype,
        tokens=tokens,
        num_top=num_top,
    )
    progress = progress or LoadProgress()
    return compute_reference(request, directory, free_bytes=free_bytes, progress=progress)


@torch.no_grad()
def expected_logits(directory: Path, dtype: DType, tokens: tuple[int, ...] = TOKENS) -> Tensor:
    """Of transformers, in float32 with weights that are rounded to `dtype`."""
    model = load_reference(directory).float()
    for parameter in model.parameters():
        parameter.copy_(parameter.to(TORCH_DTYPES[dtype]))
    logits = model(torch.tensor([tokens])).logits[0]
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize("dtype", list(DType))
def test_log_probabilities_are_those_of_transformers(directory: Path, dtype: DType) -> None:
    check_against(expected_logits(directory, dtype), reference_of(directory, dtype=dtype))


def check_against(logits: Tensor, reference: Reference) -> None:
    """`reference` says of its tokens what follows from `logits` [n, vocab_size]."""
    expected = logits.log_softmax(dim=-1)
    assert [row.token for row in reference.rows] == [*reference.tokens[1:], int(logits[-1].argmax())]
    for row, values in zip(reference.rows, expected, strict=True):
        assert [token for token, _ in row.top] == values.topk(20).indices.tolist()
        for token, logprob in (*row.top, (row.token, row.logprob)):
            assert logprob == pytest.approx(float(values[token]), abs=2e-5)
    assert reference.logit_spread == pytest.approx(
        float(logits.var(-1, correction=0).mean().sqrt()), rel=1e-4
    )


def test_rounding_matters_more_the_coarser_the_dtype(llama: Path) -> None:
    assert reference_of(llama, dtype=DType.F32).rounding == 0.0
    half = reference_of(llama, dtype=DType.F16).rounding
    coarse = reference_of(llama, dtype=DType.BF16).rounding
    assert 1e-5 < half < coarse / 4
    assert coarse < 0.1


def test_a_matrix_may_be_read_in_any_number_of_pieces(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reference_of(directory)
    monkeypatch.setattr(streamed_model, "BLOCK_ELEMENTS", 64 * 7)
    pieces = reference_of(directory)
    assert [row.token for row in pieces.rows] == [row.token for row in whole.rows]
    for row, expected in zip(pieces.rows, whole.rows, strict=True):
        assert row.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_no_more_than_a_block_is_read_at_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_model, "BLOCK_ELEMENTS", 64 * 7)
    sizes: list[int] = []
    load_rows = streamed_model.load_rows

    def noting(checkpoint: Checkpoint, name: str, destination: Tensor, *, first_row: int) -> None:
        sizes.append(destination.numel())
        load_rows(checkpoint, name, destination, first_row=first_row)

    monkeypatch.setattr(streamed_model, "load_rows", noting)
    reference_of(llama)
    assert max(sizes) == 64 * 7


def test_memory_is_bounded_and_refused_with_the_numbers(llama: Path) -> None:
    needed = StreamedModel.memory_bytes(Checkpoint.open(llama), DType.F32, len(TOKENS))
    assert reference_of(llama, free_bytes=needed).rows
    with pytest.raises(Overloaded, match=f"takes {needed} bytes of memory, and {needed - 1} are free"):
        reference_of(llama, free_bytes=needed - 1)


def test_memory_does_not_grow_with_the_layers(tmp_path: Path, llama: Path) -> None:
    deep = Checkpoint.open(make_checkpoint(tmp_path / "deep", "llama", num_layers=9))
    flat = Checkpoint.open(llama)
    sizes = {StreamedModel.memory_bytes(each, DType.BF16, 8) for each in (deep, flat)}
    assert len(sizes) == 1


def test_another_checkpoint_is_refused(llama: Path) -> None:
    with pytest.raises(HandshakeMismatch, match="expected 0123, got"):
        reference_of(llama, fingerprint="0123")


def test_a_checkpoint_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HandshakeMismatch, match="is not a directory"):
        reference_of(tmp_path / "nothing", fingerprint="0123")


def test_weights_that_the_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "wide", "llama", num_layers=1)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][3] = 1e5
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HandshakeMismatch, match="float16 cannot hold"):
        reference_of(directory, dtype=DType.F16)


def test_logits_that_are_not_finite_are_no_reference(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.zeros(2, len(TOKENS), 128)
    broken[0, 3, 5] = math.inf
    monkeypatch.setattr(StreamedModel, "logits", lambda model, tokens: broken)
    with pytest.raises(HandshakeMismatch, match="expected finite numbers, got others for position 4"):
        reference_of(llama)


def test_a_token_outside_the_vocabulary_is_refused(llama: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"token 128 is outside the vocabulary \[0, 128\)"):
        reference_of(llama, tokens=(1, 128))


def test_a_reference_that_nobody_waits_for_ends_early(llama: Path) -> None:
    progress = LoadProgress()
    progress.cancel()
    with pytest.raises(StaleStream):
        reference_of(llama, progress=progress)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": []}, "0 tokens"),
        ({"tokens": range(65)}, "65 tokens, of 1 to 64"),
        ({"num_top": 1025}, "1025 most likely tokens, of at most 1024"),
        ({"dtype": 0}, "dtype number 0 is not known"),
    ],
)
def test_requests_have_bounds(changes: dict[str, Any], text: str) -> None:
    fields = {"fingerprint": "f", "dtype": stage_pb2.DTYPE_F32, "tokens": [1], "num_top": 20} | changes
    with pytest.raises(InvalidRequest, match=text):
        decode_request(stage_pb2.ReferenceRequest(**fields), "")


@pytest.mark.parametrize("dtype", list(DType))
def test_what_is_recorded_of_the_built_in_model_is_true(tmp_path: Path, dtype: DType) -> None:
    """Run `python -m stage_worker.record_reference` after the model was trained anew."""
    fingerprint = Checkpoint.open(MODEL_DIRECTORY).fingerprint
    recorded = read_recorded(SELF_CHECK_FILE, fingerprint)[dtype]
    assert recorded.tokens == check_prompt(1536)
    check_against(expected_logits(MODEL_DIRECTORY, dtype, recorded.tokens), recorded)
    record(tmp_path / "fresh.json")
    fresh = read_recorded(tmp_path / "fresh.json", fingerprint)[dtype]
    assert (recorded.logit_spread, recorded.rounding) == pytest.approx(
        (fresh.logit_spread, fresh.rounding), rel=0.05
    )
