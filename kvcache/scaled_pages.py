"""Pages of 8 bits: each key, value or latent is a row of one-byte elements with a float32 scale of its own.

A row with the largest magnitude m has the scale s = max(m / 448, 2 ** -126) in float8_e4m3fn, and
s = max(m / 127, 2 ** -126) in int8. An element x is read as y with

    float8_e4m3fn  |x - y| <= max(|x| / 16, s / 1024)
    int8           |x - y| <= s / 2

up to the rounding of float32 and of the run dtype, for m up to 2 ** 127. Zeros stay zeros. A row with a
non-finite element has a non-finite scale, and is read without any finite element.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvcache.layer_rows import NO_ROWS, LayerRows, RowKind
from kvcache.pages import IndexKeys, KvPages
from kvcache.state_store import zeros

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny

# Value of each byte: a CPU converts float8 five times slower than it looks it up.
_F8_VALUES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


def scaled_rows(rows: Tensor, element: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round `rows` [..., width] to elements uint8 [..., width] and scales float32 [..., 1]."""
    wide = rows.float()
    # A smaller scale would be subnormal, a row divided by it could overflow, and zeros need some scale.
    scales = (wide.abs().amax(dim=-1, keepdim=True) / _LARGEST[element]).clamp_(min=_SMALLEST_SCALE)
    scaled = wide / scales
    if element is torch.int8:
        scaled = scaled.round_()
    return scaled.to(element).view(torch.uint8), scales


def unscaled_rows(elements: Tensor, scales: Tensor, element: torch.dtype, into: torch.dtype) -> Tensor:
    """Rows [..., width] in `into` of elements uint8 [..., width] and scales float32 [..., 1]."""
    if elements.is_cuda:
        # Elements are exact in every run dtype; the product is float32, and never in memory.
        found = torch.empty(elements.shape, dtype=into, device=elements.device)
        return torch.mul(elements.view(element).to(into), scales, out=found)
    if element is torch.float8_e4m3fn:
        wide = _F8_VALUES.index_select(0, elements.flatten().int()).view(elements.shape)
    else:
        wide = elements.view(element).float()
    return wide.mul_(scales).to(into)


class ScaledPages(KvPages):
    """Pages whose keys and values of `dtype` are held as `element`: torch.float8_e4m3fn or torch.int8."""

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
        element: torch.dtype,
        num_parts: int = 2,
        num_spare: int = 0,
        index: IndexKeys | None = None,
        rows: Mapping[RowKind, LayerRows] = NO_ROWS,
    ) -> None:
        super().__init__(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=torch.uint8,
            device=device,
            num_parts=num_parts,
            num_spare=num_spare,
            index=index,
            rows=rows,
        )
        self._dtype, self._element = dtype, element
        shape = (num_layers, num_blocks + num_spare, num_parts, num_kv_heads, block_size)
        self._scales = zeros(shape, torch.float32, torch.device(device))
        self._layer_scales: list[Tensor] = list(self._scales)
        self._scale_rows = [layer.view(-1, 1) for layer in self._layer_scales]
        self._stores = [layer.view(element) for layer in self._layers]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of keys and values as they are written and gathered."""
        return self._dtype

    @property
    def size_bytes(self) -> int:
        return super().size_bytes + self._scales.numel() * self._scales.element_size()

    def write(self, layer: int, tokens: Tensor, slots: Tensor, rows: Tensor | None = None) -> None:
        """Like `KvPages.write`, and round all `tokens` in place to what a gather returns for them.

        So attention does not depend on where it finds them, and a prompt not on its chunks.
        """
        self._check_tokens(tokens, len(tokens) if rows is not None else slots.numel())
        elements, scales = scaled_rows(tokens, self._element)
        tokens.copy_(unscaled_rows(elements, scales, self._element, self._dtype))
        if rows is not None:
            elements, scales = elements.index_select(0, rows), scales.index_select(0, rows)
        self._put(self._rows[layer], elements, slots)
        self._put(self._scale_rows[layer], scales, slots)

    def store(self, layer: int) -> Tensor:
        return self._stores[layer]

    def scales(self, layer: int) -> Tensor | None:
        return self._layer_scales[layer]

    def clear(self, pages: Tensor) -> None:
        super().clear(pages)
        self._scales.index_fill_(1, pages, 0)

    def gather_latents(self, layer: int, slots: Tensor) -> Tensor:
        elements = super().gather_latents(layer, slots)
        scales = self._scale_rows[layer].index_select(0, slots.flatten()).view(*slots.shape, 1)
        return unscaled_rows(elements, scales, self._element, self._dtype)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, ...]:
        found = super().gather(layer, pages)
        batch, num_pages = pages.shape
        scales = self._layer_scales[layer].index_select(0, pages.flatten()).permute(1, 2, 0, 3)
        shape = (self.num_parts, self.num_kv_heads, batch, num_pages * self.block_size, 1)
        return tuple(
            unscaled_rows(elements, of_elements, self._element, self._dtype)
            for elements, of_elements in zip(found, scales.reshape(shape), strict=True)
        )
