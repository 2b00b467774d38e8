"""What the model needs of a stage's paged KV storage (kvcache.pages.KvPages)."""

from typing import Protocol

from torch import Tensor


class PagedKv(Protocol):
    """Keys and values of a stage's own layers, counted from 0, in pages of `block_size` slots."""

    def places(self, slots: Tensor) -> Tensor:
        """Where `write` puts the tokens of `slots` int64 [n], which are page * block_size + offset."""

    def write(self, layer: int, tokens: Tensor, places: Tensor) -> None:
        """Store `tokens` [n, 2 * kv_heads, head_dim], the heads of their keys, then those of their values."""

    def clear(self, pages: Tensor) -> None:
        """Set `pages` int64 [p] to zero in all layers."""

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` int64 [b, p], [kv_heads, b, p * block_size, head_dim] each; they hold
        until the next gather."""
