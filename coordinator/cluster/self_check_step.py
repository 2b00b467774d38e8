"""The one step of a self-check, a short prompt whose every token is scored, and what is answered. Pure."""

from itertools import count

from coordinator.planning.plan import Plan
from coordinator.scheduling.kv_log import KvLog
from kvcache import ActiveSequence
from wire.ids import RequestId, SequenceKey
from wire.reference import NUM_TOP, check_prompt
from wire.steps import Prefill, Slice, SliceError, StartRecord, Step, StepResult, StepSampling, TokenLogprobs

_KEY = SequenceKey(RequestId(bytes(16)), 0)


class BadAnswer(ValueError):
    """The pipeline has not answered with log-probabilities of all tokens; the text says with what."""


def prompt_for(plan: Plan, vocab_size: int) -> tuple[int, ...]:
    """As many tokens of the check's prompt as fit into one step of the plan."""
    return check_prompt(vocab_size)[: min(plan.limits.max_step_tokens, plan.max_sequence_tokens)]


def check_step(plan: Plan, epoch: int, prompt: tuple[int, ...]) -> Step:
    """The first step of an epoch, which has no other."""
    kv = KvLog(num_blocks=plan.num_blocks, block_size=plan.block_size, prefix_caching=False)
    blocks = ActiveSequence(
        prompt,
        block_size=plan.block_size,
        max_output_tokens=1,
        prefix_caching=False,
        new_id=count(1).__next__,
    )
    kv.allocate(_KEY, blocks, len(prompt))
    sampling = StepSampling(logprobs=NUM_TOP, prompt_logprobs=NUM_TOP)
    prefill = Prefill(0, len(prompt), len(prompt), is_scored=len(prompt) > 1)
    return Step(
        epoch=epoch,
        step_id=0,
        slices=(Slice(_KEY, 0, prompt, prefill),),
        starts=(StartRecord(_KEY, 0, len(prompt), prompt, sampling),),
        signals=kv.take_pending(),
        digest=kv.digest,
    )


def answered_rows(result: StepResult, num_tokens: int) -> tuple[TokenLogprobs, ...]:
    """What the pipeline says after each of the prompt's `num_tokens` tokens. Raises BadAnswer."""
    if result.step_id != 0 or [each.sequence for each in result.results] != [_KEY]:
        raise BadAnswer(f"an answer to step {result.step_id} with {len(result.results)} results")
    (answer,) = result.results
    if isinstance(answer.outcome, SliceError):
        raise BadAnswer(answer.outcome.message.replace(f" of {_KEY}", ""))
    if answer.logprobs is None or len(answer.prompt_logprobs) != num_tokens - 1:
        raise BadAnswer(f"{len(answer.prompt_logprobs)} log-probabilities for {num_tokens} tokens")
    return (*answer.prompt_logprobs, answer.logprobs)
