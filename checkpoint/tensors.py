"""Tensor names, shapes and sizes of a model.

The names are those in transformers' Llama, Mistral, Qwen2 and Qwen3 checkpoints, which agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from checkpoint.config import ModelConfig
from checkpoint.dtypes import DType
from checkpoint.errors import MissingTensor, UnexpectedTensor, WrongShape
from checkpoint.headers import TensorEntry

EMBEDDINGS = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT_HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


def layer_tensor_name(layer: int, suffix: str) -> str:
    """Return the full name of tensor `suffix` (see `layer_tensor_shapes`) of layer `layer`."""
    return f"model.layers.{layer}.{suffix}"


def layer_tensor_shapes(config: ModelConfig) -> Shapes:
    """Return the shape of each tensor of one layer by name within the layer; all layers are equal.

    Matrices are [out, in], as in torch.nn.functional.linear.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {"input_layernorm.weight": (hidden,)}
    for name, width in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size)):
        shapes |= _projection(f"self_attn.{name}_proj", width, hidden, bias=config.qkv_bias)
    if config.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (config.head_dim,) for name in ("q", "k")}
    shapes |= _projection("self_attn.o_proj", hidden, config.q_size, bias=config.o_bias)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes |= _projection("mlp.gate_proj", inner, hidden, bias=config.mlp_bias)
    shapes |= _projection("mlp.up_proj", inner, hidden, bias=config.mlp_bias)
    return shapes | _projection("mlp.down_proj", hidden, inner, bias=config.mlp_bias)


def stage_tensor_shapes(
    config: ModelConfig, layer_begin: int, layer_end: int, *, has_embeddings: bool, has_head: bool
) -> Shapes:
    """Return name and shape of every tensor that a stage with layers [layer_begin, layer_end) reads.

    A tied output head is the embedding matrix, listed once even if a stage has both.
    """
    if not 0 <= layer_begin < layer_end <= config.num_layers:
        raise ValueError(
            f"layers [{layer_begin}, {layer_end}) are not within the model's {config.num_layers} layers"
        )
    matrix = (config.vocab_size, config.hidden_size)
    shapes: Shapes = {EMBEDDINGS: matrix} if has_embeddings else {}
    for layer in range(layer_begin, layer_end):
        for suffix, shape in layer_tensor_shapes(config).items():
            shapes[layer_tensor_name(layer, suffix)] = shape
    if has_head:
        shapes[FINAL_NORM] = (config.hidden_size,)
        shapes[EMBEDDINGS if config.tie_word_embeddings else OUTPUT_HEAD] = matrix
    return shapes


def stage_tensor_names(
    config: ModelConfig, layer_begin: int, layer_end: int, *, has_embeddings: bool, has_head: bool
) -> list[str]:
    """Return the names of the tensors that a stage reads; see `stage_tensor_shapes`."""
    return list(
        stage_tensor_shapes(config, layer_begin, layer_end, has_embeddings=has_embeddings, has_head=has_head)
    )


def num_elements(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes.values())


def verify_tensors(config: ModelConfig, tensors: Mapping[str, TensorEntry]) -> None:
    """Check, from the headers alone, that the checkpoint has exactly the tensors of `config`.

    Rotary `inv_freq` buffers and a second copy of a tied output head are allowed in addition. Raises
    MissingTensor, UnexpectedTensor or WrongShape, naming the tensors.
    """
    expected = stage_tensor_shapes(config, 0, config.num_layers, has_embeddings=True, has_head=True)
    if missing := [name for name in expected if name not in tensors]:
        raise MissingTensor(f"checkpoint lacks {_listed(missing)}")
    if config.tie_word_embeddings and OUTPUT_HEAD in tensors:
        expected[OUTPUT_HEAD] = expected[EMBEDDINGS]
    extra = [name for name in tensors if name not in expected and not _is_harmless(name)]
    if extra:
        raise UnexpectedTensor(f"checkpoint has {_listed(extra)}, unknown to {config.family.value!r}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise WrongShape(f"tensor {name} has shape {tensors[name].shape}, the config requires {shape}")


def _projection(name: str, out_size: int, in_size: int, *, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (out_size, in_size)}
    return weight | {f"{name}.bias": (out_size,)} if bias else weight


def _is_harmless(name: str) -> bool:
    return name.endswith("rotary_emb.inv_freq")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more tensors"


def layer_weight_bytes(config: ModelConfig, dtype: DType) -> int:
    """Size of the weights of one layer; all layers are equal."""
    return num_elements(layer_tensor_shapes(config)) * dtype.size_bytes


def head_bytes(config: ModelConfig, dtype: DType) -> int:
    """Size of final norm and output head on a stage without embeddings.

    A tied head is a second copy of the embedding matrix there; a stage with both has one copy, see
    `stage_weight_bytes`.
    """
    return (config.vocab_size + 1) * config.hidden_size * dtype.size_bytes


def stage_weight_bytes(
    config: ModelConfig,
    dtype: DType,
    layer_begin: int,
    layer_end: int,
    *,
    has_embeddings: bool,
    has_head: bool,
) -> int:
    """Size of the weights of a stage with layers [layer_begin, layer_end); tied weights count once."""
    shapes = stage_tensor_shapes(
        config, layer_begin, layer_end, has_embeddings=has_embeddings, has_head=has_head
    )
    return num_elements(shapes) * dtype.size_bytes


def kv_bytes_per_token_per_layer(config: ModelConfig, dtype: DType) -> int:
    """Size of keys and values of one position in one layer."""
    return 2 * config.kv_size * dtype.size_bytes
