"""Reads Hugging Face safetensors checkpoints: config, headers, identity, sizes. Never loads weights."""

from checkpoint.blueprint import (
    Attention,
    Blueprint,
    Dense,
    Experts,
    Latent,
    LayerPlan,
    Mixer,
    NoFeedForward,
    Norm,
    Opaque,
)
from checkpoint.boundary import BoundaryTensor
from checkpoint.compressed import Compressed
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
    cached_bytes_per_token,
    entry_bytes_per_block,
    expert_weight_bytes,
    head_bytes,
    held_expert_bytes,
    kv_bytes_per_token,
    layer_sizes,
    layer_weight_bytes,
    stage_weight_bytes,
    state_bytes,
)
from checkpoint.recurrent import (
    DeltaLayout,
    GatedDelta,
    KimiDelta,
    Mamba2,
    NoMixer,
    Pageless,
    Recurrent,
    StatePart,
)
from checkpoint.rope_config import RopeConfig, RopeKind
from checkpoint.step_sizes import EXPANDED_ELEMENTS, INDEX_ELEMENTS
from checkpoint.tensors import (
    stage_tensor_names,
    stage_tensor_shapes,
)
from checkpoint.verification import verify_tensors

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
    "Compressed",
    "DType",
    "DeltaLayout",
    "Dense",
    "Experts",
    "FileTooLarge",
    "GatedDelta",
    "KimiDelta",
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
    "entry_bytes_per_block",
    "expert_weight_bytes",
    "head_bytes",
    "held_expert_bytes",
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
