"""Which formats are read, which fields are refused, and which stored tensors must be there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpoint import (
    BadConfig,
    Checkpoint,
    CheckpointError,
    MissingTensor,
    UnexpectedTensor,
    UnsupportedModel,
    WrongShape,
    stage_tensor_names,
)
from checkpoint.inspection import inspect
from checkpoint.quantization import matches
from checkpoint.quantization_config import parse_quantization
from tests.checkpoints import edit_config
from tests.quantized import CONFIG, EIGHT_EXPERTS, FORMATS, compressed, is_packed, write_quantized

_FP8 = FORMATS["fp8-block"].config
_GPTQ = FORMATS["gptq"].config
_AWQ = FORMATS["awq"].config
_NF4 = FORMATS["nf4"].config
_MODELOPT = FORMATS["modelopt-fp8"].config
_PACK = FORMATS["pack4-group"].config


def _weights(**changes: object) -> dict[str, Any]:
    return compressed("pack-quantized", strategy="group", group_size=32, **changes)


@pytest.mark.parametrize(
    ("config", "error", "named"),
    [
        ({"bits": 4}, UnsupportedModel, "has quant_method None, which is not supported (fp8, "),
        ({"quant_method": "aqlm"}, UnsupportedModel, "quant_method 'aqlm'"),
        ("fp8", BadConfig, "must be an object, is 'fp8'"),
        (_FP8 | {"fmt": "e5m2"}, UnsupportedModel, "'quantization_config.fmt' = 'e5m2'"),
        (_FP8 | {"rotate": True}, UnsupportedModel, "'quantization_config.rotate' = True"),
        (_FP8 | {"weight_block_size": [0, 128]}, BadConfig, "weight_block_size' must be two numbers"),
        (_FP8 | {"modules_to_not_convert": "lm_head"}, BadConfig, "must be a list of names"),
        (_FP8 | {"modules_to_not_convert": ["re:["]}, BadConfig, "'re:[', not a regular expression"),
        (_GPTQ | {"bits": 3}, UnsupportedModel, "'quantization_config.bits' = 3 is not supported"),
        (_GPTQ | {"checkpoint_format": "marlin"}, UnsupportedModel, "= 'marlin'"),
        (_GPTQ | {"group_size": 0}, BadConfig, "group_size' must be a number of elements or -1, is 0"),
        (
            _GPTQ | {"dynamic": {"-:.*gate.*": {}, "+:.*up.*": {"bits": 8}}},
            UnsupportedModel,
            "'quantization_config.dynamic' = {'+:.*up.*': {'bits': 8}} is not supported, only rules",
        ),
        (_GPTQ | {"dynamic": [1]}, BadConfig, "'quantization_config.dynamic' must be an object"),
        (_GPTQ | {"use_marlin": True}, UnsupportedModel, "'quantization_config.use_marlin' = True"),
        (_FP8 | {"is_checkpoint_fp8_serialized": False}, UnsupportedModel, "fp8_serialized' = False"),
        (_AWQ | {"version": "gemv"}, UnsupportedModel, "= 'gemv' is not supported (supported: 'gemm'"),
        (_AWQ | {"zero_point": False}, UnsupportedModel, "zero_point' = False"),
        (_NF4 | {"bnb_4bit_quant_type": "fp4"}, UnsupportedModel, "= 'fp4'"),
        (_NF4 | {"load_in_8bit": True}, UnsupportedModel, "load_in_8bit' = True"),
        (_MODELOPT | {"quant_algo": "W4A8_AWQ"}, UnsupportedModel, "= 'W4A8_AWQ'"),
        (_PACK | {"format": "marlin-24"}, UnsupportedModel, "format 'marlin-24'"),
        (
            _PACK | {"sparsity_config": {"format": "sparse-24"}},
            UnsupportedModel,
            "sparsity_config' = {'format'",
        ),
        (_PACK | {"transform_config": {"u": {}}}, UnsupportedModel, "transform_config' = {'u'"),
        (_PACK | {"config_groups": {}}, BadConfig, "config_groups' must be an object"),
        (_weights(num_bits=3), UnsupportedModel, "group_0.weights.num_bits' = 3"),
        (_weights(dynamic=True), UnsupportedModel, "group_0.weights.dynamic' = True"),
        (_weights(rounding="odd"), UnsupportedModel, "group_0.weights.rounding' = 'odd'"),
    ],
)
def test_unknown_fields_and_values_are_refused_by_name(
    config: object, error: type[CheckpointError], named: str
) -> None:
    with pytest.raises(error, match=re.escape(named)):
        parse_quantization({"quantization_config": config})


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("gptq", {"dynamic": {"-:.*gate.*": {}, "-:.*up.*": {}}}),
        ("gptq", {"use_marlin": False, "mock_quantization": False}),
        ("fp8-block", {"is_checkpoint_fp8_serialized": True}),
    ],
)
def test_fields_that_say_what_is_so_anyway_change_nothing(form: str, said: dict[str, object]) -> None:
    config = FORMATS[form].config
    assert parse_quantization({"quantization_config": config | said}) == parse_quantization(
        {"quantization_config": config}
    )


@pytest.mark.parametrize("nothing", [None, False, {}])
def test_no_quantisation_is_none(nothing: object) -> None:
    assert parse_quantization({"quantization_config": nothing}) is None


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("up_proj", "model.layers.1.mlp.up_proj", True),
        ("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj", True),
        ("model.layers.1*", "model.layers.12.mlp.up_proj", True),
        ("re:.*self_attn.*", "model.layers.3.self_attn.q_proj", True),
        ("re:self_attn", "model.layers.3.self_attn.q_proj", False),
    ],
)
def test_patterns_select_modules(pattern: str, module: str, expected: bool) -> None:
    assert matches(pattern, module) is expected


def test_the_first_group_of_a_mixed_checkpoint_that_names_a_module_holds() -> None:
    config = _weights() | {"format": "mixed-precision"}
    groups = config["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    floats = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    groups["group_1"] = {"targets": ["re:.*down_proj"], "weights": floats, "format": "float-quantized"}
    found = parse_quantization({"quantization_config": config})
    assert found is not None and found.label == "fp8 and int4"
    down, up = (found.scheme_of(f"model.layers.0.mlp.{name}_proj.weight") for name in ("down", "up"))
    assert down is not None and up is not None
    assert (down.label, up.label) == ("fp8", "int4")
    assert found.scheme_of("lm_head.weight") is None


@pytest.mark.parametrize("form", FORMATS)
def test_every_stored_tensor_is_needed(form: str, tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS[form])
    checkpoint = Checkpoint.open(tmp_path)
    config = checkpoint.config
    names = stage_tensor_names(config, 0, config.num_layers, has_embeddings=True, has_head=True)
    needed = {name for name in checkpoint.tensors if not name.endswith("weight_shape")}
    assert set(names) == needed
    assert checkpoint.weight_file_bytes == sum(checkpoint.tensors[name].num_bytes for name in needed)


def _rewrite(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit the header of the only file; data stay."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("form", "edit", "error", "named"),
    [
        (
            "gptq",
            lambda header: header.update({f"{UP}.scale": header.pop(f"{UP}.scales")}),
            MissingTensor,
            rf"lacks {UP}\.scales \(gptq int4\)",
        ),
        (
            "gptq",
            lambda header: header[f"{UP}.qweight"].update(shape=[192, 16]),
            WrongShape,
            r"qweight has shape \(192, 16\), the config requires \(16, 192\) \(gptq int4\)",
        ),
        (
            "fp8-block",
            lambda header: header[f"{UP}.weight"].update(dtype="I8"),
            UnsupportedModel,
            r"up_proj\.weight has dtype i8, the config requires f8_e4m3 \(fp8\)",
        ),
    ],
)
def test_stored_tensors_are_checked_by_name(
    form: str,
    edit: Callable[[dict[str, Any]], None],
    error: type[CheckpointError],
    named: str,
    tmp_path: Path,
) -> None:
    write_quantized(tmp_path, FORMATS[form])
    _rewrite(tmp_path, edit)
    with pytest.raises(error, match=named):
        Checkpoint.open(tmp_path)


_LISTS: dict[str, object] = {
    "missing": ...,
    "null": None,
    "trailing dots": ["layers.1.mlp.up_proj."],
    "another hierarchy": ["language_model.layers.1.up"],
    "too much": ["model.layers.0"],
}
_LIST_FIELDS = {"modules_to_not_convert", "ignore", "exclude_modules", "llm_int8_skip_modules"}


@pytest.mark.parametrize("listed", _LISTS)
@pytest.mark.parametrize("form", ["fp8-block", "int-channel", "modelopt-fp8", "nvfp4", "mxfp4", "awq", "nf4"])
def test_stored_tensors_decide_which_matrices_are_quantised(form: str, listed: str, tmp_path: Path) -> None:
    weights = write_quantized(tmp_path, FORMATS[form])
    changed = FORMATS[form].config | dict.fromkeys(_LIST_FIELDS & FORMATS[form].config.keys(), _LISTS[listed])
    kept = {key: value for key, value in changed.items() if value is not ...}
    edit_config(tmp_path, quantization_config=kept)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint.packed) == {name for name in weights if is_packed(FORMATS[form], name)}


@pytest.mark.parametrize("form", ["fp8-block", "gptq", "awq"])
def test_routers_of_experts_may_be_plain_or_quantised(form: str, tmp_path: Path) -> None:
    chosen = FORMATS[form]
    for number, plain in enumerate((chosen.plain, (*chosen.plain, "mlp.gate."))):
        directory = tmp_path / str(number)
        written = replace(chosen, plain=plain, packs_router=True)
        weights = write_quantized(directory, written, config=EIGHT_EXPERTS)
        packed = {name for name in weights if is_packed(written, name)}
        assert set(Checkpoint.open(directory).packed) == packed
        assert ("model.layers.1.mlp.gate.weight" in packed) == (number == 0)


@pytest.mark.parametrize("form", ["fp8-block", "pack4-group", "gptq", "awq"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_quantised_head_that_is_stored_is_used(form: str, is_tied: bool, tmp_path: Path) -> None:
    write_quantized(
        tmp_path, replace(FORMATS[form], packs_head=True), config=CONFIG | {"tie_word_embeddings": is_tied}
    )
    checkpoint = Checkpoint.open(tmp_path)
    assert "lm_head.weight" in checkpoint.packed
    assert not checkpoint.config.tie_word_embeddings


@pytest.mark.parametrize(
    ("form", "edit", "error", "named"),
    [
        (
            "fp8-block",
            lambda header: _rename(header, f"{UP}.weight_scale_inv", f"{UP}.input_scale"),
            MissingTensor,
            rf"lacks {UP}\.weight_scale_inv",
        ),
        (
            "awq",
            lambda header: _rename(header, "model.layers.1.mlp.up_proj.weight", f"{UP}.weight"),
            UnexpectedTensor,
            rf"has {UP}\.weight, unknown",
        ),
        (
            "int-channel",
            lambda header: header[f"{UP}.weight"].update(dtype="BF16", shape=[96, 128]),
            UnsupportedModel,
            r"up_proj\.weight has dtype bf16, the config requires i8",
        ),
    ],
)
def test_tensors_that_contradict_each_other_are_named(
    form: str,
    edit: Callable[[dict[str, Any]], None],
    error: type[CheckpointError],
    named: str,
    tmp_path: Path,
) -> None:
    """A packed matrix without its scales, a matrix that is packed and plain, scales of a plain matrix."""
    write_quantized(tmp_path, FORMATS[form])
    _rewrite(tmp_path, edit)
    errors = [str(found) for found in inspect(tmp_path).errors if isinstance(found, error)]
    assert any(re.search(named, text) for text in errors), errors


def test_sorted_columns_need_their_groups(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["gptq-without-index"])
    edit_config(tmp_path, quantization_config=FORMATS["gptq-without-index"].config | {"desc_act": True})
    with pytest.raises(MissingTensor, match=r"lacks model\.layers\.0.*q_proj\.g_idx"):
        Checkpoint.open(tmp_path)


def test_scales_without_a_quantisation_are_unexpected(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["float-channel"])
    edit_config(tmp_path, quantization_config=...)
    with pytest.raises(UnexpectedTensor, match=r"proj\.weight_scale"):
        Checkpoint.open(tmp_path)


def test_scales_of_activations_are_allowed(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["pack4-group"])
    _rewrite(tmp_path, lambda header: _rename(header, f"{UP}.weight_shape", f"{UP}.input_scale"))
    assert f"{UP}.input_scale" in Checkpoint.open(tmp_path).tensors


def _rename(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


def test_rows_that_are_no_whole_groups_are_refused(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["gptq"])
    edit_config(tmp_path, quantization_config=_GPTQ | {"group_size": 48})
    with pytest.raises(UnsupportedModel, match=r"rows of 128 elements are not whole groups of 48"):
        Checkpoint.open(tmp_path)


def test_the_fingerprint_covers_the_separate_file_of_modelopt(tmp_path: Path) -> None:
    write_quantized(tmp_path, FORMATS["modelopt-nvfp4"])
    before = Checkpoint.open(tmp_path).fingerprint
    file = tmp_path / "hf_quant_config.json"
    file.write_text(file.read_text().replace('"FP8"', "null"))
    assert Checkpoint.open(tmp_path).fingerprint != before
    file.write_text("{}")
    with pytest.raises(BadConfig, match="must have an object 'quantization'"):
        Checkpoint.open(tmp_path)
