"""Loading of stage weights: correct values, own tensors only, bounded memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoint import BadHeader, Checkpoint, CheckpointNotFound, DType, stage_tensor_names
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.decoder_layer import GroupedAttention, HeadNorms
from stage_worker.model.latent_attention import LatentAttention
from stage_worker.model.projections import PlainProjection
from stage_worker.model.weights import load_tensors
from tests.checkpoints import make_checkpoint
from tests.families import make_family
from tests.zero_checkpoint import write_zero_checkpoint

ROOT = Path(__file__).parents[3]


def make_stage(checkpoint: Checkpoint, begin: int, end: int, dtype: DType | None = None) -> DecoderStage:
    config = checkpoint.config
    return DecoderStage(
        config,
        layer_begin=begin,
        layer_end=end,
        has_embeddings=begin == 0,
        has_head=end == config.num_layers,
        dtype=dtype or config.dtype,
    )


@pytest.mark.parametrize("window_bytes", [6, 1000, 4096, 1 << 30])
def test_windows_of_any_size_copy_every_element(window_bytes: int, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "qwen2", num_layers=1, max_shard_size="40KB"))
    if window_bytes == 6:
        names = ["model.norm.weight", "model.layers.0.self_attn.k_proj.bias"]
    else:
        names = list(checkpoint.tensors)
    places = {name: torch.full(checkpoint.tensors[name].shape, float("nan")) for name in names}
    load_tensors(checkpoint, places, window_bytes=window_bytes)
    assert len({entry.file for entry in checkpoint.tensors.values()}) > 1
    stored = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    for name, place in places.items():
        assert torch.equal(place, stored[name])


@pytest.mark.parametrize(("stored", "run"), [("bfloat16", DType.F32), ("float32", DType.BF16)])
def test_weights_are_converted_to_the_run_dtype(stored: str, run: DType, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=2, dtype=stored))
    stage = make_stage(checkpoint, 0, 2, run)
    stage.load(checkpoint)
    tokens = torch.arange(128)
    expected = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(stage.embed(tokens), expected.to(stage.torch_dtype))


def test_tensors_at_odd_offsets_are_read(tmp_path: Path) -> None:
    """The format allows a header of any length, and so data that is not aligned to its elements."""
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=1))
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip(b" ")
    header += b" " * (1 - len(header) % 2)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    moved = Checkpoint.open(tmp_path)
    assert moved.tensors["model.norm.weight"].begin % 2 == 1
    places = {"model.norm.weight": torch.empty(64)}
    load_tensors(moved, places)
    assert torch.equal(places["model.norm.weight"], load_file(file)["model.norm.weight"])
    assert checkpoint.fingerprint != moved.fingerprint


def test_a_stage_opens_only_the_files_that_hold_its_tensors(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=4, max_shard_size="130KB"))
    names = stage_tensor_names(checkpoint.config, 1, 2, has_embeddings=False, has_head=False)
    needed = {checkpoint.tensors[name].file for name in names}
    others = {entry.file for entry in checkpoint.tensors.values()} - needed
    assert others
    for file in others:
        (tmp_path / file).unlink()
    make_stage(checkpoint, 1, 2).load(checkpoint)
    (tmp_path / needed.pop()).unlink()
    with pytest.raises(CheckpointNotFound, match="cannot be read"):
        make_stage(checkpoint, 1, 2).load(checkpoint)


def test_a_file_that_shrank_since_its_header_was_read_is_rejected(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_checkpoint(tmp_path, "llama", num_layers=1))
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 4)
    with pytest.raises(BadHeader, match="its header accounted for"):
        make_stage(checkpoint, 0, 1).load(checkpoint)


def test_a_weight_beyond_the_range_of_float16_is_rejected_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = 70_000.0
    save_file(tensors, file)
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight of f32 has values that float16 cannot hold"):
        make_stage(checkpoint, 0, 1, DType.F16).load(checkpoint)


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama", True), ("qwen3", True)])
def test_weight_bytes_equals_the_allocated_memory(family: str, tied: bool, tmp_path: Path) -> None:
    check_weight_bytes(make_checkpoint(tmp_path, family, num_layers=3, tie_word_embeddings=tied))


@pytest.mark.parametrize("query_rank", [40, None])
def test_weights_of_latent_attention_are_in_memory_once(query_rank: int | None, tmp_path: Path) -> None:
    """In layers without experts; their matrices of keys and values are separated."""
    sizes: dict[str, Any] = {"num_layers": 3, "first_k_dense_replace": 3, "q_lora_rank": query_rank}
    check_weight_bytes(make_family(tmp_path, "deepseek_v3", **sizes))


def check_weight_bytes(directory: Path) -> None:
    checkpoint = Checkpoint.open(directory)
    for begin, end in [(0, 3), (0, 1), (1, 2), (2, 3)]:
        stage = make_stage(checkpoint, begin, end)
        stage.load(checkpoint)
        assert stage.weight_bytes == _allocated_bytes(stage)


def _allocated_bytes(stage: DecoderStage) -> int:
    weights = stage._loaded()
    owners = [owner for layer in weights.layers for owner in (layer, layer._mix, layer._feed_forward)]
    owners += [layer._mix._write for layer in weights.layers if isinstance(layer._mix, GroupedAttention)]
    held = [part for owner in owners for part in vars(owner).values()]
    norms = [layer._mixer_norm for layer in weights.layers] + [layer._ffn_norm for layer in weights.layers]
    norms += [norm for part in held if isinstance(part, HeadNorms) for _, norm in part._parts]
    mixers = [layer._mix for layer in weights.layers if isinstance(layer._mix, LatentAttention)]
    norms += [norm for mixer in mixers for norm in (mixer._latent_norm, getattr(mixer, "_query_norm", None))]
    held += [getattr(norm, "_weight", None) for norm in (*norms, weights.final_norm)]
    held += [weights.embeddings, weights.head]
    projections = [part for part in held if isinstance(part, PlainProjection)]
    tensors = [t for projection in projections for t in (projection.weight, projection.bias)] + held
    storages = [t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# Peak memory. The stage is a third of the checkpoint; its projections are fused on loading.

LARGE: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}

SLACK_BYTES = 200e6
"""Windows of readers, buffers, and libraries that loading maps."""

PROGRAM = """
import re, sys
import torch
from checkpoint import Checkpoint, DType
from stage_worker.model import DecoderStage, LoadedParts
torch.set_num_threads(1)
def kib(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])
at_start = kib("VmRSS")
checkpoint = Checkpoint.open(sys.argv[1])
parts = LoadedParts()
def new_stage(begin, end):
    return DecoderStage(checkpoint.config, layer_begin=begin, layer_end=end, has_embeddings=False,
                        has_head=False, dtype=DType.from_name(sys.argv[2]))
