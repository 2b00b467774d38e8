"""The tensors behind the blocks: keys and values of one stage's layers, page by page.

Measured on one x86 core with torch 2.13, decode shapes (8 KV heads, 32 query heads, 2,048 or 4,096 cached
tokens per sequence, batch 1 and 16): a gather by `index_select` is 1.1 to 4.7 times as fast as by advanced
indexing, and NHD gathers 1.9 to 3.4 times as fast as HND, which must copy once more to bring the heads
outside. What attention makes of the result turns the balance for bfloat16: `scaled_dot_product_attention`
takes 1.4 to 2.3 times as long over the strided view that NHD gives (float32: 0.9 to 1.3 times), and is most
of the total there. Gather and attention together: float32 is 1.3 to 1.6 times as fast with NHD, bfloat16 up
to 1.9 times as fast with HND.
"""

import math
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from kvcache.errors import KvCacheError

_CPU_ALIGNMENT = 64
"""Bytes; what torch gives its own CPU tensors, and a cache line. numpy aligns to 16 only."""


class PageLayout(Enum):
    """Order of the dimensions inside a page."""

    NHD = "NHD"
    """Token, head, dim: one token's heads lie together."""
    HND = "HND"
    """Head, token, dim: one head's tokens lie together."""


class InvalidWrite(KvCacheError, ValueError):
    """Keys, values, slots or pages do not fit the store. Nothing was written."""


