"""What layers of compressed attention write of a step: keys, what entries are pooled of, and entries.

Queries are normed and rotated with the keys: by torch's operators, or by kernels. Pooling is as in
transformers: the softmax of gates is float32, and its weights are rounded before they multiply values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from checkpoint import Compressed, Norm
from checkpoint.blueprint import NormKind
from checkpoint.compressed import Compressor
from checkpoint.names import TensorRole
from kvcache.layer_rows import RowKind
from stage_worker.model.entry_layout import EntryStep
from stage_worker.model.kernels import Kernels, load_triton
from stage_worker.model.layer_weights import PoolingWeights
from stage_worker.model.norms import NormWeights, RowNorm, row_norm, unit_norm
from stage_worker.model.rope import Rotary, RotaryTable, rotate_last_
from stage_worker.model.step_layout import LayerEntries, LayerKv

ENTRY_NORMS = {RowKind.ENTRY: TensorRole.ENTRY_NORM, RowKind.ENTRY_KEY: TensorRole.INDEX_NORM}


@dataclass(frozen=True, slots=True, eq=False)
class Fresh:
    """Projections of a step's tokens: `heads` [n, heads, head_dim] of queries, `keys` [n, head_dim], and with
    a compressor `pending` [n, pending_width].
    """

    heads: Tensor
    keys: Tensor
    pending: Tensor | None


class CompressedWrites(Protocol):
    """Writes of a layer."""

    def write(self, fresh: Fresh, kv: LayerKv) -> Tensor | None:
        """Norm and rotate queries in place, and write all else; entries are pooled after what they need.

        Returns the keys [n, 1, head_dim] as they were written, if attention needs them beside the pages.
        """

    def rotate(self, heads: Tensor, table: RotaryTable, *, is_back: bool = False) -> None:
        """Rotate the last elements of `heads` [n, heads, width] in place, `is_back` by negative angles."""


def compressed_writes(
    mixer: Compressed,
    pooling: Mapping[RowKind, PoolingWeights],
    norms: Mapping[TensorRole, NormWeights],
    kernels: Kernels,
) -> CompressedWrites:
    """The implementation for `kernels`."""
    of_kernels = WritesByKernels if kernels.are_triton else WritesByTorch
    return of_kernels(mixer, pooling, norms)


class WritesByKernels:
    """A launch for queries, keys and what entries are pooled of, and one for each kind of rows of entries."""

    def __init__(
        self,
        mixer: Compressed,
        pooling: Mapping[RowKind, PoolingWeights],
        norms: Mapping[TensorRole, NormWeights],
    ) -> None:
        self._mixer, self._rotary = mixer, Rotary.of(mixer)
        self._key_weight = norms[TensorRole.K_NORM].weight.float()
        self._pools = {}
        first = 0
        for kind, weights in pooling.items():
            assert mixer.compressor is not None, "pooling without a compressor"
            self._pools[kind] = load_triton("pooling").Pooling(
                plan=mixer.compressor,
                first=first,
                bias=weights.bias,
                weight=norms[ENTRY_NORMS[kind]].weight.float(),
                eps=mixer.norm_eps,
                rope=mixer.rope,
            )
            first += 2 * weights.bias.shape[1]

    def write(self, fresh: Fresh, kv: LayerKv) -> None:
        table, pending_rows = kv.step.rotary[self._rotary], None
        if fresh.pending is not None:
            pending_rows = kv.pages.rows[RowKind.PENDING].blocks(kv.layer)
        load_triton("last_rotation").norm_and_write(
            *(fresh.heads, fresh.keys, table.cos, table.sin, kv.writes.by_row, kv.store),
            rope=self._mixer.rope,
            weight=self._key_weight,
            eps=self._mixer.norm_eps,
            page_scales=kv.scales,
            pending=fresh.pending,
            pending_rows=pending_rows,
        )
        if self._mixer.compressor is not None and pending_rows is not None:
            assert kv.entries is not None, "pages without entries"
            self._pool(self._mixer.compressor, pending_rows, kv, kv.entries)

    def _pool(self, plan: Compressor, pending: Tensor, kv: LayerKv, entries: LayerEntries) -> None:
        step = entries.step.entries[plan]
        if not len(step.slots):
            return
        table, pool = step.rotary[self._rotary], load_triton("pooling").pool
        for kind, pooling in self._pools.items():
            into = entries.rows[kind].blocks(entries.layer)
            pool(pooling, pending, kv.step.sources[plan], step.kept, table.cos, table.sin, step.slots, into)

    def rotate(self, heads: Tensor, table: RotaryTable, *, is_back: bool = False) -> None:
        rotate_last = load_triton("last_rotation").rotate_last
        rotate_last(heads, table.cos, table.sin, rope=self._mixer.rope, is_back=is_back)


class WritesByTorch:
    """One operation after the other."""

    def __init__(
        self,
        mixer: Compressed,
        pooling: Mapping[RowKind, PoolingWeights],
        norms: Mapping[TensorRole, NormWeights],
    ) -> None:
        self._mixer, self._rotary = mixer, Rotary.of(mixer)
        norm = Norm(kind=NormKind.RMS_WIDE, eps=mixer.norm_eps)
        self._head_norm = unit_norm(mixer.norm_eps)
        self._key_norm = row_norm(norm, norms[TensorRole.K_NORM])
        self._pools: dict[RowKind, EntryPool] = {}
        for kind, weights in pooling.items():
            assert mixer.compressor is not None, "pooling without a compressor"
            self._pools[kind] = EntryPool(mixer.compressor, weights, row_norm(norm, norms[ENTRY_NORMS[kind]]))

    def write(self, fresh: Fresh, kv: LayerKv) -> Tensor:
        table = kv.step.rotary[self._rotary]
        fresh.heads.copy_(self._head_norm(fresh.heads))
        keys = self._key_norm(fresh.keys)[:, None]
        self.rotate(fresh.heads, table)
        self.rotate(keys, table)
        kv.write(keys)
        if self._mixer.compressor is not None and fresh.pending is not None:
            assert kv.entries is not None, "pages without entries"
            step = kv.entries.step.entries[self._mixer.compressor]
            self._write_entries(fresh.pending, step, self._mixer.compressor, kv, kv.entries)
        return keys

    def rotate(self, heads: Tensor, table: RotaryTable, *, is_back: bool = False) -> None:
        if self._mixer.rope is not None:
            rotate_last_(heads, table, self._mixer.rope, is_back=is_back)

    def _write_entries(
        self, fresh: Tensor, step: EntryStep, plan: Compressor, kv: LayerKv, entries: LayerEntries
    ) -> None:
        """Write what entries are pooled of, and the entries that end in the step."""
        pending, writes = kv.pages.rows[RowKind.PENDING], kv.writes
        written = fresh if writes.rows is None else fresh.index_select(0, writes.rows)
        pending.write(kv.layer, written, writes.slots)
        if not len(step.slots):
            return
        sources = kv.step.sources[plan]
        if step.kept is not None:
            sources = sources.index_select(0, step.kept)
        absent = (sources < 0)[..., None]
        widths = [pool.columns for pool in self._pools.values() for _ in range(2)]
        parts = pending.at(kv.layer, sources.clamp(min=0)).split_with_sizes(widths, dim=-1)
        table = step.rotary[self._rotary]
        for number, (kind, pool) in enumerate(self._pools.items()):
            found = pool(parts[2 * number], parts[2 * number + 1], absent)[:, None]
            self.rotate(found, table)
            entries.rows[kind].write(entries.layer, found[:, 0], step.slots)


class EntryPool:
    """The pooling of entries, or of their keys."""

    def __init__(self, plan: Compressor, weights: PoolingWeights, norm: RowNorm) -> None:
        self._plan, self._norm = plan, norm
        self._width, self._bias = weights.width, weights.bias
        self.columns = weights.bias.shape[1]
        """Values of a token, and gates."""
        if plan.has_overlap:
            self._bias = torch.cat(weights.bias.tensor_split(2, dim=1))

    def __call__(self, values: Tensor, gates: Tensor, absent: Tensor) -> Tensor:
        """Normed entries [c, width] of `values` and `gates` [c, span, columns]; `absent` [c, span, 1] tokens
        are before the first one.
        """
        values, gates = (self._of_entry(x) for x in (values, gates))
        gates = (gates + self._bias).masked_fill_(absent, -math.inf)
        weights = gates.softmax(dim=1, dtype=torch.float32).to(values.dtype)
        return self._norm((values.masked_fill(absent, 0.0) * weights).sum(dim=1))

    def _of_entry(self, x: Tensor) -> Tensor:
        """The columns of each token that are for this entry, [c, span, width]."""
        if not self._plan.has_overlap:
            return x
        ratio, width = self._plan.ratio, self._width
        return torch.cat((x[:, :ratio, :width], x[:, ratio:, width:]), dim=1)
