"""Validates a client's message and converts it to a request; errors name field, value and limit."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from coordinator.api.tenants import NO_PUBLIC_PREFIXES, PublicPrefixes
from coordinator.engine.output_buffer import OutputBuffer
from coordinator.engine.request import Choice, Request
from coordinator.model import ServedModel
from coordinator.planner.plan import Plan
from coordinator.scheduler.sequence import Priority, QueueOrder, Sequence
from stageline_rpc.v1 import inference_pb2
from text.chat_template import ConversationError
from text.detokenizer import IncrementalDetokenizer
from text.grammars import GrammarKind, UnusableGrammar
from text.tokenizer import ChatMessage, TextCodec, TokenizerError
from wire.errors import InvalidRequest
from wire.ids import RequestId, SequenceKey, new_request_id, parse_request_id
from wire.sampling import (
    BIAS_RANGE,
    KEEP_RANGE_S,
    MAX_CHOICES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    SAMPLING_NUMBERS,
    GrammarSpec,
    Range,
    SamplingNumber,
    StepSampling,
)
from wire.step_codec import encoded_ahead

MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 64
MAX_BAD_WORD_CHARACTERS = 1024
MAX_ENTRIES = 65_536
MAX_ENTRIES_ENCODED_LATE = 512
"""Limit for encoding on each step; larger parameters are encoded once, off the event loop."""
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The checkpoint's vocabulary; `has_text` if it has a tokenizer."""

    size: int
    eos_token_ids: frozenset[int]
    has_text: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedSampling:
    """Resolved parameters; `stop_token_ids` include end-of-sequence ids unless ignored."""

    sampling: StepSampling
    stop_token_ids: frozenset[int]
    stops: tuple[str, ...]
    num_choices: int
    echo: bool
    skip_special_tokens: bool
    num_top_prompt_logprobs: int | None

    @property
    def num_top_echoed(self) -> int | None:
        """Number of log-probabilities per prompt token, for echo with logprobs."""
        return self.sampling.logprobs if self.echo else None

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.num_top_prompt_logprobs is not None or self.num_top_echoed is not None


def resolve_sampling(
    message: inference_pb2.SamplingParameters,
    vocabulary: Vocabulary,
    *,
    max_tokens: int,
    bad_words: tuple[tuple[int, ...], ...] = (),
    grammar: GrammarSpec | None = None,
) -> ResolvedSampling:
    """`bad_words` and `grammar` are the tokenizer's results for the message. Raises InvalidRequest."""
    stop_token_ids = _stop_token_ids(message, vocabulary)
    numbers: dict[str, Any] = {number.name: _number(message, number) for number in SAMPLING_NUMBERS}
    sampling = StepSampling(
        **numbers,
        top_k=_count("top_k", message.top_k, vocabulary.size),
        seed=message.seed if message.HasField("seed") else secrets.randbelow(MAX_SEED + 1),
        logit_bias=_logit_bias(message, vocabulary),
        allowed_token_ids=_allowed_token_ids(message, vocabulary),
        bad_words=_bad_words(message, bad_words, vocabulary),
        min_tokens=_count("min_tokens", message.min_tokens, max_tokens),
        min_tokens_hold_back=tuple(sorted(stop_token_ids)) if message.min_tokens else (),
        logprobs=_num_logprobs(message, "logprobs"),
        prompt_logprobs=_most_prompt_logprobs(message),
        grammar=grammar,
    )
    return _resolved(message, _checked_weight(message, sampling), stop_token_ids, _stops(message, vocabulary))


def _checked_weight(message: inference_pb2.SamplingParameters, sampling: StepSampling) -> StepSampling:
    """Encode large parameters now, so that steps do not wait for it. Raises InvalidRequest."""
    _check_weight(message, sampling)
    if len(sampling.logit_bias) + len(sampling.bad_words) > MAX_ENTRIES_ENCODED_LATE:
        return encoded_ahead(sampling)
    return sampling


