"""The decoder that a stage runs."""

from stage_worker.models.decoder import DecoderStage
from stage_worker.models.stage_parts import StageParts
from stage_worker.models.step_layout import StepLayout
from stage_worker.models.torch_dtypes import TORCH_DTYPES

__all__ = ["TORCH_DTYPES", "DecoderStage", "StageParts", "StepLayout"]
