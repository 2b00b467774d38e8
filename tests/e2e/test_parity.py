"""Tokens that travel through real stage processes equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploy import LocalCluster
from stageline import Client
from tests.e2e.clusters import NUM_NEW_TOKENS, START_TIMEOUT_S, Reference, Served, config, tokens_of
from tests.shared_files import shared_path

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def _generate_all(address: str, reference: Reference) -> list[list[int]]:
    async with Client(address) as client:
        return [await tokens_of(client, prompt, NUM_NEW_TOKENS) for prompt in reference.prompts]


async def test_a_llama_on_three_unequal_workers(served: Served) -> None:
    status = await served.cluster.wait_until_serving(timeout_s=10)
    assert [(each.layer_begin, each.layer_end) for each in status.workers] == [(0, 1), (1, 5), (5, 8)]
    assert await _generate_all(served.address, served.reference) == served.reference.expected


async def test_a_llama_on_one_worker(llama: Reference, tmp_path: Path) -> None:
    async with LocalCluster(config(llama.directory, 1, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert await _generate_all(cluster.address, llama) == llama.expected


async def test_a_qwen3_on_three_unequal_workers(qwen3: Reference, tmp_path: Path) -> None:
    flags = ("--layers", "5,1,2")
    async with LocalCluster(config(qwen3.directory, 3, *flags, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        assert await _generate_all(cluster.address, qwen3) == qwen3.expected


async def test_stories260k_on_five_workers(tmp_path: Path) -> None:
    directory = shared_path("models/stories260k")
    expected = json.loads((directory / "expected.json").read_text())
    async with LocalCluster(config(directory, 5, log_directory=tmp_path)) as cluster:
        await cluster.wait_until_serving(timeout_s=START_TIMEOUT_S)
        async with Client(cluster.address) as client:
            tokens = await tokens_of(client, expected["prompt_token_ids"], 256)
    assert tokens == expected["generated_token_ids"]
