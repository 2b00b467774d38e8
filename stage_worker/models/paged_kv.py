"""What the model needs of a stage's paged KV storage (kvcache.pages.KvPages)."""

from typing import Protocol

from torch import Tensor


class PagedKv(Protocol):
    """Keys and values of a stage's own layers, counted from 0, in pages of `block_size` slots."""

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store [n, kv_heads, head_dim] each in `slots` int64 [n], which are page * block_size + offset."""

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of `pages` int64 [p] or [b, p]: [kv_heads, p * block_size, head_dim], or that with
        a leading b."""
