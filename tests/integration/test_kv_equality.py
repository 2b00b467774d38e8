"""Tokens do not depend on the cache: sharing, chunks, block sizes, preemption, windows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.checkpoints import load_reference, make_checkpoint
from tests.local_pipeline import GREEDY, LocalPipeline, Request

NUM_LAYERS = 3
LAYERS = (1, 2)
NUM_NEW_TOKENS = 20
WINDOW = 24
MODELS: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": WINDOW, "tie_word_embeddings": False},
}


def random_tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (num_tokens,), generator=generator).tolist()


def load() -> list[Request]:
    """Prompts with and without a common prefix, one twice, over time; every second one is sampled."""
    common, other = random_tokens(133, seed=1), random_tokens(60, seed=2)
    prompts = [
        [*common, *random_tokens(9, seed=3)],
        [*common, *random_tokens(20, seed=4)],
        other,
        [*common[:64], *random_tokens(5, seed=5)],
        other,
        random_tokens(62, seed=7),
        [*common, *random_tokens(9, seed=3)],
        [7],
        random_tokens(16, seed=6),
    ]
    return [
        Request(
            prompt=prompt,
            max_tokens=NUM_NEW_TOKENS,
            sampling=replace(GREEDY, temperature=0.8, top_k=20, seed=index) if index % 2 else GREEDY,
            arrives_at=2 * index,
        )
        for index, prompt in enumerate(prompts)
    ]


def smallest_pool(block_size: int) -> int:
    """Number of blocks of the longest request."""
    return -(-max(len(request.prompt) + request.max_tokens for request in load()) // block_size)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    return make_checkpoint(
        tmp_path_factory.mktemp(name) / name,
        name,
        num_layers=NUM_LAYERS,
        seed=3,
        initializer_range=0.3,
        **MODELS[name],
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Tokens of each request alone, its prompt in one chunk; greedy ones equal those of transformers."""
    pipeline = LocalPipeline(model, (NUM_LAYERS,), max_step_tokens=256, prefix_caching=False)
    alone = [pipeline.serve([replace(request, arrives_at=0)]).tokens[0] for request in load()]
    for request, tokens in zip(load(), alone, strict=True):
        assert len(set(tokens)) > 6, "a degenerate model proves nothing"
        if request.sampling == GREEDY:
            assert tokens == reference_tokens(model, list(request.prompt))
    return alone


def reference_tokens(directory: Path, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    output = load_reference(directory).generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def chunk_sizes(block_size: int) -> list[int]:
    """One block, an odd number of tokens, and the whole prompt."""
    return [block_size, 2 * block_size + 5, 256]


@pytest.mark.matrix(1, full=18)
@pytest.mark.parametrize("pool", ["ample", "smallest"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["shared", "not shared"])
@pytest.mark.parametrize(
    ("block_size", "chunk_size"),
    [(block_size, chunk_size) for block_size in (8, 16, 64) for chunk_size in chunk_sizes(block_size)],
)
def test_every_cache_gives_the_same_tokens(
    model: Path,
    expected: list[list[int]],
    block_size: int,
    chunk_size: int,
    prefix_caching: bool,
    pool: str,
) -> None:
    is_small = pool == "smallest"
    pipeline = LocalPipeline(
        model,
        LAYERS,
        block_size=block_size,
        num_blocks=smallest_pool(block_size) if is_small else 256,
        max_step_tokens=chunk_size,
        prefix_caching=prefix_caching,
    )
    run = pipeline.serve(load())
    counts = run.scheduler.counts
    assert run.tokens == expected
    if not (is_small and model.name == "mistral"):  # whose released blocks may make preemptions unnecessary
        assert (counts.num_preemptions > 0) == is_small
    if prefix_caching and not is_small:
        assert counts.num_cached_tokens > 200
    if not prefix_caching:
        assert counts.num_cached_tokens == 0
    if not is_small:
        assert run.num_prefill_tokens == counts.num_prompt_tokens - counts.num_cached_tokens


@pytest.mark.full
@pytest.mark.parametrize("num_blocks", [smallest_pool(16), 64])
def test_cancels_change_no_token_of_other_requests(
    model: Path, expected: list[list[int]], num_blocks: int
) -> None:
    pipeline = LocalPipeline(model, LAYERS, num_blocks=num_blocks, max_step_tokens=40)
    for first in range(0, 36, 9):
        cancels = {0: first, 3: first + 3, 4: first + 9}
        requests = [replace(request, cancelled_at=cancels.get(i)) for i, request in enumerate(load())]
        for index, tokens in enumerate(pipeline.serve(requests).tokens):
            if index in cancels:
                assert tokens == expected[index][: len(tokens)]
            else:
                assert tokens == expected[index]
