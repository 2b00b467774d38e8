"""Tensors behind the blocks: keys and values of one stage's layers, page by page.

A page is [2, kv_heads, block_size, head_dim] (FlashInfer calls this layout HND): keys and values side by
side, the tokens of one head together. A page of latents, from which attention computes keys and values, is
[1, 1, block_size, width]: one row per token. One `index_select` over whole pages, into a permuted view of the
result, gathers keys and values contiguously by head and sequence, as attention needs them, and reads each
page in one piece. bench/STUDIES.md compares it with other orders.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvcache.errors import KvCacheError
from kvcache.layer_rows import NO_ROWS, LayerRows, RowKind
from kvcache.state_store import StateStore, zeros

_KEPT_BYTES = 16 * 1024 * 1024
"""Gathers up to this size reuse one buffer: allocating fresh memory costs as much as the copy."""


class InvalidWrite(KvCacheError, ValueError):
    """Keys, values, slots or pages do not fit the store. Nothing was written."""


class IndexKeys:
    """Keys of indexers, [num_blocks, block_size, width] of each layer that has one; layers count from 0.

    They lie apart from latents, so that scoring all tokens of a sequence reads nothing else. They are in the
    run dtype even where pages have 8 bits: a rounded key changes which tokens are seen, and not only their
    weights. `num_spare` blocks after them are for padding, as in the pages.
    """

    def __init__(
        self,
        *,
        widths: Sequence[int],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        num_spare: int = 0,
    ) -> None:
        """Allocate zeroed keys at once; a CPU commits memory when a block is first written.

        `widths` are of all layers, 0 for layers without an indexer; the others have one width.
        """
        width = max(widths, default=0)
        if min(num_blocks, block_size, width) < 1 or set(widths) - {0, width}:
            raise ValueError(
                f"blocks, block size and widths must be at least 1, got {num_blocks}, {block_size} and"
                f" {sorted(set(widths))}; keys of indexers have one width"
            )
        layers = [layer for layer, own in enumerate(widths) if own]
        shape = (len(layers), num_blocks + num_spare, block_size, width)
        self._store = zeros(shape, dtype, torch.device(device))
        self._blocks = dict(zip(layers, self._store, strict=True))
        self._rows = {layer: blocks.view(-1, width) for layer, blocks in self._blocks.items()}

    @property
    def size_bytes(self) -> int:
        return self._store.numel() * self._store.element_size()

    def write(self, layer: int, keys: Tensor, slots: Tensor, rows: Tensor | None = None) -> None:
        """Store `rows` int64 [n] (None: all) of `keys` [m, width] in `slots` int64 [n] of one layer.

        Raises InvalidWrite, before anything is written, for another shape, dtype or device.
        """
        chosen = keys if rows is None else keys.index_select(0, rows)
        target = self._rows[layer]
        expected = (slots.numel(), target.shape[1])
        if chosen.shape != expected or chosen.dtype is not target.dtype or chosen.device != target.device:
            needed = f"{target.dtype} {expected} on {target.device}"
            raise InvalidWrite(
                f"keys of an indexer: expected {needed}, got {chosen.dtype} {tuple(chosen.shape)} on"
                f" {chosen.device}"
            )
        target.index_copy_(0, slots, chosen)

    def store(self, layer: int) -> Tensor:
        """All keys of one layer, [num_blocks, block_size, width], not a copy; the spare blocks come last."""
        blocks: Tensor = self._blocks[layer]
        return blocks

    def gather(self, layer: int, pages: Tensor) -> Tensor:
        """Keys [b, p * block_size, width] of one layer in `pages` int64 [b, p]."""
        blocks: Tensor = self._blocks[layer].index_select(0, pages.flatten())
        return blocks.view(len(pages), -1, blocks.shape[2])

    def clear(self, pages: Tensor) -> None:
        """Set whole pages (int64 [n]) to zero in all layers."""
        self._store.index_fill_(1, pages, 0)


class KvPages:
    """Keys and values of all layers of one stage, in `num_blocks` pages of `block_size` tokens.

    They are `num_parts` of a page: 2, or 1 for latents, which are both. The latter have one KV head.
    `num_spare` pages after them belong to no block: padding of a step is written there.

    A *slot* is the place of one token: page * block_size + offset. All layers share pages and slots, so a
    step is validated once (`validate_write`), then written layer by layer. Layers count from 0 within the
    stage.
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
        num_parts: int = 2,
        num_spare: int = 0,
        index: IndexKeys | None = None,
        rows: Mapping[RowKind, LayerRows] = NO_ROWS,
    ) -> None:
        """Allocate zeroed pages at once; a CPU commits memory when a page is first written.

        `index` are the keys of the layers with an indexer, in as many blocks, and so are `rows` beside pages.
        """
        sizes = (num_blocks, block_size, num_kv_heads, head_dim, num_parts)
        if min(sizes) < 1 or num_layers < 0:
            raise ValueError(
                f"blocks, block size, heads, head dim and parts must be at least 1, got {sizes}, and layers"
                f" at least 0, got {num_layers}"
            )
        self.num_layers, self.num_blocks, self.block_size = num_layers, num_blocks, block_size
        self.num_kv_heads, self.head_dim, self.num_parts = num_kv_heads, head_dim, num_parts
        self.index, self.rows = index, rows
        shape = (num_layers, num_blocks + num_spare, num_parts, num_kv_heads, block_size, head_dim)
        self._store = zeros(shape, dtype, torch.device(device))
        # Created once, because indexing a tensor costs microseconds.
        self._layers: list[Tensor] = list(self._store)
        self._pages = [
            layer.flatten(3) for layer in self._layers
        ]  # [num_blocks, parts, kv_heads, block * dim]
        self._rows = [layer.view(-1, head_dim) for layer in self._layers]  # one token of one head each
        # All layers of a step write the same slots.
        self._placed = (torch.empty(0), torch.empty(0))
        self._gathered = self._store.new_empty(0)

    @property
    def groups(self) -> tuple["KvPages"]:
        """These pages, as pages of a stage with one block group."""
        return (self,)

    @property
    def states(self) -> None:
        """The stage has no recurrent layers."""
        return None

    @property
    def places(self) -> list[tuple[int, int]]:
        """Group and layer within it of each layer of the stage."""
        return [(0, layer) for layer in range(self.num_layers)]

    @property
    def dtype(self) -> torch.dtype:
        return self._store.dtype

    @property
    def device(self) -> torch.device:
        """Device of the pages; keys, values, written slots and page indexes must be on it too."""
        return self._store.device

    @property
    def num_slots(self) -> int:
        """Number of slots; valid slots are 0..num_slots-1."""
        return self.num_blocks * self.block_size

    @property
    def size_bytes(self) -> int:
        """Memory of all pages, of keys of indexers, and of rows beside them."""
        beside = 0 if self.index is None else self.index.size_bytes
        beside += sum(rows.size_bytes for rows in self.rows.values())
        return self._store.numel() * self._store.element_size() + beside

    def validate_write(
        self, slots: NDArray[np.int64], *, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Check a whole step before its first layer is written, and before its `slots` are on the device.

        `slots` is int64 [num_tokens]; `shape` of the keys and of the values is (num_tokens, num_kv_heads,
        head_dim). Raises InvalidWrite for a mismatch and for slots that do not exist or occur twice.
        """
        if slots.ndim != 1 or slots.dtype != np.int64:
            raise InvalidWrite(f"slots: expected int64 (num_tokens,), got {slots.dtype} {slots.shape}")
        self._check_tensor("keys and values", shape, dtype, device, num_tokens=slots.size)
        numbers = set(slots.tolist())
        if not numbers:
            return
        low, high = min(numbers), max(numbers)
        if low < 0 or high >= self.num_slots:
            raise InvalidWrite(f"slots {low}..{high} are out of range, available are 0..{self.num_slots - 1}")
        if len(numbers) != slots.size:
            raise InvalidWrite(f"slots: expected {slots.size} different ones, got {len(numbers)}")

    def write(self, layer: int, tokens: Tensor, slots: Tensor, rows: Tensor | None = None) -> None:
        """Store one layer's keys and values at `slots` (int64 [n]) that passed `validate_write`.

        `tokens` is [n, num_parts * num_kv_heads, head_dim]: the heads of the keys, then of the values.
        With `rows` (int64 [n]) only these of more tokens are stored. Raises InvalidWrite, before anything is
        written, for another shape, dtype or device.
        """
        chosen = tokens if rows is None else tokens.index_select(0, rows)
        self._check_tokens(chosen, slots.numel())
        self._put(self._rows[layer], chosen, slots)

    def _check_tokens(self, tokens: Tensor, num_tokens: int) -> None:
        expected = (num_tokens, self.num_parts * self.num_kv_heads, self.head_dim)
        if tokens.shape != expected or tokens.dtype is not self.dtype or tokens.device != self.device:
            needed = f"{self.dtype} {expected} on {self.device}"
            got = f"{tokens.dtype} {tuple(tokens.shape)} on {tokens.device}"
            raise InvalidWrite(f"keys and values: expected {needed}, got {got}")

    def _put(self, target: Tensor, tokens: Tensor, slots: Tensor) -> None:
        """Copy `tokens` to the rows of `target` at `slots`."""
        if slots is not self._placed[0]:
            self._placed = (slots, self._places(slots))
        target.index_copy_(0, self._placed[1], tokens.reshape(-1, target.shape[1]))

    def store(self, layer: int) -> Tensor:
        """Return one layer's pages, [num_blocks, parts, num_kv_heads, block_size, head_dim], not a copy; the
        spare ones come last.
        """
        return self._layers[layer]

    def scales(self, layer: int) -> Tensor | None:
        """Scale of each row of `store(layer)`, in that shape but for the last dimension; None without."""
        return None

    def clear(self, pages: Tensor) -> None:
        """Set whole pages (int64 [num_pages]) to zero in all layers."""
        self._store.index_fill_(1, pages, 0)
        if self.index is not None:
            self.index.clear(pages)
        for rows in self.rows.values():
            rows.clear(pages)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, ...]:
        """Gather one layer's keys and values of whole pages, for `pages` int64 [batch, num_pages].

        Each part is contiguous, [num_kv_heads, batch, num_pages * block_size, head_dim], and valid until
        the next gather, which may reuse the memory. Raises InvalidWrite for another rank, IndexError (CPU)
        for a page that does not exist.
        """
        if pages.dim() != 2:
            raise InvalidWrite(f"pages: expected 2 dimensions, got shape {tuple(pages.shape)}")
        batch, num_pages = pages.shape
        store = self._pages[layer]
        size = (self.num_parts, self.num_kv_heads, batch * num_pages, store.shape[3])
        if self.device.type == "cpu":
            gathered = self._room(size)
            torch.index_select(store, 0, pages.flatten(), out=gathered.permute(2, 0, 1, 3))
        else:
            gathered = store.index_select(0, pages.flatten()).permute(1, 2, 0, 3).contiguous()
        shape = (self.num_parts, self.num_kv_heads, batch, num_pages * self.block_size, self.head_dim)
        return gathered.view(shape).unbind()

    def gather_latents(self, layer: int, slots: Tensor) -> Tensor:
        """Latents of single tokens of one layer, [..., head_dim] for `slots` int64 [...].

        Raises IndexError (CPU) for a slot that does not exist.
        """
        assert self.num_parts * self.num_kv_heads == 1, "a token has several rows"
        return self._rows[layer].index_select(0, slots.flatten()).view(*slots.shape, self.head_dim)

    def _places(self, slots: Tensor) -> Tensor:
        """Return the rows of `_rows` that hold the tokens at `slots`, head by head."""
        num_heads = self.num_parts * self.num_kv_heads
        heads = torch.arange(num_heads, device=slots.device)
        page, offset = slots // self.block_size, slots % self.block_size
        first = page * (num_heads * self.block_size) + offset
        return (first[:, None] + heads * self.block_size).flatten()

    def _room(self, size: tuple[int, ...]) -> Tensor:
        num_elements = math.prod(size)
        if num_elements * self._store.element_size() > _KEPT_BYTES:
            return self._store.new_empty(size)
        if num_elements > self._gathered.numel():
            with torch.inference_mode(mode=False):  # writable in both modes
                self._gathered = self._store.new_empty(num_elements)
        return self._gathered[:num_elements].view(size)

    def _check_tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, num_tokens: int
    ) -> None:
        expected = (num_tokens, self.num_kv_heads, self.head_dim)
        if tuple(shape) != expected or dtype != self.dtype or device != self.device:
            needed = f"{self.dtype} {expected} on {self.device}"
            raise InvalidWrite(f"{name}: expected {needed}, got {dtype} {tuple(shape)} on {device}")


class PageGroups:
    """Pages of a stage whose layers are in several block groups.

    `layer_groups` has, for each mixer of the stage's layers, the index of its pages in `groups`, or None for
    a recurrent one, which has its part of `states`.
    """

    def __init__(
        self,
        groups: Sequence[KvPages],
        layer_groups: Sequence[int | None],
        states: StateStore | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.states = states
        self.places = [(group, layer_groups[:layer].count(group)) for layer, group in enumerate(layer_groups)]
        expected = [layer_groups.count(group) for group in range(len(groups))]
        num_recurrent = 0 if states is None else states.num_layers
        if layer_groups.count(None) != num_recurrent:
            raise ValueError(
                f"states for {num_recurrent} layers, the stage has {layer_groups.count(None)} recurrent ones"
            )
        if [pages.num_layers for pages in groups] != expected:
            raise ValueError(
                f"pages for {[pages.num_layers for pages in groups]} layers, the stage has {expected}"
            )

    @property
    def block_size(self) -> int:
        """Tokens per block, the same in all groups."""
        return self.groups[0].block_size
