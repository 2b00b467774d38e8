"""A model that hands on several tensors computes what it computes uncut, through real frames and stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from checkpoint import BoundaryTensor, Checkpoint, DType, ScaledDType
from kvcache.pages import PageGroups
from stage_worker.backends.contract import StageOutput
from stage_worker.backends.tensor_views import from_frame, payload, to_frame
from stage_worker.executor import StepExecutor
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.step_layout import StepLayout
from tests.local_pipeline import LocalPipeline
from wire.errors import StepFault, StepFaultKind
from wire.frames import Frame
from wire.tensors import HiddenStates, TensorView

CUTS = [(3,), (1, 2), (2, 1), (1, 1, 1)]
PROMPTS = [tuple(range(1, 41)), (5, 6, 7), tuple(range(1, 20))]
HALF = 32
HANDED_ON = (
    BoundaryTensor(name="right_half", width=HALF),
    BoundaryTensor(name="tokens", width=1, dtype=DType.F32),
)


class HalvedStage(DecoderStage):
    """Hands on the right half of the hidden states apart, and the numbers of the tokens."""

    CARRIED: ClassVar[tuple[str, ...]] = ("hidden_states", "right_half", "tokens")

    def enter(self, token_ids: Tensor) -> tuple[Tensor, ...]:
        return (*_halved(self.embed(token_ids)), token_ids[:, None].float())

    def advance(self, carried: Sequence[Tensor], step: StepLayout, pages: PageGroups) -> tuple[Tensor, ...]:
        hidden, right, tokens = carried
        assert tokens.dtype is torch.float32, "a number of a token needs all its bits"
        whole = torch.cat((hidden[:, :HALF] + 0 * tokens, right), dim=1)
        return (*_halved(self.forward(whole, step, pages)), tokens)

    def leave(self, carried: Sequence[Tensor]) -> Tensor:
        return torch.cat((carried[0][:, :HALF], carried[1]), dim=1)


def _halved(hidden: Tensor) -> tuple[Tensor, Tensor]:
    left = hidden.clone()
    left[:, HALF:] = 0
    return left, hidden[:, HALF:].contiguous()


def halved(directory: Path, layers: Sequence[int]) -> LocalPipeline:
    return LocalPipeline(directory, layers, stage_type=HalvedStage, handed_on=HANDED_ON)


@pytest.mark.parametrize("layers", CUTS, ids=str)
def test_a_model_with_three_tensors_generates_the_same_tokens_at_every_cut(
    tiny_llama: Path, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    compute, seen = StepExecutor.compute, []

    def recording(executor: StepExecutor, frame: Frame) -> StageOutput:
        if frame.hidden:
            seen.append([(tensor.name, tensor.dtype, tensor.shape[1]) for tensor in frame.hidden])
            tokens = torch.frombuffer(bytearray(frame.hidden[2].data), dtype=torch.float32)
            assert tokens.tolist() == list(frame.step.tokens)
        return compute(executor, frame)

    monkeypatch.setattr(StepExecutor, "compute", recording)
    expected = LocalPipeline(tiny_llama, (3,)).generate(PROMPTS, max_tokens=12)
    assert halved(tiny_llama, layers).generate(PROMPTS, max_tokens=12) == expected
    named = [
        ("hidden_states", DType.F32, 2 * HALF),
        ("right_half", DType.F32, HALF),
        ("tokens", DType.F32, 1),
    ]
    assert all(frame == named for frame in seen)
    assert bool(seen) == (len(layers) > 1)


def test_a_stage_that_knows_fewer_tensors_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(
        ValueError, match="hidden_states, right_half, tokens cross a cut, layers compute hidden"
    ):
        LocalPipeline(tiny_llama, (1, 2), handed_on=HANDED_ON)


def without_last(hidden: HiddenStates) -> HiddenStates:
    return hidden[:-1]


def swapped(hidden: HiddenStates) -> HiddenStates:
    return hidden[1], hidden[0], hidden[2]


def renamed(hidden: HiddenStates) -> HiddenStates:
    return *hidden[:2], replace(hidden[2], name="numbers")


def narrower(hidden: HiddenStates) -> HiddenStates:
    rows = hidden[1].shape[0]
    return hidden[0], TensorView(DType.F32, (rows, 1), bytes(4 * rows), "right_half"), hidden[2]


def compressed(hidden: HiddenStates) -> HiddenStates:
    rows = hidden[2].shape[0]
    return *hidden[:2], TensorView(DType.BF16, (rows, 1), bytes(2 * rows), "tokens")


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        (without_last, StepFaultKind.SHAPE, "expected hidden_states, right_half, tokens"),
        (swapped, StepFaultKind.SHAPE, "expected hidden_states, right_half, tokens"),
        (renamed, StepFaultKind.SHAPE, "'numbers'"),
        (narrower, StepFaultKind.SHAPE, "tensor 'right_half' (3, 1) for 3 tokens of width 32"),
        (compressed, StepFaultKind.DTYPE, "tensor 'tokens' in bf16, expected f32"),
    ],
)
def test_names_shapes_and_dtypes_of_all_tensors_are_checked(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, change: object, kind: StepFaultKind, text: str
) -> None:
    compute = StepExecutor.compute

    def changed(executor: StepExecutor, frame: Frame) -> StageOutput:
        assert callable(change)
        return compute(executor, replace(frame, hidden=change(frame.hidden)) if frame.hidden else frame)

    monkeypatch.setattr(StepExecutor, "compute", changed)
    with pytest.raises(StepFault) as fault:
        halved(tiny_llama, (1, 2)).generate([(5, 6, 7)], max_tokens=2)
    assert fault.value.kind is kind
    assert text in fault.value.message


@pytest.mark.parametrize("wire_dtype", [DType.BF16, ScaledDType.F8_E4M3])
def test_a_smaller_wire_dtype_leaves_exact_tensors_as_they_are(
    tiny_llama: Path, wire_dtype: DType | ScaledDType
) -> None:
    boundary = replace(Checkpoint.open(tiny_llama).config, handed_on=HANDED_ON).boundary
    tensors = (torch.randn(3, 64), torch.randn(3, HALF), torch.tensor([[1.0], [70_001.0], [16_777_215.0]]))
    sent = to_frame(tensors, boundary, wire_dtype)
    assert [tensor.dtype for tensor in sent] == [wire_dtype, wire_dtype, DType.F32]
    payloads = [torch.from_numpy(payload(view)) for view in sent]
    received = from_frame(sent, payloads, boundary, torch.float32)
    assert torch.equal(received[2], tensors[2])
    assert torch.allclose(received[1], tensors[1], rtol=0.07, atol=0.05)
    assert not torch.equal(received[1], tensors[1])
