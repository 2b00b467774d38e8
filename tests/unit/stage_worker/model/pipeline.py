"""Runs a checkpoint through DecoderStages in one process, with paged KV and a simple page table."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from checkpoint import Checkpoint, Compressed, NoMixer, Recurrent
from checkpoint.compressed import PageShape, has_entries
from kvcache import SlotChange
from kvcache.layer_rows import NO_ROWS, LayerRows, RowKind
from kvcache.pages import IndexKeys, KvPages, PageGroups
from kvcache.state_store import StateStore
from stage_worker.loading.stage_loader import new_queue
from stage_worker.model.decoder import DecoderStage
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.state_rows import StateRows
from stage_worker.model.step_layout import StepLayout
from stage_worker.validation import SliceLayout
from tests.step_layouts import layout_for, placed_on

NUM_STATES = 16
"""Recurrent states of a pipeline; a sequence keeps its own for good."""


class NanPages(KvPages):
    """Pages that are NaN until written: anything that reads a slot too early poisons its output."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        num_parts: int = 2,
        device: torch.device | str = "cpu",
        index_widths: Sequence[int] = (),
        rows: Mapping[RowKind, LayerRows] = NO_ROWS,
    ) -> None:
        index = None
        if any(index_widths):
            index = IndexKeys(
                widths=index_widths,
                num_blocks=num_blocks,
                block_size=block_size,
                dtype=dtype,
                device=device,
            )
        super().__init__(
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=device,
            num_parts=num_parts,
            index=index,
            rows=rows,
        )
        self.fill(float("nan"))

    @classmethod
    def of(
        cls,
        shape: PageShape,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        index_widths: Sequence[int] = (),
        rows: Mapping[RowKind, LayerRows] = NO_ROWS,
    ) -> NanPages:
        sizes = (num_layers, num_blocks, block_size, shape.heads, shape.width)
        return cls(*sizes, dtype, shape.parts, device, index_widths, rows)

    def fill(self, value: float, blocks: slice = slice(None)) -> None:
        """Overwrite these blocks in all layers."""
        self._store[:, blocks] = value
        if self.index is not None:
            self.index._store[:, blocks] = value
        for rows in self.rows.values():
            rows.fill(value, torch.arange(self.num_blocks, device=self.device)[blocks])

    def contents(self) -> Tensor:
        """A copy of all pages, [layers, blocks, keys and values, heads, block_size, head_dim]."""
        return self._store.clone()


@dataclass
class Running:
    """A running sequence: its pages and its number of computed tokens."""

    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    first_block: int = 0
    slot: int | None = None


