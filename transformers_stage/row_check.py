"""Proves on loaded layers that tokens meet in attention only, and that hidden states are all that is read.

Not-a-number spreads to whatever is computed from it, in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvcache.pages import KvPages, PageGroups
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.step_layout import PagedLayers, StepLayout
from stage_worker.validation import SliceLayout
from transformers_stage.empty_model import DecoderModel, refusal_of

_NUM_TOKENS = 2
"""Tokens of each of two sequences."""
Compute = Callable[[Tensor, Tensor, StepLayout, PagedLayers], Tensor]


def check_rows(stage: PipelineStage, model: DecoderModel, compute: Compute) -> None:
    """Raise UnsupportedModel for layers that mix sequences, or read more than what a cut hands on.

    `compute` gets embeddings and hidden states [n, hidden_size], layout and pages.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2 * _NUM_TOKENS, stage.config.hidden_size, generator=generator)
    hidden = hidden.to(stage.device, stage.torch_dtype)
    unset = torch.full_like(hidden, math.nan)
    step = _layout(stage)
    if not _is_finite(compute(hidden, hidden, step, _pages(stage))):
        return  # of weights that are no numbers; steps report it
    if not _is_finite(compute(unset, hidden, step, _pages(stage))):
        raise refusal_of(model, "layers read the embeddings beside the hidden states, which no cut hands on")
    spoilt = hidden.clone()
    spoilt[:_NUM_TOKENS] = math.nan
    if not _is_finite(compute(hidden, spoilt, step, _pages(stage))[_NUM_TOKENS:]):
        raise refusal_of(model, "layers mix the tokens of a step other than by attention")


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _layout(stage: PipelineStage) -> StepLayout:
    """Both sequences from their beginning, in a page each."""
    slices = [
        SliceLayout(first_position=0, num_tokens=_NUM_TOKENS, pages=(page,), first_block=0, num_valid=0)
        for page in range(2)
    ]
    arrays = [
        stage.step_arrays(slices, block_size=_NUM_TOKENS, windows=(window,)) for window in _windows(stage)
    ]
    return stage.layout(arrays, lambda array: torch.from_numpy(array).to(stage.device))


def _windows(stage: PipelineStage) -> list[int | None]:
    return list(dict.fromkeys(stage.windows))


def _pages(stage: PipelineStage) -> PageGroups:
    windows, groups = _windows(stage), []
    for window in windows:
        shape = stage.config.page_shape(window)
        pages = KvPages(
            num_layers=stage.windows.count(window),
            num_blocks=2,
            block_size=_NUM_TOKENS,
            num_kv_heads=shape.heads,
            head_dim=shape.width,
            dtype=stage.torch_dtype,
            device=stage.device,
            num_parts=shape.parts,
        )
        groups.append(pages)
    return PageGroups(groups, [windows.index(window) for window in stage.windows])
