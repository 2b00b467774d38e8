"""transformers' model of a checkpoint, without weights: built on the meta device, or refused by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import Module, ModuleList
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from checkpoint import UnsupportedModel
from checkpoint.catalog import TRANSFORMERS
from checkpoint.description import read_config
from checkpoint.wrappers import text_config
from transformers_stage.attention import ATTENTION

# How models are made and loaded is no public interface.
if not transformers.__version__.startswith(f"{TRANSFORMERS}."):
    raise ImportError(f"transformers {transformers.__version__} is installed, {TRANSFORMERS} is known")
_UNSET = -(2**40)
"""Stands for a whole number that is not computed."""
_LENGTH_DEPENDENT = ("longrope",)
"""Types of rotary embeddings whose angles depend on the longest sequence of a step."""


class DecoderModel:
    """A causal language model of transformers with the modules that a stage needs.

    `causal` is the model with its head, `base` the one inside, which has the list of layers.
    """

    def __init__(self, causal: PreTrainedModel) -> None:
        """Raises UnsupportedModel for a model that is no stack of decoder layers."""
        self.causal = causal
        base = causal.base_model
        if base is causal or not isinstance(base, PreTrainedModel):
            raise _refusal(causal.config, f"{type(causal).__name__} has no base model")
        self.base: PreTrainedModel = base
        self.layers_name, self.layers = _layers_of(base, causal.config)

    def place_layers(self, layers: ModuleList) -> None:
        """Replace the list of layers, which has one module for each layer of the whole model."""
        setattr(self.base, self.layers_name, layers)

    def drop_ends(
        self, before: Iterable[str], after: Iterable[str], *, keeps_embeddings: bool, keeps_head: bool
    ) -> None:
        """Replace modules of `base` by `_Nothing`, and embeddings and head unless they are kept."""
        for name in (*before, *after):
            setattr(self.base, name, _Nothing())
        if not keeps_embeddings:
            self.base.set_input_embeddings(_Nothing())
        if not keeps_head:
            for name, _ in list(self.causal.named_children()):
                if getattr(self.causal, name) is not self.base:
                    setattr(self.causal, name, _Nothing())


class _Nothing(Module):
    """In the place of a module of another stage: returns its first input."""

    def forward(self, x: Tensor, *args: object, **keywords: object) -> Tensor:
        return x


def empty_model(directory: Path, dtype: torch.dtype) -> DecoderModel:
    """Build the model of `directory` on the meta device. Code of the checkpoint is never run.

    Raises UnsupportedModel for a family that transformers lacks or whose layers Stageline cannot cut, and
    CheckpointError for an unreadable config.
    """
    config = _config(text_config(read_config(directory)))
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None:
        raise _refusal(config, f"transformers {transformers.__version__} has no causal language model of it")
    _check_class(config, model_class)
    with torch.device("meta"):
        causal = model_class._from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    return DecoderModel(causal.eval())


def _config(raw: Mapping[str, object]) -> PreTrainedConfig:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        own_code = "; the code that its 'auto_map' names is never run" if raw.get("auto_map") else ""
        raise UnsupportedModel(
            f"model type {model_type!r} has no native layers, and transformers {transformers.__version__} has"
            f" none either{own_code}"
        )
    try:
        config = CONFIG_MAPPING[model_type].from_dict(PreTrainedConfig._decode_special_floats(dict(raw)))
    except Exception as error:  # each class checks its own fields in its own way
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"transformers refuses the config of {model_type!r}: {reason}") from error
    assert isinstance(config, PreTrainedConfig)
    return config


def _check_class(config: PreTrainedConfig, model_class: type[PreTrainedModel]) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(config, "it is an encoder-decoder, stages have decoder layers only")
    if getattr(model_class, "_is_stateful", False):
        raise _refusal(config, "layers keep recurrent state, which has no pages")
    if not model_class._supports_attention_backend:
        raise _refusal(config, f"{model_class.__name__} does not use transformers' attention interface")
    for name, parameters in (getattr(config, "rope_parameters", None) or {}).items():
        kind = parameters.get("rope_type") if isinstance(parameters, dict) else parameters
        if (name == "rope_type" or isinstance(parameters, dict)) and kind in _LENGTH_DEPENDENT:
            raise _refusal(config, f"rotary embeddings of type {kind!r} depend on the sequences of a step")


def _layers_of(base: PreTrainedModel, config: PreTrainedConfig) -> tuple[str, ModuleList]:
    """The list of layers and its attribute."""
    lists = [
        (name, module)
        for name, module in base.named_children()
        if isinstance(module, ModuleList) and len(module) == config.num_hidden_layers
    ]
    if len(lists) != 1:
        names = ", ".join(name for name, _ in base.named_children())
        raise _refusal(config, f"{type(base).__name__} has no single list of its layers ({names})")
    if "position_ids" not in inspect.signature(base.forward).parameters:
        raise _refusal(config, f"{type(base).__name__} takes no position_ids")
    return lists[0]


def _refusal(config: PreTrainedConfig, reason: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model type {config.model_type!r} cannot be served by transformers' layers: {reason}"
    )


def refusal_of(model: DecoderModel, reason: str) -> UnsupportedModel:
    """The error for a model that cannot be served."""
    return _refusal(model.causal.config, reason)


def is_buffer_owner(module: Module) -> bool:
    """Whether the module computes buffers when it is made, which no file has."""
    return bool(module._non_persistent_buffers_set)


def compute_buffers(model: DecoderModel, module: Module, device: torch.device) -> None:
    """Compute the buffers of `module` on `device`, as transformers does when it loads a model.

    Raises UnsupportedModel for buffers that it leaves as they are.
    """
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers[name]
        if buffer is not None:
            unset = math.nan if buffer.is_floating_point() else _UNSET
            module._buffers[name] = torch.full_like(buffer, unset, device=device)
    with torch.no_grad():
        model.causal._init_weights(module)  # type: ignore[no-untyped-call]
    for name in module._non_persistent_buffers_set:
        buffer = module._buffers[name]
        if buffer is not None and bool(
            (buffer.isnan() if buffer.is_floating_point() else buffer == _UNSET).any()
        ):
            raise refusal_of(
                model, f"buffer {name!r} of {type(module).__name__} is in no file and not computed"
            )
