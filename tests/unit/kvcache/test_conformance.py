"""Every case of the conformance vectors."""

import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from kvcache import (
    ActiveSequence,
    Block,
    BlockPool,
    Deref,
    Destroy,
    Event,
    FullBlock,
    KvCacheError,
    OutOfBlocks,
    PartialBlock,
    Promote,
    Signal,
    Stored,
    Use,
    block_hash,
    sequence_hash,
)
from tests.repository import DATA

Json = dict[str, Any]


_VECTORS: Json = json.loads((DATA / "kv_vectors.json").read_text())


def _cases(kind: str) -> list[Any]:
    return [pytest.param(case, id=case.get("name")) for case in _VECTORS[kind]]


@pytest.mark.parametrize("case", _cases("hashes"))
def test_hashes_equal_the_vectors(case: Json) -> None:
    if "blocks" not in case:
        assert block_hash(case["tokens"], case["salt"]) == case["block_hash"]
        return
    parent = None
    for index, expected in enumerate(case["blocks"]):
        start = index * case["block_size"]
        of_block = block_hash(case["tokens"][start : start + case["block_size"]], case["salt"])
        parent = sequence_hash(parent, of_block)
        assert {"block_hash": of_block, "sequence_hash": parent} == expected
    sequence = ActiveSequence(
        case["tokens"],
        block_size=case["block_size"],
        max_output_tokens=0,
        salt=case["salt"],
        new_id=count().__next__,
    )
    use = sequence.prepare(len(sequence))
    assert use is not None
    assert list(use.block_hashes) == [block["block_hash"] for block in case["blocks"]]
    assert list(use.blocks) == [FullBlock(block["sequence_hash"]) for block in case["blocks"]]


def _named(block: Block) -> str | int:
    return f"P{block.id}" if isinstance(block, PartialBlock) else block.sequence_hash


def _described(signal: Signal) -> Json:
    match signal:
        case Use():
            return {"use": [_named(block) for block in signal.blocks]}
        case Promote():
            names = {
                "sequence_hash": signal.sequence_hash,
                "parent": signal.parent,
                "block_hash": signal.block_hash,
            }
            return {"promote": _named(signal.partial)} | names
        case Deref():
            return {"deref": _named(signal.block)}
        case Destroy():
            return {"destroy": _named(signal.block)}


def _sequence_step(sequence: ActiveSequence, op: str, arg: Any) -> list[Signal]:
    """Runs one step and returns its signals."""
    match op:
        case "prepare":
            use = sequence.prepare(arg)
            return [use] if use else []
        case "commit":
            sequence.commit(arg)
        case "push":
            return sequence.push(arg)
        case "push_range":
            for token in range(*arg):
                sequence.push(token)
        case "pop":
            sequence.pop()
        case "preempt":
            return sequence.preempt()
        case "free":
            return sequence.free_signals()
        case "release_before":
            return sequence.release_before(arg)
        case _:
            raise AssertionError(f"the vectors have a new operation {op!r}")
    return []


@pytest.mark.parametrize("case", _cases("sequences"))
def test_sequences_emit_the_signals_of_the_vectors(case: Json) -> None:
    sequence = ActiveSequence(
        range(case["num_prompt"]),
        block_size=case["block_size"],
        max_output_tokens=case["max_output_tokens"],
        new_id=count().__next__,
    )
    for step in case["steps"]:
        signals = _sequence_step(sequence, step["op"], step.get("arg"))
        if "expect" in step:
            assert [_described(signal) for signal in signals] == step["expect"], step
    observed: dict[str, Callable[[], int]] = {
        "len": lambda: len(sequence),
        "num_blocks": lambda: len(sequence.blocks),
        "num_generated": lambda: sequence.num_generated_tokens,
    }
    assert {name: observed[name]() for name in case["end"]} == case["end"]


def _block(name: str | int) -> Block:
    return PartialBlock(int(name[1:])) if isinstance(name, str) else FullBlock(name)


def _pool_signals(step: Json) -> list[Signal]:
    if "use" in step:
        blocks = tuple(_block(name) for name in step["use"])
        hashes = tuple(1000 + block.sequence_hash for block in blocks if isinstance(block, FullBlock))
        return [Use(blocks, hashes, None)]
    if "promote" in step:
        partial = _block(step["promote"])
        assert isinstance(partial, PartialBlock)
        return [Promote(partial, step["to"], step["parent"], 1000 + step["to"])]
    kind, names = ("deref", step["deref"]) if "deref" in step else ("destroy", step["destroy"])
    return [Deref(_block(name)) if kind == "deref" else Destroy(_block(name)) for name in names]


def _event_json(event: Event) -> Json:
    if isinstance(event, Stored):
        assert event.block_hashes == tuple(1000 + name for name in event.sequence_hashes)
        return {"stored": list(event.sequence_hashes), "parent": event.parent}
    return {"removed": list(event.block_hashes)}


@pytest.mark.parametrize("case", _cases("pools"))
def test_pools_end_in_the_state_of_the_vectors(case: Json) -> None:
    pool = BlockPool(case["num_blocks"])
    events: list[Event] = []
    for step in case["steps"]:
        if "raises" in step:
            error = {"OutOfBlocks": OutOfBlocks, "any": KvCacheError}[step["raises"]]
            digest = pool.digest
            (signal,) = _pool_signals(step)
            with pytest.raises(error):
                pool.apply(signal)
            assert pool.digest == digest
        else:
            for signal in _pool_signals(step):
                events += pool.apply(signal)
        pool.check_integrity()
    end = case["end"]
    active = {int(name): num_owners for name, num_owners in end["active"].items()}
    assert {name: pool.refcount(FullBlock(name)) for name in active} == active
    assert pool.num_active == len(active)
    assert list(pool.inactive) == end["inactive"]
    if "free" in end:
        assert pool.num_free == end["free"]
    if "events" in case:
        assert [_event_json(event) for event in events] == case["events"]
        assert [event.event_id for event in events] == list(range(len(events)))
