"""Bytes and floating point operations that a step of a stage needs at least. Pure.

Bytes: each weight and each key and value is read once, each new key and value written once, hidden states are
read and written once. Operations: a multiplication and an addition for each weight and token, and for each
query and visible key and value; norms, rotations and softmax are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.harness.llama import Geometry


@dataclass(frozen=True, slots=True)
class StageWork:
    """`num_layers` layers of `geometry`, elements of `element_bytes` bytes."""

    geometry: Geometry
    num_layers: int
    element_bytes: int

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of a layer."""
        return sum(rows * columns for rows, columns in self.geometry.layer_products)

    @property
    def weight_bytes(self) -> int:
        norms = 2 * self.geometry.hidden
        return self.num_layers * (self.layer_weights + norms) * self.element_bytes

    @property
    def head_bytes(self) -> int:
        rows, columns = self.geometry.head_product
        return rows * columns * self.element_bytes

    @property
    def kv_token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.geometry.num_kv_heads * self.geometry.head_dim * self.num_layers * self.element_bytes

    def attention_bytes(self, contexts: Sequence[int]) -> int:
        """Keys and values that a decode step reads, of sequences with `contexts` tokens."""
        return sum(contexts) * self.kv_token_bytes

    def decode_bytes(self, contexts: Sequence[int]) -> int:
        """A decode step of sequences with `contexts` tokens, the new one included."""
        hidden = 2 * len(contexts) * self.geometry.hidden * self.element_bytes
        written = len(contexts) * self.kv_token_bytes
        return self.weight_bytes + self.attention_bytes(contexts) + written + hidden

    def prompt_flops(self, num_tokens: int, start: int) -> int:
        """`num_tokens` tokens of a prompt behind `start`, each of which sees itself and all before it."""
        visible = num_tokens * start + num_tokens * (num_tokens + 1) // 2
        query_width = self.geometry.num_heads * self.geometry.head_dim
        products = 2 * self.layer_weights * num_tokens
        return self.num_layers * (products + 4 * query_width * visible)

    def prompt_bytes(self, num_tokens: int, start: int) -> int:
        """Bytes of a prompt step, which bound short chunks behind long contexts."""
        return self.decode_bytes([start + num_tokens]) + (num_tokens - 1) * self.kv_token_bytes
