"""Mutants of the reference, each with one typical sampler bug and the scenarios that must detect it."""

from dataclasses import replace

import numpy as np

from tests.unit.stage_worker.sampling import reference_distribution as reference
from tests.unit.stage_worker.sampling.reference_distribution import (
    FILTERS,
    Array,
    Context,
    Filter,
    probabilities,
)


def unchanged(scores: Array, context: Context) -> Array:
    return scores


def top_k_of_one_more(scores: Array, context: Context) -> Array:
    sampling = context.sampling
    return reference.top_k(scores, replace(context, sampling=replace(sampling, top_k=sampling.top_k + 1)))


def top_k_of_one_less(scores: Array, context: Context) -> Array:
    sampling = context.sampling
    return reference.top_k(scores, replace(context, sampling=replace(sampling, top_k=sampling.top_k - 1)))


def top_k_without_equals(scores: Array, context: Context) -> Array:
    return reference.only(scores, np.argsort(-scores, kind="stable")[: context.sampling.top_k])


def top_p_without_the_token_that_reaches_it(scores: Array, context: Context) -> Array:
    shares = probabilities(scores)
    order = np.argsort(-shares)
    return reference.only(scores, order[np.cumsum(shares[order]) < context.sampling.top_p])


def min_p_relative_to_one(scores: Array, context: Context) -> Array:
    return np.where(probabilities(scores) >= context.sampling.min_p, scores, -np.inf)


def typical_p_as_top_p(scores: Array, context: Context) -> Array:
    sampling = replace(context.sampling, top_p=context.sampling.typical_p)
    return reference.top_p(scores, replace(context, sampling=sampling))


def repetition_penalty_divides_always(scores: Array, context: Context) -> Array:
    penalised = scores.copy()
    penalised[list(set(context.tokens))] /= context.sampling.repetition_penalty
    return penalised


def repetition_penalty_of_the_generated(scores: Array, context: Context) -> Array:
    return reference.repetition_penalty(scores, replace(context, prompt=(), generated=context.generated))


def repetition_penalty_of_the_prompt(scores: Array, context: Context) -> Array:
    return reference.repetition_penalty(scores, replace(context, generated=()))


def repetition_penalty_per_occurrence(scores: Array, context: Context) -> Array:
    for token in context.tokens:
        scores = reference.repetition_penalty(scores, replace(context, prompt=(token,), generated=()))
    return scores


def frequency_penalty_once(scores: Array, context: Context) -> Array:
    return reference.frequency_penalty(scores, replace(context, generated=tuple(set(context.generated))))


def presence_penalty_of_the_prompt_too(scores: Array, context: Context) -> Array:
    return reference.presence_penalty(scores, replace(context, generated=context.tokens))


def presence_penalty_per_occurrence(scores: Array, context: Context) -> Array:
    sampling = replace(context.sampling, frequency_penalty=context.sampling.presence_penalty)
    return reference.frequency_penalty(scores, replace(context, sampling=sampling))


def bad_words_within_the_generated(scores: Array, context: Context) -> Array:
    return reference.bad_words(scores, replace(context, prompt=()))


def bad_words_wherever_their_beginning_is(scores: Array, context: Context) -> Array:
    return reference.without(scores, [word[-1] for word in context.sampling.bad_words])


def min_tokens_one_too_long(scores: Array, context: Context) -> Array:
    return reference.min_tokens(scores, replace(context, generated=context.generated[1:]))


def min_tokens_one_too_short(scores: Array, context: Context) -> Array:
    return reference.min_tokens(scores, replace(context, generated=(0, *context.generated)))


def min_tokens_with_the_prompt(scores: Array, context: Context) -> Array:
    return reference.min_tokens(scores, replace(context, generated=context.tokens))


def replaced(original: Filter, wrong: Filter) -> tuple[Filter, ...]:
    return tuple(wrong if step_filter is original else step_filter for step_filter in FILTERS)


def moved(name: Filter, *, behind: Filter | None) -> tuple[Filter, ...]:
    """Moves a filter behind another one; None: to the front."""
    others = [step_filter for step_filter in FILTERS if step_filter is not name]
    place = 0 if behind is None else others.index(behind) + 1
    return (*others[:place], name, *others[place:])


