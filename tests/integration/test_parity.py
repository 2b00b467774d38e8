"""Greedy tokens equal tokens of transformers, however the layers are cut."""

import itertools
from pathlib import Path

import pytest
import torch

from tests.checkpoints import load_reference, make_checkpoint
from tests.local_pipeline import LocalPipeline

FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": 24, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"tie_word_embeddings": False, "head_dim": 24},
}
NUM_LAYERS = 8
BLOCK_SIZE = 16
CHUNK = 64
NUM_NEW_TOKENS = 24
PROMPT_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK + 37)


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Every split of the layers into `num_stages` stages of at least one layer."""
    marks = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, num_layers))) for cut in marks]


ALL_CUTS = [
    *cuts(NUM_LAYERS, 2),
    *cuts(NUM_LAYERS, 3),
    (8,),
    (2, 2, 2, 2),
    (1,) * 8,
]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 128, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def reference_tokens(directory: Path, prompt: list[int]) -> list[int]:
    model = load_reference(directory)
    ids = torch.tensor([prompt])
    # Without a mask, generate() takes prompt tokens that equal the pad token for padding.
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    name = request.param
    directory = make_checkpoint(
        tmp_path_factory.mktemp(name) / "model",
        name,
        num_layers=NUM_LAYERS,
        seed=3,
        initializer_range=0.3,
        **FAMILIES[name],
    )
    expected = [reference_tokens(directory, prompt) for prompt in prompts()]
    assert all(len(set(tokens)) > 8 for tokens in expected), "a degenerate model proves nothing"
    return directory, expected


@pytest.mark.matrix(1, full=14)
@pytest.mark.parametrize("layers", ALL_CUTS, ids=lambda layers: "-".join(map(str, layers)))
def test_every_cut_generates_the_tokens_of_transformers(
    family: tuple[Path, list[list[int]]], layers: tuple[int, ...]
) -> None:
    directory, expected = family
    pipeline = LocalPipeline(directory, layers, block_size=BLOCK_SIZE, max_step_tokens=CHUNK)
    assert pipeline.generate(prompts(), max_tokens=NUM_NEW_TOKENS) == expected


@pytest.mark.matrix(1, full=2)
@pytest.mark.parametrize("layers", [(8,), (3, 5), (2, 3, 3)], ids=lambda layers: "-".join(map(str, layers)))
def test_prompts_alone_generate_the_same_as_together(
    family: tuple[Path, list[list[int]]], layers: tuple[int, ...]
) -> None:
    directory, expected = family
    pipeline = LocalPipeline(directory, layers, block_size=BLOCK_SIZE, max_step_tokens=CHUNK)
    alone = [pipeline.generate([prompt], max_tokens=NUM_NEW_TOKENS)[0] for prompt in prompts()]
    assert alone == expected
