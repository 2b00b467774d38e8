"""Surfaces of a checkpoint: config.json, the index, headers of safetensors files, and GGUF files.

A case is the name of a file, a line break, and its content.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np

from checkpoint import Checkpoint, CheckpointError, parse_config, stage_tensor_shapes
from checkpoint.gguf.model import gguf_tokenizer_files
from tests.fuzz.harness import Broken, Opened, Surface
from tests.fuzz.mutations import BIG_NUMBERS, NUMBERS, json_bytes, mutate_bytes, mutate_json
from tests.zero_checkpoint import write_zero_checkpoint, write_zero_shard

CONFIG, GENERATION = "config.json", "generation_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_ODD_FILES = (
    "../model.safetensors",
    "/dev/zero.safetensors",
    "a\0.safetensors",
    "\ud800.safetensors",
    ".safetensors",
)
_ODD_NAMES = ("\ud800.rotary_emb.inv_freq", "", "__metadata__", "model.layers.0.rotary_emb.inv_freq")

_LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": [1][0],
    "hidden_act": "silu",
    "attention_bias": False,
}
_SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: tuple[Mapping[str, Any], ...] = (
    _LLAMA,
    {**_LLAMA, "rope_scaling": _SCALED},
    {**_LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    {**_LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    {**_LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 4},
    {**_LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8,
     "use_sliding_window": True, "max_window_layers": 0, "layer_types": ["sliding_attention"]},
    {**_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 8},
)  # fmt: skip


def make_config(random: Random) -> bytes:
    if random.random() < 0.2:
        valid: Any = {"eos_token_id": [2, 3], "bos_token_id": 1, "temperature": 0.5}
        return _named(GENERATION, json_bytes(mutate_json(valid, random), random))
    return _named(CONFIG, json_bytes(mutate_json(dict(random.choice(CONFIGS)), random), random))


def make_index(random: Random) -> bytes:
    index = json.loads(_files()[INDEX])
    weights = index["weight_map"]
    if random.random() < 0.4:
        weights[random.choice(list(weights))] = random.choice((*_ODD_FILES, SINGLE, CONFIG))
    if random.random() < 0.2:
        weights[random.choice(_ODD_NAMES)] = random.choice(list(weights.values()))
    if random.random() < 0.7:
        index = mutate_json(index, random)
    return _named(INDEX, json_bytes(index, random))


def make_header(random: Random) -> bytes:
    """A header with changed values, the right length in front of it, and the tensors behind it, mostly."""
    file = _files()[SINGLE]
    size = int.from_bytes(file[:8], "little")
    header, tensors = json.loads(file[8 : 8 + size]), file[8 + size :]
    for _ in range(random.randint(0, 2)):
        entry = header[random.choice(list(header))]
        if isinstance(entry, dict) and "shape" in entry:
            entry[random.choice(("shape", "data_offsets"))] = [
                random.choice((*NUMBERS, *BIG_NUMBERS, 8, 32)) for _ in range(random.choice((0, 1, 2, 2, 3)))
            ]
    if random.random() < 0.3:
        header[random.choice(_ODD_NAMES)] = {"dtype": "F32", "shape": [0], "data_offsets": [len(tensors)] * 2}
    if random.random() < 0.6:
        header = mutate_json(header, random)
    text = json_bytes(header, random)
    length = len(text) if random.random() < 0.9 else random.choice((*NUMBERS, 2**63)) % 2**64
    data = length.to_bytes(8, "little") + text + tensors
    return _named(SINGLE, mutate_bytes(data, random) if random.random() < 0.15 else data)


@contextmanager
def opened_checkpoint() -> Iterator[Opened]:
    """Takes a case by opening a checkpoint with this file in it."""
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        directory = Path(made)

        def examine(data: bytes) -> str:
            name, _, content = data.partition(b"\n")
            files = {CONFIG: _files()[CONFIG], **_weights(name.decode()), name.decode(): content}
            for file, body in files.items():
                (directory / file).write_bytes(body)
            try:
                return _outcome(lambda: Checkpoint.open(directory))
            finally:
                for file in files:
                    (directory / file).unlink()

        yield Opened(examine, lambda: _check_valid(examine), (os.getpid(),))


def _outcome(work: Callable[[], object]) -> str:
    try:
        work()
    except CheckpointError as error:
        if len(str(error)) > 20_000:
            raise Broken(f"an error of {len(str(error))} characters: {str(error)[:200]}") from None
        return type(error).__name__
    return "ok"


def _check_valid(examine: Callable[[bytes], str]) -> None:
    for name in (CONFIG, INDEX, SINGLE):
        assert examine(_named(name, _files()[name])) == "ok", name


def _named(name: str, content: bytes) -> bytes:
    return name.encode() + b"\n" + content


def _weights(name: str) -> dict[str, bytes]:
    """Files of weights beside the file `name`: two shards for the index, else one file."""
    if name != INDEX:
        return {} if name == SINGLE else {SINGLE: _files()[SINGLE]}
    return {file: content for file, content in _files().items() if file.startswith("model-")}


@cache
def _files() -> Mapping[str, bytes]:
    """Of a valid checkpoint, once whole and once in two shards."""
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        directory = Path(made)
        write_zero_checkpoint(directory, _LLAMA, num_shards=2)
        files = {path.name: path.read_bytes() for path in directory.iterdir()}
    return {**files, SINGLE: _single_file()}


def _single_file() -> bytes:
    config = parse_config(_LLAMA)
    shapes = stage_tensor_shapes(config, 0, config.num_layers, has_embeddings=True, has_head=True)
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        write_zero_shard(Path(made) / SINGLE, shapes, "float32")
        return (Path(made) / SINGLE).read_bytes()


GGUF = "model.gguf"
_GGUF_TOKENS = ("<unk>", "<s>", "</s>", "a", "b", "▁", "▁a", "ab")
_GGUF_KEYS = (
    *("embedding_length", "block_count", "attention.head_count", "attention.key_length", "expert_count"),
    *("context_length", "attention.head_count_kv", "feed_forward_length", "rope.dimension_count"),
)


@cache
def _gguf_file() -> bytes:
    """A small model of zeros with a tokenizer."""
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        path = Path(made) / GGUF
        writer = gguf.GGUFWriter(path, "llama")
        for key in _GGUF_KEYS:
            writer.add_uint32(f"llama.{key}", 0 if key == "expert_count" else _LLAMA_KEYS.get(key, 4))
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_tokenizer_model("llama")
        writer.add_token_list(list(_GGUF_TOKENS))
        writer.add_token_scores([-float(place) for place in range(len(_GGUF_TOKENS))])
        writer.add_token_types([2, 3, 3, 1, 1, 1, 1, 1])
        for name, number in (("unknown", 0), ("bos", 1), ("eos", 2)):
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
        writer.add_chat_template("{{ messages }}")
        for name, shape in _GGUF_TENSORS.items():
            writer.add_tensor(name, np.zeros(shape, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


_LLAMA_KEYS = {
    "embedding_length": 8,
    "block_count": 1,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
}
_LLAMA_KEYS |= {"feed_forward_length": 16, "context_length": 64}
_GGUF_TENSORS: Mapping[str, tuple[int, ...]] = {
    "token_embd.weight": (8, 8),
    "output_norm.weight": (8,),
    "blk.0.attn_norm.weight": (8,),
    "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8),
    "blk.0.attn_k.weight": (4, 8),
    "blk.0.attn_v.weight": (4, 8),
    "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (16, 8),
    "blk.0.ffn_up.weight": (16, 8),
    "blk.0.ffn_down.weight": (8, 16),
}


def make_gguf(random: Random) -> bytes:
    """A GGUF file with changed numbers behind names of keys and tensors, other bytes, or a part of it."""
    data = bytearray(_gguf_file())
    places = [
        data.find(name.encode()) + len(name) for name in (*_GGUF_KEYS, *_GGUF_TENSORS, "tokens", "scores")
    ]
    for _ in range(random.randint(0, 3)):
        place = random.choice(
            (8, 16, *(place + random.choice((0, 4, 8, 12, 16, 20, 24)) for place in places))
        )
        size = random.choice((4, 8))
        number = random.choice((*NUMBERS, *BIG_NUMBERS, 2, 16, 2**31, 2**63, random.getrandbits(size * 8)))
        data[place : place + size] = (int(number) % 2 ** (8 * size)).to_bytes(size, "little")
    if random.random() < 0.2:
        return bytes(data[: random.randrange(len(data))])
    return mutate_bytes(bytes(data), random) if random.random() < 0.3 else bytes(data)


@contextmanager
def opened_gguf() -> Iterator[Opened]:
    """Takes a case by opening the file, and by making the files of its tokenizer."""
    with tempfile.TemporaryDirectory(prefix="stageline-fuzz-") as made:
        path = Path(made) / GGUF

        def examine(data: bytes) -> str:
            path.write_bytes(data)
            return f"{_outcome(lambda: Checkpoint.open(path))} {_outcome(lambda: gguf_tokenizer_files(path))}"

        yield Opened(examine, lambda: _check_valid_gguf(examine), (os.getpid(),))


def _check_valid_gguf(examine: Callable[[bytes], str]) -> None:
    assert examine(_gguf_file()) == "ok ok"


SURFACES = (
    Surface(name="config", share=14, make=make_config, opened=opened_checkpoint),
    Surface(name="index", share=8, make=make_index, opened=opened_checkpoint),
    Surface(name="safetensors", share=12, make=make_header, opened=opened_checkpoint),
    Surface(name="gguf", share=10, make=make_gguf, opened=opened_gguf),
)