_IGNORED = {
    f"{step_filter.__name__} ignored": (
        replaced(step_filter, unchanged),
        ("everything-min-p" if step_filter is reference.min_p else "everything",),
    )
    for step_filter in FILTERS
}

MISTAKES: dict[str, tuple[tuple[Filter, ...], tuple[str, ...]]] = {
    **_IGNORED,
    "top_k one more": (replaced(reference.top_k, top_k_of_one_more), ("top-k", "large-top-k")),
    "top_k one less": (replaced(reference.top_k, top_k_of_one_less), ("top-k", "large-top-k")),
    "top_k without equals": (replaced(reference.top_k, top_k_without_equals), ("top-k-ties",)),
    "top_p stops before it is reached": (
        replaced(reference.top_p, top_p_without_the_token_that_reaches_it),
        ("top-p", "large-top-p"),
    ),
    "min_p relative to 1": (
        replaced(reference.min_p, min_p_relative_to_one),
        ("min-p", "warpers"),
    ),
    "typical_p as top_p": (
        replaced(reference.typical_p, typical_p_as_top_p),
        ("typical-p", "large-typical-p", "warpers", "everything"),
    ),
    "repetition_penalty divides negative ones": (
        replaced(reference.repetition_penalty, repetition_penalty_divides_always),
        ("repetition-of-unlikely",),
    ),
    "repetition_penalty of generated tokens only": (
        replaced(reference.repetition_penalty, repetition_penalty_of_the_generated),
        ("repetition", "repetition-of-the-prompt"),
    ),
    "repetition_penalty of prompt tokens only": (
        replaced(reference.repetition_penalty, repetition_penalty_of_the_prompt),
        ("repetition", "penalties"),
    ),
    "repetition_penalty per occurrence": (
        replaced(reference.repetition_penalty, repetition_penalty_per_occurrence),
        ("repetition", "penalties"),
    ),
    "frequency_penalty not times the count": (
        replaced(reference.frequency_penalty, frequency_penalty_once),
        ("frequency", "anti-frequency", "penalties"),
    ),
    "presence_penalty of prompt tokens": (
        replaced(reference.presence_penalty, presence_penalty_of_the_prompt_too),
        ("presence", "presence-at-start"),
    ),
    "presence_penalty times the count": (
        replaced(reference.presence_penalty, presence_penalty_per_occurrence),
        ("presence", "anti-presence"),
    ),
    "bad_words only within generated tokens": (
        replaced(reference.bad_words, bad_words_within_the_generated),
        ("bad-words", "bad-words-of-the-prompt"),
    ),
    "bad_words without their beginning": (
        replaced(reference.bad_words, bad_words_wherever_their_beginning_is),
        ("bad-words", "bad-words-of-the-prompt"),
    ),
    "min_tokens one too long": (
        replaced(reference.min_tokens, min_tokens_one_too_long),
        ("min-tokens-reached",),
    ),
    "min_tokens one too short": (
        replaced(reference.min_tokens, min_tokens_one_too_short),
        ("min-tokens-one-missing", "min-tokens-at-start"),
    ),
    "min_tokens counts the prompt": (
        replaced(reference.min_tokens, min_tokens_with_the_prompt),
        ("min-tokens-one-missing", "min-tokens-at-start"),
    ),
    "temperature before penalties": (
        moved(reference.temperature, behind=None),
        ("penalties-cold", "penalties-hot", "everything"),
    ),
    "temperature after top_p": (
        moved(reference.temperature, behind=reference.top_p),
        ("top-k-top-p", "large-top-p"),
    ),
    "top_p before top_k": (moved(reference.top_k, behind=reference.top_p), ("top-k-top-p",)),
    "typical_p before top_k": (
        moved(reference.typical_p, behind=reference.temperature),
        ("top-k-typical-p", "large-warpers"),
    ),
    "min_p before top_p": (moved(reference.top_p, behind=reference.min_p), ("top-p-min-p",)),
    "masks after top_k": (
        moved(reference.bad_words, behind=reference.top_k),
        ("masked-bias",),
    ),
    "penalties after top_k": (
        moved(reference.repetition_penalty, behind=reference.top_k),
        ("penalised-top-k",),
    ),
    "bias after penalties": (
        moved(reference.logit_bias, behind=reference.frequency_penalty),
        ("penalties-bias",),
    ),
}
