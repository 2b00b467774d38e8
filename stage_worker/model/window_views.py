"""Views of the keys that a step's queries attend to through one window: gathered, in place, or chosen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from checkpoint.block_indexer import BlockIndexer
from stage_worker.model.attention_views import (
    DecodeView,
    HostArray,
    OnHost,
    Place,
    PrefillView,
    ViewRules,
    decode_views,
    prefill_view,
)
from stage_worker.model.attention_work import AttentionWork, HostWork
from stage_worker.model.block_work import BlockChoices, block_choices
from stage_worker.model.choice_work import ChoiceGroup, choice_groups
from stage_worker.model.decode_rows import NO_DECODES, Column, DecodeRows, SliceRows
from stage_worker.model.kernels import AttentionMethod
from stage_worker.validation import SliceLayout


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionViews:
    """Keys visible to the step's queries through one window.

    `decodes` covers one-token slices (in either phase: one query is computed alike), `prefills` the
    others, in the order of `StepLayout.prefill_rows`. With Triton kernels, `work` covers one-token slices
    instead, and the others, too, unless they have other kernels; in that case its items count only the rows
    `work_rows` int64 [b] (None: all). Slices of which queries choose among their tokens are in `choices`
    instead, or in `block_choices`.
    """

    decodes: tuple[DecodeView, ...]
    prefills: tuple[PrefillView, ...]
    work: AttentionWork | None = None
    work_rows: Tensor | None = None
    choices: tuple[ChoiceGroup, ...] = ()
    block_choices: BlockChoices | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WindowViews:
    """Views through one window; `work` covers all queries, or is None."""

    views: OnHost[AttentionViews]
    work: HostWork | None = None


def view_of(work: HostWork) -> OnHost[AttentionViews]:
    """The view of a step whose queries are all in `work`."""

    def make(place: Place) -> AttentionViews:
        found = work.on_device(place(work.array)) if work.num_items else None
        return AttentionViews(decodes=(), prefills=(), work=found)

    return OnHost((work.array,), make)


def window_views(
    decodes: DecodeRows,
    slices: Sequence[SliceLayout],
    window: int | None,
    rules: ViewRules,
) -> WindowViews:
    """Views of `decodes`, and of the `slices` after them, through `window`."""
    found = SliceRows.of(decodes, slices)
    decodes, rows, longer = found.singles, found.single_rows, found.longer
    if rules.kernels.decode is AttentionMethod.TRITON:
        return _work_views(decodes, rows, longer, found.begins, window, rules)
    of_decodes = decode_views(decodes, rows, window, rules, are_all=not longer)
    of_longer = [prefill_view(item, window, rules) for item in longer]

    def make(place: Place) -> AttentionViews:
        return AttentionViews(
            decodes=tuple(view.make(place) for view in of_decodes),
            prefills=tuple(view.make(place) for view in of_longer),
        )

    arrays = [view.arrays for view in of_decodes] + [view.arrays for view in of_longer]
    return WindowViews(OnHost(tuple(itertools.chain.from_iterable(arrays)), make))


def _work_views(
    decodes: DecodeRows,
    rows: Column,
    longer: Sequence[SliceLayout],
    begins: Sequence[int],
    window: int | None,
    rules: ViewRules,
) -> WindowViews:
    """Views for Triton kernels of `decodes` in `rows`, and of `longer` slices from rows `begins` on."""
    if rules.top_k is not None:
        return _views_of_choices(decodes, rows, longer, begins, rules.top_k, rules)
    if rules.indexer is not None:
        assert window is None, "blocks of all tokens"
        return _views_of_block_choices(decodes, rows, longer, begins, rules.indexer, rules)
    has_all = rules.kernels.prefill is AttentionMethod.TRITON
    work = HostWork.of(
        decodes,
        rows if has_all else np.arange(len(decodes)),
        longer if has_all else (),
        begins if has_all else (),
        window=window,
        block_size=rules.block_size,
        queries_per_item=rules.queries_per_item,
    )
    others = [] if has_all else [prefill_view(item, window, rules) for item in longer]
    if not others:
        return WindowViews(view_of(work), work)
    return WindowViews(_view_of_both(work, rows, others, None))


def _views_of_choices(
    decodes: DecodeRows,
    rows: Column,
    longer: Sequence[SliceLayout],
    begins: Sequence[int],
    top_k: int,
    rules: ViewRules,
) -> WindowViews:
    """Like `_work_views`, where queries of more than `top_k` tokens choose among them."""
    do_choose = [item.end_position > top_k for item in longer]
    chosen = list(itertools.compress(longer, do_choose))
    first_rows = list(itertools.compress(begins, do_choose))
    decode_choices = len(decodes) > 0 and int(decodes.positions.max()) >= top_k
    groups = None
    if decode_choices or chosen:
        choosing = (decodes, rows) if decode_choices else (NO_DECODES, rows[:0])
        groups = choice_groups(*choosing, chosen, first_rows, top_k=top_k, block_size=rules.block_size)
    kept, kept_rows = (NO_DECODES, rows[:0]) if decode_choices else (decodes, rows)
    work = HostWork.of(
        kept, np.arange(len(kept)), window=None, block_size=rules.block_size, queries_per_item=1
    )
    others = [prefill_view(item, None, rules) for item in longer if item.end_position <= top_k]
    if groups is None and not others:
        return WindowViews(view_of(work), work)
    return WindowViews(_view_of_both(work, kept_rows, others, groups))


def _views_of_block_choices(
    decodes: DecodeRows,
    rows: Column,
    longer: Sequence[SliceLayout],
    begins: Sequence[int],
    indexer: BlockIndexer,
    rules: ViewRules,
) -> WindowViews:
    """Like `_work_views`, where queries of more than `indexer.top_blocks` whole blocks choose among them."""
    fewest = (indexer.top_blocks + 1) * indexer.block_size
    do_choose = [item.end_position >= fewest for item in longer]
    decode_choices = len(decodes) > 0 and int(decodes.positions.max()) + 1 >= fewest
    nothing = (NO_DECODES, rows[:0])
    choosing, kept = ((decodes, rows), nothing) if decode_choices else (nothing, (decodes, rows))
    work = HostWork.of(
        *kept,
        [item for item, chooses in zip(longer, do_choose, strict=True) if not chooses],
        [row for row, chooses in zip(begins, do_choose, strict=True) if not chooses],
        window=None,
        block_size=rules.block_size,
        queries_per_item=rules.queries_per_item,
    )
    if not decode_choices and not any(do_choose):
        return WindowViews(view_of(work), work)
    choices = block_choices(
        *choosing,
        list(itertools.compress(longer, do_choose)),
        list(itertools.compress(begins, do_choose)),
        indexer=indexer,
        block_size=rules.block_size,
    )
    plain = view_of(work)

    def make(place: Place) -> AttentionViews:
        return replace(plain.make(place), block_choices=choices.make(place))

    return WindowViews(OnHost((*plain.arrays, *choices.arrays), make))


def _view_of_both(
    work: HostWork,
    rows: Column,
    others: Sequence[OnHost[PrefillView]],
    groups: OnHost[tuple[ChoiceGroup, ...]] | None,
) -> OnHost[AttentionViews]:
    """`work` of one-token slices in `rows`, views of longer ones, and groups of queries that choose."""

    def make(place: Place) -> AttentionViews:
        return AttentionViews(
            decodes=(),
            prefills=tuple(view.make(place) for view in others),
            work=work.on_device(place(work.array)) if work.num_items else None,
            work_rows=place(rows),
            choices=() if groups is None else groups.make(place),
        )

    arrays: list[HostArray] = [work.array, rows]
    arrays += itertools.chain.from_iterable(view.arrays for view in others)
    return OnHost((*arrays, *(() if groups is None else groups.arrays)), make)


def prefill_rows(
    slices: Sequence[SliceLayout], ranges: Sequence[tuple[int, int]], rules: ViewRules
) -> tuple[tuple[int, int], ...]:
    """The rows of `AttentionViews.prefills`, of `slices` in rows `ranges`."""
    if rules.kernels.prefill is AttentionMethod.TRITON:
        return ()
    return tuple(
        (begin, end)
        for item, (begin, end) in zip(slices, ranges, strict=True)
        if end - begin > 1 and not rules.does_choose(item.end_position)
    )