def block_size_bytes(
    *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that one block takes on a stage of `num_layers` layers, keys and values together."""
    return num_layers * 2 * block_size * num_kv_heads * head_dim * dtype.itemsize


class KvPages:
    """Keys and values of all layers of one stage, in `num_blocks` pages of `block_size` tokens.

    A *slot* is one token's place, page * block_size + offset. All layers share pages and slots, so a step is
    validated once (`validate_write`) and then written layer by layer. Layers count from 0 within the stage.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layout: PageLayout = PageLayout.NHD,
    ) -> None:
        """Allocates everything at once, as zeros; a CPU commits memory only as pages are first written.

        Raises ValueError for a size below 1.
        """
        sizes = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        if min(sizes) < 1:
            raise ValueError(
                f"layers, blocks, block size, heads and head dim must be at least 1, got {sizes}"
            )
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        self.layout = layout
        page = (block_size, num_kv_heads) if layout is PageLayout.NHD else (num_kv_heads, block_size)
        shape = (num_layers, 2, num_blocks, *page, head_dim)
        self._store = _zeros(shape, dtype, torch.device(device))
        # [num_blocks, *page, head_dim] each; made once because indexing a tensor costs microseconds.
        self._keys = [layer[0] for layer in self._store]
        self._values = [layer[1] for layer in self._store]

    @property
    def dtype(self) -> torch.dtype:
        """Element type of keys and values."""
        return self._store.dtype

    @property
    def device(self) -> torch.device:
        """Where the pages are; keys, values, slots and page indexes must be there too."""
        return self._store.device

    @property
    def num_slots(self) -> int:
        """Slots 0..num_slots-1 exist."""
        return self.num_blocks * self.block_size

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole store: num_blocks * block_size_bytes(...)."""
        return self._store.numel() * self._store.element_size()

    def validate_write(
        self, slots: Tensor, *, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Checks a whole step before its first layer is written.

        `slots`: int64 [num_tokens]; `shape`, `dtype`, `device`: those of the keys and of the values of every
        layer, `shape` being (num_tokens, num_kv_heads, head_dim). Raises InvalidWrite for anything that does
        not fit, and for slots that do not exist or occur twice. Reads the slots, so on a GPU it waits for
        them.
        """
        self._check_slots(slots)
        self._check_tensor("keys and values", shape, dtype, device, num_tokens=slots.numel())
        if slots.numel() == 0:
            return
        low, high = (int(bound) for bound in torch.aminmax(slots))
        if low < 0 or high >= self.num_slots:
            raise InvalidWrite(f"slots {low}..{high} needed, 0..{self.num_slots - 1} available")
        num_unique = torch.unique(slots).numel()
        if num_unique != slots.numel():
            raise InvalidWrite(f"slots: expected {slots.numel()} different ones, got {num_unique}")

    def write(self, layer: int, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Stores one layer's keys and values [num_tokens, num_kv_heads, head_dim] at slots (int64, 1-D).

        The slots have passed `validate_write`; shapes, dtypes and devices are checked here again, before
        anything is written (InvalidWrite), because that costs next to nothing.
        """
        self._check_slots(slots)
        for name, tensor in (("keys", keys), ("values", values)):
            self._check_tensor(name, tensor.shape, tensor.dtype, tensor.device, num_tokens=slots.numel())
        if self.layout is PageLayout.NHD:
            self._keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
            self._values[layer].flatten(0, 1).index_copy_(0, slots, values)
        else:
            pages, offsets = slots // self.block_size, slots % self.block_size
            self._keys[layer][pages, :, offsets] = keys
            self._values[layer][pages, :, offsets] = values

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """One layer's keys and values of whole pages, ready for `scaled_dot_product_attention`.

        `pages`: int64 [num_pages] or [batch, num_pages]. Returns two tensors of shape
        [num_kv_heads, num_pages * block_size, head_dim], or the same with batch in front: copies, not
        contiguous with NHD. Raises InvalidWrite for another rank, IndexError (CPU) for a page that does not
        exist.
        """
        if pages.dim() not in (1, 2):
            raise InvalidWrite(f"pages: expected 1 or 2 dimensions, got shape {tuple(pages.shape)}")
        return self._gather(self._keys[layer], pages), self._gather(self._values[layer], pages)

    def copy_blocks(self, source_pages: Tensor, target_pages: Tensor) -> None:
        """Copies whole pages in all layers at once; both int64 [num_pages]. A page may be source and target.

        Raises InvalidWrite, before anything is copied, for different counts, pages that do not exist, or two
        copies to one page.
        """
        if source_pages.shape != target_pages.shape or source_pages.dim() != 1:
            got = f"{tuple(source_pages.shape)} and {tuple(target_pages.shape)}"
            raise InvalidWrite(f"source and target pages: expected equal lengths, got shapes {got}")
        if source_pages.numel() == 0:
            return
        for name, pages in (("source", source_pages), ("target", target_pages)):
            low, high = (int(bound) for bound in torch.aminmax(pages))
            if low < 0 or high >= self.num_blocks:
                raise InvalidWrite(f"{name} pages {low}..{high} needed, 0..{self.num_blocks - 1} available")
        num_unique = torch.unique(target_pages).numel()
        if num_unique != target_pages.numel():
            count = target_pages.numel()
            raise InvalidWrite(f"target pages: expected {count} different ones, got {num_unique}")
        self._store.index_copy_(2, target_pages, self._store.index_select(2, source_pages))

    def _gather(self, store: Tensor, pages: Tensor) -> Tensor:
        found = store.index_select(0, pages.flatten()).view(*pages.shape, *store.shape[1:])
        if self.layout is PageLayout.NHD:
            return found.flatten(-4, -3).transpose(-3, -2)
        return found.transpose(-4, -3).flatten(-3, -2)

    def _check_slots(self, slots: Tensor) -> None:
        if slots.dim() != 1 or slots.dtype != torch.int64 or slots.device != self.device:
            got = f"{slots.dtype} {tuple(slots.shape)} on {slots.device}"
            raise InvalidWrite(f"slots: expected torch.int64 (num_tokens,) on {self.device}, got {got}")

    def _check_tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, num_tokens: int
    ) -> None:
        expected = (num_tokens, self.num_kv_heads, self.head_dim)
        if tuple(shape) != expected or dtype != self.dtype or device != self.device:
            needed = f"{self.dtype} {expected} on {self.device}"
            raise InvalidWrite(f"{name}: expected {needed}, got {dtype} {tuple(shape)} on {device}")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As torch.zeros, which writes every byte on a CPU; numpy takes memory that the system has zeroed."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    memory = torch.from_numpy(np.zeros(size + _CPU_ALIGNMENT, np.uint8))
    start = -memory.data_ptr() % _CPU_ALIGNMENT
    return memory[start : start + size].view(dtype).view(shape)
