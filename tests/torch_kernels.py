"""Functions of torch in the place of Triton kernels: the same interface, on any device, without a host read.

Attention takes a work list as the kernels do, padding and parts of keys included.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.functional import rms_norm as scaled_to_unit

from checkpoint import GatedDelta, KimiDelta, Mamba2, RopeConfig
from checkpoint.ngrams import NgramEmbedding
from stage_worker.backends import tensor_views
from stage_worker.backends.tensor_views import scale_rows, unscale_rows
from stage_worker.model import (
    attention_work,
    block_indexer,
    compressed_writes,
    indexer,
    joined_attention,
    operations,
    projections,
)
from stage_worker.model.attention_work import AttentionWork
from stage_worker.model.block_work import SequenceBlocks
from stage_worker.model.choice_work import ChoiceGroup
from stage_worker.model.compressed_work import JoinedWork, SequencePages
from stage_worker.model.gated_delta import SeparateDelta
from stage_worker.model.kernels import Kernels
from stage_worker.model.kimi_delta import SeparateChannelDelta
from stage_worker.model.layer_weights import DeltaWeights, KimiDeltaWeights, MambaWeights, NgramWeights
from stage_worker.model.mamba2 import SeparateScan
from stage_worker.model.ngrams import SeparateNgrams
from stage_worker.model.norms import RowNorm
from stage_worker.model.operations import (
    GateProjection,
    NgramFunction,
    StateFunction,
    TorchOperations,
    limited,
)
from stage_worker.model.rope import RotaryTable, rotate_, rotate_last_
from stage_worker.model.state_rows import StateRows
from stage_worker.model.step_layout import LayerStates
from stage_worker.model.weight_reads import HostTable
from stage_worker.sampling import step_rows

MOST_KEYS = 64
"""Keys of an item, at most."""


def use_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "operations": SimpleNamespace(TritonOperations=_StateOperations),
        "attention": SimpleNamespace(attend=attend),
        "last_rotation": SimpleNamespace(norm_and_write=norm_and_write, rotate_last=rotate_last),
        "pooling": SimpleNamespace(Pooling=SimpleNamespace, pool=pool),
        "compressed_attention": SimpleNamespace(attend_joined=attend_joined),
        "wire_rows": SimpleNamespace(scale_rows=scale_rows, unscale_rows=unscale_rows),
        "sampling": SimpleNamespace(choose=choose),
        "row_products": SimpleNamespace(row_product=row_product),
        "block_keys": SimpleNamespace(write_keys=write_keys, block_keys=block_keys),
        "choices": SimpleNamespace(
            rotate_and_write_keys=rotate_and_write_keys, score=score, choose=choose_tokens
        ),
    }
    for module in (
        block_indexer,
        compressed_writes,
        indexer,
        joined_attention,
        projections,
        operations,
        tensor_views,
        step_rows,
    ):
        monkeypatch.setattr(module, "load_triton", lambda name: modules[name])


class _StateOperations(TorchOperations):
    """With recurrent mixers whose rows are those of a table on the device."""

    def delta_function(self, mixer: GatedDelta, weights: DeltaWeights) -> StateFunction:
        return _TableRows(SeparateDelta(mixer, weights))

    def channel_delta_function(
        self, mixer: KimiDelta, weights: KimiDeltaWeights, expand: GateProjection
    ) -> StateFunction:
        return _TableRows(SeparateChannelDelta(mixer, weights, expand))

    def scan_function(self, mixer: Mamba2, weights: MambaWeights) -> StateFunction:
        return _TableRows(SeparateScan(mixer, weights))

    def ngram_function(
        self, plan: NgramEmbedding, weights: NgramWeights, kernels: Kernels
    ) -> NgramFunction | None:
        if isinstance(weights.table, HostTable):
            weights = replace(weights, table=weights.table.rows.to(weights.sizes.device))
        return _TableNgrams(SeparateNgrams(plan, weights, kernels))


class _TableRows:
    """Token by token: sequences without a further one have a copy of slot 0, which is dropped."""

    def __init__(self, function: StateFunction) -> None:
        self._function = function

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        assert memory.rows.sequences is not None, "a table of the step's sequences"
        first, count, slot = memory.rows.sequences.long().unbind(1)
        num_rows, num_slots = len(projected), len(memory.parts[0])
        longer = [torch.cat((part, part.narrow(0, 0, 1))) for part in memory.parts]
        given = torch.cat((projected, projected.new_zeros(1, projected.shape[1])))
        ids = memory.step.token_ids
        if ids is not None:
            ids = torch.cat((ids, ids.new_zeros(num_rows + 1 - len(ids))))
        outputs = None
        for token in range(num_rows if memory.rows.has_longer else 1):
            is_row = count > token
            rows, slots = torch.where(is_row, first + token, num_rows), torch.where(is_row, slot, num_slots)
            states = StateRows(has_longer=False, singles=torch.arange(len(rows), device=rows.device))
            states = replace(states, single_slots=slots)
            own_ids = None if ids is None else ids.index_select(0, rows)
            step: Any = SimpleNamespace(num_tokens=len(rows), states=states, token_ids=own_ids)
            found = self._function(given.index_select(0, rows), LayerStates(step, longer))
            outputs = found.new_zeros(num_rows + 1, found.shape[1]) if outputs is None else outputs
            outputs.index_copy_(0, rows, found)
        for part, kept in zip(memory.parts, longer, strict=True):
            part.copy_(kept.narrow(0, 0, num_slots))
        assert outputs is not None
        return outputs.narrow(0, 0, num_rows)


class _TableNgrams(_TableRows):
    """Rows that no sequence has stay as they are."""

    def __call__(self, projected: Tensor, memory: LayerStates) -> Tensor:
        found = super().__call__(projected, memory)
        assert memory.rows.sequences is not None, "a table of the step's sequences"
        num_rows = memory.rows.sequences.narrow(1, 0, 2).sum(dim=1).amax()
        is_row = torch.arange(len(projected), device=projected.device) < num_rows
        return torch.where(is_row[:, None], found, projected)


def row_product(x: Tensor, matrix: Tensor, bias: Tensor | None, residual: Tensor | None = None) -> Tensor:
    """See `triton_kernels.row_products.row_product`."""
    found = linear(x, matrix, bias)
    return found if residual is None else residual.add_(found)


def choose(
    logits: Tensor,
    scores: Tensor,
    reals: Tensor | None,
    top_k: Tensor | None,
    row_flags: Tensor | None = None,
) -> Tensor:
    """The likeliest tokens; random rows are left to the host."""
    tokens = scores.argmax(-1)
    if reals is not None:
        tokens = torch.where(reals[0] > 0.0, step_rows.OPEN, tokens)
    bad = logits.isnan().any(-1)
    if row_flags is not None:
        bad = bad | (row_flags != 0)
    return torch.where(bad, step_rows.NOT_FINITE, tokens)


def rotate_and_write_keys(
    queries: Tensor | None,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    first: int,
) -> None:
    """See `triton_kernels.choices.rotate_and_write_keys`."""
    keys = keys.clone()
    for heads in (queries, keys.unsqueeze(1)):
        if heads is not None:
            rotate_(heads.narrow(-1, first, cos.shape[2]), cos, sin)
    flat = pages.view(-1, keys.shape[1])
    flat.copy_(_rows_at(flat, torch.where(slots < 0, len(flat), slots), keys))


def norm_and_write(
    queries: Tensor,
    keys: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    rope: RopeConfig | None,
    weight: Tensor,
    eps: float,
    page_scales: Tensor | None = None,
    pending: Tensor | None = None,
    pending_rows: Tensor | None = None,
) -> None:
    """See `triton_kernels.last_rotation.norm_and_write`; for pages in the run dtype."""
    assert page_scales is None, "pages of 8 bits"
    queries.copy_(scaled_to_unit(queries, queries.shape[-1:], None, eps))
    found = scaled_to_unit(keys.float(), weight.shape, weight, eps).to(keys.dtype).unsqueeze(1)
    for heads in (queries, found):
        rotate_last(heads, cos, sin, rope=rope)
    for rows, given in ((pages, found.squeeze(1)), (pending_rows, pending)):
        if rows is not None and given is not None:
            flat = rows.view(-1, given.shape[1])
            flat.copy_(_rows_at(flat, torch.where(slots < 0, len(flat), slots), given))


def rotate_last(
    heads: Tensor, cos: Tensor, sin: Tensor, *, rope: RopeConfig | None, is_back: bool = False
) -> None:
    """See `triton_kernels.last_rotation.rotate_last`."""
    if rope is not None:
        rotate_last_(heads, RotaryTable(cos=cos, sin=sin), rope, is_back=is_back)


def pool(
    pooling: Any,
    pending: Tensor,
    sources: Tensor,
    kept: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    rows: Tensor,
) -> None:
    """See `triton_kernels.pooling.pool`."""
    columns, width, plan = pooling.bias.shape[1], rows.shape[2], pooling.plan
    own = sources if kept is None else sources.index_select(0, kept)
    absent = (own < 0).unsqueeze(2)
    flat = pending.view(-1, pending.shape[2]).index_select(0, own.clamp(min=0).flatten())
    found = flat.view(*own.shape, -1).narrow(2, pooling.first, 2 * columns)
    values, gates, bias = *found.split(columns, dim=2), pooling.bias
    if plan.has_overlap:
        values, gates, bias = (
            torch.cat((x[..., : plan.ratio, :width], x[..., -plan.ratio :, width:]), dim=-2)
            for x in (values, gates, bias)
        )
    gates = (gates + bias).masked_fill(absent, -torch.inf).softmax(dim=1, dtype=torch.float32)
    mixed = (values.masked_fill(absent, 0.0) * gates.to(values.dtype)).sum(dim=1)
    entries = scaled_to_unit(mixed.float(), pooling.weight.shape, pooling.weight, pooling.eps)
    entries = entries.to(rows.dtype).unsqueeze(1)
    rotate_last(entries, cos, sin, rope=pooling.rope)
    rows.view(-1, width).index_copy_(0, slots, entries.squeeze(1))


def write_keys(
    projected: Tensor,
    num_heads: int,
    norm: RowNorm,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    pages: Tensor,
    *,
    has_queries: bool,
) -> Tensor | None:
    """See `triton_kernels.block_keys.write_keys`."""
    heads, flat = projected.view(len(projected), num_heads + 1, -1), pages.view(-1, pages.shape[2])
    written = heads.select(1, num_heads)
    flat.copy_(_rows_at(flat, torch.where(slots < 0, len(flat), slots), written))
    if not has_queries:
        return None
    queries = norm(heads.narrow(1, 0, num_heads))
    rotate_(queries, cos, sin)
    return queries


def block_keys(
    pages: Tensor, work: SequenceBlocks, size: int, norm: RowNorm, cos: Tensor, sin: Tensor
) -> Tensor:
    """See `triton_kernels.block_keys.block_keys`."""
    first_page, num_blocks, place = (column[:, None] for column in work.sequences.long().unbind(1))
    blocks = torch.arange(work.longest, device=pages.device)[None]
    is_block = blocks < num_blocks
    tokens = torch.arange(work.longest * size, device=pages.device)[None]
    is_token, page_size = tokens < num_blocks * size, pages.shape[1]
    entries = torch.where(is_token, first_page + tokens // page_size, 0)
    slots = work.table.long().index_select(0, entries.flatten()).view(entries.shape) * page_size
    slots = torch.where(is_token, slots + tokens % page_size, 0)
    keys = pages.view(-1, pages.shape[2]).index_select(0, slots.flatten()).float()
    means = norm(keys.view(-1, size, keys.shape[1]).mean(dim=1).to(pages.dtype))
    means = means.view(len(work.sequences), work.longest, -1)
    rotate_(means, cos.narrow(0, 0, work.longest)[:, 0], sin.narrow(0, 0, work.longest)[:, 0])
    into = torch.where(is_block, place + blocks, work.num_blocks)
    return _rows_at(pages.new_zeros((work.num_blocks, pages.shape[2])), into, means)


def score(
    queries: Tensor, weights: Tensor | None, group: ChoiceGroup, pages: Tensor, *, ratio: int = 1
) -> Tensor:
    """See `triton_kernels.choices.score`; `ratio` has its effect on the group's rows."""
    place, num_keys = (column[:, None] for column in group.rows.long().unbind(1))
    blocks = group.blocks.long()
    rows = torch.arange(*group.span, device=blocks.device) if group.queries is None else group.queries
    of_rows = torch.searchsorted(blocks.select(1, 0), rows, right=True) - 1
    first_pages = blocks.select(1, 2).index_select(0, of_rows)
    tokens = torch.arange(group.longest, device=queries.device)[None]
    is_key, size = tokens < num_keys, pages.shape[1]
    entries = torch.where(is_key, first_pages[:, None] + tokens // size, 0)
    if group.table is not None:
        entries = group.table.long().index_select(0, entries.flatten()).view(entries.shape)
    slots = entries * size + tokens % size
    keys = pages.view(-1, pages.shape[2]).index_select(0, torch.where(is_key, slots, 0).flatten()).float()
    asked = _of_group(queries, group).float()
    products = torch.einsum("rhd,rsd->rhs", asked, keys.view(*slots.shape, -1)).relu()
    if weights is not None:
        products = products * _of_group(weights, group).unsqueeze(2)
    into = torch.where(is_key, place + tokens, group.num_scores)
    return _rows_at(products.new_zeros(group.num_scores), into, products.sum(dim=1))


def _of_group(rows: Tensor, group: ChoiceGroup) -> Tensor:
    if group.queries is not None:
        return rows.index_select(0, group.queries)
    return rows.narrow(0, group.span[0], group.span[1] - group.span[0])


def choose_tokens(scores: Tensor, group: ChoiceGroup, top_k: int, *, has_last: bool = False) -> Tensor:
    """See `triton_kernels.choices.choose`; by a stable order, in which what is no unit follows all units."""
    place, num_keys = (column[:, None] for column in group.rows.long().unbind(1))
    tokens = torch.arange(group.longest, device=scores.device)[None]
    is_key = tokens < num_keys
    places = torch.where(is_key, place + tokens, 0)
    found = scores.index_select(0, places.flatten()).view(places.shape)
    own = found.masked_fill(is_key.logical_not(), -torch.inf)
    order = own.sort(dim=1, descending=True, stable=True).indices.narrow(1, 0, top_k)
    chosen = order.sort(dim=1).values
    return (torch.cat((chosen, num_keys), dim=1) if has_last else chosen).to(torch.int32)


def _gathered(pages: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """Rows float32 [i, k, parts, kv_heads, row_width] of `slots` [i, k]."""
    rows = pages.permute(0, 3, 1, 2, 4).flatten(0, 1)
    found = rows.index_select(0, slots.flatten()).float()
    if scales is not None:
        found = found * scales.permute(0, 3, 1, 2).flatten(0, 1).index_select(0, slots.flatten()).unsqueeze(3)
    return found.view(*slots.shape, *found.shape[1:])


def _rows_at(target: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """`target` [n, ...] with `rows` at `places`, of which n is nowhere."""
    longer = torch.cat((target, target.new_zeros((1, *target.shape[1:]))))
    longer.index_copy_(0, places.flatten(), rows.flatten(0, places.dim() - 1).to(target.dtype))
    return longer.narrow(0, 0, len(target))


def _softmaxed(mixed: Tensor, highest: Tensor, total: Tensor, sinks: Tensor | None) -> Tensor:
    """Values [..., heads, width] of sums relative to `highest` [..., heads]."""
    if sinks is not None:
        top = torch.maximum(highest, sinks)
        kept = torch.exp(highest - top)
        total, mixed = total * kept + torch.exp(sinks - top), mixed * kept.unsqueeze(-1)
    return mixed / torch.where(total == 0.0, 1.0, total).unsqueeze(-1)


def attend(
    query: Tensor,
    output: Tensor,
    work: AttentionWork,
    pages: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    page_scales: Tensor | None = None,
    chosen: Tensor | None = None,
    unit: int = 1,
) -> None:
    """See `triton_kernels.attention.attend`."""
    num_rows, _, row_width = query.shape
    _, parts, kv_heads, block_size, _ = pages.shape
    row, count, first, begin, end, position, partial = (
        column[:, None] for column in work.items.long().unbind(1)
    )
    index = torch.arange(work.num_queries, device=query.device)[None]
    is_query, keys = index < count, begin + torch.arange(MOST_KEYS, device=query.device)
    is_key = keys < end
    tokens = keys
    if chosen is not None:
        places = torch.where(is_key, row * chosen.shape[1] + keys // unit, 0)
        units = chosen.flatten().long().index_select(0, places.flatten()).view(keys.shape)
        tokens = units * unit + keys % unit
    entries = torch.where(is_key, first + tokens // block_size, 0)
    page = work.table.long().index_select(0, entries.flatten()).view(keys.shape)
    found = _gathered(pages, page_scales, torch.where(is_key, page * block_size + tokens % block_size, 0))
    found = found.masked_fill(is_key.logical_not()[:, :, None, None, None], 0.0)
    rows = torch.where(is_query, row + index, 0)
    asked = query.index_select(0, rows.flatten()).float().view(*rows.shape, kv_heads, -1, row_width)
    scores = torch.einsum("iqhgd,ikhd->iqhgk", asked, found[:, :, 0]) * scale
    scores = scores if softcap is None else limited(scores, softcap)
    is_seen = is_key[:, None] & (keys[:, None] <= (position + index)[:, :, None])
    if window is not None:
        is_seen = is_seen & (keys[:, None] > (position + index)[:, :, None] - window)
    scores = scores.masked_fill(is_seen.logical_not()[:, :, None, None], -torch.inf)
    values = found[:, :, parts - 1, :, : output.shape[2]]
    places = torch.where(is_query, partial + index, -1), torch.where(is_query, rows, num_rows)
    _write(output, work, partial, places, scores, values, sinks)


def _write(
    output: Tensor,
    work: AttentionWork | JoinedWork,
    partial: Tensor,
    places: tuple[Tensor, Tensor],
    scores: Tensor,
    values: Tensor,
    sinks: Tensor | None,
) -> None:
    """Results of `scores` [i, q, kv_heads, group, k] and `values` [i, k, kv_heads, width].

    `places` [i, q] are rows of partial results (below 0: none), and of the output (its length: none).
    """
    highest = scores.amax(dim=-1)
    weights = torch.exp(scores - torch.where(highest == -torch.inf, 0.0, highest).unsqueeze(-1))
    mixed = torch.einsum("iqhgk,ikhd->iqhgd", weights, values)
    sums = mixed.flatten(2, 3), highest.flatten(2, 3), weights.sum(dim=-1).flatten(2, 3)
    of_parts, rows = places
    into = torch.where(partial < 0, rows, len(output))
    output.copy_(_rows_at(output, into, _softmaxed(*sums, sinks)))
    if work.num_partial:
        is_part = (partial >= 0) & (rows < len(output))
        _merge(output, work, torch.where(is_part, of_parts, work.num_partial), sums, sinks)


def attend_joined(
    query: Tensor,
    output: Tensor,
    work: JoinedWork,
    keys: Tensor,
    key_pages: SequencePages,
    entries: Tensor,
    entry_pages: SequencePages,
    *,
    ratio: int,
    scale: float,
    window: int,
    sinks: Tensor,
    key_scales: Tensor | None = None,
    chosen: Tensor | None = None,
) -> None:
    """See `triton_kernels.compressed_attention.attend_joined`."""
    row, count, sequence, position, key, key_end, entry, entry_end, choice, partial = (
        column[:, None] for column in work.items.long().unbind(1)
    )
    index = torch.arange(work.num_queries, device=query.device)[None]
    is_query, own = index < count, (position + index).unsqueeze(2)
    rows = torch.where(is_query, row + index, 0)
    lanes = torch.arange(MOST_KEYS, device=query.device)
    tokens, numbers = key + lanes, entry + lanes
    is_key, is_entry = tokens < key_end, numbers < entry_end
    does_see = numbers.unsqueeze(1) < (own + 1) // ratio
    if chosen is not None:
        places = torch.where(is_entry, choice * chosen.shape[1] + numbers, 0)
        numbers = chosen.flatten().long().index_select(0, places.flatten()).view(numbers.shape)
        does_see = torch.ones_like(does_see)
    sees_key = (tokens.unsqueeze(1) <= own) & (tokens.unsqueeze(1) > own - window)
    of_keys = _gathered(keys, key_scales, _slots(key_pages, sequence, tokens, is_key, keys.shape[3]))
    slots = _slots(entry_pages, sequence, numbers, is_entry, entries.shape[1])
    found = torch.cat((of_keys, _gathered(entries[:, None, None], None, slots)), dim=1)[:, :, 0, 0]
    is_there = torch.cat((is_key, is_entry), dim=1)
    found = found.masked_fill(is_there.logical_not().unsqueeze(2), 0.0)
    asked = query.index_select(0, rows.flatten()).float().view(*rows.shape, *query.shape[1:])
    is_seen = torch.cat((sees_key, does_see), dim=2) & is_there.unsqueeze(1)
    scores = torch.einsum("iqhd,ikd->iqhk", asked, found) * scale
    scores = scores.masked_fill(is_seen.logical_not().unsqueeze(2), -torch.inf).unsqueeze(2)
    into = torch.where(is_query, partial + index, -1), torch.where(is_query, rows, len(output))
    _write(output, work, partial, into, scores, found.unsqueeze(2), sinks)


def _slots(
    pages: SequencePages, sequence: Tensor, numbers: Tensor, is_there: Tensor, block_size: int
) -> Tensor:
    """Slots [i, k] of keys or entries `numbers` [i, k] of a sequence each; 0 where there is none."""
    place, first = pages.firsts.long().index_select(0, sequence.flatten()).unsqueeze(2).unbind(1)
    own = numbers - first
    places = torch.where(is_there, place + own // block_size, 0)
    page = pages.table.long().index_select(0, places.flatten()).view(places.shape)
    return torch.where(is_there, page * block_size + own % block_size, 0)


def _merge(
    output: Tensor,
    work: AttentionWork | JoinedWork,
    places: Tensor,
    sums: Any,
    sinks: Tensor | None,
) -> None:
    empties = (0.0, -torch.inf, 0.0)
    kept = [
        torch.cat(
            (
                _rows_at(part.new_zeros((work.num_partial, *part.shape[2:])), places, part),
                part.new_full((1, *part.shape[2:]), empty),
            )
        )
        for part, empty in zip(sums, empties, strict=True)
    ]
    row, first, num_parts, distance = (column[:, None] for column in work.merges.long().unbind(1))
    part = torch.arange(-(-MOST_KEYS // attention_work.KEY_SPLIT), device=output.device)[None]
    sources = torch.where(part < num_parts, first + part * distance, work.num_partial)
    mixed, highest, total = (
        x.index_select(0, sources.flatten()).view(*sources.shape, *x.shape[1:]) for x in kept
    )
    top = highest.amax(dim=1)
    factors = torch.exp(highest - torch.where(top == -torch.inf, 0.0, top).unsqueeze(1))
    merged = (mixed * factors.unsqueeze(-1)).sum(dim=1), top, (total * factors).sum(dim=1)
    targets = torch.where(num_parts > 0, row, len(output))
    output.copy_(_rows_at(output, targets[:, 0], _softmaxed(*merged, sinks)))
