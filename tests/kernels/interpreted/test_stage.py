"""Stages of every family with Triton kernels compute what torch's operators compute, and launch at most ten
kernels a layer.

Logits of float32 differ by at most 1e-4 of their spread, as those of torch's operators from transformers'.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from checkpoint import Checkpoint
from stage_worker.model import attention_work
from stage_worker.model.kernels import Kernels, by_triton
from stage_worker.model.triton_kernels import choices, launch
from tests.families import FAMILIES, make_family
from tests.unit.stage_worker.model.pipeline import Pipeline, Running, states_of
from tests.unit.stage_worker.model.test_parity import random_sequences

pytestmark = pytest.mark.kernels

_VIEWS = {"view", "slice", "select", "unsqueeze", "permute", "transpose", "t", "split", "expand", "alias"}
_VIEWS |= {"split_with_sizes", "as_strided", "empty", "new_empty", "empty_strided", "_unsafe_view", "detach"}
_VIEWS |= {"empty_like", "unbind", "lift_fresh"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """From which tokens are chosen."""
    monkeypatch.setattr(choices, "CHOICE_PART", 64)


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_family(tmp_path_factory.mktemp(request.param) / "model", request.param))


STEPS = ((14, 1, 26), (14, 1, 1), (1, 1, 1))
"""Tokens of three sequences: prompts, a chunk beside decodes, decodes; chunks begin before and end after the
24 tokens of a choice.
"""


def logits(checkpoint: Checkpoint, kernels: Kernels | None, *, cut: int | None = None) -> Tensor:
    """Of all tokens, in two stages; without `cut`, the second begins behind the second layer or later."""
    begin = cut or min(checkpoint.config.legal_cuts - {1})
    pipeline = Pipeline(checkpoint, cuts=(begin,), kernels=kernels)
    vocab_size = min(128, checkpoint.config.vocab_size)
    sequences = random_sequences([sum(counts) for counts in zip(*STEPS, strict=True)], vocab_size)
    return torch.cat(
        [row for counts in STEPS for row in pipeline.step(list(zip(sequences, counts, strict=True)))]
    )


def test_logits_equal_those_of_torch(checkpoint: Checkpoint) -> None:
    expected = logits(checkpoint, None)
    found = logits(checkpoint, by_triton(checkpoint.config))
    assert float((found - expected).abs().max() / expected.std()) < 1e-4


class Launches(TorchDispatchMode):
    """Counts operators of torch that launch something on a GPU, and Triton kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        start = launch.Launch.__call__

        def counted(launched: launch.Launch, *arguments: Any) -> None:
            before = Counter(self.counts)  # the interpreter uses torch's operators itself
            start(launched, *arguments)
            self.counts = before + Counter([launched.kernel.fn.__name__])

        monkeypatch.setattr(launch.Launch, "__call__", counted)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name not in _VIEWS:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def launches_of_a_step(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    kernels: Kernels | None = None,
    cuts: Sequence[int] = (),
) -> Counter[str]:
    """Launches of all layers of the first stage in a step of decodes at these positions."""
    chosen = kernels or by_triton(checkpoint.config)
    pipeline = Pipeline(checkpoint, cuts, kernels=chosen, block_size=16)
    pipeline.fill(1.0)
    sequences = [Running(tokens=[1] * (length + 1)) for length in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        sequence.num_computed = length
    stage, (pages, *_) = pipeline.stages[0], pipeline.pages
    slices = [pipeline._slice(sequence, 1) for sequence in sequences]
    layout = pipeline._layout(stage, slices).with_tokens(torch.ones(len(slices), dtype=torch.int64))
    if pages.states is not None:
        layout = replace(layout, states=states_of(stage, [1] * len(slices), list(range(len(slices)))))
    hidden = stage.embed(torch.ones(len(slices), dtype=torch.int64))
    with Launches(monkeypatch) as launches:
        stage.forward(hidden, layout, pages)
    return launches.counts


@pytest.mark.parametrize(
    ("family", "most"),
    [("llama", 10), ("qwen3", 10), ("mistral", 10), ("phi3", 10), ("gemma2", 11), ("gemma3_text", 11)],
)
def test_a_layer_launches_at_most_ten_kernels(
    family: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With parts of keys that are merged; norms of both ends of a sum need one more."""
    changed = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
    if "sliding_window" in FAMILIES[family]:
        changed = {"sliding_window": 4096}
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", family, **changed))
    monkeypatch.setattr(attention_work, "KEY_SPLIT", 32)
    counts = launches_of_a_step(checkpoint, monkeypatch, [40, 3])
    assert counts["merge_kernel"] == checkpoint.config.num_layers
    assert counts.total() <= most * checkpoint.config.num_layers, counts


@pytest.mark.parametrize("lengths", [[40, 3], [20, 3]], ids=["choices", "whole"])
def test_layers_that_share_a_choice_launch_no_indexer(
    lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer 2 of 5 shares that of layer 1. Without a query of more than 24 tokens, only keys are written."""
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", "glm_moe_dsa"))
    counts = launches_of_a_step(checkpoint, monkeypatch, lengths)
    num_choices = 4 if max(lengths) >= 24 else 0
    assert (counts["scores_kernel"], counts["choice_kernel"]) == (num_choices, num_choices)
    assert (counts["rotation_kernel"], counts["attend_kernel"]) == (4, 5)


@pytest.mark.parametrize("lengths", [[40, 3], [25, 3]], ids=["choices", "whole"])
def test_a_choice_of_blocks_launches_three_kernels(
    lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a query of more than 8 whole blocks of 3 tokens, only keys are written."""
    changed: dict[str, Any] = {
        "ple_layer_ids": [],
        "layer_types": ["full_attention", *["linear_attention"] * 4],
    }
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", "qwen4_exp_text", **changed))
    counts = launches_of_a_step(checkpoint, monkeypatch, lengths, cuts=(1,))
    for name in ("block_keys_kernel", "scores_kernel", "choice_kernel"):
        assert counts[name] == (max(lengths) >= 26)
    assert counts["index_kernel"] == counts["attend_kernel"] == 1


@pytest.mark.parametrize(
    ("lengths", "choices", "pools"),
    [([40, 3], 1, (0, 1)), ([38, 2], 1, (0, 0)), ([15, 3], 0, (1, 1))],
    ids=["choices", "no-entries", "whole"],
)
def test_compressed_attention_launches_three_kernels_and_those_of_entries(
    lengths: list[int], choices: int, pools: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a layer with a window alone: rotation and writes, attention, rotation back. The two layers with
    entries of 8 tokens pool them if one ends in the step; those with entries of 4 pool keys, too, and with a
    query of more than 5 entries they rotate queries of the indexer, score, and choose.
    """
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", "deepseek_v4"))
    counts = launches_of_a_step(checkpoint, monkeypatch, lengths)
    assert (counts["attend_kernel"], counts["joined_kernel"], counts["merge_kernel"]) == (1, 4, 0)
    assert counts["last_rotation_kernel"] == 2 * 5 + 2 * choices
    assert (counts["scores_kernel"], counts["choice_kernel"]) == (2 * choices, 2 * choices)
    assert counts["pooling_kernel"] == 2 * pools[0] + 2 * 2 * pools[1]
    assert counts["bmm"] == 5, "one product for all groups of heads"


@pytest.mark.parametrize(
    ("family", "most"),
    [("qwen3_5_text", 10), ("bamba", 10), ("granitemoehybrid+dense", 11), ("kimi_linear", 11)],
)
def test_a_recurrent_layer_launches_at_most_ten_kernels(
    family: str, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of them are its own. One more: Granite scales what it adds to the residual stream, Kimi Delta
    Attention projects latents of decays and gates.
    """
    changed = {"mlp_bias": False} if family == "bamba" else {}
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", family, **changed))
    counts = launches_of_a_step(checkpoint, monkeypatch, [40, 3], cuts=(1,))
    assert counts.total() <= most, counts
    assert sum(counts[name] for name in ("convolution_kernel", "gated_norm_kernel")) == 2


def test_a_sub_layer_of_several_streams_launches_three_kernels_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them norms what is read: other norms are of the keys of indexers."""
    checkpoint = Checkpoint.open(make_family(tmp_path / "model", "hy_v4"))
    counts = launches_of_a_step(checkpoint, monkeypatch, [20, 3])
    names = ("stream_products_kernel", "stream_read_kernel", "stream_write_kernel")
    assert [counts[name] for name in names] == [2 * checkpoint.config.num_layers] * 3, counts
    assert counts["add_norm_kernel"] == counts["rotation_kernel"] < checkpoint.config.num_layers
    assert "stream" not in str(by_triton(checkpoint.config))


def test_a_layer_with_a_mixer_beside_attention_launches_five_more_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of Mamba2, and two products around it, the second of which adds."""
    biases = ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias")
    family = make_family(tmp_path / "model", "falcon_h1", **dict.fromkeys(biases, False))
    counts = launches_of_a_step(Checkpoint.open(family), monkeypatch, [40, 3], cuts=(1,))
    assert counts.total() <= 10 + 5, counts
    assert counts["scan_kernel"] == counts["attend_kernel"] == 1
