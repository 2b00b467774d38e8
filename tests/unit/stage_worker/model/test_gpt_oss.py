"""Experts of gpt-oss: 4-bit floats compute what the same weights in plain form do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import Checkpoint, DType
from stage_worker.loading.reference import StreamedModel
from tests.checkpoints import load_reference
from tests.families import make_family
from tests.quantized import mxfp4
from tests.unit.stage_worker.model.pipeline import Pipeline
from tests.unit.stage_worker.model.test_families import spread_of
from tests.unit.stage_worker.model.test_parity import (
    compute_in_chunks,
    random_sequences,
    reference_logits,
)

PUBLISHED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
    ],
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A plain checkpoint, [experts, in, out], and a packed one, [experts, out, in], of the same weights."""
    parent = tmp_path_factory.mktemp("gpt_oss")
    plain = make_family(parent / "plain", "gpt_oss", num_layers=2)
    packed = parent / "packed"
    shutil.copytree(plain, packed)
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": PUBLISHED}
    (packed / "config.json").write_text(json.dumps(config))
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    rng = np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, columns, rows = tensors[name].shape
        found = [mxfp4(is_gpt_oss=True)(rng, name, rows, columns) for _ in range(num_experts)]
        weights = torch.from_numpy(np.stack([matrix for _, matrix in found]))
        tensors[name] = weights.transpose(1, 2).contiguous()
        del stored[name]
        for part in (f"{name}_blocks", f"{name}_scales"):
            given = [written[part] for written, _ in found]
            octets = np.stack([np.frombuffer(one.data, np.uint8).reshape(one.shape) for one in given])
            stored[part] = torch.from_numpy(octets)
    for directory, content in ((plain, tensors), (packed, stored)):
        save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    return plain, packed


def test_packed_experts_compute_like_plain_ones_and_like_transformers(both: tuple[Path, Path]) -> None:
    plain, packed = map(Checkpoint.open, both)
    assert len(packed.packed) == 4 and not plain.packed
    sequence = random_sequences([40])
    found = compute_in_chunks(Pipeline(packed, cuts=(1,)), sequence, [7, 5, 1, 11])[0]
    (of_plain,) = compute_in_chunks(Pipeline(plain), random_sequences([40]), [7, 5, 1, 11])
    assert torch.equal(found, of_plain)
    assert spread_of(found, reference_logits(load_reference(both[0]), sequence[0].tokens)) < 1e-4


def test_the_streamed_reference_reads_packed_experts(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of rows that are odd, and end within matrices."""
    monkeypatch.setattr("stage_worker.loading.reference_memory.BLOCK_ELEMENTS", 64 * 7)
    found = []
    for directory in both:
        model = StreamedModel(Checkpoint.open(directory), DType.F32)
        with torch.inference_mode():
            *_, hidden = model.hidden_states([random_sequences([40])[0].tokens])
            found.append(torch.cat([block for _, block in model.logits(hidden)], dim=-1)[0])
    expected = reference_logits(load_reference(both[0]), random_sequences([40])[0].tokens)
    assert max(spread_of(logits, expected) for logits in found) < 1e-4
