"""A second block pool, written from the rules with nothing but dicts and lists, to test the first against."""

from dataclasses import dataclass, field

from kvcache import (
    Block,
    Deref,
    Destroy,
    Event,
    FullBlock,
    PartialBlock,
    Promote,
    Removed,
    Signal,
    Stored,
    Use,
)


class Refused(Exception):
    """The signal does not apply, or does not fit."""


@dataclass
class NaivePool:
    capacity: int
    refcounts: dict[Block, int] = field(default_factory=dict)
    inactive: list[FullBlock] = field(default_factory=list)
    num_events: int = 0

    def apply(self, signal: Signal) -> list[Event]:
        before = (dict(self.refcounts), list(self.inactive), self.num_events)
        try:
            match signal:
                case Use():
                    return self._use(signal)
                case Promote():
                    return self._promote(signal)
                case Deref():
                    return self._deref(signal.block)
                case Destroy():
                    return self._destroy(signal.block)
        except Refused:
            self.refcounts, self.inactive, self.num_events = before
            raise

    def _use(self, use: Use) -> list[Event]:
        removed, entered = [], []
        for block in use.blocks:
            if block in self.refcounts:
                self.refcounts[block] += 1
                entered.append(False)
            elif block in self.inactive:
                assert isinstance(block, FullBlock)
                self.inactive.remove(block)
                self.refcounts[block] = 1
                entered.append(False)
            else:
                if len(self.refcounts) + len(self.inactive) == self.capacity:
                    removed.append(self._evict(use))
                self.refcounts[block] = 1
                entered.append(True)
        events: list[Event] = [Removed(tuple(removed), self._event_id())] if removed else []
        full = [(b, new) for b, new in zip(use.blocks, entered, strict=True) if isinstance(b, FullBlock)]
        index = 0
        while index < len(full):
            end = index
            while end < len(full) and full[end][1]:
                end += 1
            if end > index:
                names = tuple(block.sequence_hash for block, _ in full[index:end])
                parent = full[index - 1][0].sequence_hash if index else use.parent
                events.append(Stored(parent, names, use.block_hashes[index:end], self._event_id()))
            index = end + 1
        return events

    def _evict(self, use: Use) -> int:
        for block in self.inactive:
            if block not in use.blocks:
                self.inactive.remove(block)
                return block.sequence_hash
        raise Refused

    def _promote(self, promote: Promote) -> list[Event]:
        if self.refcounts.get(promote.partial) != 1:
            raise Refused
        del self.refcounts[promote.partial]
        full = FullBlock(promote.sequence_hash)
        known = full in self.refcounts or full in self.inactive
        self.refcounts[full] = self.refcounts.get(full, 0) + 1
        self.inactive = [block for block in self.inactive if block != full]
        if known:
            return []
        return [Stored(promote.parent, (full.sequence_hash,), (promote.block_hash,), self._event_id())]

    def _deref(self, block: Block) -> list[Event]:
        if block not in self.refcounts or isinstance(block, PartialBlock):
            raise Refused
        self.refcounts[block] -= 1
        if not self.refcounts[block]:
            del self.refcounts[block]
            self.inactive.append(block)
        return []

    def _destroy(self, block: Block) -> list[Event]:
        if block not in self.refcounts:
            raise Refused
        self.refcounts[block] -= 1
        if self.refcounts[block]:
            return []
        del self.refcounts[block]
        return [Removed((block.sequence_hash,), self._event_id())] if isinstance(block, FullBlock) else []

    def _event_id(self) -> int:
        self.num_events += 1
        return self.num_events - 1
