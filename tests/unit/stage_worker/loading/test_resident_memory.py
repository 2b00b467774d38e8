"""A loaded stage keeps the bytes of the plan: temporaries of rounding go back to the system."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from checkpoint import Checkpoint, DType, WeightFormat, stage_weight_bytes
from tests.quantized import compressed
from tests.zero_checkpoint import write_zero_checkpoint

ROOT = Path(__file__).parents[4]
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
SLACK_BYTES = 20e6
"""Python objects and libraries that loading creates."""

PROGRAM = """
import re, sys
from dataclasses import replace
from pathlib import Path
import torch
from checkpoint import Checkpoint, DType, WeightFormat
from checkpoint.implementation import Implementation
from kvcache import group_windows
from stage_worker.loading import stage_loader
from tests.integration.stage_bench import new_assignment
torch.set_num_threads(1)
directory = Path(sys.argv[1])
implementation = Implementation.NATIVE
if "transformers" in sys.argv:
    implementation = Implementation.TRANSFORMERS
    stage_loader.transformers_stage()  # the library is no part of a stage
weights = None if sys.argv[2] == "bf16" else WeightFormat.from_name(sys.argv[2])
def anonymous_bytes():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
class Measured(Exception):
    pass
def measure(*given, **others):
    raise Measured
stage_loader.new_pages = measure  # the step after the weights
if "keep" in sys.argv:
    stage_loader.free_memory = lambda device: None
windows = group_windows(Checkpoint.open(directory).config.cache_windows)
others = (8,) * (len(windows) - 1)
assignment = replace(new_assignment(directory, stage=0, num_stages=1, num_layers=6), dtype=DType.BF16,
                     weights=weights, implementation=implementation, other_num_blocks=others)
resources = stage_loader.WorkerResources(device=torch.device("cpu"), memory_bytes=1 << 40,
                                         model_directory=None)
cache = stage_loader.StageCache()
at_start = anonymous_bytes()
try:
    stage_loader._load(assignment, resources, stage_loader.LoadProgress(), cache)
except Measured:
    print(anonymous_bytes() - at_start)
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zeros")
    write_zero_checkpoint(directory, CONFIG, num_shards=2)
    return directory


def measure(directory: Path, form: WeightFormat | None, mode: str = "") -> int:
    """Growth of a fresh process in bytes until a stage has its weights; mode "keep" keeps temporaries,
    "transformers" loads transformers' layers.
    """
    command = [sys.executable, "-c", PROGRAM, str(directory), form.value if form else "bf16", mode]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.matrix(0, full=2)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is read from /proc")
@pytest.mark.parametrize("form", WeightFormat)
def test_memory_after_a_load_is_the_plan_s_resident_size(directory: Path, form: WeightFormat) -> None:
    config = Checkpoint.open(directory).with_weights(form).config
    planned = stage_weight_bytes(config, DType.BF16, 0, 6, has_embeddings=True, has_head=True)
    assert 0.9 * planned < measure(directory, form) < 1.03 * planned + SLACK_BYTES
    assert measure(directory, form, "keep") > 1.03 * planned + SLACK_BYTES, "the bound notices nothing"


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is read from /proc")
def test_memory_of_transformers_layers_is_the_plan_s_resident_size(directory: Path) -> None:
    config = Checkpoint.open(directory).config
    planned = stage_weight_bytes(config, DType.BF16, 0, 6, has_embeddings=True, has_head=True)
    assert 0.9 * planned < measure(directory, None, "transformers") < 1.03 * planned + SLACK_BYTES


GROUPED: dict[str, object] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "head_dim": 256,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 2048,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}
"""Half of its weights project groups of heads."""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is read from /proc")
def test_memory_of_projections_by_groups_is_the_plan_s_resident_size(tmp_path: Path) -> None:
    write_zero_checkpoint(tmp_path, GROUPED, num_shards=2)
    config = Checkpoint.open(tmp_path).config
    planned = stage_weight_bytes(config, DType.BF16, 0, 6, has_embeddings=True, has_head=True)
    assert 0.9 * planned < measure(tmp_path, None) < 1.03 * planned + SLACK_BYTES


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PACKED = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)


@pytest.mark.matrix(0, full=2)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is read from /proc")
@pytest.mark.parametrize("form", [None, WeightFormat.INT4], ids=["bf16", "int4"])
@pytest.mark.parametrize("stored", [FP8, PACKED], ids=["fp8", "int4 in files"])
def test_memory_of_a_quantised_checkpoint_is_the_plan_s_resident_size(
    tmp_path: Path, stored: dict[str, object], form: WeightFormat | None
) -> None:
    """Unpacked window by window: neither the files nor float32 matrices stay."""
    size_bytes = write_zero_checkpoint(tmp_path, CONFIG | {"quantization_config": stored}, num_shards=2)
    config = Checkpoint.open(tmp_path).with_weights(form).config
    planned = stage_weight_bytes(config, DType.BF16, 0, 6, has_embeddings=True, has_head=True)
    plain = stage_weight_bytes(
        Checkpoint.open(tmp_path).config, DType.BF16, 0, 6, has_embeddings=True, has_head=True
    )
    assert size_bytes < 0.6 * plain
    assert 0.9 * planned < measure(tmp_path, form) < 1.03 * planned + SLACK_BYTES