def _resolved(
    message: inference_pb2.SamplingParameters,
    sampling: StepSampling,
    stop_token_ids: frozenset[int],
    stops: tuple[str, ...],
) -> ResolvedSampling:
    return ResolvedSampling(
        sampling=sampling,
        stop_token_ids=stop_token_ids,
        stops=stops,
        num_choices=_num_choices(message),
        echo=message.echo,
        skip_special_tokens=message.skip_special_tokens if message.HasField("skip_special_tokens") else True,
        num_top_prompt_logprobs=_num_logprobs(message, "prompt_logprobs"),
    )


def check_bad_words(message: inference_pb2.SamplingParameters) -> None:
    """Raises InvalidRequest for words that cannot be tokenized, and for too many."""
    num_words = len(message.bad_words) + len(message.bad_word_ids)
    if num_words > MAX_BAD_WORDS:
        raise InvalidRequest(
            f"bad_words and bad_word_ids have {num_words} entries, at most {MAX_BAD_WORDS}", field="bad_words"
        )
    for word in message.bad_words:
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            raise InvalidRequest(
                f"bad_words has a word of {len(word)} characters, must be in [1, {MAX_BAD_WORD_CHARACTERS}]",
                field="bad_words",
            )
        if not word.strip():
            raise InvalidRequest(
                "bad_words has an empty word; each needs at least one visible character", field="bad_words"
            )


def refuse_unmockable(message: inference_pb2.SamplingParameters) -> None:
    """Raises InvalidRequest for a parameter that needs logits, which mock stages do not compute."""
    needs_logits = {
        "logprobs": message.HasField("logprobs"),
        "prompt_logprobs": message.HasField("prompt_logprobs"),
        "repetition_penalty": message.HasField("repetition_penalty") and message.repetition_penalty != 1.0,
        "frequency_penalty": message.frequency_penalty != 0.0,
        "presence_penalty": message.presence_penalty != 0.0,
        message.WhichOneof("structured_output") or "": message.WhichOneof("structured_output") is not None,
    }
    if given := [name for name, is_given in needs_logits.items() if is_given]:
        raise InvalidRequest(
            f"{' and '.join(given)}: mock stages compute no logits, so they cannot honour this",
            field=given[0],
        )


def _number(message: inference_pb2.SamplingParameters, number: SamplingNumber) -> float:
    if not message.HasField(number.name):  # type: ignore[arg-type]
        return number.default
    return _within(number.name, getattr(message, number.name), number.range)


def _within(name: str, value: float, valid: Range) -> float:
    if value not in valid:
        raise InvalidRequest(f"{name} is {value:g}, must be in {valid}", field=name.partition(" ")[0])
    return value


def _count(name: str, value: int, most: int) -> int:
    if value > most:
        raise InvalidRequest(f"{name} is {value}, must be in [0, {most}]", field=name)
    return value


def _logit_bias(
    message: inference_pb2.SamplingParameters, vocabulary: Vocabulary
) -> tuple[tuple[int, float], ...]:
    _token_ids("logit_bias", message.logit_bias, vocabulary)
    for token, bias in message.logit_bias.items():
        _within(f"logit_bias of token {token}", bias, BIAS_RANGE)
    return tuple(sorted(message.logit_bias.items()))


def _token_ids(name: str, ids: Iterable[int], vocabulary: Vocabulary) -> tuple[int, ...]:
    for token in ids:
        if token >= vocabulary.size:
            raise InvalidRequest(
                f"{name} has token id {token}, must be in [0, {vocabulary.size - 1}]", field=name
            )
    return tuple(ids)


