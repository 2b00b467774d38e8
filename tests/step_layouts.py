"""Layouts of steps, placed by copies of their arrays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stage_worker.model import StepLayout
from stage_worker.model.attention_views import HostArray, Place
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.rope import Rope, Rotary
from stage_worker.model.step_layout import StepArrays
from stage_worker.validation import SliceLayout


def placed_on(device: torch.device) -> Place:
    def place(array: HostArray) -> Tensor:
        return torch.from_numpy(array).to(device)

    return place


def layout_for(stage: PipelineStage, slices: list[SliceLayout], **others: Any) -> StepLayout:
    """The layout of a step for the layers of `stage`; `others` as in `PipelineStage.step_arrays`."""
    return stage.layout([stage.step_arrays(slices, **others)], placed_on(stage.device))


def layout_by(arrays: StepArrays, ropes: dict[Rotary, Rope]) -> StepLayout:
    place = placed_on(arrays.rules.device)
    return arrays.layout(arrays.rotary(ropes, place), place)
