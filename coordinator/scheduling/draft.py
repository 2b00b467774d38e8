"""The step that is being put together. Pure."""

from dataclasses import dataclass, field

from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.work import StepWork, decodes_cost
from wire.steps import Prefill, Slice, StartRecord


@dataclass(slots=True)
class Draft:
    """Slices and start records so far. `prefill_us`: what its chunks are expected to take."""

    slices: list[Slice] = field(default_factory=list)
    starts: list[StartRecord] = field(default_factory=list)
    work: StepWork = field(default_factory=StepWork)
    num_tokens: int = 0
    record_bytes: int = 0
    prefill_us: float = 0.0

    def count_decodes(self, context: int) -> None:
        """All slices so far are decodes, which attend to `context` tokens in all."""
        self.num_tokens = len(self.slices)
        self.work.decode_cost = decodes_cost(self.num_tokens, context)

    def add_chunk(self, sequence: Sequence, tokens: tuple[int, ...], prefill: Prefill) -> None:
        """A chunk that was taken from `sequence`; its start record goes before the first."""
        start = sequence.take_start_record()
        if start is not None:
            self.starts.append(start)
            self.record_bytes += start.most_bytes
        self.slices.append(Slice(sequence.key, sequence.generation, tokens, prefill))
        self.work.add_chunk(prefill.start, prefill.num_tokens)
        self.num_tokens += len(tokens)
