"""How much a step computes, in the terms that its time depends on. Pure."""

from dataclasses import dataclass

from wire.steps import Prefill, Step

CONTEXT_PER_SEQUENCE = 1024
"""Tokens of context whose keys and values cost a decode as much as everything else about one sequence.

Only the balance between steps depends on it; how long a step takes is measured.
"""


def decodes_cost(num_sequences: int, context: int) -> int:
    """The cost of decodes of sequences with `context` tokens in all, in tokens of context."""
    return num_sequences * CONTEXT_PER_SEQUENCE + context


CONTEXT_ROWS = 32
"""To get at the keys and values of a context takes as long as attending to them with so many tokens."""


def chunk_pairs(start: int, num_tokens: float) -> float:
    """What attention costs a prefill chunk whose first token is at position `start`, in query-key pairs."""
    return (num_tokens + CONTEXT_ROWS) * start + num_tokens * (num_tokens + 1) / 2


@dataclass(slots=True)
class StepWork:
    """The decodes of a step by their cost, its prefill chunks by tokens and query-key pairs."""

    decode_cost: int = 0
    chunk_tokens: int = 0
    chunk_pairs: float = 0

    def add_chunk(self, start: int, num_tokens: int) -> None:
        self.chunk_tokens += num_tokens
        self.chunk_pairs += chunk_pairs(start, num_tokens)

    @property
    def is_empty(self) -> bool:
        """Nothing is computed: the step carries records and frees only."""
        return not self.decode_cost and not self.chunk_tokens


def work_of(step: Step) -> StepWork:
    """What `step` computes, as its slices say."""
    work = StepWork()
    num_decodes = context = 0
    for part in step.slices:
        if isinstance(part.inference_step, Prefill):
            work.add_chunk(part.first_position, len(part.tokens))
        else:
            num_decodes += 1
            context += part.first_position + 1
    if num_decodes:
        work.decode_cost = decodes_cost(num_decodes, context)
    return work
