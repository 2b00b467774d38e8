"""`--kv-dtype` in whole pipelines: one text at every cut, and logits near those of an exact cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from builtin_model import MODEL_DIRECTORY
from checkpoint import Checkpoint, DType, ScaledDType
from kvcache.pages import KvPages
from kvcache.scaled_pages import ScaledPages
from stage_worker.backends.tensor_views import ELEMENTS
from stage_worker.model.decoder import DecoderStage
from stage_worker.validation import SliceLayout
from stageline_rpc.v1 import cluster_pb2
from tests.checkpoints import make_checkpoint
from tests.families import make_family
from tests.integration.cluster import Cluster, RequestCase
from tests.integration.test_sliding_window import prompt_of
from tests.local_pipeline import LocalPipeline, Request
from tests.step_layouts import layout_for

CUTS = [(5,), (2, 3), (1, 1, 3), (1, 1, 1, 1, 1)]
LIMITS = {ScaledDType.I8: (3e-5, 3e-4), ScaledDType.F8_E4M3: (1e-3, 1e-3)}
"""Of the built-in model: mean divergence from an exact cache, of float32 and of bfloat16, in nats."""
NUMBERS = {ScaledDType.I8: cluster_pb2.DTYPE_I8, ScaledDType.F8_E4M3: cluster_pb2.DTYPE_F8_E4M3}


@pytest.fixture(scope="module", params=["windows", "latents"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 1 and 4 have full attention, so there are two block groups; or pages of latents."""
    if request.param == "latents":
        return make_family(tmp_path_factory.mktemp("latents") / "model", "deepseek_v3")
    return make_checkpoint(
        tmp_path_factory.mktemp("mixed") / "model",
        "qwen2",
        num_layers=5,
        seed=6,
        initializer_range=0.3,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=0,
        layer_types=["full_attention" if layer in (1, 4) else "sliding_attention" for layer in range(5)],
    )


def tokens_of(
    directory: Path,
    layers: tuple[int, ...],
    requests: list[Request],
    kv_dtype: ScaledDType | None,
    *,
    num_blocks: int = 90,
    max_step_tokens: int = 24,
    prefix_caching: bool = True,
) -> tuple[list[list[int]], int]:
    """The tokens of all requests, and the number of preemptions."""
    pipeline = LocalPipeline(
        directory,
        layers,
        block_size=8,
        num_blocks=num_blocks,
        max_step_tokens=max_step_tokens,
        prefix_caching=prefix_caching,
        kv_dtype=kv_dtype,
    )
    run = pipeline.serve(requests)
    return run.tokens, run.scheduler.counts.num_preemptions


@pytest.mark.matrix(0, full=1)
@pytest.mark.parametrize("kv_dtype", ScaledDType)
def test_a_text_depends_neither_on_cuts_nor_on_chunks_hits_and_preemptions(
    kv_dtype: ScaledDType, mixed: Path
) -> None:
    shared = prompt_of(48, 1)
    requests = [
        Request(prompt=[*shared, *prompt_of(length, length)], max_tokens=40, arrives_at=length)
        for length in (3, 9, 20, 31)
    ]
    expected, _ = tokens_of(mixed, (5,), requests, kv_dtype)
    assert expected != tokens_of(mixed, (5,), requests, None)[0], "the rounding shows"
    for layers in CUTS[1:]:
        assert tokens_of(mixed, layers, requests, kv_dtype)[0] == expected
    assert tokens_of(mixed, (2, 3), requests, kv_dtype, prefix_caching=False)[0] == expected
    assert tokens_of(mixed, (2, 3), requests, kv_dtype, max_step_tokens=200)[0] == expected
    tokens, num_preemptions = tokens_of(mixed, (2, 3), requests, kv_dtype, num_blocks=24)
    assert num_preemptions > 0
    assert tokens == expected


def _logprobs(tokens: list[int], dtype: DType, kv_dtype: ScaledDType | None) -> Tensor:
    """float64 [tokens, vocabulary] of the built-in model, in chunks of 32."""
    checkpoint = Checkpoint.open(MODEL_DIRECTORY)
    num_layers = checkpoint.config.num_layers
    stage = DecoderStage(
        checkpoint.config,
        layer_begin=0,
        layer_end=num_layers,
        has_embeddings=True,
        has_head=True,
        dtype=dtype,
    )
    stage.load(checkpoint)
    shape = checkpoint.config.page_shape(None)
    sizes = {
        "num_layers": num_layers,
        "num_blocks": 1 + len(tokens) // 16,
        "block_size": 16,
        "num_kv_heads": shape.heads,
        "head_dim": shape.width,
    }
    if kv_dtype is None:
        pages = KvPages(**sizes, dtype=stage.torch_dtype, device="cpu")
    else:
        pages = ScaledPages(**sizes, dtype=stage.torch_dtype, device="cpu", element=ELEMENTS[kv_dtype])
    table, logits = tuple(range(sizes["num_blocks"])), []
    for begin in range(0, len(tokens), 32):
        chunk = torch.tensor(tokens[begin : begin + 32])
        item = SliceLayout(first_position=begin, num_tokens=len(chunk), pages=table, num_valid=begin)
        hidden = stage.forward(stage.embed(chunk), layout_for(stage, [item], block_size=16), pages)
        logits.append(stage.logits(hidden))
    return torch.cat(logits).double().log_softmax(dim=1)


@pytest.mark.matrix(0, full=2)
@pytest.mark.parametrize("kv_dtype", ScaledDType)
def test_the_builtin_model_predicts_almost_as_with_an_exact_cache(kv_dtype: ScaledDType) -> None:
    (story,) = LocalPipeline(MODEL_DIRECTORY, (12,)).generate([[1, 330, 290]], max_tokens=250)
    exact = _logprobs(story, DType.F32, None)
    for dtype, limit in zip((DType.F32, DType.BF16), LIMITS[kv_dtype], strict=True):
        found = _logprobs(story, dtype, kv_dtype)
        divergence = float((exact.exp() * (exact - found)).sum(dim=1).mean())
        assert 1e-9 < divergence < limit
        assert float((found.argmax(dim=1) == exact.argmax(dim=1)).double().mean()) > 0.97


@pytest.mark.matrix(1, full=2)
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("kv_dtype", ScaledDType)
async def test_a_checked_cluster_serves_with_rounded_keys_and_values(
    kv_dtype: ScaledDType, dtype: DType, mixed: Path
) -> None:
    case = RequestCase(prompt=tuple(prompt_of(60, 1)), max_tokens=24)
    async with Cluster(
        mixed, layers=(1, 2, 2), dtype=dtype.value, kv_dtype=kv_dtype.value, self_check=True
    ) as cluster:
        status = await cluster.client.status()
        answer = await cluster.generate(case)
    assert status.self_check.verdict == cluster_pb2.SELF_CHECK_VERDICT_PASSED
    assert status.kv_dtype == NUMBERS[kv_dtype]
    if dtype is DType.F32:
        request = Request(prompt=list(case.prompt), max_tokens=24)
        assert [list(answer.tokens)] == tokens_of(mixed, (5,), [request], kv_dtype)[0]
        assert [list(answer.tokens)] != tokens_of(mixed, (5,), [request], None)[0]
