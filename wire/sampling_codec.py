"""Encodes and decodes sampling parameters and log-probabilities."""

from dataclasses import replace

from stageline_rpc.internal.v1 import step_pb2
from wire.steps import GrammarSpec, StepSampling, TokenLogprobs


def encode_sampling(sampling: StepSampling, message: step_pb2.StepSampling) -> None:
    """Write `sampling` into the empty `message`."""
    if sampling.encoded is not None:
        message.MergeFromString(sampling.encoded)
        return
    message.temperature = sampling.temperature
    message.top_k = sampling.top_k
    message.top_p = sampling.top_p
    message.seed = sampling.seed
    message.min_p = sampling.min_p
    message.typical_p = sampling.typical_p
    message.repetition_penalty = sampling.repetition_penalty
    message.frequency_penalty = sampling.frequency_penalty
    message.presence_penalty = sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        message.logit_bias.add(token=token, bias=bias)
    message.allowed_token_ids.extend(sampling.allowed_token_ids)
    for word in sampling.bad_words:
        message.bad_words.add(tokens=word)
    message.min_tokens = sampling.min_tokens
    message.min_tokens_hold_back.extend(sampling.min_tokens_hold_back)
    if sampling.logprobs is not None:
        message.logprobs = sampling.logprobs
    message.prompt_logprobs = sampling.prompt_logprobs
    if sampling.grammar is not None:
        message.grammar.definition = sampling.grammar.definition
        message.grammar.tokenizer_checksum = sampling.grammar.tokenizer_checksum


def encoded_ahead(sampling: StepSampling) -> StepSampling:
    """Return a copy with `encoded` set; 65,536 biases take 50 ms, too long for an event loop."""
    message = step_pb2.StepSampling()
    encode_sampling(sampling, message)
    return replace(sampling, encoded=message.SerializeToString())


def decode_sampling(message: step_pb2.StepSampling) -> StepSampling:
    """Decode the parameters without validating them; the sampler does that."""
    return StepSampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        seed=message.seed,
        min_p=message.min_p,
        typical_p=message.typical_p,
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=tuple((entry.token, entry.bias) for entry in message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        bad_words=tuple(tuple(word.tokens) for word in message.bad_words),
        min_tokens=message.min_tokens,
        min_tokens_hold_back=tuple(message.min_tokens_hold_back),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs,
        grammar=_decode_grammar(message.grammar) if message.HasField("grammar") else None,
    )


def encode_logprobs(logprobs: TokenLogprobs, message: step_pb2.StepLogprobs) -> None:
    """Write `logprobs` into the empty `message`."""
    message.token = logprobs.token
    message.logprob = logprobs.logprob
    message.rank = logprobs.rank
    message.top_tokens.extend(token for token, _ in logprobs.top)
    message.top_logprobs.extend(logprob for _, logprob in logprobs.top)


def decode_logprobs(message: step_pb2.StepLogprobs) -> TokenLogprobs:
    """Decode log-probabilities; lists of unequal lengths (no stage sends them) are cut."""
    top = tuple(zip(message.top_tokens, message.top_logprobs, strict=False))
    return TokenLogprobs(message.token, message.logprob, message.rank, top)


def _decode_grammar(message: step_pb2.Grammar) -> GrammarSpec:
    return GrammarSpec(definition=message.definition, tokenizer_checksum=message.tokenizer_checksum)
