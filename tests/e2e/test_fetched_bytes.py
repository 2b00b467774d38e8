"""What each worker process fetches of a remote model: its own tensors, and little twice if it is killed."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
import threading
from base64 import b64encode
from itertools import pairwise
from pathlib import Path

import pytest

from checkpoint import Checkpoint, TensorEntry, stage_tensor_names
from deploy import LocalProcess
from stageline import Client
from tests.e2e.commands import Shell, until_logged
from tests.random_checkpoint import write_random_checkpoint
from tests.range_server import Handler, RangeServer, Request, range_server
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
    write_random_checkpoint(directory, CONFIG, num_shards=3)
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


async def start_worker(shell: Shell, coordinator: str, folder: Path, name: str = "w0") -> LocalProcess:
    """Start a worker whose requests for weights have its name as their user."""
    (folder / name).mkdir(exist_ok=True)
    credentials = folder / name / ".netrc"
    credentials.write_text(f"default login {name} password any")
    credentials.chmod(0o600)
    env = shutil.which("env")
    assert env is not None
    options = ("--coordinator", coordinator, "--name", name, "--insecure", "--memory", "2GiB")
    cache = ("--cache-dir", str(folder / name / "cache"))
    return await shell.start(name, "worker", *options, *cache, prefix=(env, f"HOME={folder / name}"))


def sent_to(server: RangeServer, name: str) -> int:
    """Bytes of all answers to a worker."""
    user = "Basic " + b64encode(f"{name}:any".encode()).decode()
    return sum(
        request.sent_bytes for request in server.requests if request.headers.get("authorization") == user
    )


def bytes_beside_tensors(model: Path, *, has_head: bool) -> int:
    """Headers of all files, config and index, and the tokenizer for the stage with the head."""
    files = {entry.file for entry in Checkpoint.open(model).tensors.values()}
    others = ["config.json", "model.safetensors.index.json", *(["tokenizer.json"] if has_head else [])]
    return sum(header_bytes(model / file) for file in files) + sum(
        (model / name).stat().st_size for name in others
    )


def header_bytes(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("num_stages", [pytest.param(2, marks=pytest.mark.nightly), 3])
async def test_each_worker_fetches_its_own_tensors_and_headers(
    model: Path, tmp_path: Path, num_stages: int
) -> None:
    checkpoint = Checkpoint.open(model)
    with range_server(model) as server:
        async with Shell(tmp_path) as shell:
            options = ("--model", server.url, "--stages", str(num_stages), "--insecure", "--no-self-check")
            coordinator, address = await shell.coordinator(*options)
            for number in range(num_stages):
                await start_worker(shell, address, tmp_path, f"w{number}")
            await until_logged(coordinator, "serving: epoch", timeout_s=240)
            async with Client(address) as client:
                workers = (await client.status()).workers
    fetched = 0
    for worker in workers:
        has_head = worker.layer_end == checkpoint.config.num_layers
        names = stage_tensor_names(
            *(checkpoint.config, worker.layer_begin, worker.layer_end),
            has_embeddings=worker.layer_begin == 0,
            has_head=has_head,
        )
        of_stage = sum(checkpoint.tensors[name].num_bytes for name in names)
        sent = sent_to(server, worker.name)
        print(f"{worker.name}: {sent} bytes for {of_stage} of tensors")
        assert of_stage <= sent <= of_stage * 1.01 + bytes_beside_tensors(model, has_head=has_head)
        fetched += sent
    assert len(workers) == num_stages
    assert fetched >= sum(entry.num_bytes for entry in checkpoint.tensors.values())


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


@pytest.mark.nightly
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
    assert not wrong_tensors(model, tmp_path / "w0" / "cache")
