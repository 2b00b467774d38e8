"""Reads Hugging Face safetensors checkpoints: config, headers, identity, sizes. Never loads weights."""

from checkpoint.config import ModelConfig, ModelFamily, parse_config
from checkpoint.directory import Checkpoint, differing_parts
from checkpoint.dtypes import DType
from checkpoint.errors import (
    BadConfig,
    BadHeader,
    CheckpointError,
    CheckpointNotFound,
    FileTooLarge,
    MissingTensor,
    NotRegularFile,
    UnexpectedTensor,
    UnknownDType,
    UnsupportedFormat,
    UnsupportedModel,
    WrongShape,
)
from checkpoint.files import is_named, open_regular
from checkpoint.headers import TensorEntry
from checkpoint.rope_config import RopeConfig, RopeKind
from checkpoint.tensors import (
    head_bytes,
    kv_bytes_per_token_per_layer,
    layer_weight_bytes,
    stage_tensor_names,
    stage_tensor_shapes,
    stage_weight_bytes,
    verify_tensors,
)

__all__ = [
    "BadConfig",
    "BadHeader",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFound",
    "DType",
    "FileTooLarge",
    "MissingTensor",
    "ModelConfig",
    "ModelFamily",
    "NotRegularFile",
    "RopeConfig",
    "RopeKind",
    "TensorEntry",
    "UnexpectedTensor",
    "UnknownDType",
    "UnsupportedFormat",
    "UnsupportedModel",
    "WrongShape",
    "differing_parts",
    "head_bytes",
    "is_named",
    "kv_bytes_per_token_per_layer",
    "layer_weight_bytes",
    "open_regular",
    "parse_config",
    "stage_tensor_names",
    "stage_tensor_shapes",
    "stage_weight_bytes",
    "verify_tensors",
]
