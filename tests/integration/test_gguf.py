"""A whole cluster serves a GGUF file: text, chat, structured output, self-check and hashes of weights."""

import asyncio
from pathlib import Path

from builtin_model import MODEL_DIRECTORY
from stageline.client.output import FinishReason
from tests.gguf_files import quantised, write_gguf
from tests.integration.cluster import Cluster

PROMPTS = ("Once upon a time", "The big dog", "Lily")


async def texts_of(cluster: Cluster) -> list[str]:
    completions = await asyncio.gather(
        *(cluster.client.complete(prompt, max_tokens=24, timeout_s=120) for prompt in PROMPTS)
    )
    return [completion.text for (completion,) in completions]


async def test_a_cluster_answers_like_the_safetensors_of_the_same_weights(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "stories.gguf", MODEL_DIRECTORY, quantised("BF16"), pre="gpt-2")
    async with Cluster(None, layers=(4, 8), max_kv_tokens=4096, has_text=True) as cluster:
        expected = await texts_of(cluster)
    async with Cluster(path, layers=(4, 8), max_kv_tokens=4096, has_text=True, self_check=True) as cluster:
        assert await texts_of(cluster) == expected
        (found,) = await cluster.client.complete("Once", regex=r"[a-c]{3}-\d{2}", timeout_s=120)
        assert found.finish_reason is FinishReason.STOP
        assert len(found.text) == 6
        assert (await cluster.client.model()).name == "stories"
