"""Clusters of real processes, and conditions on their status."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deploy import LocalCluster, LocalClusterConfig
from stageline import Client
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import load_reference, make_checkpoint
from tests.e2e.commands import ENVIRONMENT

BLOCK_SIZE = 16
CHUNK = 64
VOCAB_SIZE = 128
NUM_NEW_TOKENS = 48
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK + 37)
START_TIMEOUT_S = 120.0
MEMORY_BYTES = 512 * 2**20

STEP_FLAGS = ("--block-size", str(BLOCK_SIZE), "--max-step-tokens", str(CHUNK), "--kv-tokens", "8192")


@dataclass(frozen=True, slots=True)
class Reference:
    """A checkpoint, prompts, and the greedy tokens of transformers for each."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@dataclass(frozen=True, slots=True)
class Served:
    """A running cluster and its expected tokens."""

    cluster: LocalCluster
    reference: Reference

    @property
    def address(self) -> str:
        return self.cluster.address


def make_reference(directory: Path, family: str) -> Reference:
    """Eight float32 layers with random weights that generate varied tokens."""
    make_checkpoint(directory, family, num_layers=8, seed=3, initializer_range=0.3, **_OVERRIDES[family])
    prompts = [random_prompt(length) for length in PROMPT_LENGTHS]
    model = load_reference(directory)
    expected = [reference_tokens(model, prompt) for prompt in prompts]
    assert all(len(set(tokens)) > 8 for tokens in expected), "a degenerate model proves nothing"
    return Reference(directory, prompts, expected)


_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "max_position_embeddings": 4096},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 24},
}


def reference_tokens(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens of `generate` of a transformers model."""
    ids = torch.tensor([prompt])
    # Without a mask, generate() takes prompt tokens that equal the pad token for padding.
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def random_prompt(length: int, *, seed: int = 7) -> list[int]:
    """Random token ids, reproducible per seed."""
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def config(
    directory: Path | None, num_workers: int, *flags: str, log_directory: Path | None = None
) -> LocalClusterConfig:
    """A cluster with one compute thread and little memory per worker."""
    return LocalClusterConfig(
        num_workers=num_workers,
        model=directory,
        memory_bytes=MEMORY_BYTES,
        num_threads=1,
        coordinator_arguments=(*STEP_FLAGS, *flags),
        environment=ENVIRONMENT,
        log_directory=log_directory,
    )


async def tokens_of(client: Client, prompt: Sequence[int], max_tokens: int, **options: object) -> list[int]:
    """Generate, and return the token ids."""
    tokens: list[int] = []
    async for output in client.generate(list(prompt), max_tokens=max_tokens, **options):  # type: ignore[arg-type]
        tokens += output.token_ids
    return tokens


async def generate_all(address: str, reference: Reference) -> list[list[int]]:
    """Greedy tokens of every prompt."""
    async with Client(address) as client:
        return [await tokens_of(client, prompt, NUM_NEW_TOKENS) for prompt in reference.prompts]


async def wait_for_status(
    address: str,
    condition: Callable[[cluster_pb2.GetStatusResponse], bool],
    *,
    timeout_s: float = 30.0,
) -> cluster_pb2.GetStatusResponse:
    """Poll until the condition holds, within `timeout_s`; return that status."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    async with Client(address, connect_timeout_s=timeout_s) as client:
        while not condition(status := await client.status()):
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"not within {timeout_s:g} s; last status:\n{status}")
            await asyncio.sleep(0.05)
    return status


def is_serving(status: cluster_pb2.GetStatusResponse) -> bool:
    return status.state == cluster_pb2.CLUSTER_STATE_SERVING


def holds_pages_everywhere(status: cluster_pb2.GetStatusResponse) -> bool:
    """Whether every stage reports pages of live sequences."""
    return is_serving(status) and all(worker.kv.blocks_active for worker in status.workers)


def is_idle(status: cluster_pb2.GetStatusResponse) -> bool:
    """Whether no request is live and every stage reports no page in use."""
    live = status.requests.waiting + status.requests.prefill + status.requests.decode
    active = [worker.kv.blocks_active for worker in status.workers]
    return is_serving(status) and live == 0 and status.requests.steps_in_flight == 0 and not any(active)
