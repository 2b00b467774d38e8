"""What the sampler knows of one (sequence, generation): a function of its tokens and parameters only."""

from dataclasses import dataclass

from stage_worker.sampling.masks import SequenceMasks, masks_for
from stage_worker.sampling.parameters import check_sampling
from stage_worker.sampling.penalties import Bias, TokenCounts, counts_for
from wire.steps import StartRecord, StepSampling


@dataclass(slots=True)
class SequenceState:
    """`problem` is why no token can be drawn; `prompt` is kept for scoring until the first decode step.

    What is None is not used by the sequence and costs nothing.
    """

    sampling: StepSampling
    prompt: tuple[int, ...]
    problem: str | None = None
    bias: Bias | None = None
    counts: TokenCounts | None = None
    masks: SequenceMasks | None = None

    @classmethod
    def of(cls, record: StartRecord, *, vocab_size: int) -> "SequenceState":
        """The state after `record.tokens`, whether they came with a prompt or were generated before."""
        sampling, tokens = record.sampling, record.tokens
        prompt = tokens[: record.num_prompt_tokens]
        problem = _problem(record, vocab_size)
        if problem is not None:
            return cls(sampling, prompt, problem)
        return cls(
            sampling,
            prompt,
            bias=Bias.of(sampling),
            counts=counts_for(sampling, tokens, record.num_prompt_tokens),
            masks=masks_for(sampling, tokens, record.num_prompt_tokens),
        )

    @property
    def edits_logits(self) -> bool:
        return (
            self.bias is not None
            or self.counts is not None
            or self.masks is not None
            or self.sampling.grammar is not None
        )

    def add(self, token: int) -> None:
        """One more generated token."""
        self.prompt = ()
        if self.counts is not None:
            self.counts.add(token)
        if self.masks is not None:
            self.masks.add(token)


def _problem(record: StartRecord, vocab_size: int) -> str | None:
    largest = max(record.tokens, default=0)
    if largest >= vocab_size:
        return f"token {largest} of the start record is not in [0, {vocab_size})"
    try:
        check_sampling(record.sampling, vocab_size=vocab_size)
    except ValueError as error:
        return str(error)
    return None
