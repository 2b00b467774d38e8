"""`stageline plan` prints the stage of each worker, or the number that makes the plan impossible."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint
from coordinator.config import CoordinatorConfig
from coordinator.model import open_model
from coordinator.planner.layer_kinds import layer_kinds
from coordinator.planner.plan import PlanImpossible
from coordinator.planner.planner import plan_for
from stageline.cli import main
from stageline.cli.plan import parse_workers, plan_json, plan_view
from tests.checkpoints import edit_config, make_checkpoint
from tests.families import make_family
from tests.gguf_files import quantised, write_gguf
from tests.mistral_files import write_mistral
from tests.quantized import FORMATS, write_quantized
from tests.range_server import range_server

HEAD_DIM = 32
"""Of the built-in model."""
Captured = pytest.CaptureFixture[str]


def test_the_table_shows_layers_memory_and_tokens(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", "--workers", "64MiB,32MiB,32MiB", "--layers", "6,3,3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("12 layers on 3 stages")
    assert [line.split()[0] for line in lines if "worker-" in line] == ["FIRST", "MIDDLE", "LAST"]
    assert "worker-0 0 to 5 (6)" in lines[4]
    assert "tokens (" in lines[-1]
    assert max(len(line) for line in lines) <= 80


def test_kinds_of_layers_and_cuts_are_shown(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shape = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1}
    make_checkpoint(tmp_path, "glm4_moe", num_layers=6, first_k_dense_replace=2, topk_group=1, **shape)
    command = ["plan", "--model", str(tmp_path), "--workers", "64MiB,64MiB", "--max-step-sequences", "8"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    dense, sparse = plan["layer_kinds"]
    assert (plan["legal_cuts"], plan["step_sequences"]) == ([1, 2, 3, 4, 5], 4)
    assert (dense["layers"], sparse["layers"]) == ([[0, 2]], [[2, 6]])
    assert main(command) == 0
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if "2 of 8 experts + shared expert" in line)
    assert row.split()[-5:] == ["KiB", f"{sparse['step_cost']:.2f}", "256", "0", f"({plan['num_blocks']})"]
    assert "2-5" in row
    assert "Step cost: weights read by a decode step of 4 sequences, relative to the cheapest layer." in out
    assert "A stage can begin with any layer." in out


def test_layers_that_no_stage_can_begin_with_are_shown(capsys: Captured) -> None:
    config = CoordinatorConfig(num_stages=1)
    model = open_model(config)
    model.config = replace(model.config, legal_cuts=frozenset({1, 2, 8}))
    plan = plan_for(config, model, parse_workers("64MiB"))
    Console(width=120).print(plan_view(plan, model, layer_kinds(model.config, plan)))
    assert "A stage can begin with layers 0-2, 8; not with 3-7, 9-11." in capsys.readouterr().out


def test_sequences_may_be_as_long_as_a_scaled_rotary_embedding_reaches(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    edit_config(make_checkpoint(tmp_path, "qwen3", num_layers=2), rope_parameters=..., rope_scaling=yarn)
    config = CoordinatorConfig(model=tmp_path, num_stages=1)

    def longest(**given: int) -> int:
        changed = replace(config, **given)
        return plan_for(changed, open_model(changed), parse_workers("256MiB")).max_sequence_tokens

    assert longest() == 512
    assert longest(max_sequence_tokens=2048) == 2048
    with pytest.raises(PlanImpossible, match=r"is 2049, but the model's limit is 2048 \(factor x original"):
        longest(max_sequence_tokens=2049)


def test_json_adds_up(capsys: Captured) -> None:
    assert main(["plan", "--workers", "64MiB,32MiB", "--kv-tokens", "1000", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["num_kv_tokens"] == plan["num_blocks"] * plan["block_size"] == 992
    assert plan["max_sequence_tokens"] == 992
    assert plan["stages"][0]["layer_end"] == plan["stages"][1]["layer_begin"]
    assert plan["stages"][1]["layer_end"] == plan["num_layers"]
    for stage, memory_mib in zip(plan["stages"], (64, 32), strict=True):
        parts = stage["weight_bytes"] + stage["kv_bytes"] + stage["activation_bytes"]
        assert stage["total_bytes"] == parts == (memory_mib << 20) - stage["free_bytes"]


def test_gpus_have_buffers_and_workspaces(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = ["plan", "--workers", "600MiB,600MiB", "--gpus"]
    assert main([*command, "--json"]) == 0
    for stage in json.loads(capsys.readouterr().out)["stages"]:
        parts = ("weight_bytes", "kv_bytes", "activation_bytes", "buffer_bytes", "overhead_bytes")
        assert stage["total_bytes"] == sum(stage[part] for part in parts) == (600 << 20) - stage["free_bytes"]
        assert stage["pinned_bytes"] == stage["buffer_bytes"] > 0 < stage["overhead_bytes"]
    assert main(command) == 0
    (note,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("Activations"))
    assert re.fullmatch(
        r"Activations include up to \S+ MiB of buffers .* and 487.6 MiB of workspaces and CUDA graphs .*",
        note,
    )


def test_tables_on_the_host_of_a_gpu_are_named(capsys: Captured) -> None:
    config = CoordinatorConfig(num_stages=1)
    model = open_model(config)
    plan = plan_for(config, model, parse_workers("1GiB", gpus=True))
    with_table = replace(plan, stages=(replace(plan.stages[0], table_bytes=3 << 30),))
    Console(width=200).print(plan_view(with_table, model, layer_kinds(model.config, plan)))
    line = (
        "worker-0 reads 3.0 GiB of tables of n-grams in page-locked memory of its host, which is assumed to"
        " have room."
    )
    assert line in capsys.readouterr().out
    (stage,) = json.loads(plan_json(with_table, model, layer_kinds(model.config, plan)))["stages"]
    assert stage["table_bytes"] == 3 << 30 and stage["pinned_bytes"] == stage["buffer_bytes"] + (3 << 30)


def test_given_rates_share_the_layers(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = ["plan", "--workers", "64MiB,64MiB", "--device-rates"]
    assert main([*command, "3350:800,1675:400", "--json"]) == 0
    fast, slow = json.loads(capsys.readouterr().out)["stages"]
    assert [stage["layer_end"] - stage["layer_begin"] for stage in (fast, slow)] == [9, 3]
    assert (fast["bytes_per_second"], slow["operations_per_second"]) == (3350e9, 400e12)
    assert fast["step_s"] == pytest.approx(fast["cost"] / 3350e9, rel=1e-4)
    assert main([*command, "3350:800,1675:400"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "1675 GB/s" in line)
    assert row.split()[:6] == ["worker-1", "1675", "GB/s", "400", "TFLOP/s", "31%"]
    assert main([*command, "3350:800,3300:790", "--json"]) == 0
    equal = json.loads(capsys.readouterr().out)["stages"]
    assert {(stage["step_s"], stage["bytes_per_second"]) for stage in equal} == {(None, None)}


def test_the_memory_of_unpacked_weights_is_said_aloud(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_quantized(tmp_path, FORMATS["fp8-tensor"])
    command = ["plan", "--model", str(tmp_path), "--workers", "64MiB,64MiB", "--dtype", "bf16"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    memory = sum(stage["weight_bytes"] for stage in plan["stages"])
    files = (tmp_path / "model.safetensors").stat().st_size
    assert plan["stored_format"] == "fp8" and 0.95 * files < plan["stored_bytes"] < files
    assert main(command) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"Weights need {memory / plan['stored_bytes']:.1f} x their size in files (")
    assert last.endswith("because fp8 is unpacked to bf16.")


def test_gpus_hold_quantised_weights_as_they_are_stored(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    write_quantized(tmp_path, FORMATS["gptq"])
    command = ["plan", "--model", str(tmp_path), "--workers", "600MiB,600MiB", "--dtype", "bf16"]
    weight_bytes = []
    for gpus in ([], ["--gpus"]):
        assert main([*command, *gpus, "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["holds_stored"] == bool(gpus)
        assert sum(kind["weight_bytes"] for kind in plan["layer_kinds"]) < plan["stages"][0]["weight_bytes"]
        weight_bytes.append(plan["layer_kinds"][0]["weight_bytes"])
    assert weight_bytes[0] > 2.5 * weight_bytes[1]
    assert main([*command, "--gpus"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("because gptq int4 is multiplied by as it is stored.")


def test_rounded_weights_need_less_memory(capsys: Captured) -> None:
    sizes = []
    for quantize in ([], ["--quantize", "int8"], ["--quantize", "int4"]):
        assert main(["plan", "--workers", "64MiB,64MiB", "--kv-tokens", "1000", "--json", *quantize]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan.get("weight_format") == (quantize or [None, None])[1]
        sizes.append(plan["stages"][1]["weight_bytes"])
    assert sizes[0] > 1.6 * sizes[1] > 2.2 * sizes[2]
    assert main(["plan", "--workers", "64MiB", "--quantize", "int4"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("in bf16 with int4 weights: 12 layers on 1 stage")


def test_smaller_keys_and_values_leave_room_for_more_tokens(capsys: Captured) -> None:
    command = ["plan", "--workers", "24MiB", "--max-step-sequences", "4", "--max-step-tokens", "32"]
    tokens, kv_bytes = {}, {}
    for kv_dtype in ("bf16", "fp8", "int8"):
        flags = [] if kv_dtype == "bf16" else ["--kv-dtype", kv_dtype]
        assert main([*command, "--json", *flags]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan.get("kv_dtype", "bf16") == kv_dtype
        tokens[kv_dtype] = plan["num_kv_tokens"]
        kv_bytes[kv_dtype] = plan["stages"][0]["kv_bytes"] / plan["num_kv_tokens"]
    assert kv_bytes["fp8"] == kv_bytes["int8"] == kv_bytes["bf16"] * (HEAD_DIM + 4) / (2 * HEAD_DIM)
    # Attention needs the keys and values of one of the twelve layers in bf16.
    assert 1.3 * tokens["bf16"] < tokens["fp8"] == tokens["int8"]
    assert main([*command, "--kv-dtype", "fp8"]) == 0
    assert f"KV cache: {tokens['fp8']} tokens in fp8 (" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "64MiB,1MiB"], "but worker-1 has 1.0 MiB ("),
        (["--workers", "64MiB,64MiB", "--layers", "6,5"], "layers 6,5 sum to 11, the model has 12"),
        (["--workers", ",".join(["64MiB"] * 13)], "13 stages for a model of 12 layers"),
    ],
)
def test_an_impossible_plan_is_one_line_and_exit_code_1(
    arguments: list[str], words: str, capsys: Captured
) -> None:
    assert main(["plan", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--workers", "64"],
        ["--workers", "64MiB,"],
        ["--workers", "64MiB,64MiB", "--device-rates", "3350:800"],
        ["--workers", "64MiB", "--device-rates", "3350"],
        ["--workers", "64MiB", "--layers", "6,6"],
        ["--workers", "64MiB", "--dtype", "q4"],
        ["--workers", "64MiB", "--quantize", "int3"],
        ["--workers", "64MiB", "--kv-dtype", "bf16"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: Captured) -> None:
    assert main(["plan", *arguments]) == 2
    assert capsys.readouterr().out == ""


def test_too_few_recurrent_states_are_a_warning(tmp_path: Path, capsys: Captured) -> None:
    make_family(tmp_path, "qwen3_next", max_position_embeddings=1 << 20)
    command = ["plan", "--model", str(tmp_path), "--workers", "13MiB", "--max-step-tokens", "16"]
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert 2 < plan["num_states"] < 128 and plan["num_kv_tokens"] < 1 << 20
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"Warning: memory for {plan['num_states']} recurrent states, 128 sequences are in flight" in out
    assert f"the KV cache holds {plan['num_kv_tokens']} tokens." in out
    assert main([*command, "--max-step-sequences", "2", "--no-prefix-cache"]) == 0
    out = capsys.readouterr().out
    assert ", 4 recurrent states" in out and "Warning" not in out


def test_transformers_layers_come_with_a_warning(tmp_path: Path, capsys: Captured) -> None:
    make_checkpoint(tmp_path, "helium", num_layers=4)
    command = ["plan", "--model", str(tmp_path), "--workers", "64MiB,64MiB"]
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "attention by transformers" in out
    assert (
        "Warning: transformers' layers serve this model, as 'helium' has no native ones: they are slower and"
        " less tested." in out
    )
    assert main([*command, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["implementation"] == "transformers"
    assert sum(stage["weight_bytes"] for stage in plan["stages"]) == sum(
        entry.num_bytes for entry in Checkpoint.open(tmp_path).tensors.values()
    )


def test_the_implementation_is_a_choice(tmp_path: Path, capsys: Captured) -> None:
    make_checkpoint(tmp_path / "llama", "llama", num_layers=2)
    make_checkpoint(tmp_path / "helium", "helium", num_layers=2)
    workers = ["--workers", "64MiB", "--json"]
    for given, expected in (("auto", "native"), ("native", "native"), ("transformers", "transformers")):
        command = ["plan", "--model", str(tmp_path / "llama"), *workers, "--implementation", given]
        assert main(command) == 0
        assert json.loads(capsys.readouterr().out)["implementation"] == expected
    helium = ["plan", "--model", str(tmp_path / "helium"), *workers]
    assert main([*helium, "--implementation", "native"]) == 1
    assert "'helium' has no native layers" in capsys.readouterr().err
    assert main([*helium, "--quantize", "int8"]) == 1
    assert "'helium' has no native layers, which --quantize needs" in capsys.readouterr().err
    llama = ["plan", "--model", str(tmp_path / "llama"), *workers, "--implementation", "transformers"]
    assert main([*llama, "--quantize", "int8"]) == 1
    assert "--quantize is for native layers" in capsys.readouterr().err


def test_a_plan_of_a_remote_gguf_file_reads_headers(tmp_path: Path, capsys: Captured) -> None:
    (source := tmp_path / "source").mkdir()
    path = write_gguf(source / "stories.gguf", MODEL_DIRECTORY, quantised("BF16"), pre="gpt-2")
    plans = []
    with range_server(source) as server:
        for model in (str(path), f"{server.url}/stories.gguf"):
            assert main(["plan", "--model", model, "--workers", "64MiB,64MiB", "--json"]) == 0
            plans.append(json.loads(capsys.readouterr().out))
        assert server.sent_bytes < 0.3 * path.stat().st_size
    fields = ("stages", "num_blocks")
    assert [plans[0][field] for field in fields] == [plans[1][field] for field in fields]


def test_gguf_files_are_for_native_layers(tmp_path: Path, capsys: Captured) -> None:
    path = write_gguf(tmp_path / "stories.gguf", MODEL_DIRECTORY, quantised("BF16"), pre="gpt-2")
    command = ["plan", "--model", str(path), "--workers", "64MiB"]
    assert main(command) == 0
    capsys.readouterr()
    assert main([*command, "--implementation", "transformers"]) == 1
    assert "GGUF files are for native layers: use --implementation auto" in capsys.readouterr().err


def test_checkpoints_in_mistrals_format_are_for_native_layers(tmp_path: Path, capsys: Captured) -> None:
    source = make_checkpoint(tmp_path / "source", "mistral", num_layers=2, sliding_window=None)
    directory = write_mistral(tmp_path / "model", source, {})
    command = ["plan", "--model", str(directory), "--workers", "64MiB"]
    assert main(command) == 0
    assert main(["plan", "--check", str(directory)]) == 0
    assert "is served: mistral" in capsys.readouterr().out
    assert main([*command, "--implementation", "transformers"]) == 1
    assert "Mistral's own format is for native layers" in capsys.readouterr().err
