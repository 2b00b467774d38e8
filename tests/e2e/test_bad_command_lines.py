"""User errors are reported in one line with an exit code, without traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.e2e.commands import run_stageline

pytestmark = pytest.mark.asyncio(loop_scope="package")

# Unit tests cover all flags in one process; these are flags of the process commands.
BAD_USAGE = {
    "coordinator --stages 1 --model /no/such/model": "'/no/such/model' does not exist",
    "coordinator --stages 2 --layers 1,2,3": "layers 1,2,3 are for 3 stages, but there are 2",
    "worker --model /no/such/model": "'/no/such/model' does not exist",
    "worker --device tpu": "device 'tpu'",
    "worker --threads 100000000": "--threads is 100000000, the limit is ",
    "up --memory 999TiB": "--memory is 999.0 TiB for each of 3 workers on the CPU, 2997.0 TiB in all, but",
    "worker --memory 1000TiB": "--memory is 1099511627776000 bytes (1024000.0 GiB), device cpu has ",
}


@pytest.mark.matrix(1)
@pytest.mark.parametrize("line", BAD_USAGE)
async def test_bad_flags_are_rejected_with_exit_code_2(line: str) -> None:
    run = await run_stageline(*line.split())
    assert run.code == 2
    assert BAD_USAGE[line] in run.the_error()


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--stages 2 --layers 1,1", "layers 1,1 sum to 2, the model has 12"),
        ("--stages 40", "40 stages for a model of 12 layers"),
        (
            "--stages 2 --max-model-len 2049",
            "--max-model-len is 2049, but the model's limit is 2048 (max_position_embeddings)",
        ),
    ],
)
async def test_an_impossible_split_is_rejected_at_startup(flags: str, text: str) -> None:
    run = await run_stageline("coordinator", *flags.split(), "--no-http")
    assert run.code == 1
    assert f"error[PLAN_IMPOSSIBLE]: {text}" in run.the_error()


async def test_a_folder_with_a_gguf_file_is_rejected_with_instructions(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    run = await run_stageline("plan", "--workers", "1GiB", "--model", str(tmp_path))
    assert run.code == 1
    assert "error[UNSUPPORTED_FORMAT]" in run.the_error()
    assert "has model.gguf and no config.json: give the path of the file" in run.the_error()


@pytest.mark.full
async def test_a_client_without_a_coordinator_fails_soon(free_address: str) -> None:
    run = await run_stageline("status", "--coordinator", free_address, timeout_s=30.0)
    assert run.code == 1
    assert f"no coordinator at {free_address}" in run.the_error()


async def test_a_folder_without_a_checkpoint_is_rejected_with_the_missing_file(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    pickled = make_checkpoint(tmp_path / "pickled", "llama", num_layers=1)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    for directory, text in ((empty, "config.json"), (pickled, "safetensors")):
        run = await run_stageline("coordinator", "--stages", "1", "--model", str(directory))
        assert run.code == 1
        assert text in run.the_error()
        assert str(directory) in run.the_error()
