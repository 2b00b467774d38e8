"""A worker that is killed while it fetches weights goes on where it was."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint, TensorEntry
from deploy import LocalProcess
from stageline import Client
from tests.e2e.commands import Shell, until_logged
from tests.range_server import Handler, Request, range_server
from tests.zero_checkpoint import write_zero_checkpoint
from weights.pieces import DEFAULT_TRANSFER

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.full]

NUM_KILLS = 10
MAX_REPEATED = 0.05
"""Share of the stage that may be sent twice."""
BYTES_PER_S = 0.4e6
"""Of each connection."""
CHUNK_BYTES, SEND_BUFFER_BYTES = 4096, 32 * 1024
"""Small, in the server and in its kernel: bytes count as sent that a killed worker never sees."""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Random weights of 150 MB in three files."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_zero_checkpoint(directory, CONFIG, num_shards=3)
    entries = Checkpoint.open(directory).tensors
    for file in {entry.file for entry in entries.values()}:
        shapes = {name: entry.shape for name, entry in entries.items() if entry.file == file}
        weights = {name: 0.05 * torch.randn(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
        save_file(weights, directory / file)
    for path in MODEL_DIRECTORY.glob("tokenizer*"):
        shutil.copy(path, directory)
    return directory


def moments(seed: int, duration_s: float) -> list[float]:
    """Times between kills: their moments are drawn from most of a transfer's duration, each alike."""
    generator = random.Random(seed)
    points = sorted(generator.uniform(0.0, 0.95 * duration_s) for _ in range(NUM_KILLS))
    return [after - before for before, after in pairwise([0.0, *points])]


class Watch:
    """Limits the buffers of the server's connections, and tells when weights are first requested."""

    def __init__(self) -> None:
        self._begun = threading.Event()

    def __call__(self, handler: Handler, request: Request) -> bool:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        if request.method == "GET" and request.path.endswith(".safetensors") and request.begin > 8:
            self._begun.set()
        return False

    async def next_begin(self) -> None:
        self._begun.clear()
        assert await asyncio.to_thread(self._begun.wait, 120)


async def start_worker(shell: Shell, coordinator: str, folder: Path) -> LocalProcess:
    options = ("--coordinator", coordinator, "--name", "w0", "--insecure", "--memory", "2GiB")
    return await shell.start("w0", "worker", *options, "--cache-dir", str(folder / "cache"))


def wrong_tensors(model: Path, cache: Path) -> list[str]:
    """Tensors whose bytes in the cache are not the model's."""
    (files,) = cache.glob("models/*/files")
    return [
        name
        for name, entry in Checkpoint.open(model).tensors.items()
        if bytes_of(files, entry) != bytes_of(model, entry)
    ]


def bytes_of(directory: Path, entry: TensorEntry) -> bytes:
    with (directory / entry.file).open("rb") as file:
        return os.pread(file.fileno(), entry.num_bytes, entry.begin)


@pytest.mark.parametrize("seed", [1])
async def test_ten_kills_at_random_moments_repeat_at_most_a_twentieth(
    model: Path, tmp_path: Path, seed: int
) -> None:
    entries = Checkpoint.open(model).tensors
    total = sum(entry.num_bytes for entry in entries.values())
    watch = Watch()
    with range_server(model) as server:
        server.misbehave = watch
        server.bytes_per_s, server.chunk_bytes = BYTES_PER_S, CHUNK_BYTES
        async with Shell(tmp_path) as shell:
            options = ("--model", server.url, "--stages", "1", "--insecure", "--no-self-check")
            coordinator, address = await shell.coordinator(*options)
            opened = server.sent_bytes
            for delay_s in moments(seed, total / (DEFAULT_TRANSFER.num_connections * BYTES_PER_S)):
                worker = await start_worker(shell, address, tmp_path)
                await watch.next_begin()
                await asyncio.sleep(delay_s)
                worker.send_signal(signal.SIGKILL)
                await worker.wait()
            await start_worker(shell, address, tmp_path)
            await until_logged(coordinator, "serving: epoch", timeout_s=240)
            async with Client(address) as client:
                assert len([token async for token in client.generate([1, 2, 3], max_tokens=4)]) == 4
            sent = server.sent_bytes - opened
    print(f"seed {seed}: {sent / total:.4f} of {total} bytes sent")
    assert total <= sent <= total * (1 + MAX_REPEATED)
    assert not wrong_tensors(model, tmp_path / "cache")
