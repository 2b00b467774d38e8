"""The decoder that a stage runs."""

from stage_worker.model.decoder import DecoderStage
from stage_worker.model.layer_weights import TORCH_DTYPES
from stage_worker.model.parts import LoadedParts
from stage_worker.model.step_layout import StepLayout

__all__ = ["TORCH_DTYPES", "DecoderStage", "LoadedParts", "StepLayout"]
