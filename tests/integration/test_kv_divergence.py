"""A replica that diverges from the ledger is detected before it causes a wrong token.

Each test damages the accounting of one stage during a run with constant hits, evictions and preemptions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvcache import Block, BlockTables, Deref, Destroy, FullBlock, Grow, Promote, Signal, Use
from tests.checkpoints import make_checkpoint
from tests.local_pipeline import LocalPipeline, Request
from wire.errors import StepFault, StepFaultKind
from wire.steps import Step

BLOCK_SIZE, NUM_BLOCKS = 8, 10
NUM_STAGES = 3
CAUGHT = (StepFaultKind.KV_DIVERGENCE, StepFaultKind.KV_SIGNAL)


def load() -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 128, (400,), generator=generator).tolist()
    return [
        Request(prompt=[*tokens[:21], *tokens[30 * i : 30 * i + 9]], max_tokens=20, arrives_at=3 * i)
        for i in range(8)
    ]


class Damaged(LocalPipeline):
    """Serves the load with one stage damaged before a step, and records the outcome."""

    def damage(self, stage: int, step_id: int, harm: Callable[[BlockTables], bool]) -> StepFault | None:
        """Run the load; return the fault, or None. `harm` is tried from `step_id` on until it returns that it
        changed something.
        """
        self.harmed_at: int | None = None
        self.now = 0
        tables: list[BlockTables] = []

        def before(now: int, step: Step) -> None:
            self.now = step.step_id
            if now == 0 and step.step_id == 0:
                tables[:] = [executor._tables for executor in self.stages]
            if now == 0 and self.harmed_at is not None and step.step_id > self.harmed_at:
                # The steps before this one passed, so none of them may have had an effect.
                reference = tables[(stage + 1) % NUM_STAGES]
                assert held_blocks(tables[stage]) == held_blocks(reference)
                assert tables[stage].digest == reference.digest
            if now == stage and step.step_id >= step_id and self.harmed_at is None and harm(tables[stage]):
                self.harmed_at = step.step_id

        self.before_stage = before
        try:
            self.serve(load())
        except StepFault as fault:
            return fault
        return None


def held_blocks(tables: BlockTables) -> dict[object, list[Block]]:
    return {key: table.blocks for key, table in tables._tables.items()}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    directory = make_checkpoint(
        tmp_path_factory.mktemp("llama"), "llama", num_layers=3, seed=9, initializer_range=0.3
    )
    return Damaged(
        directory, (1, 1, 1), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_step_tokens=2 * BLOCK_SIZE
    )


@pytest.fixture(scope="module")
def expected(pipeline: Damaged) -> list[list[int]]:
    run = pipeline.serve(load())
    assert run.scheduler.counts.num_preemptions > 2
    assert run.scheduler.counts.num_cached_tokens > 0
    assert run.num_answered > 80
    return run.tokens


def check(pipeline: Damaged, fault: StepFault | None, expected: list[list[int]]) -> StepFault:
    """Assert that the damage was detected before any wrong token."""
    assert pipeline.harmed_at is not None
    assert fault is not None, f"the damage before step {pipeline.harmed_at} was never detected"
    assert fault.kind in CAUGHT
    assert fault.step_id is not None
    assert fault.step_id >= pipeline.harmed_at
    assert pipeline.last_run is not None
    for tokens, right in zip(pipeline.last_run.tokens, expected, strict=True):
        assert tokens == right[: len(tokens)]
    if fault.kind is StepFaultKind.KV_DIVERGENCE:
        text = re.fullmatch(r"KV digest after step (\d+): expected (\w{16}), got (\w{16})", fault.message)
        assert text is not None
        assert int(text[1]) == fault.step_id
        assert text[2] != text[3]
    return fault


def swap_lru(tables: BlockTables) -> bool:
    """Swap the two least recently used blocks."""
    inactive = tables.pool._inactive
    if len(inactive) < 2:
        return False
    keys = list(inactive)
    for key in [keys[1], keys[0], *keys[2:]]:
        inactive.move_to_end(key)
    return True


def raise_refcount(tables: BlockTables) -> bool:
    """Add an owner that does not exist."""
    for page in tables.pool._full.values():
        page.num_owners += 1
        return True
    return False


def lower_refcount(tables: BlockTables) -> bool:
    """Remove an owner from a shared block."""
    for page in tables.pool._full.values():
        if page.num_owners > 1:
            page.num_owners -= 1
            return True
    return False


def forget_cached(tables: BlockTables) -> bool:
    """Lose the most recently used inactive block."""
    if not tables.pool._inactive:
        return False
    _, page = tables.pool._inactive.popitem()
    tables.pool._freed.append(page)
    return True


HARMS = [swap_lru, raise_refcount, lower_refcount, forget_cached]


@pytest.mark.matrix(0, full=4)
@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
@pytest.mark.parametrize("stage", range(NUM_STAGES))
def test_damage_to_a_pool_is_detected_before_a_wrong_token(
    pipeline: Damaged, expected: list[list[int]], stage: int, harm: Callable[[BlockTables], bool]
) -> None:
    kinds = []
    for step_id in range(2, 60, 7):
        fault = pipeline.damage(stage, step_id, harm)
        if fault is None:
            # No effect: for example, a swapped block was reused before its eviction.
            assert pipeline.last_run is not None
            assert pipeline.last_run.tokens == expected
        else:
            kinds.append(check(pipeline, fault, expected).kind)
    assert len(kinds) > 4
    assert StepFaultKind.KV_DIVERGENCE in kinds


def flipped(signal: Signal) -> Signal:
    """The same signal with one bit or its kind changed."""
    match signal:
        case Use(blocks, hashes, _) if hashes:
            first = FullBlock(blocks[0].sequence_hash ^ 1) if isinstance(blocks[0], FullBlock) else blocks[0]
            return replace(signal, blocks=(first, *blocks[1:]))
        case Use(_, _, parent):
            return replace(signal, parent=(parent or 0) ^ 1)
        case Promote():
            return replace(signal, sequence_hash=signal.sequence_hash ^ 1)
        case Deref(block):
            return Destroy(block)
        case Destroy():
            return replace(signal, block=replace(signal.block, id=signal.block.id ^ 1))


def left_out(signal: Signal) -> None:
    """Drop the signal."""


@pytest.mark.matrix(0, full=3)
@pytest.mark.parametrize("change", [flipped, left_out], ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", [Use, Promote, Deref, Destroy])
def test_a_changed_signal_is_detected_in_its_own_step(
    pipeline: Damaged,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Signal],
    change: Callable[[Signal], Signal | None],
) -> None:
    apply = BlockTables.apply
    for stage, step_id in itertools.product(range(NUM_STAGES), (1, 9, 30, 55)):
        is_due = True

        def changed(
            tables: BlockTables,
            key: object,
            signal: Signal,
            *,
            is_counted: bool = True,
            stage: int = stage,
            step_id: int = step_id,
        ) -> object:
            nonlocal is_due
            wanted: Signal | None = signal
            is_here = tables is pipeline.stages[stage]._tables and pipeline.now >= step_id
            if is_due and is_here and isinstance(signal, kind):
                is_due, pipeline.harmed_at = False, pipeline.now
                wanted = change(signal)
            return () if wanted is None else apply(tables, key, wanted, is_counted=is_counted)

        with monkeypatch.context() as patch:
            patch.setattr(BlockTables, "apply", changed)
            fault = pipeline.damage(stage, step_id, lambda tables: False)
        assert check(pipeline, fault, expected).step_id == pipeline.harmed_at


@pytest.mark.matrix(2)
@pytest.mark.parametrize("number", range(6), ids=[*Grow._fields, "left out"])
def test_a_changed_grow_is_detected_in_its_own_step(
    pipeline: Damaged, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    grow = BlockTables.grow
    for stage in range(NUM_STAGES):
        is_due = True

        def changed(tables: BlockTables, key: object, given: Grow, *, stage: int = stage) -> object:
            nonlocal is_due
            if is_due and tables is pipeline.stages[stage]._tables and pipeline.now >= 9:
                is_due, pipeline.harmed_at = False, pipeline.now
                if number == len(given):
                    return ()
                given = Grow._make(value ^ (index == number) for index, value in enumerate(given))
            return grow(tables, key, given)

        with monkeypatch.context() as patch:
            patch.setattr(BlockTables, "grow", changed)
            fault = pipeline.damage(stage, 9, lambda tables: False)
        assert check(pipeline, fault, expected).step_id == pipeline.harmed_at
