"""Sizes to which steps are padded, so that a stage repeats what it has recorded for one step of that size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpoint.step_graphs import (
    MAX_ITEMS,
    MAX_PARTIAL_BYTES,
    PARTIAL_PER_ITEM,
    decode_sizes,
    mixed_sizes,
    partial_bytes,
)
from stage_worker.assignment import Assignment
from stage_worker.model.attention_work import WorkRoom, most_pages, most_parts
from stage_worker.model.kernels import AttentionMethod
from stage_worker.model.pipeline_stage import PipelineStage
from stage_worker.model.step_layout import StepArrays, StepRoom

_GROWTH = 4
"""Ratio of items of successive rooms: at most three of four programs have nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBucket:
    """A size of steps: `num_tokens` rows and `num_items` items of attention work.

    Without `has_splits`, the keys of each query are in one item. Steps with `is_decode` have one query per
    sequence.
    """

    num_tokens: int
    num_items: int
    has_splits: bool
    is_decode: bool

    def __str__(self) -> str:
        kind = "decodes" if self.is_decode else "tokens with prompts"
        return f"{self.num_tokens} {kind} and {self.num_items} items of attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBuckets:
    """The buckets of a stage within the limits of its steps.

    Without `has_mixed`, only decodes are recorded. A partial result of attention takes `partial_bytes`; an
    item has up to `queries_per_item` queries.
    `num_blocks` are the stage's, by block group; the page after them is spare.
    """

    max_step_tokens: int
    max_step_sequences: int
    max_sequence_tokens: int
    block_size: int
    num_blocks: Sequence[int]
    has_mixed: bool
    queries_per_item: int
    partial_bytes: int

    @classmethod
    def of(cls, model: PipelineStage, assignment: Assignment) -> StepBuckets:
        """The buckets of `model` for steps within the limits of `assignment`."""
        return cls(
            max_step_tokens=assignment.max_step_tokens,
            max_step_sequences=assignment.max_step_sequences,
            max_sequence_tokens=assignment.max_sequence_tokens,
            block_size=assignment.block_size,
            num_blocks=[assignment.group_blocks[number] for number, _ in model.group_windows],
            has_mixed=model.kernels.prefill is AttentionMethod.TRITON,
            queries_per_item=model.queries_per_item,
            partial_bytes=max(1, *(partial_bytes(layer.mixer) for layer in model.config.kinds)),
        )

    def padded(self, arrays: Sequence[StepArrays]) -> tuple[StepBucket, list[StepArrays]] | None:
        """The step with `arrays` of each block group, in the smallest bucket that has room; None without."""
        for bucket in self._candidates(arrays):
            found = [
                part.padded(self._room(bucket, num_blocks))
                for part, num_blocks in zip(arrays, self.num_blocks, strict=True)
            ]
            padded = [part for part in found if part is not None]
            if len(padded) == len(arrays):
                return bucket, padded
        return None

    def largest(self) -> list[StepBucket]:
        """The largest bucket of each kind, the largest first."""
        sizes = [(self.decode_sizes[-1], True), *((size, False) for size in self.mixed_sizes[-1:])]
        buckets = [list(self._with_tokens(size, is_decode=is_decode))[-1] for size, is_decode in sizes]
        return sorted(buckets, key=lambda bucket: -bucket.num_tokens)

    def empty(self, bucket: StepBucket, arrays: Sequence[StepArrays]) -> list[StepArrays]:
        """A step of padding only, from `arrays` without rows."""
        found = [
            part.padded(self._room(bucket, num_blocks))
            for part, num_blocks in zip(arrays, self.num_blocks, strict=True)
        ]
        return [part for part in found if part is not None]

    @property
    def decode_sizes(self) -> tuple[int, ...]:
        return decode_sizes(min(self.max_step_sequences, self.max_step_tokens))

    @property
    def mixed_sizes(self) -> tuple[int, ...]:
        return mixed_sizes(self.max_step_tokens) if self.has_mixed else ()

    def _candidates(self, arrays: Sequence[StepArrays]) -> Iterator[StepBucket]:
        """Buckets of the smallest size with enough rows, by their room for attention."""
        num_tokens = len(arrays[0].positions)
        is_decode = all(work.num_queries == 1 for part in arrays for work in part.works.values())
        is_decode = is_decode and not any(part.states and part.states.has_longer for part in arrays)
        sizes = self.decode_sizes if is_decode else self.mixed_sizes
        if (size := next((size for size in sizes if size >= num_tokens), None)) is not None:
            yield from self._with_tokens(size, is_decode=is_decode)

    def _with_tokens(self, num_tokens: int, *, is_decode: bool) -> Iterator[StepBucket]:
        """Without parts of keys, then with more and more of them."""
        num_blocks = num_tokens
        if not is_decode:
            # Each slice, and the padding, ends with an item that may have fewer queries.
            num_blocks = min(num_tokens, self.max_step_sequences) + 1 + num_tokens // self.queries_per_item
        most = min(num_blocks * most_parts(self.max_sequence_tokens), self._most_items(is_decode=is_decode))
        num_items, has_splits = num_blocks, False
        while True:
            yield StepBucket(
                num_tokens=num_tokens, num_items=num_items, has_splits=has_splits, is_decode=is_decode
            )
            if num_items >= most:
                return
            num_items, has_splits = min(_GROWTH * num_items, most), True

    def _most_items(self, *, is_decode: bool) -> int:
        of_an_item = self.partial_bytes * (1 if is_decode else PARTIAL_PER_ITEM)
        return max(1, min(MAX_ITEMS, MAX_PARTIAL_BYTES // of_an_item))

    def _room(self, bucket: StepBucket, num_blocks: int) -> StepRoom:
        num_partial = bucket.num_items * (1 if bucket.is_decode else PARTIAL_PER_ITEM)
        return StepRoom(
            num_tokens=bucket.num_tokens,
            num_sequences=min(bucket.num_tokens, self.max_step_sequences),
            has_longer=not bucket.is_decode,
            work=WorkRoom(
                num_items=bucket.num_items,
                num_merges=bucket.num_tokens if bucket.has_splits else 0,
                num_pages=bucket.num_items * most_pages(self.block_size),
                num_partial=num_partial if bucket.has_splits else 0,
                num_queries=1 if bucket.is_decode else self.queries_per_item,
            ),
            spare_slot=num_blocks * self.block_size,
            end_position=self.max_sequence_tokens,
        )
