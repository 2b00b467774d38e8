"""Models of several residual streams: names, parts that are kept, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint import Checkpoint, DType, MissingTensor, UnexpectedTensor, UnsupportedModel
from checkpoint.implementation import Implementation
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.parts import LoadedParts, NeededParts
from tests.checkpoints import edit_config
from tests.fake_device import FakeQueue
from tests.families import NUM_LAYERS, make_family
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_parity import compute_in_chunks, random_sequences


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("streams") / "model", "hy_v4")


def published(name: str) -> str:
    """The name in published checkpoints of a tensor that transformers has saved."""
    for module in ("hc_attn_layer.", "hc_mlp_layer."):
        name = name.replace(f"hc_pre.{module}", f"{module}hc_pre.")
    name = name.replace("hc_pre.hc_head.", "hc_head.")
    return name.replace("linear_gate", "gate_proj") if ".mlp." in name else name


def rewritten(source: Path, target: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return target


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {published(name): tensor for name, tensor in tensors.items()}


def logits_of(directory: Path) -> Tensor:
    (found,) = compute_in_chunks(Pipeline(Checkpoint.open(directory), (1,)), random_sequences([33]), [16])
    return found


def test_published_names_and_those_of_transformers_are_read(directory: Path, tmp_path: Path) -> None:
    other = rewritten(directory, tmp_path / "published", renamed)
    names = {*Checkpoint.open(directory).tensors, *Checkpoint.open(other).tensors}
    assert len(names) > len(Checkpoint.open(other).tensors) + 6 * NUM_LAYERS
    assert torch.equal(logits_of(other), logits_of(directory))


def test_a_lacking_tensor_is_told_by_its_published_name(directory: Path, tmp_path: Path) -> None:
    lacking = "model.layers.0.hc_mlp_layer.hc_pre.hc_scale"

    def without(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in renamed(tensors).items() if name != lacking}

    with pytest.raises(MissingTensor, match=f"checkpoint lacks {lacking}"):
        Checkpoint.open(rewritten(directory, tmp_path / "model", without))


def test_draft_layers_of_a_module_of_their_own_are_not_read(directory: Path, tmp_path: Path) -> None:
    def with_drafts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return renamed(tensors) | {"model.mtp_layers.0.enorm.weight": torch.full((64,), torch.nan)}

    target = rewritten(directory, tmp_path / "model", with_drafts)
    with pytest.raises(UnexpectedTensor, match=r"model\.mtp_layers\.0"):
        Checkpoint.open(target)
    edit_config(target, num_nextn_predict_layers=1)
    assert Checkpoint.open(target).drafts.num_tensors == 1
    assert torch.equal(logits_of(target), logits_of(directory))


def stage(checkpoint: Checkpoint, layer_begin: int, *, has_head: bool) -> DecoderStage:
    return DecoderStage(
        checkpoint.config,
        layer_begin=layer_begin,
        layer_end=NUM_LAYERS if has_head else NUM_LAYERS - 1,
        has_embeddings=False,
        has_head=has_head,
        dtype=DType.BF16,
    )


def collapsed(last: DecoderStage) -> Tensor:
    torch.manual_seed(1)
    return last.logits(torch.randn(3, last.config.residual_width).bfloat16())


def test_the_collapse_is_kept_with_the_head_from_one_load_to_the_next(directory: Path) -> None:
    checkpoint, parts = Checkpoint.open(directory), LoadedParts()
    last = stage(checkpoint, 3, has_head=True)
    assert "collapse of streams" in last.load(checkpoint, parts=parts).read_others
    expected = collapsed(last)
    longer = stage(checkpoint, 1, has_head=True)
    assert "collapse of streams" in longer.load(checkpoint, parts=parts).kept_others
    assert torch.equal(collapsed(longer), expected)
    stage(checkpoint, 1, has_head=False).load(checkpoint, parts=parts)
    assert parts.collapse is None


def test_connections_and_collapse_come_back_from_memory_of_the_host(directory: Path) -> None:
    checkpoint, parts, copies = Checkpoint.open(directory), LoadedParts(), FakeQueue()
    last = stage(checkpoint, 3, has_head=True)
    last.load(checkpoint)
    expected = collapsed(last)
    needed = NeededParts(layers=last.layers, has_embeddings=False, has_head=True, is_tied=False)
    last.keep_on_host(checkpoint, parts, needed, copies, pinned_limit_bytes=0)
    again = stage(checkpoint, 3, has_head=True)
    read = again.load(checkpoint, parts=parts, copies=copies)
    assert read.num_bytes == 0 and "collapse of streams" in read.host_others
    assert torch.equal(collapsed(again), expected)


def test_weights_of_streams_stay_in_float32(directory: Path) -> None:
    """Of bf16 ones, weights near 1 would be wrong by 2^-9."""
    checkpoint, parts, copies = Checkpoint.open(directory), LoadedParts(), FakeQueue()
    last = stage(checkpoint, 3, has_head=True)
    needed = NeededParts(layers=last.layers, has_embeddings=False, has_head=True, is_tied=False)
    last.keep_on_host(checkpoint, parts, needed, copies, pinned_limit_bytes=0)
    (layer,) = (held.form for names, held in parts.on_host.items() if any(".4." in name for name in names))
    tensors = [tensor for kinds in layer.streams.values() for tensor in kinds.values()]  # type: ignore[union-attr]
    assert len(tensors) == 6 and {tensor.dtype for tensor in tensors} == {torch.float32}


def test_layers_of_transformers_are_refused(directory: Path) -> None:
    config = Checkpoint.open(directory).config
    with pytest.raises(UnsupportedModel, match="'hy_v4' has 3 residual streams, which transformers' layers"):
        Implementation.choose("transformers", config)
    assert Implementation.choose("auto", config) is Implementation.NATIVE
