"""Reference outputs computed directly from checkpoint files equal transformers'."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from builtin_model import MODEL_DIRECTORY, SELF_CHECK_FILE
from checkpoint import Checkpoint, DType
from checkpoint.dtypes import ScaledDType
from stage_worker.assignment import ReferenceRequest, decode_request
from stage_worker.backends.backend import LoadProgress
from stage_worker.backends.tensor_views import project
from stage_worker.loading import reference as reference_module
from stage_worker.loading import reference_memory
from stage_worker.loading.reference import StreamedModel, compute_reference
from stage_worker.loading.reference_copies import EXACT, NUM_COPIES
from stage_worker.model.layer_weights import TORCH_DTYPES
from stageline_rpc.internal.v1 import forward_pb2, step_pb2
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import load_reference, make_checkpoint
from tools.record_reference import record
from wire.errors import HandshakeMismatch, InvalidRequest, Overloaded, StaleStream
from wire.reference import (
    NUM_PROJECTIONS,
    NUM_TEXTS,
    STATE_WIDTH,
    Reference,
    Text,
    check_text,
    read_references,
)
from wire.tensors import WireDType

TEXTS = (check_text(0, 20, 128), check_text(1, 7, 128))
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
    texts: tuple[Text, ...] = TEXTS,
    wire_dtype: WireDType | None = None,
    kv_dtype: ScaledDType | None = None,
    num_top: int = 20,
    fingerprint: str | None = None,
    free_bytes: int = 1 << 30,
    progress: LoadProgress | None = None,
) -> Reference:
    request = ReferenceRequest(
        directory="",
        fingerprint=fingerprint or Checkpoint.open(directory).fingerprint,
        dtype=dtype,
        texts=texts,
        num_top=num_top,
        wire_dtype=wire_dtype or dtype,
        kv_dtype=kv_dtype,
    )
    progress = progress or LoadProgress()
    return compute_reference(request, directory, free_bytes=free_bytes, progress=progress)


@torch.no_grad()
def expected_outputs(directory: Path, dtype: DType, text: Text) -> tuple[Tensor, list[Tensor]]:
    """Logits, and hidden states after each layer but the last: of transformers, in float32 with weights that
    are rounded to `dtype`.
    """
    model = load_reference(directory).float()
    for parameter in model.parameters():
        parameter.copy_(parameter.to(TORCH_DTYPES[dtype]))
    output = model(torch.tensor([text]), output_hidden_states=True)
    # transformers applies the final norm to the last one.
    return output.logits[0], [hidden[0] for hidden in output.hidden_states[1:-1]]


@pytest.mark.matrix(6)
@pytest.mark.parametrize("dtype", list(DType))
def test_log_probabilities_and_hidden_states_equal_transformers(directory: Path, dtype: DType) -> None:
    reference = reference_of(directory, dtype=dtype)
    check_against(directory, dtype, reference)


def check_against(directory: Path, dtype: DType, reference: Reference) -> None:
    variances = []
    for number, text in enumerate(reference.texts):
        logits, layers = expected_outputs(directory, dtype, text.tokens)
        expected = logits.log_softmax(dim=-1)
        assert [row.token for row in text.rows] == [*text.tokens[1:], int(logits[-1].argmax())]
        for row, values in zip(text.rows, expected, strict=True):
            # Another order of sums in float32 moves values by some 2e-5, and swaps tokens that are as close.
            assert len({token for token, _ in row.top}) == 20
            assert [logprob for _, logprob in row.top] == pytest.approx(
                values.topk(20).values.tolist(), abs=1e-4
            )
            for token, logprob in (*row.top, (row.token, row.logprob)):
                assert logprob == pytest.approx(float(values[token]), abs=1e-4)
        variances += logits.var(-1, correction=0).tolist()
        for layer, hidden in zip(reference.layers[:-1], layers, strict=True):
            for position, state in enumerate(project(hidden).tolist()):
                begin = reference.token_index(number, position) * STATE_WIDTH
                assert list(layer.states[begin : begin + STATE_WIDTH]) == pytest.approx(
                    state, rel=1e-3, abs=1e-3
                )
    spread = math.sqrt(math.fsum(variances) / len(variances))
    assert reference.logit_spread == pytest.approx(spread, rel=1e-4)


def test_projections_equal_those_of_the_contract() -> None:
    """The bits of a hash, recomputed from its definition."""

    def hashed(value: int) -> int:
        value ^= value >> 16
        value = value * 0x85EBCA6B & 0xFFFFFFFF
        value ^= value >> 13
        value = value * 0xC2B2AE35 & 0xFFFFFFFF
        return value ^ (value >> 16)

    row = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    expected = [
        sum((-1) ** (hashed(i * NUM_PROJECTIONS + k) >> 31) * float(row[0, i]) for i in range(5))
        for k in range(NUM_PROJECTIONS)
    ]
    assert project(row)[0].tolist() == pytest.approx([*expected, float(row.norm())], abs=1e-5)


def rounding(reference: Reference) -> float:
    """Root mean square of the highest roundings of all rows."""
    return root_mean_square([value for text in reference.texts for value in text.roundings.highest])


def rounding_of_layer(reference: Reference, layer: int = 0) -> float:
    return root_mean_square(reference.layers[layer].roundings.highest)


def root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def test_every_token_has_roundings(llama: Path) -> None:
    reference = reference_of(llama, dtype=DType.BF16)
    for found in (
        *(layer.roundings for layer in reference.layers),
        *(text.roundings for text in reference.texts),
    ):
        assert min(found.typical) > 0.0
        assert all(map(operator.le, found.typical, found.highest))
    assert [len(layer.roundings.typical) for layer in reference.layers] == [sum(map(len, TEXTS))] * 2
    assert [len(text.roundings.highest) for text in reference.texts] == list(map(len, TEXTS))


def test_texts_do_not_see_each_other(llama: Path) -> None:
    alone = reference_of(llama, texts=TEXTS[1:])
    together = reference_of(llama)
    for row, expected in zip(together.texts[1].rows, alone.texts[0].rows, strict=True):
        assert row.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_rounding_grows_with_the_wire_dtype(llama: Path) -> None:
    whole, small = (reference_of(llama, wire_dtype=wire) for wire in (DType.F32, ScaledDType.I8))
    assert rounding(whole) < 1e-5 and rounding_of_layer(whole) < 1e-5
    assert rounding(small) > 1e-4 and rounding_of_layer(small) > 1e-4


def test_rounding_grows_with_the_dtype_of_keys_and_values(llama: Path) -> None:
    whole, eight, four = (
        reference_of(llama, kv_dtype=kv) for kv in (None, ScaledDType.I8, ScaledDType.F8_E4M3)
    )
    assert rounding(whole) < 1e-5
    assert 1e-4 < 2 * rounding(eight) < rounding(four) < 1.0
    assert whole.layers[0].states == eight.layers[0].states, "the exact states have exact keys and values"


def test_values_are_rounded_and_not_only_keys(tmp_path: Path) -> None:
    """With a window of one token, attention returns its value, whatever the key."""
    directory = make_checkpoint(tmp_path / "own", "mistral", num_layers=1, sliding_window=1)
    assert rounding(reference_of(directory)) < 1e-5
    assert rounding(reference_of(directory, kv_dtype=ScaledDType.F8_E4M3)) > 1e-4


def test_rounding_matters_more_the_coarser_the_dtype(llama: Path) -> None:
    assert 1e-7 < rounding(reference_of(llama, dtype=DType.F32)) < 1e-5
    half = rounding(reference_of(llama, dtype=DType.F16))
    coarse = rounding(reference_of(llama, dtype=DType.BF16))
    assert 1e-5 < half < coarse / 4
    assert coarse < 0.1


def test_a_matrix_may_be_read_in_any_number_of_pieces(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reference_of(directory)
    monkeypatch.setattr(reference_memory, "BLOCK_ELEMENTS", 64 * 7)
    pieces = reference_of(directory)
    assert pieces.logit_spread == pytest.approx(whole.logit_spread, rel=1e-5)
    for text, whole_text in zip(pieces.texts, whole.texts, strict=True):
        for row, expected in zip(text.rows, whole_text.rows, strict=True):
            assert row.token == expected.token
            assert [token for token, _ in row.top] == [token for token, _ in expected.top]
            assert row.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_no_more_than_a_block_is_read_at_once(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference_memory, "BLOCK_ELEMENTS", 64 * 7)
    sizes: list[int] = []
    load_rows = reference_module.load_rows

    def noting(checkpoint: Checkpoint, name: str, destination: Tensor, *, first_row: int) -> None:
        sizes.append(destination.numel())
        load_rows(checkpoint, name, destination, first_row=first_row)

    monkeypatch.setattr(reference_module, "load_rows", noting)
    reference_of(llama)
    assert max(sizes) == 64 * 7


def test_memory_is_bounded_and_rejected_with_the_numbers(llama: Path) -> None:
    needed = reference_memory.reference_bytes(
        Checkpoint.open(llama), DType.F32, [len(text) for text in TEXTS]
    )
    assert reference_of(llama, free_bytes=needed).texts
    with pytest.raises(Overloaded, match=f"needs {needed} bytes of memory, {needed - 1} are free"):
        reference_of(llama, free_bytes=needed - 1)


def test_memory_does_not_grow_with_the_layers(tmp_path: Path, llama: Path) -> None:
    deep = Checkpoint.open(make_checkpoint(tmp_path / "deep", "llama", num_layers=9))
    flat = Checkpoint.open(llama)
    sizes = {reference_memory.reference_bytes(config, DType.BF16, [8]) for config in (deep, flat)}
    assert len(sizes) == 1


def test_another_checkpoint_is_rejected(llama: Path) -> None:
    with pytest.raises(HandshakeMismatch, match=r"it has the fingerprint [0-9a-f-]+, expected 0123: copy"):
        reference_of(llama, fingerprint="0123")


def test_a_missing_checkpoint_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(HandshakeMismatch, match="is not a directory"):
        reference_of(tmp_path / "nothing", fingerprint="0123")


def test_weights_that_the_dtype_cannot_hold_are_rejected(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "wide", "llama", num_layers=1)
    weights = load_file(directory / "model.safetensors")
    weights["model.norm.weight"][3] = 1e5
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HandshakeMismatch, match="float16 cannot hold"):
        reference_of(directory, dtype=DType.F16)


def test_non_finite_logits_give_no_reference(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.zeros(NUM_COPIES, sum(map(len, TEXTS)), 128)
    broken[EXACT, 23, 5] = math.inf
    monkeypatch.setattr(StreamedModel, "logits", lambda model, hidden: iter([(0, broken)]))
    with pytest.raises(HandshakeMismatch, match="finite numbers, got others for position 4 of text 1"):
        reference_of(llama)


def test_a_token_outside_the_vocabulary_is_rejected(llama: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"token 128 is outside the vocabulary \[0, 128\)"):
        reference_of(llama, texts=((1,), (5, 128)))


def test_a_reference_without_a_waiter_stops_early(llama: Path) -> None:
    progress = LoadProgress()
    progress.cancel()
    with pytest.raises(StaleStream):
        reference_of(llama, progress=progress)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"texts": []}, r"texts of \[\] tokens"),
        ({"texts": [[]]}, r"texts of \[0\] tokens"),
        ({"texts": [range(1000), range(25)]}, r"texts of \[1000, 25\] tokens, must be 1 to 1024 in all"),
        ({"num_top": 1025}, r"num_top is 1025, must be in \[1, 1024\]"),
        ({"num_top": 0}, "num_top is 0"),
        ({"dtype": 0}, "dtype number 0 is not known"),
        ({"dtype": cluster_pb2.DTYPE_BF16, "wire_dtype": cluster_pb2.DTYPE_F32}, "not one for bf16"),
    ],
)
def test_requests_have_bounds(changes: dict[str, Any], text: str) -> None:
    fields = {"fingerprint": "f", "dtype": cluster_pb2.DTYPE_F32, "texts": [[1]], "num_top": 20} | changes
    fields["texts"] = [step_pb2.TokenSequence(tokens=tokens) for tokens in fields["texts"]]
    with pytest.raises(InvalidRequest, match=text):
        decode_request(forward_pb2.ComputeReferenceRequest(**fields), "")


@pytest.mark.parametrize("dtype", list(DType))
def test_the_recorded_reference_equals_a_computed_one(tmp_path: Path, dtype: DType) -> None:
    """Run `python -m tools.record_reference` after training the model again."""
    checkpoint = Checkpoint.open(MODEL_DIRECTORY)
    recorded = read_references(SELF_CHECK_FILE, checkpoint.fingerprint)[dtype.value]
    vocab_size = checkpoint.config.vocab_size
    texts = tuple(check_text(number, 36, vocab_size) for number in range(NUM_TEXTS))
    assert tuple(text.tokens for text in recorded.texts) == texts
    check_against(MODEL_DIRECTORY, dtype, recorded)


def test_the_recorded_reference_equals_a_fresh_recording(tmp_path: Path) -> None:
    record(tmp_path / "fresh.json")
    fingerprint = Checkpoint.open(MODEL_DIRECTORY).fingerprint
    fresh, recorded = (
        read_references(path, fingerprint) for path in (tmp_path / "fresh.json", SELF_CHECK_FILE)
    )
    for key, reference in recorded.items():
        found, expected = (
            (
                each.logit_spread,
                rounding(each),
                *(rounding_of_layer(each, i) for i in range(len(each.layers))),
            )
            for each in (reference, fresh[key])
        )
        assert found == pytest.approx(expected, rel=0.1)  # products round differently on other CPUs
