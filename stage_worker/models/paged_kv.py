"""What the model needs of a stage's paged KV storage (kvcache.pages.KvPages)."""

from typing import Protocol

from torch import Tensor


class PagedKv(Protocol):
    """Keys and values of a stage's own layers, counted from 0, in pages of `block_size` slots."""

    def write(self, layer: int, tokens: Tensor, slots: Tensor) -> None:
        """Store `tokens` [n, 2 * kv_heads, head_dim], the heads of their keys, then those of their values, at
        `slots` int64 [n], which are page * block_size + offset."""

    def store(self, layer: int) -> Tensor:
        """The pages themselves, [num_blocks, 2, kv_heads, block_size, head_dim]."""

    def clear(self, pages: Tensor) -> None:
        """Set `pages` int64 [p] to zero in all layers."""

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` int64 [b, p], [kv_heads, b, p * block_size, head_dim] each; they hold
        until the next gather."""