def _allowed_token_ids(message: inference_pb2.SamplingParameters, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Distinct tokens: repetitions would be sent to every stage."""
    return tuple(sorted(set(_token_ids("allowed_token_ids", message.allowed_token_ids, vocabulary))))


def _bad_words(
    message: inference_pb2.SamplingParameters, spelled: tuple[tuple[int, ...], ...], vocabulary: Vocabulary
) -> tuple[tuple[int, ...], ...]:
    check_bad_words(message)
    if spelled and (largest := max(map(max, spelled))) >= vocabulary.size:
        raise InvalidRequest(
            f"bad_words has a word with token id {largest}, which the model cannot generate: its ids are in "
            f"[0, {vocabulary.size - 1}], leave the word out",
            field="bad_words",
        )
    given = tuple(_token_ids("bad_word_ids", word.ids, vocabulary) for word in message.bad_word_ids)
    for name, words in (("bad_words", spelled), ("bad_word_ids", given)):
        for word in words:
            if not 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
                raise InvalidRequest(
                    f"{name} has a word of {len(word)} tokens, must be in [1, {MAX_BAD_WORD_TOKENS}]",
                    field=name,
                )
    return (*spelled, *given)


def _stop_token_ids(message: inference_pb2.SamplingParameters, vocabulary: Vocabulary) -> frozenset[int]:
    stops = frozenset(_token_ids("stop_token_ids", message.stop_token_ids, vocabulary))
    return stops if message.ignore_eos else stops | vocabulary.eos_token_ids


def _stops(message: inference_pb2.SamplingParameters, vocabulary: Vocabulary) -> tuple[str, ...]:
    stops = tuple(message.stop)
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop has {len(stops)} strings, must be in [0, {MAX_STOPS}]", field="stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop has a string of {len(stop)} characters, must be in [1, {MAX_STOP_CHARACTERS}]",
                field="stop",
            )
    if stops and not vocabulary.has_text:
        raise InvalidRequest(
            "stop needs a tokenizer, which this model lacks: use stop_token_ids", field="stop"
        )
    return stops


def _num_logprobs(
    message: inference_pb2.SamplingParameters, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    if not message.HasField(name):
        return None
    return _count(name, getattr(message, name), MAX_TOP_LOGPROBS)


def _most_prompt_logprobs(message: inference_pb2.SamplingParameters) -> int:
    """Maximum number requested by any reader, which stages report for scored chunks."""
    echoed = message.logprobs if message.echo else 0
    return max(message.prompt_logprobs, echoed)


def _check_weight(message: inference_pb2.SamplingParameters, sampling: StepSampling) -> None:
    """Limit entries over all choices: every stage reads them one by one for each choice."""
    num_choices = _num_choices(message)
    num_entries = len(sampling.logit_bias) + sum(map(len, sampling.bad_words))
    if num_choices * num_entries > MAX_ENTRIES:
        raise InvalidRequest(
            f"logit_bias and bad_words have {num_entries} entries and tokens for each of n = {num_choices} "
            f"choices, {num_choices * num_entries} in all; at most {MAX_ENTRIES}",
            field="logit_bias" if sampling.logit_bias else "bad_words",
        )


def _num_choices(message: inference_pb2.SamplingParameters) -> int:
    num_choices = message.n if message.HasField("n") else 1
    if not 1 <= num_choices <= MAX_CHOICES:
        raise InvalidRequest(f"n is {num_choices}, must be in [1, {MAX_CHOICES}]", field="n")
    return num_choices


DEFAULT_MAX_TOKENS = 256
TEXT_SLACK = 4
DEFAULT_KEEP_S = 60.0

PRIORITY_OF_MESSAGE: dict[int, Priority] = {
    inference_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    inference_pb2.PRIORITY_LOW: Priority.LOW,
    inference_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    inference_pb2.PRIORITY_HIGH: Priority.HIGH,
}


def request_id_of(request: inference_pb2.GenerateRequest) -> RequestId:
    """The client's id, or a new one. Raises InvalidRequest for anything but a UUIDv7."""
    if not request.request_id:
        return new_request_id()
    try:
        return parse_request_id(request.request_id)
    except ValueError as error:
        raise InvalidRequest(str(error), field="request_id") from None


def check_text_size(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """Reject a text that cannot fit before tokenizing it, which would take seconds per megabyte.

    A token has at most as many bytes as the longest in the vocabulary; `TEXT_SLACK` allows for folded
    white space.
    """
    text = _text_codec(model, "token_ids", instead_of=f"a prompt of {request.WhichOneof('prompt')}")
    texts = [request.text, *(message.content for message in request.conversation.messages)]
    size_bytes = sum(len(text.encode()) for text in texts)
    max_tokens = model.config.longest_sequence
    most_bytes = TEXT_SLACK * max_tokens * text.longest_token_bytes
    if size_bytes > most_bytes:
        raise InvalidRequest(
            f"the prompt's text has {size_bytes} bytes; more than {most_bytes} can never fit into the "
            f"model's {max_tokens} tokens of at most {text.longest_token_bytes} bytes each",
            field="prompt",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """Tokenized parts of a request: prompt, bad words and grammar."""

    prompt: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarSpec | None = None


def num_sequences_of(request: inference_pb2.GenerateRequest) -> int:
    """Number of sequences to reserve in the queue, before parameters are validated."""
    return min(max(request.sampling.n, 1), MAX_CHOICES)


def needs_tokenizer(request: inference_pb2.GenerateRequest) -> bool:
    """Whether `resolve_texts` is slow."""
    return request.WhichOneof("prompt") in ("text", "conversation") or bool(request.sampling.bad_words)


def resolve_texts(request: inference_pb2.GenerateRequest, model: ServedModel, tenant: str = "") -> Resolved:
    """Tokenize, without a grammar. Slow for a long text; kept token ids of texts are the tenant's own.

    Raises InvalidRequest.
    """
    bad_words = _bad_words_intake(request.sampling, model)
    return Resolved(prompt=resolve_prompt(request, model, tenant), bad_words=bad_words)


def resolve_prompt(
    request: inference_pb2.GenerateRequest, model: ServedModel, tenant: str = ""
) -> tuple[int, ...]:
    """Return the prompt's token ids; slow for a long text. Raises InvalidRequest."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("a prompt is needed: text, token_ids or conversation", field="prompt")
    if kind == "token_ids":
        prompt = tuple(request.token_ids.ids)
    else:
        codec = _text_codec(model, "token_ids", instead_of=f"a prompt of {kind}")
        prompt = tuple(_encode(request, codec, tenant))
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; at least 1 is needed", field="prompt")
    vocab_size = model.config.vocab_size
    if (largest := max(prompt)) >= vocab_size:
        raise InvalidRequest(
            f"prompt token id {largest} is outside the vocabulary [0, {vocab_size})", field="prompt"
        )
    return prompt


def make_request(
    message: inference_pb2.GenerateRequest,
    resolved: Resolved,
    request_id: RequestId,
    *,
    model: ServedModel,
    plan: Plan | None,
    client: str,
    place: Callable[[Priority, int], QueueOrder],
    public: PublicPrefixes = NO_PUBLIC_PREFIXES,
) -> Request:
    """Create the request; `place` assigns each choice's place in the queue. Raises InvalidRequest."""
    prompt = resolved.prompt
    max_tokens = message.max_tokens if plan is None else _max_tokens(message, len(prompt), model, plan)
    generation = _sampling_of(message, resolved, model, max_tokens)
    priority, codec, num_public = _priority(message), _output_codec(message, model), public.num_in(prompt)
    sequences = [
        Sequence(
            SequenceKey(request_id, index),
            prompt,
            max_tokens=max_tokens,
            sampling=generation.sampling,
            stop_token_ids=generation.stop_token_ids,
            order=place(priority, index),
            cache_salt=message.cache_salt,
            num_public_tokens=num_public,
            shares_cache=not message.HasField("prefix_cache") or message.prefix_cache,
            wants_prompt_logprobs=generation.wants_prompt_logprobs and index == 0,
        )
        for index in range(generation.num_choices)
    ]
    return Request(
        request_id,
        [Choice(one, _output_buffer(generation, prompt, codec)) for one in sequences],
        client=client,
        client_state=message.client_state,
        keep_s=_keep_s(message),
        num_top_prompt_logprobs=generation.num_top_prompt_logprobs,
        num_top_echoed=generation.num_top_echoed,
    )


def _sampling_of(
    message: inference_pb2.GenerateRequest, resolved: Resolved, model: ServedModel, max_tokens: int
) -> ResolvedSampling:
    return resolve_sampling(
        message.sampling,
        _vocabulary(model),
        max_tokens=max_tokens,
        bad_words=resolved.bad_words,
        grammar=resolved.grammar,
    )


def make_echoed_text(request: Request) -> None:
    """Decode the echoed prompts; slow for a long prompt."""
    for choice in request.choices:
        num_tokens = choice.buffer.num_tokens
        choice.buffer.detokenize(num_tokens, max_new=num_tokens)


def _output_buffer(
    generation: ResolvedSampling, prompt: tuple[int, ...], codec: TextCodec | None
) -> OutputBuffer:
    """With echo, the output begins with the prompt's tokens and text."""
    context, echoed = ((), prompt) if generation.echo else (prompt, ())
    detokenizer = None
    if codec is not None:
        skips = generation.skip_special_tokens
        detokenizer = IncrementalDetokenizer(codec, context, skip_special_tokens=skips)
    return OutputBuffer(
        detokenizer,
        stops=generation.stops,
        min_tokens=generation.sampling.min_tokens,
        prompt=echoed,
        has_logprobs=generation.sampling.logprobs is not None,
    )


def _output_codec(message: inference_pb2.GenerateRequest, model: ServedModel) -> TextCodec | None:
    """The codec of the output's text; None for an output of tokens only."""
    if message.output not in inference_pb2.Output.values():
        raise InvalidRequest(f"output is {message.output}, must be TEXT or TOKENS_ONLY", field="output")
    if message.output != inference_pb2.OUTPUT_TOKENS_ONLY:
        return model.text
    if message.sampling.stop:
        raise InvalidRequest("stop needs text, output is TOKENS_ONLY: use stop_token_ids", field="stop")
    return None


def _vocabulary(model: ServedModel) -> Vocabulary:
    size = model.config.vocab_size
    eos = frozenset(token for token in model.eos_token_ids if token < size)
    return Vocabulary(size=size, eos_token_ids=eos, has_text=model.text is not None)


def _keep_s(request: inference_pb2.GenerateRequest) -> float | None:
    """Seconds to keep the output after a disconnect; None to cancel."""
    policy = request.on_disconnect
    if policy.action in (
        inference_pb2.OnDisconnect.ACTION_UNSPECIFIED,
        inference_pb2.OnDisconnect.ACTION_CANCEL,
    ):
        if policy.HasField("keep_for"):
            raise InvalidRequest("on_disconnect has keep_for, which only DETACH takes", field="on_disconnect")
        return None
    if policy.action != inference_pb2.OnDisconnect.ACTION_DETACH:
        raise InvalidRequest(
            f"on_disconnect is {policy.action}, must be CANCEL or DETACH", field="on_disconnect"
        )
    if not policy.HasField("keep_for"):
        return DEFAULT_KEEP_S
    keep_s = policy.keep_for.seconds + policy.keep_for.nanos / 1e9
    if keep_s not in KEEP_RANGE_S:
        raise InvalidRequest(f"keep_for is {keep_s:g} s, must be in {KEEP_RANGE_S}", field="on_disconnect")
    return keep_s


def _priority(request: inference_pb2.GenerateRequest) -> Priority:
    if (priority := PRIORITY_OF_MESSAGE.get(request.priority)) is None:
        raise InvalidRequest(f"priority is {request.priority}, must be LOW, NORMAL or HIGH", field="priority")
    return priority


def _text_codec(model: ServedModel, possible: str, *, instead_of: str) -> TextCodec:
    if model.text is None:
        raise InvalidRequest(
            f"model {model.name} has no tokenizer: pass {possible}, not {instead_of}",
            field=instead_of if instead_of == "bad_words" else "prompt",
        )
    return model.text


def _bad_words_intake(
    sampling: inference_pb2.SamplingParameters, model: ServedModel
) -> tuple[tuple[int, ...], ...]:
    if not sampling.bad_words:
        return ()
    check_bad_words(sampling)
    codec = _text_codec(model, "bad_word_ids", instead_of="bad_words")
    return tuple(spelling for word in sampling.bad_words for spelling in codec.spellings(word))


def _never_first(
    sampling: inference_pb2.SamplingParameters, model: ServedModel, bad_words: tuple[tuple[int, ...], ...]
) -> set[int]:
    """Tokens that an output cannot begin with."""
    words = (*bad_words, *(tuple(word.ids) for word in sampling.bad_word_ids))
    never = {word[0] for word in words if len(word) == 1}
    return never | {*sampling.stop_token_ids, *model.eos_token_ids} if sampling.min_tokens else never


def compile_grammar(
    sampling: inference_pb2.SamplingParameters, model: ServedModel, bad_words: tuple[tuple[int, ...], ...]
) -> GrammarSpec:
    """Compile the grammar of a structured output; up to a second for a hostile one. Raises InvalidRequest."""
    field = sampling.WhichOneof("structured_output")
    assert field is not None, "no structured output"
    if sampling.ignore_eos:
        raise InvalidRequest(
            "ignore_eos excludes structured output, which ends with an end-of-sequence token",
            field="ignore_eos",
        )
    if model.grammars is None:
        raise InvalidRequest(f"{field}: structured output is not served", field=field)
    kind = GrammarKind(field)
    texts = sampling.choice.texts if kind is GrammarKind.CHOICE else [getattr(sampling, field)]
    try:
        return model.grammars.compile(
            kind,
            texts,
            allowed=frozenset(sampling.allowed_token_ids),
            forbidden=_never_first(sampling, model, bad_words),
        )
    except UnusableGrammar as error:
        raise InvalidRequest(str(error), field=field) from error


def _encode(request: inference_pb2.GenerateRequest, codec: TextCodec, tenant: str) -> list[int]:
    try:
        if request.WhichOneof("prompt") == "text":
            return codec.encode(request.text)
        messages = [ChatMessage(message.role, message.content) for message in request.conversation.messages]
        return codec.encode_conversation(messages, tenant=tenant)
    except (ConversationError, TokenizerError) as error:
        raise InvalidRequest(str(error), field="prompt") from error


def _max_tokens(
    request: inference_pb2.GenerateRequest, num_prompt_tokens: int, model: ServedModel, plan: Plan
) -> int:
    room = plan.max_sequence_tokens - num_prompt_tokens
    if not request.HasField("max_tokens"):
        wanted = max(1, min(DEFAULT_MAX_TOKENS, room))
    else:
        wanted = request.max_tokens
    if wanted > room:
        raise InvalidRequest(
            f"prompt of {num_prompt_tokens} + max_tokens {wanted} = {num_prompt_tokens + wanted} tokens, "
            f"more than the {plan.max_sequence_tokens} that fit ({_limit_reason(model, plan)})",
            field="max_tokens" if request.HasField("max_tokens") else "prompt",
        )
    return wanted


def _limit_reason(model: ServedModel, plan: Plan) -> str:
    model_limit = model.config.longest_sequence
    limits = f"model: {model_limit}, configured: {plan.limits.max_sequence_tokens}"
    if plan.holds_any_length:
        return limits
    return f"{limits}, KV cache: {plan.num_kv_tokens} = {plan.num_blocks} blocks of {plan.block_size}"
