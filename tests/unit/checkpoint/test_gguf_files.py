"""GGUF headers: what is read, and that hostile files are refused with numbers, in bounded memory."""

from __future__ import annotations

import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from checkpoint import Checkpoint, CheckpointError, DType
from checkpoint.dtypes import BlockDType
from checkpoint.errors import (
    BadConfig,
    BadHeader,
    CheckpointNotFound,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedFormat,
    UnsupportedModel,
)
from checkpoint.gguf.files import GgufArray, read_gguf_file, shard_paths
from checkpoint.inspection import inspect
from tests.checkpoints import make_checkpoint
from tests.gguf_files import QuantType, add_tensor, close, write_gguf


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gguf") / "model", "llama", num_layers=2)


def text(content: str) -> bytes:
    octets = content.encode()
    return struct.pack("<Q", len(octets)) + octets


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def header(*keys: bytes, tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(keys)) + b"".join(keys) + tensors


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    """`shape` is innermost first."""
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    numbers = {"uint8": 200, "int8": -5, "uint16": 60_000, "int16": -300, "uint32": 1 << 31, "int32": -70_000}
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(f"a.{name}", value)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 62))
    writer.add_float32("a.f32", 1e-5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Zürich 🙂")
    writer.add_array("a.numbers", [3, 1, 2])
    writer.add_array("a.texts", ["ab", "", "ü"])
    add_tensor(writer, "x", np.arange(6, dtype=np.float32).reshape(2, 3), QuantType.F32)
    close(writer)
    file = read_gguf_file(tmp_path / "a.gguf")
    found = {name: value for name, value in file.metadata.items() if not isinstance(value, GgufArray)}
    assert found == {f"a.{name}": value for name, value in numbers.items()} | {
        "general.architecture": "llama",
        "a.u64": 1 << 63,
        "a.i64": -(1 << 62),
        "a.f32": 1e-5,  # not 9.999999747378752e-06
        "a.f64": 0.1,
        "a.bool": True,
        "a.text": "Zürich 🙂",
    }
    assert file.numbers("a.numbers") == (3, 1, 2)
    assert file.texts("a.texts") == ["ab", "", "ü"]
    entry = file.header.tensors["x"]
    assert (entry.shape, entry.dtype, entry.num_bytes) == ((2, 3), DType.F32, 24)
    content = (tmp_path / "a.gguf").read_bytes()[entry.begin : entry.end]
    assert np.array_equal(np.frombuffer(content, np.float32), np.arange(6))


@pytest.mark.parametrize("dtype", BlockDType)
def test_sizes_of_blocks_are_those_of_the_gguf_package(dtype: BlockDType) -> None:
    assert (dtype.num_elements, dtype.num_bytes) == gguf.GGML_QUANT_SIZES[QuantType[dtype.name]]


HUGE = (1 << 63) + 5
HOSTILE: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "the magic number of 4 bytes at byte 0 goes beyond byte 0"),
    "another magic": (b"GGML" + b"\0" * 40, "begins with b'GGML'"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), f"claims {HUGE} tensors, the limit is 65536"),
    "keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), f"claims {HUGE} metadata keys, the limit is 4096"),
    "a key's length": (
        header(struct.pack("<Q", HUGE)),
        f"a metadata key has {HUGE} bytes, the limit is 1024",
    ),
    "a text's length": (
        header(key("a", 8, struct.pack("<Q", HUGE))),
        f"has {HUGE} bytes, the limit is 4194304",
    ),
    "a text beyond": (
        header(key("a", 8, struct.pack("<Q", 1000))),
        "of 1000 bytes at byte 45 goes beyond byte 45",
    ),
    "an array's length": (
        header(key("a", 9, struct.pack("<IQ", 4, HUGE))),
        f"'a' has {HUGE} items, the limit is 2097152",
    ),
    "an array beyond": (
        header(key("a", 9, struct.pack("<IQ", 10, 1 << 20))),
        "'a' of 8388608 bytes at byte 49 goes beyond byte 49",
    ),
    "texts beyond": (header(key("a", 9, struct.pack("<IQQ", 8, 2, HUGE))), f"'a' of {HUGE} bytes"),
    "arrays of arrays": (header(key("a", 9, struct.pack("<IQ", 9, 1))), "'a' is an array of type 9"),
    "a type": (header(key("a", 77, b"")), "'a' has the unknown type 77"),
    "no UTF-8": (header(key("a", 8, struct.pack("<Q", 1) + b"\xff")), "'a' is no UTF-8 text"),
    "a key twice": (header(key("a", 0, b"1"), key("a", 0, b"1")), "has the metadata key 'a' twice"),
    "dimensions": (
        header(tensors=text("x") + struct.pack("<I", 9), num_tensors=1),
        "tensor x has 9 dimensions, the limit is 4",
    ),
    "a shape": (header(tensors=tensor("x", (HUGE, HUGE), 0), num_tensors=1), "tensor x has shape"),
    "an offset": (header(tensors=tensor("x", (1,), 0, HUGE), num_tensors=1), f"at byte {HUGE} of the data"),
    "data beyond": (
        header(tensors=tensor("x", (8,), 0), num_tensors=1),
        "tensor x has bytes 0 to 32 of the data",
    ),
    "blocks": (
        header(tensors=tensor("x", (33,), 2), num_tensors=1),
        "rows of 33 elements, which are not whole blocks of 32 (Q4_0)",
    ),
    "overlapping": (
        header(tensors=tensor("x", (8,), 0) + tensor("y", (8,), 0, 16), num_tensors=2) + b"\0" * 200,
        "tensor y has bytes 16 to 48 of the data, which may begin at 32",
    ),
    "one name": (
        header(tensors=tensor("x", (8,), 0) + tensor("x", (8,), 0, 32), num_tensors=2) + b"\0" * 200,
        "has the tensor x twice",
    ),
    "alignment": (header(key("general.alignment", 4, struct.pack("<I", 24))), "'general.alignment' is 24"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_violation_is_named_with_its_numbers_in_bounded_memory(case: str, tmp_path: Path) -> None:
    content, words = HOSTILE[case]
    (tmp_path / "a.gguf").write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(BadHeader, match=re.escape(words)):
            read_gguf_file(tmp_path / "a.gguf")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_every_prefix_of_a_file_is_refused(directory: Path, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "whole.gguf", directory).read_bytes()
    begin = min(entry.begin for entry in Checkpoint.open(tmp_path / "whole.gguf").tensors.values())
    for size in [*range(0, begin, 7), begin, begin + 1000, len(content) - 1]:
        (tmp_path / "part.gguf").write_bytes(content[:size])
        with pytest.raises(BadHeader):
            Checkpoint.open(tmp_path / "part.gguf")


@pytest.mark.parametrize("version", [0, 1, 4, 3 << 24])
def test_other_versions_and_big_endian_files_are_refused(version: int, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(header(version=version))
    with pytest.raises(UnsupportedFormat, match=f"GGUF version {version}; versions 2 and 3"):
        read_gguf_file(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("kind", "name"), [(16, "IQ2_XXS"), (34, "TQ1_0"), (24, "I8"), (99, "an unknown type")]
)
def test_a_type_that_is_not_served_is_named(kind: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(header(tensors=tensor("x", (256,), kind), num_tensors=1))
    with pytest.raises(UnsupportedModel, match=re.escape(f"tensor x has type {kind} ({name}), which is not")):
        read_gguf_file(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            {"llama.attention.clamp_kqv": 8.0},
            "metadata key 'llama.attention.clamp_kqv' = 8.0 is not supported",
        ),
        (
            {"llama.rope.scaling.attn_factor": 2.0},
            "'llama.rope.scaling.attn_factor' = 2.0 is not supported, expected 1.0",
        ),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.logit_scale": 0.5}, "'llama.logit_scale' = 0.5 is not supported"),
    ],
)
def test_a_key_that_changes_tokens_is_refused_by_name(
    metadata: dict[str, Any], words: str, directory: Path, tmp_path: Path
) -> None:
    packed = write_gguf(tmp_path / "a.gguf", directory, metadata=metadata)
    with pytest.raises(UnsupportedModel, match=re.escape(words)):
        Checkpoint.open(packed)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(header(key("general.architecture", 8, text("mamba"))))
    with pytest.raises(
        UnsupportedModel, match=r"architecture 'mamba' is not supported in GGUF files .supported: llama"
    ):
        Checkpoint.open(tmp_path / "a.gguf")
    (tmp_path / "b.gguf").write_bytes(header(key("general.architecture", 8, text("llama"))))
    with pytest.raises(BadConfig, match=r"metadata key 'llama.vocab_size' is missing"):
        Checkpoint.open(tmp_path / "b.gguf")


def test_unknown_and_missing_tensors_are_all_listed(directory: Path, tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        add_tensor(writer, "blk.0.attn_sub_norm.weight", np.zeros(8, np.float32), QuantType.F32)

    packed = write_gguf(tmp_path / "a.gguf", directory, extra=extra)
    content = packed.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight")
    packed.write_bytes(content)
    found = inspect(packed).errors
    assert [type(error) for error in found] == [MissingTensor, UnexpectedTensor]
    assert "blk.1.ffn_up.weight" in str(found[0])
    assert "blk.1.ffn_xx.weight, blk.0.attn_sub_norm.weight" in str(found[1])


def test_a_model_is_opened_by_its_first_file(directory: Path, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "m.gguf", directory, split_max_tensors=8)
    second, third, *_ = (first.with_name(path.name) for path in shard_paths(first)[1:])
    with pytest.raises(
        BadHeader, match=re.escape(f"is not the first of 3 files (limit 1000): give {first.name}")
    ):
        Checkpoint.open(second)
    third_content, second_content = third.read_bytes(), second.read_bytes()
    third.write_bytes(second_content)
    with pytest.raises(BadHeader, match="is file 1 of 3 by its metadata, expected 2 of 3"):
        Checkpoint.open(first)
    third.unlink()
    with pytest.raises(CheckpointNotFound):
        Checkpoint.open(first)
    third.write_bytes(third_content)
    Checkpoint.open(first)


def test_the_fingerprint_covers_metadata_and_values(directory: Path, tmp_path: Path) -> None:
    one = Checkpoint.open(write_gguf(tmp_path / "a.gguf", directory)).fingerprint.split("-")
    other = Checkpoint.open(
        write_gguf(tmp_path / "a.gguf", directory, metadata={"llama.rope.freq_base": 5e4})
    )
    changed = other.fingerprint.split("-")
    assert changed[0] != one[0]
    assert changed[1] != one[1]
    assert changed[2] == one[2]
    entry = other.tensors["blk.1.ffn_down.weight"]
    with (tmp_path / "a.gguf").open("r+b") as stream:
        stream.seek(entry.begin)
        stream.write(b"\1\2\3\4")
    assert Checkpoint.open(tmp_path / "a.gguf").fingerprint.split("-")[2] != changed[2]


def test_a_fifo_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="is a FIFO"):
        Checkpoint.open(tmp_path / "a.gguf")
