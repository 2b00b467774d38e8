"""A model that is computed in float32 straight from its files, a few rows of a matrix at a time.

It shares no code with the stages but norm-free primitives of torch and the frequencies of the rotary
embedding, and never holds a layer: `BLOCK_ELEMENTS` weights are in memory at once, whatever the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from checkpoint import Checkpoint, DType
from checkpoint.tensors import EMBEDDINGS, FINAL_NORM, OUTPUT_HEAD, layer_tensor_name
from stage_worker.models.rope import Rope, rotate_
from stage_worker.models.torch_dtypes import TORCH_DTYPES
from stage_worker.weights import load_rows

BLOCK_ELEMENTS = 1 << 22


class StreamedModel:
    """One sequence, from its first token on, without a cache; on the CPU, whatever device a worker has."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: DType, *, on_progress: Callable[[float], None] = lambda _: None
    ) -> None:
        """Weights are rounded to `dtype`. `on_progress` is told the fraction of all layers that are computed;
        what it raises ends the computation, within one matrix.
        """
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._dtype = TORCH_DTYPES[dtype]
        self._on_progress = on_progress
        self._fraction = 0.0

    @staticmethod
    def memory_bytes(checkpoint: Checkpoint, dtype: DType, num_tokens: int) -> int:
        """The most that `logits` takes: a block of weights as read and in float32, a window of the file, and
        what the tokens need in a layer and at the head.
        """
        config = checkpoint.config
        width = max(config.hidden_size, config.intermediate_size, config.q_size)
        largest = max(math.prod(entry.shape) for entry in checkpoint.tensors.values())
        block = min(largest, max(BLOCK_ELEMENTS, width))
        in_layer = 6 * config.hidden_size + 3 * (config.q_size + config.kv_size) + 3 * config.intermediate_size
        return block * (8 + dtype.size_bytes) + 4 * num_tokens * (in_layer + 3 * config.vocab_size)

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Logits float32 [n, vocab_size] after each of n tokens. Raises what `load_tensors` raises."""
        hidden = torch.cat([self._rows(EMBEDDINGS, token, token + 1) for token in token_ids])
        for layer in range(self._config.num_layers):
            self._fraction = layer / self._config.num_layers
            hidden = self._layer(hidden, layer)
        normed = self._norm(hidden, FINAL_NORM)
        head = EMBEDDINGS if self._config.tie_word_embeddings else OUTPUT_HEAD
        return self._product(normed, head)

    def _layer(self, hidden: Tensor, layer: int) -> Tensor:
        config = self._config

        def name(suffix: str) -> str:
            return layer_tensor_name(layer, suffix)

        def project(x: Tensor, part: str, has_bias: bool) -> Tensor:
            return self._product(x, name(f"{part}.weight"), name(f"{part}.bias") if has_bias else None)

        normed = self._norm(hidden, name("input_layernorm.weight"))
        query, key, value = (
            project(normed, f"self_attn.{part}_proj", config.qkv_bias).unflatten(1, (-1, config.head_dim))
            for part in "qkv"
        )
        if config.qk_norm:
            query = self._norm(query, name("self_attn.q_norm.weight"))
            key = self._norm(key, name("self_attn.k_norm.weight"))
        mixed = self._attention(query, key, value, config.layer_windows[layer])
        hidden = hidden + project(mixed, "self_attn.o_proj", config.o_bias)
        normed = self._norm(hidden, name("post_attention_layernorm.weight"))
        gate = silu(project(normed, "mlp.gate_proj", config.mlp_bias))
        return hidden + project(gate * project(normed, "mlp.up_proj", config.mlp_bias), "mlp.down_proj", config.mlp_bias)

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
        """[n, heads * head_dim] for query [n, heads, head_dim], key and value [n, kv_heads, head_dim]."""
        num_tokens, num_heads, head_dim = query.shape
        cos, sin = Rope(self._config, torch.float32, query.device).cos_sin(range(num_tokens))
        rotate_(query, cos, sin)
        rotate_(key, cos, sin)
        shared = num_heads // key.shape[1]
        keys, values = (x.repeat_interleave(shared, dim=1).transpose(0, 1) for x in (key, value))
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) / math.sqrt(head_dim)
        positions = torch.arange(num_tokens)
        distance = positions[:, None] - positions
        is_hidden = (distance < 0) | (distance >= (window or num_tokens))
        weights = scores.masked_fill(is_hidden, -math.inf).softmax(dim=-1)
        return (weights @ values).transpose(0, 1).flatten(1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + self._config.rms_norm_eps)
        return x * scale * self._rows(name, 0, x.shape[-1])

    def _product(self, x: Tensor, weight: str, bias: str | None = None) -> Tensor:
        """[n, out] for x [n, in]."""
        num_rows, width = self._checkpoint.tensors[weight].shape
        step = max(1, BLOCK_ELEMENTS // width)
        blocks = (
            self._rows(weight, first, min(first + step, num_rows)) for first in range(0, num_rows, step)
        )
        product = torch.cat([linear(x, block) for block in blocks], dim=1)
        return product if bias is None else product + self._rows(bias, 0, num_rows)

    def _rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [begin, end) of a tensor, rounded to the run dtype, in float32."""
        self._on_progress(self._fraction)
        shape = self._checkpoint.tensors[name].shape
        rows = torch.empty((end - begin, *shape[1:]), dtype=self._dtype)
        load_rows(self._checkpoint, name, rows, first_row=begin)
        return rows.float()