class Pipeline:
    """The stages of `checkpoint` cut at `cuts` (layer numbers), each with its own pages."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        cuts: Sequence[int] = (),
        *,
        block_size: int = 8,
        stage_type: Callable[..., PipelineStage] = DecoderStage,
        **stage_options: Any,
    ) -> None:
        config = checkpoint.config
        self.stages: list[PipelineStage] = []
        self.pages: list[PageGroups] = []
        self._sets: list[NanPages] = []
        for begin, end in pairwise([0, *cuts, config.num_layers]):
            stage = stage_type(
                config,
                layer_begin=begin,
                layer_end=end,
                has_embeddings=begin == 0,
                has_head=end == config.num_layers,
                dtype=config.dtype,
                **stage_options,
            )
            stage.load(checkpoint, copies=new_queue(stage.device))
            self.stages.append(stage)
            self.pages.append(self._new_pages(stage, block_size))
        self.block_size = block_size
        self.free = list(range(96))
        random.Random(7).shuffle(self.free)
        self.free_slots = list(range(NUM_STATES))
        self.window = max((w for w in config.layer_windows if w), default=0)
        self.releases = all(config.cache_windows)

    def step(self, work: Sequence[tuple[Running, int]], *, shift: int = 0) -> list[Tensor]:
        """Compute the next `n` tokens of each sequence; logits [n, vocab] of each. `shift` falsifies the
        positions of all but the first stage."""
        inputs = [s.tokens[s.num_computed : s.num_computed + n] for s, n in work]
        slices = [self._slice(s, n) for s, n in work]
        slots = [self._slot(s) for s, _ in work]
        tokens = torch.tensor(list(chain.from_iterable(inputs)))
        hidden = self.stages[0].embed(tokens)
        for index, (stage, pages) in enumerate(zip(self.stages, self.pages, strict=True)):
            shifted = [_shifted(item, shift if index else 0) for item in slices]
            layout = self._layout(stage, shifted).with_tokens(tokens.to(stage.device))
            if pages.states is not None:
                layout = replace(layout, states=states_of(stage, [n for _, n in work], slots))
            hidden = stage.forward(hidden, layout, pages)
        for s, n in work:
            s.num_computed += n
            self._release(s)
        return list(torch.split(self.stages[-1].logits(hidden), [n for _, n in work]))

    def fill(self, value: float) -> None:
        """Overwrite all pages of all stages."""
        for pages in self._sets:
            pages.fill(value)

    def _new_pages(self, stage: PipelineStage, block_size: int) -> PageGroups:
        """One set for each shape; blocks of all sets have the same numbers."""
        shapes = _shapes(stage)
        layers = [stage.config.layers[layer] for layer in stage.layers]
        both = [mixer for layer in layers for mixer in (layer.mixer, layer.beside)]
        mixers = [mixer for mixer in both if mixer is not None and not isinstance(mixer, NoMixer)]
        recurrent = [layer.state_parts for layer in layers if layer.state_parts]
        of_layers = [
            None if isinstance(mixer, Recurrent) else shapes.index(stage.config.page_shape(mixer.window))
            for mixer in mixers
        ]
        placed = list(zip(mixers, of_layers, strict=True))
        pages = [
            NanPages.of(
                shape,
                of_layers.count(group),
                96,
                block_size,
                stage.torch_dtype,
                stage.device,
                index_widths=[mixer.index_width for mixer, own in placed if own == group],
                rows=_pending(stage, block_size),
            )
            for group, shape in enumerate(shapes)
        ]
        if entries := _entries(stage, block_size):
            sizes = (0, 96, block_size, 1, 1)
            pages.insert(0, NanPages(*sizes, stage.torch_dtype, 1, stage.device, rows=entries))
            of_layers = [None if group is None else group + 1 for group in of_layers]
        self._sets += pages
        if not recurrent:
            return PageGroups(pages, of_layers)
        of_states = [
            [(part.shape, torch.float32 if part.is_wide else stage.torch_dtype) for part in parts]
            for parts in recurrent
        ]
        states = StateStore(layers=of_states, num_states=NUM_STATES, device=stage.device)
        for layer in range(len(recurrent)):
            for part in states.layer(layer):
                part.fill_(float("nan"))
        return PageGroups(pages, of_layers, states)

    def _slot(self, sequence: Running) -> int:
        """Slot of the sequence's recurrent state, zeroed when it begins."""
        if sequence.slot is None:
            sequence.slot = self.free_slots.pop(0)
            for pages in self.pages:
                if pages.states is not None:
                    pages.states.change([SlotChange(sequence.slot, None)])
        return sequence.slot

    def _layout(self, stage: PipelineStage, slices: list[SliceLayout]) -> StepLayout:
        """The layout of each set of pages."""
        windows: list[set[int | None]] = [
            {window for window in stage.windows if stage.config.page_shape(window) == shape}
            for shape in _shapes(stage)
        ]
        if _entries(stage, self.block_size):
            windows.insert(0, {None})
        first, *others = (
            layout_for(stage, slices, block_size=self.block_size, windows=own) for own in windows
        )
        return replace(first, others=tuple(others))

    def _slice(self, sequence: Running, num_tokens: int) -> SliceLayout:
        end = sequence.num_computed + num_tokens + 1  # one to spare, for positions that a test shifts
        while (sequence.first_block + len(sequence.pages)) * self.block_size < end:
            sequence.pages.append(self.free.pop())
        return SliceLayout(
            first_position=sequence.num_computed,
            num_tokens=num_tokens,
            pages=tuple(sequence.pages),
            first_block=sequence.first_block,
            num_valid=sequence.num_computed,
        )

    def _release(self, sequence: Running) -> None:
        """Free the blocks that no later query reads, if every layer has a window."""
        if not self.releases:
            return
        while (sequence.first_block + 1) * self.block_size <= sequence.num_computed - self.window + 1:
            self.free.append(sequence.pages.pop(0))
            sequence.first_block += 1


def _compressed(stage: PipelineStage) -> list[tuple[int, Compressed]]:
    """The stage's layers with entries, by their numbers on the stage."""
    mixers = enumerate(stage.config.layers[layer].mixer for layer in stage.layers)
    return [
        (number, mixer) for number, mixer in mixers if isinstance(mixer, Compressed) and has_entries(mixer)
    ]


def _pending(stage: PipelineStage, block_size: int) -> Mapping[RowKind, LayerRows]:
    shapes = {number: (block_size, mixer.pending_width) for number, mixer in _compressed(stage)}
    return {RowKind.PENDING: _rows(stage, shapes)} if shapes else NO_ROWS


def _entries(stage: PipelineStage, block_size: int) -> Mapping[RowKind, LayerRows]:
    entries, keys = {}, {}
    for number, mixer in _compressed(stage):
        assert mixer.compressor is not None
        entries[number] = (mixer.compressor.rows_per_block(block_size), mixer.head_dim)
        if mixer.entry_index_width:
            keys[number] = (entries[number][0], mixer.entry_index_width)
    shapes = {RowKind.ENTRY: entries, RowKind.ENTRY_KEY: keys}
    return {kind: _rows(stage, some) for kind, some in shapes.items() if some}


def _rows(stage: PipelineStage, shapes: Mapping[int, tuple[int, int]]) -> LayerRows:
    return LayerRows(shapes, num_blocks=96, dtype=stage.torch_dtype, device=stage.device)


def _shapes(stage: PipelineStage) -> list[PageShape]:
    """The distinct shapes of a stage's pages."""
    return list(dict.fromkeys(map(stage.config.page_shape, stage.windows)))


def states_of(stage: PipelineStage, lengths: list[int], slots: list[int]) -> StateRows:
    """Rows of slices of `lengths` tokens on the stage's device."""
    return stage.host_states(lengths, slots).rows.make(placed_on(stage.device))


def _shifted(item: SliceLayout, shift: int) -> SliceLayout:
    return SliceLayout(
        first_position=item.first_position + shift,
        num_tokens=item.num_tokens,
        pages=item.pages,
        first_block=item.first_block,
        num_valid=0,
    )