if sys.argv[3] == "drop late":
    LoadedParts._drop_layers = lambda self, keep: None
for stage_before in sys.argv[4:]:
    new_stage(*map(int, stage_before.split("-"))).load(checkpoint, parts=parts)
stage = new_stage(5, 10)
if sys.argv[3] == "keep windows":
    from stage_worker.model import weights
    memory, kept = weights._Scratch.memory, []
    def keep(self, num_bytes):
        kept.append(self._memory)
        self._memory = self._memory[:0]
        return memory(self, num_bytes)
    weights._Scratch.memory = keep
stage.load(checkpoint, parts=parts)
print(stage.weight_bytes, kib("VmHWM") - at_start)
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("large")
    assert write_zero_checkpoint(directory, LARGE, num_shards=4) > 1_400_000_000
    yield directory
    shutil.rmtree(directory)


def measure(directory: Path, dtype: str, mode: str = "", *stages_before: str) -> tuple[int, int]:
    """(weights, peak resident memory) in bytes of a fresh process that loads layers 5 to 9, perhaps after
    other stages of as many layers ("2-7"). The peak is without the libraries of the process, of which the
    kernel maps more or less.
    """
    command = [sys.executable, "-c", PROGRAM, str(directory), dtype, mode, *stages_before]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    weight_bytes, peak_kib = result.stdout.split()
    return int(weight_bytes), int(peak_kib) * 1024


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is read from /proc")
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_peak_memory_while_loading_stays_near_the_stage_s_own_weights(
    dtype: str, large_checkpoint: Path
) -> None:
    weight_bytes, peak = measure(large_checkpoint, dtype)
    assert weight_bytes > 450_000_000
    assert peak < 1.15 * weight_bytes + SLACK_BYTES


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is read from /proc")
def test_the_memory_bound_notices_windows_that_stay(large_checkpoint: Path) -> None:
    weight_bytes, peak = measure(large_checkpoint, "f32", "keep windows")
    assert peak > 1.15 * weight_bytes + SLACK_BYTES


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is read from /proc")
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_the_peak_stays_there_when_stages_follow_one_another(dtype: str, large_checkpoint: Path) -> None:
    weight_bytes, peak = measure(large_checkpoint, dtype, "", "2-7", "10-15", "7-12", "0-5", "3-8")
    assert peak < 1.15 * weight_bytes + SLACK_BYTES


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="VmHWM is read from /proc")
def test_the_memory_bound_notices_layers_that_are_dropped_late(large_checkpoint: Path) -> None:
    weight_bytes, peak = measure(large_checkpoint, "bf16", "drop late", "0-5")
    assert peak > 1.15 * weight_bytes + SLACK_BYTES
