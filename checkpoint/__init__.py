"""Reads Hugging Face safetensors checkpoints: config, headers, identity, sizes. Never loads weights."""

from checkpoint.blueprint import (
    Attention,
    Blueprint,
    BoundaryTensor,
    Dense,
    Experts,
    Latent,
    LayerPlan,
    Mixer,
    NoFeedForward,
    Norm,
    Opaque,
)
from checkpoint.config import parse_config
from checkpoint.directory import Checkpoint, differing_parts
from checkpoint.dtypes import DType, ScaledDType, WeightFormat
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
from checkpoint.held import (
    expert_weight_bytes,
    head_bytes,
    layer_sizes,
    layer_weight_bytes,
    stage_weight_bytes,
)
from checkpoint.recurrent import DeltaLayout, GatedDelta, Mamba2, NoMixer, Pageless, Recurrent, StatePart
from checkpoint.rope_config import RopeConfig, RopeKind
from checkpoint.step_sizes import EXPANDED_ELEMENTS, INDEX_ELEMENTS
from checkpoint.tensors import (
    cached_bytes_per_token,
    kv_bytes_per_token,
    stage_tensor_names,
    stage_tensor_shapes,
    state_bytes,
    verify_tensors,
)

__all__ = [
    "EXPANDED_ELEMENTS",
    "INDEX_ELEMENTS",
    "Attention",
    "BadConfig",
    "BadHeader",
    "Blueprint",
    "BoundaryTensor",
    "Checkpoint",
    "CheckpointError",
    "CheckpointNotFound",
    "DType",
    "DeltaLayout",
    "Dense",
    "Experts",
    "FileTooLarge",
    "GatedDelta",
    "Latent",
    "LayerPlan",
    "Mamba2",
    "MissingTensor",
    "Mixer",
    "NoFeedForward",
    "NoMixer",
    "Norm",
    "NotRegularFile",
    "Opaque",
    "Pageless",
    "Recurrent",
    "RopeConfig",
    "RopeKind",
    "ScaledDType",
    "StatePart",
    "TensorEntry",
    "UnexpectedTensor",
    "UnknownDType",
    "UnsupportedFormat",
    "UnsupportedModel",
    "WeightFormat",
    "WrongShape",
    "cached_bytes_per_token",
    "differing_parts",
    "expert_weight_bytes",
    "head_bytes",
    "is_named",
    "kv_bytes_per_token",
    "layer_sizes",
    "layer_weight_bytes",
    "open_regular",
    "parse_config",
    "stage_tensor_names",
    "stage_tensor_shapes",
    "stage_weight_bytes",
    "state_bytes",
    "verify_tensors",
]
