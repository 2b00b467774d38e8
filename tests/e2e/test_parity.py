"""Real stage processes give the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from builtin_model import MODEL_DIRECTORY
from deploy import LocalCluster
from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import load_reference
from tests.e2e.clusters import (
    NUM_NEW_TOKENS,
    START_TIMEOUT_S,
    Reference,
    config,
    generate_all,
    reference_tokens,
    tokens_of,
    wait_for_status,
)
from tests.repository import STORIES260K

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.full
async def test_a_llama_on_one_worker(llama: Reference, tmp_path: Path) -> None:
    async with LocalCluster(config(llama.directory, 1, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert await generate_all(cluster.address, llama) == llama.expected


@pytest.mark.matrix(0, full=1)  # in one process: tests/integration/test_parity.py
@pytest.mark.parametrize(
    ("hidden_states", "transport"),
    [("grpc", cluster_pb2.HOP_TRANSPORT_GRPC), ("auto", cluster_pb2.HOP_TRANSPORT_SHARED_MEMORY)],
    ids=["grpc", "auto"],
)
async def test_a_qwen3_on_three_unequal_workers(
    qwen3: Reference, tmp_path: Path, hidden_states: str, transport: int
) -> None:
    def is_told(status: cluster_pb2.GetStatusResponse) -> bool:
        return [worker.hop_transport for worker in status.workers] == [transport, transport, 0]

    flags = ("--layers", "5,1,2", "--hidden-states", hidden_states)
    async with LocalCluster(config(qwen3.directory, 3, *flags, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert await generate_all(cluster.address, qwen3) == qwen3.expected
        await wait_for_status(cluster.address, is_told)


@pytest.mark.full
async def test_the_built_in_model_by_text_on_three_workers(tmp_path: Path) -> None:
    prompt = "Once upon a time"
    tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    model: Any = load_reference(MODEL_DIRECTORY)
    model.float()
    expected = reference_tokens(model, tokenizer.encode(prompt).ids)
    async with LocalCluster(config(None, 3, "--dtype", "f32", log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            outputs = [output async for output in client.generate(prompt, max_tokens=NUM_NEW_TOKENS)]
    assert [token for output in outputs for token in output.token_ids] == expected
    assert "".join(output.text for output in outputs) == tokenizer.decode(expected)


@pytest.mark.nightly  # in one process: tests/integration/test_stories260k.py
async def test_stories260k_on_five_workers(tmp_path: Path) -> None:
    expected = json.loads((STORIES260K / "expected.json").read_text())
    async with LocalCluster(config(STORIES260K, 5, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            tokens = await tokens_of(client, expected["prompt_token_ids"], 256)
    assert tokens == expected["generated_token_ids"]
