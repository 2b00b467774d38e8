"""Checks of a checkpoint directory before anything is loaded."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoint import (
    BadConfig,
    BadHeader,
    Checkpoint,
    CheckpointError,
    CheckpointNotFound,
    DType,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedFormat,
    UnsupportedModel,
    WrongShape,
    differing_parts,
    head_bytes,
    kv_bytes_per_token,
    layer_weight_bytes,
    stage_tensor_names,
    stage_weight_bytes,
)
from checkpoint.directory import sampled_ranges
from tests.checkpoints import (
    byte_outside_of_samples,
    edit_config,
    flip_byte,
    load_reference,
    make_checkpoint,
)

ROOT = Path(__file__).parents[3]
Header = dict[str, Any]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", num_layers=2)


def edit_header(directory: Path, edit: Callable[[Header], None], *, file: str = "model.safetensors") -> None:
    path = directory / file
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_checkpoints_saved_by_transformers_are_accepted(family: str, tied: bool, tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one", family, num_layers=2, tie_word_embeddings=tied)
    many = make_checkpoint(
        tmp_path / "many", family, num_layers=2, tie_word_embeddings=tied, max_shard_size="50KB"
    )
    single, sharded = Checkpoint.open(one), Checkpoint.open(many)
    assert single.config == sharded.config
    assert single.tensors.keys() == sharded.tensors.keys()
    assert len({entry.file for entry in sharded.tensors.values()}) > 2
    num_parameters = sum(p.numel() for p in load_reference(one).parameters())
    size = stage_weight_bytes(single.config, DType.F32, 0, 2, has_embeddings=True, has_head=True)
    assert size == 4 * num_parameters


def test_the_package_loads_without_torch_safetensors_and_transformers(directory: Path) -> None:
    program = (
        "import sys; from checkpoint import Checkpoint; Checkpoint.open(sys.argv[1]);"
        "print([m for m in ('torch', 'safetensors', 'transformers', 'numpy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(directory)]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_missing_files_are_named(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nowhere is not a directory"):
        Checkpoint.open(tmp_path / "nowhere")
    (directory / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointNotFound, match=r"neither model.safetensors nor model.safetensors.index.json"
    ):
        Checkpoint.open(directory)
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointNotFound, match=r"model has neither config\.json nor params\.json"):
        Checkpoint.open(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_a_directory_with_pickled_weights_only_is_rejected_by_name(name: str, directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / name)
    with pytest.raises(UnsupportedFormat, match=f"{name}.*convert the weights to safetensors"):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[1]", "holds a JSON list"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_json_is_rejected(file: str, text: bytes, named: str, directory: Path) -> None:
    (directory / file).write_bytes(text)
    with pytest.raises(BadConfig, match=named):
        Checkpoint.open(directory)


def test_an_unsupported_config_is_rejected_before_any_header_is_read(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"")
    edit_config(directory, quantization_config={"bits": 4})
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        Checkpoint.open(directory)


NORM = "model.norm.weight"


def _drop(name: str) -> Callable[[Header], None]:
    return lambda header: header.pop(name)


def _set(name: str, **fields: Any) -> Callable[[Header], None]:
    return lambda header: header[name].update(fields)


@pytest.mark.parametrize(
    ("edit", "error", "named"),
    [
        (_drop(NORM), BadHeader, "begins at byte|accounts for"),
        (_set(NORM, shape=[65]), BadHeader, r"model\.norm\.weight of f32 \(65,\) has data_offsets"),
        (_set(NORM, shape=[-64]), BadHeader, r"has shape \[-64\]"),
        (_set(NORM, shape=[True]), BadHeader, r"has shape \[True\]"),
        (_set(NORM, shape=[1] * 17), BadHeader, "has shape 17 numbers, the limit is a list of 16"),
        (_set(NORM, shape=[1] * 100_000), BadHeader, "has shape 100000 numbers"),
        (_set(NORM, shape="64"), BadHeader, "has shape '64', the limit is a list"),
        (
            _set(NORM, shape=[2**63]),
            BadHeader,
            r"has shape \[9223372036854775808\], expected integers from 0",
        ),
        (_set(NORM, shape=[10**64]), BadHeader, "a number has 65 digits, the limit is 64"),
        (_set(NORM, data_offsets=[0, 10**4000]), BadHeader, "a number has 4001 digits"),
        (_set(NORM, data_offsets=[0]), BadHeader, "data_offsets"),
        (_set(NORM, data_offsets=[0, 256]), BadHeader, "begins at byte"),
        (_set(NORM, dtype="F16"), BadHeader, "of f16"),
        (_set(NORM, dtype="F8_E5M2"), UnsupportedModel, "unsupported dtype 'F8_E5M2'"),
        (_set(NORM, dtype="I32"), UnsupportedModel, "norm.weight has dtype i32, the config requires bf16 or"),
        (_set(NORM, dtype=["F32"]), UnsupportedModel, "unsupported dtype"),
        (_set(NORM, strange=1), BadHeader, "is described by"),
    ],
)
def test_a_corrupt_header_is_rejected(
    edit: Callable[[Header], None], error: type[CheckpointError], named: str, directory: Path
) -> None:
    edit_header(directory, edit)
    with pytest.raises(error, match=named):
        Checkpoint.open(directory)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "0 bytes, too few"),
        (b"\x10\0\0\0\0\0\0\0{", "a header of 16 bytes in a file of 9 bytes"),
        (b"\xff" * 8, "claims a header of 18446744073709551615 bytes"),
        (b"\x02\0\0\0\0\0\0\0{]", "not valid JSON"),
        (b"\x02\0\0\0\0\0\0\0[]", "holds a JSON list"),
        (b"\x02\0\0\0\0\0\0\0{}tail", "accounts for 10"),
    ],
)
def test_a_file_that_is_not_safetensors_is_rejected(data: bytes, named: str, directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(data)
    with pytest.raises(BadHeader, match=named):
        Checkpoint.open(directory)


def test_a_truncated_file_is_rejected(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadHeader, match="its header accounts for"):
        Checkpoint.open(directory)


def _rename(old: str, new: str) -> Callable[[Header], None]:
    return lambda header: header.update({new: header.pop(old)})


def test_missing_unknown_and_misshapen_tensors_are_named(directory: Path) -> None:
    edit_header(directory, _rename("model.norm.weight", "model.norm.gain"))
    with pytest.raises(MissingTensor, match=r"lacks model\.norm\.weight"):
        Checkpoint.open(directory)
    edit_header(directory, _rename("model.norm.gain", "model.norm.weight"))
    edit_config(directory, num_hidden_layers=1)
    with pytest.raises(
        UnexpectedTensor, match=r"model\.layers\.1\..* and 4 more tensors, unknown to 'llama'"
    ):
        Checkpoint.open(directory)
    edit_config(directory, num_hidden_layers=2, intermediate_size=56)
    with pytest.raises(
        WrongShape, match=r"gate_proj.weight has shape \(112, 64\), the config requires \(56, 64\)"
    ):
        Checkpoint.open(directory)


FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def add_frequencies(directory: Path, dtype: str, content: bytes) -> None:
    """Add rotary frequencies of layer 0 to the only file."""
    path = directory / "model.safetensors"
    size = path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")
    with path.open("ab") as stream:
        stream.write(content)
    shape = [len(content) // {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}[dtype]]
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + len(content)]}
    edit_header(directory, lambda h: h.update({FREQUENCIES: entry}))


def frequencies(*, divisor: float = 1.0) -> list[float]:
    """Of heads of 16 elements."""
    return [10_000.0 ** (-pair / 16) / divisor for pair in range(0, 16, 2)]


def bf16(numbers: list[float]) -> bytes:
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)


@pytest.mark.parametrize(
    ("dtype", "content"),
    [
        ("F32", struct.pack("<8f", *frequencies())),
        ("F16", struct.pack("<8e", *frequencies())),
        ("BF16", bf16(frequencies())),
    ],
)
def test_stored_rotary_frequencies_of_the_config_are_tolerated(
    directory: Path, dtype: str, content: bytes
) -> None:
    add_frequencies(directory, dtype, content)
    checkpoint = Checkpoint.open(directory)
    names = stage_tensor_names(checkpoint.config, 0, 2, has_embeddings=True, has_head=True)
    assert set(checkpoint.tensors) - set(names) == {FREQUENCIES}


@pytest.mark.parametrize(
    ("dtype", "content"),
    [
        ("F32", struct.pack("<8f", *[1.0] * 8)),
        ("F32", struct.pack("<8f", *frequencies(divisor=4.0))),
        ("F32", struct.pack("<7f", *frequencies()[:7])),
        ("F32", struct.pack("<8f", *frequencies()[:7], float("nan"))),
        ("BF16", bf16([1.0] * 8)),
        ("U8", bytes(8)),
    ],
    ids=["ones", "scaled", "too few", "nan", "ones in bf16", "bytes"],
)
def test_other_rotary_frequencies_than_those_of_the_config_are_refused_by_name(
    directory: Path, dtype: str, content: bytes
) -> None:
    add_frequencies(directory, dtype, content)
    with pytest.raises(
        UnexpectedTensor, match=rf"{re.escape(FREQUENCIES)} of shape .* the config gives 1, 0\.316"
    ):
        Checkpoint.open(directory)


@pytest.mark.parametrize("divisor", [1.0, 4.0])
def test_stored_rotary_frequencies_may_be_scaled(directory: Path, divisor: float) -> None:
    edit_config(
        directory, rope_parameters=..., rope_theta=10_000.0, rope_scaling={"type": "linear", "factor": 4.0}
    )
    add_frequencies(directory, "F32", struct.pack("<8f", *frequencies(divisor=divisor)))
    assert FREQUENCIES in Checkpoint.open(directory).tensors


def test_a_stored_head_is_used_where_the_config_ties_it(directory: Path) -> None:
    edit_config(directory, tie_word_embeddings=True)
    config = Checkpoint.open(directory).config
    assert not config.tie_word_embeddings
    assert "lm_head.weight" in stage_tensor_names(config, 0, 2, has_embeddings=True, has_head=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.norm.weight": "../model.safetensors"}, "not a safetensors file beside it"),
        ({"model.norm.weight": "weights.bin"}, "not a safetensors file beside it"),
        ({"model.norm.weight": 3}, "not a safetensors file beside it"),
        ({"model.norm.weight": "model-00009-of-00009.safetensors"}, "cannot be read"),
        ({"model.nor": "model-00001-of-00003.safetensors"}, "which does not contain it"),
        (None, "has no weight_map"),
    ],
)
def test_a_broken_index_is_rejected(change: dict[str, Any] | None, named: str, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_layers=2, max_shard_size="150KB")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    assert "model-00001-of-00003.safetensors" in index["weight_map"].values()
    index["weight_map"] = index["weight_map"] | change if change else None
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=named):
        Checkpoint.open(directory)


def test_a_tensor_in_another_shard_than_the_index_says_is_rejected(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_layers=2, max_shard_size="150KB")
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    wrong = next(file for file in files if file != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = wrong
    path.write_text(json.dumps(index))
    with pytest.raises(BadHeader, match=r"places tensor model\.norm\.weight in"):
        Checkpoint.open(directory)


def test_the_fingerprint_follows_config_headers_and_values(tmp_path: Path) -> None:
    first = make_checkpoint(tmp_path / "a", "llama", num_layers=2)
    original = Checkpoint.open(first).fingerprint
    assert re.fullmatch("[0-9a-f]{16}(-[0-9a-f]{16}){2}", original)
    config = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=7))
    assert Checkpoint.open(first).fingerprint == original

    others = make_checkpoint(tmp_path / "b", "llama", num_layers=2, seed=1)
    assert differing_parts(original, Checkpoint.open(others).fingerprint) == "values"
    edit_config(first, rms_norm_eps=2e-5)
    assert differing_parts(original, Checkpoint.open(first).fingerprint) == "config"
    edit_header(first, lambda header: header.setdefault("__metadata__", {}).update(note="x"))
    assert differing_parts(original, Checkpoint.open(first).fingerprint) == "config and headers"
    sharded = make_checkpoint(tmp_path / "c", "llama", num_layers=2, max_shard_size="150KB")
    assert differing_parts(original, Checkpoint.open(sharded).fingerprint) == "headers"
    assert differing_parts(original, original) == differing_parts(original, "mock-1") == ""


def test_every_tensor_is_in_the_fingerprint_at_both_ends_and_between(directory: Path) -> None:
    """A byte in the middle, outside of the samples, is left to the full hash."""
    checkpoint = Checkpoint.open(directory)
    for name, entry in checkpoint.tensors.items():
        ranges = sampled_ranges(name, entry)
        places = {entry.begin, entry.end - 1, *(begin for begin, _ in ranges)}
        assert all(fingerprint_with_other_byte(directory, at) != checkpoint.fingerprint for at in places)
    embeddings = checkpoint.tensors["model.embed_tokens.weight"]
    assert len(sampled_ranges("model.embed_tokens.weight", embeddings)) == 4
    free = byte_outside_of_samples("model.embed_tokens.weight", embeddings)
    assert fingerprint_with_other_byte(directory, free) == checkpoint.fingerprint


def fingerprint_with_other_byte(directory: Path, at: int) -> str:
    flip_byte(directory / "model.safetensors", at)
    fingerprint = Checkpoint.open(directory).fingerprint
    flip_byte(directory / "model.safetensors", at)
    return fingerprint


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": 5}, 2, (5, 2)),
        ({"eos_token_id": [7, 5, 7]}, [2, 5], (7, 5, 2)),
        ({"eos_token_id": None}, [2, 3], (2, 3)),
        ({"eos_token_id": []}, 2, (2,)),
        ({}, 2, (2,)),
        ({}, None, ()),
        (None, 2, (2,)),
    ],
)
def test_eos_ids_are_those_of_both_configs(
    generation: dict[str, Any] | None, config: object, expected: tuple[int, ...], directory: Path
) -> None:
    path = directory / "generation_config.json"
    path.unlink() if generation is None else path.write_text(json.dumps(generation))
    edit_config(directory, eos_token_id=config)
    assert Checkpoint.open(directory).eos_token_ids == expected


@pytest.mark.parametrize("value", ["2", -1, True, [2, None], 2.0])
def test_an_invalid_eos_id_is_rejected(value: object, directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(BadConfig, match="'eos_token_id' holds"):
        Checkpoint.open(directory)


def test_without_a_configured_dtype_the_stored_one_is_used(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path, "llama", num_layers=1, dtype="float16")
    assert Checkpoint.open(directory).config.dtype is DType.F16
    assert Checkpoint.open(edit_config(directory, dtype=...)).config.dtype is DType.F16


@pytest.mark.parametrize("tied", [False, True])
def test_sizes_of_the_parts_add_up(tied: bool, tmp_path: Path) -> None:
    config = Checkpoint.open(
        make_checkpoint(tmp_path, "qwen3", num_layers=3, tie_word_embeddings=tied)
    ).config
    bf16 = DType.BF16
    layers = [layer_weight_bytes(config.hidden_size, layer, bf16) for layer in config.layers]
    parts = [
        stage_weight_bytes(config, bf16, i, i + 1, has_embeddings=i == 0, has_head=i == 2) for i in range(3)
    ]
    embeddings = 2 * config.vocab_size * config.hidden_size
    assert sum(parts) == sum(layers) + embeddings + head_bytes(config, bf16)
    only = stage_weight_bytes(config, bf16, 0, 3, has_embeddings=True, has_head=True)
    assert sum(parts) - only == (embeddings if tied else 0)
    assert kv_bytes_per_token(config.layers[0].mixer, bf16) == 2 * 2 * 16 * 2


def test_a_stage_needs_its_own_tensors_only(directory: Path) -> None:
    config = Checkpoint.open(directory).config
    middle = stage_tensor_names(config, 1, 2, has_embeddings=False, has_head=False)
    assert all(name.startswith("model.layers.1.") for name in middle)
    last = stage_tensor_names(config, 1, 2, has_embeddings=False, has_head=True)
    assert sorted(set(last) - set(middle)) == ["lm_head.weight", "model.norm.weight"]
    for begin, end in [(0, 0), (1, 1), (0, 3), (-1, 1)]:
        with pytest.raises(
            ValueError, match=rf"layers \[{begin}, {end}\) are not within the model's 2 layers"
        ):
            stage_tensor_names(config, begin, end, has_embeddings=False, has_head=False)
