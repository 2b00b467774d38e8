"""Pages and recurrent states of a stage's layers, by its assignment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from checkpoint import (
    Blueprint,
    Compressed,
    LayerPlan,
    Pageless,
    cached_bytes_per_token,
    entry_bytes_per_block,
    state_bytes,
)
from kvcache import group_windows
from kvcache.layer_rows import NO_ROWS, LayerRows, RowKind
from kvcache.pages import IndexKeys, KvPages, PageGroups
from kvcache.scaled_pages import ScaledPages
from kvcache.state_store import StateStore
from stage_worker.assignment import Assignment
from stage_worker.backends.backend import StageLoadError
from stage_worker.backends.tensor_views import ELEMENTS
from stage_worker.model.layer_weights import TORCH_DTYPES


def _layer_groups(assignment: Assignment, config: Blueprint) -> list[int]:
    """Number of the block group of each layer of the stage."""
    windows = group_windows(config.cache_windows)
    layers = config.layers[assignment.layer_begin : assignment.layer_end]
    return [windows.index(layer.mixer.window) for layer in layers]


def _states_of(assignment: Assignment, config: Blueprint, device: torch.device) -> StateStore | None:
    """States of a stage's recurrent layers; None without such layers."""
    layers = config.layers[assignment.layer_begin : assignment.layer_end]
    found = [layer.state_parts for layer in layers if layer.state_parts]
    if not found:
        return None
    wide, narrow = torch.float32, TORCH_DTYPES[assignment.dtype]
    return StateStore(
        layers=[[(part.shape, wide if part.is_wide else narrow) for part in parts] for parts in found],
        num_states=assignment.num_states,
        device=device,
    )


def kv_bytes_of(assignment: Assignment, config: Blueprint) -> int:
    """Memory of pages, of entries and of recurrent states."""
    layers = config.layers[assignment.layer_begin : assignment.layer_end]
    counts = [assignment.group_blocks[group] for group in _layer_groups(assignment, config)]
    states = sum(state_bytes(layer.state_parts, assignment.dtype) for layer in layers)
    entries = sum(
        entry_bytes_per_block(layer.mixer, assignment.block_size, assignment.dtype) for layer in layers
    )
    beside = assignment.num_states * states + assignment.group_blocks[0] * entries
    return beside + assignment.block_size * sum(
        count * cached_bytes_per_token(layer.mixer, assignment.dtype, assignment.kv_dtype)
        for count, layer in zip(counts, layers, strict=True)
    )


def new_pages(
    assignment: Assignment, config: Blueprint, device: torch.device, *, num_spare: int = 0
) -> KvPages | PageGroups:
    """Pages of a stage's layers, one set for each block group that they are in, each of its own shape, and
    states of its recurrent layers.
    """
    windows = group_windows(config.cache_windows)
    layer_groups = _layer_groups(assignment, config)
    numbers = sorted(set(layer_groups))
    layers = config.layers[assignment.layer_begin : assignment.layer_end]
    # A layer without keys and values counts with a group for the step's layout, and has no pages in it.
    paged = [
        place
        for number, layer in zip(layer_groups, layers, strict=True)
        for place in memory_places(layer, number)
    ]
    new = _kind_of_pages(assignment)
    groups = _entry_pages(assignment, config, device, num_spare=num_spare)
    for number in numbers:
        shape = config.page_shape(windows[number])
        pages = new(
            num_layers=paged.count(number),
            num_blocks=assignment.group_blocks[number],
            block_size=assignment.block_size,
            num_kv_heads=shape.heads,
            head_dim=shape.width,
            num_parts=shape.parts,
            num_spare=num_spare,
            dtype=TORCH_DTYPES[assignment.dtype],
            device=device,
            index=_new_index(assignment, config, number, device, num_spare=num_spare),
            rows=_pending_rows(assignment, config, number, device, num_spare=num_spare),
        )
        groups.append(pages)
    states, first = _states_of(assignment, config, device), len(groups) - len(numbers)
    if len(groups) == 1 and states is None:
        return groups[0]
    indexes = [None if number is None else first + numbers.index(number) for number in paged]
    return PageGroups(groups, indexes, states)


def memory_places(layer: LayerPlan, group: int) -> list[int | None]:
    """`group` if a layer has pages, and then None if it has a state, see `PageGroups`."""
    pages = [] if isinstance(layer.mixer, Pageless) else [group]
    return [*pages, *([] if layer.recurrent is None else [None])]


def _kind_of_pages(assignment: Assignment) -> Callable[..., KvPages]:
    if assignment.kv_dtype is None:
        return KvPages
    return partial(ScaledPages, element=ELEMENTS[assignment.kv_dtype])


def _new_index(
    assignment: Assignment, config: Blueprint, group: int, device: torch.device, *, num_spare: int
) -> IndexKeys | None:
    """Keys of the indexers of the stage's layers in block group `group`; None without indexers."""
    layers = config.layers[assignment.layer_begin : assignment.layer_end]
    in_group = zip(layers, _layer_groups(assignment, config), strict=True)
    mixers = [layer.mixer for layer, own in in_group if own == group]
    widths = [mixer.index_width for mixer in mixers if not isinstance(mixer, Pageless)]
    if not any(widths):
        return None
    return IndexKeys(
        widths=widths,
        num_blocks=assignment.group_blocks[group],
        block_size=assignment.block_size,
        dtype=TORCH_DTYPES[assignment.dtype],
        device=device,
        num_spare=num_spare,
    )


def _pending_rows(
    assignment: Assignment, config: Blueprint, group: int, device: torch.device, *, num_spare: int
) -> Mapping[RowKind, LayerRows]:
    """What entries are pooled of, of the stage's layers in block group `group`."""
    layers = config.layers[assignment.layer_begin : assignment.layer_end]
    in_group = zip(layers, _layer_groups(assignment, config), strict=True)
    mixers = [layer.mixer for layer, own in in_group if own == group]
    shapes = {
        number: (assignment.block_size, mixer.pending_width)
        for number, mixer in enumerate(mixers)
        if isinstance(mixer, Compressed) and mixer.pending_width
    }
    if not shapes:
        return NO_ROWS
    return {RowKind.PENDING: _rows(shapes, assignment, group, device, num_spare)}


def _entry_pages(
    assignment: Assignment, config: Blueprint, device: torch.device, *, num_spare: int
) -> list[KvPages]:
    """The first block group, which has entries and no keys of tokens; none on a stage without entries."""
    layers = config.layers[assignment.layer_begin : assignment.layer_end]
    size = assignment.block_size
    entries, keys = {}, {}
    for number, mixer in enumerate(layer.mixer for layer in layers):
        if isinstance(mixer, Compressed) and mixer.compressor is not None:
            if not mixer.compressor.fits(size):
                raise StageLoadError(f"blocks of {size} tokens and entries of {mixer.compressor.ratio}")
            rows_per_block = mixer.compressor.rows_per_block(size)
            entries[number] = (rows_per_block, mixer.head_dim)
            if mixer.entry_index_width:
                keys[number] = (rows_per_block, mixer.entry_index_width)
    found = {RowKind.ENTRY: entries, RowKind.ENTRY_KEY: keys}
    rows = {kind: _rows(some, assignment, 0, device, num_spare) for kind, some in found.items() if some}
    if not rows:
        return []
    pages = KvPages(
        num_layers=0,
        num_blocks=assignment.group_blocks[0],
        block_size=size,
        num_kv_heads=1,
        head_dim=1,
        dtype=TORCH_DTYPES[assignment.dtype],
        device=device,
        num_parts=1,
        num_spare=num_spare,
        rows=rows,
    )
    return [pages]


def _rows(
    shapes: Mapping[int, tuple[int, int]],
    assignment: Assignment,
    group: int,
    device: torch.device,
    num_spare: int,
) -> LayerRows:
    return LayerRows(
        shapes,
        num_blocks=assignment.group_blocks[group],
        dtype=TORCH_DTYPES[assignment.dtype],
        device=device,
        num_spare=num_spare,
    )
