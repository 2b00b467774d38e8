"""Turns a client's message into a request, or refuses it with the numbers. Pure but for the tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.api.sampling_parameters import (
    MAX_CHOICES,
    Generation,
    Vocabulary,
    check_bad_words,
    resolve_generation,
)
from coordinator.model import ServedModel
from coordinator.planning.plan import Plan
from coordinator.requests.request import Choice, Request
from coordinator.requests.transcript import Transcript
from coordinator.scheduling.order import Priority, QueueOrder
from coordinator.scheduling.sequence import Sequence
from coordinator.text.detokenizer import IncrementalDetokenizer
from coordinator.text.structured import GrammarKind, UnusableGrammar
from coordinator.text.tokenizer import ChatMessage, TextCodec, TokenizerError
from stageline_rpc.v1 import inference_pb2
from wire.errors import InvalidRequest
from wire.ids import RequestId, SequenceKey, new_request_id, parse_request_id
from wire.steps import GrammarSpec

DEFAULT_MAX_TOKENS = 256
TEXT_SLACK = 4
DEFAULT_KEEP_S = 60.0
MAX_KEEP_S = 3600.0

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
        raise InvalidRequest(str(error)) from None


def check_text_size(request: inference_pb2.GenerateRequest, model: ServedModel) -> None:
    """Refuses a text that can never fit, before it is tokenized, which would take seconds per megabyte.

    A token stands for at most as many bytes as the longest one of the vocabulary, if the tokenizer drops
    nothing; one that folds white space may drop some, so `TEXT_SLACK` times as much is let through.
    """
    text = _text_codec(model, "token_ids", instead_of=f"a prompt of {request.WhichOneof('prompt')}")
    texts = [request.text, *(each.content for each in request.conversation.messages)]
    size_bytes = sum(len(each.encode()) for each in texts)
    max_tokens = model.config.max_position_embeddings
    most_bytes = TEXT_SLACK * max_tokens * text.longest_token_bytes
    if size_bytes > most_bytes:
        raise InvalidRequest(
            f"the prompt's text has {size_bytes} bytes; more than {most_bytes} can never fit into the "
            f"model's {max_tokens} tokens of at most {text.longest_token_bytes} bytes each"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """What the tokenizer made of a request: its prompt, the words that are never generated, and what the text
    must match.
    """

    prompt: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...] = ()
    grammar: GrammarSpec | None = None


def num_sequences_of(request: inference_pb2.GenerateRequest) -> int:
    """For how many sequences the request takes room, before its parameters are checked."""
    return min(max(request.sampling.n, 1), MAX_CHOICES)


def needs_tokenizer(request: inference_pb2.GenerateRequest) -> bool:
    """Whether `resolve` takes longer than a moment."""
    sampling = request.sampling
    has_text = request.WhichOneof("prompt") in ("text", "conversation") or bool(sampling.bad_words)
    return has_text or sampling.WhichOneof("structured_output") is not None


def resolve(request: inference_pb2.GenerateRequest, model: ServedModel) -> Resolved:
    """May take a while for a long text. Raises InvalidRequest."""
    bad_words = _bad_words(request.sampling, model)
    return Resolved(
        prompt=resolve_prompt(request, model),
        bad_words=bad_words,
        grammar=_grammar(request.sampling, model, bad_words),
    )


def resolve_prompt(request: inference_pb2.GenerateRequest, model: ServedModel) -> tuple[int, ...]:
    """The prompt's token ids. May take a while for a long text. Raises InvalidRequest."""
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("a prompt is needed: text, token_ids or conversation")
    if kind == "token_ids":
        prompt = tuple(request.token_ids.ids)
    else:
        prompt = tuple(_encode(request, _text_codec(model, "token_ids", instead_of=f"a prompt of {kind}")))
    if not prompt:
        raise InvalidRequest("the prompt has no tokens; at least 1 is needed")
    vocab_size = model.config.vocab_size
    if (largest := max(prompt)) >= vocab_size:
        raise InvalidRequest(f"prompt token id {largest} is outside the vocabulary [0, {vocab_size})")
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
) -> Request:
    """`place` gives each choice its place in the queue. Without a plan, the message's `max_tokens` holds.

    Raises InvalidRequest for parameters out of range and for a sequence that can never fit.
    """
    prompt = resolved.prompt
    max_tokens = message.max_tokens if plan is None else _max_tokens(message, len(prompt), model, plan)
    generation = resolve_generation(
        message.sampling,
        _vocabulary(model),
        max_tokens=max_tokens,
        bad_words=resolved.bad_words,
        grammar=resolved.grammar,
    )
    keep_s, priority = _keep_s(message), _priority(message)

    def choice(index: int) -> Choice:
        sequence = Sequence(
            SequenceKey(request_id, index),
            prompt,
            max_tokens=max_tokens,
            sampling=generation.sampling,
            stop_token_ids=generation.stop_token_ids,
            order=place(priority, index),
            cache_salt=message.cache_salt,
            shares_cache=message.prefix_cache if message.HasField("prefix_cache") else True,
            # The prompt is the same for all choices: one of them scores it.
            wants_prompt_logprobs=generation.wants_prompt_logprobs and index == 0,
        )
        return Choice(sequence, _transcript(generation, prompt, model.text))

    return Request(
        request_id,
        [choice(index) for index in range(generation.num_choices)],
        client=client,
        keep_s=keep_s,
        num_top_prompt_logprobs=generation.num_top_prompt_logprobs,
        num_top_echoed=generation.num_top_echoed,
    )


def make_echoed_text(request: Request) -> None:
    """Decodes the prompts that outputs begin with. May take a while for a long prompt."""
    for choice in request.choices:
        choice.transcript.make_text(max_tokens=choice.transcript.num_tokens)


def _transcript(generation: Generation, prompt: tuple[int, ...], codec: TextCodec | None) -> Transcript:
    """With echo the prompt is part of the output, and its text too."""
    context, echoed = ((), prompt) if generation.echo else (prompt, ())
    detokenizer = None
    if codec is not None:
        skips = generation.skip_special_tokens
        detokenizer = IncrementalDetokenizer(codec, context, skip_special_tokens=skips)
    return Transcript(
        detokenizer,
        stops=generation.stops,
        min_tokens=generation.sampling.min_tokens,
        prompt=echoed,
        has_logprobs=generation.sampling.logprobs is not None,
    )


def _vocabulary(model: ServedModel) -> Vocabulary:
    size = model.config.vocab_size
    eos = frozenset(token for token in model.eos_token_ids if token < size)
    return Vocabulary(size=size, eos_token_ids=eos, has_text=model.text is not None)


def _keep_s(request: inference_pb2.GenerateRequest) -> float | None:
    """How long the output outlives the request; None where a disconnect cancels it."""
    policy = request.on_disconnect
    if policy.action in (inference_pb2.OnDisconnect.ACTION_UNSPECIFIED, inference_pb2.OnDisconnect.CANCEL):
        if policy.HasField("keep_s"):
            raise InvalidRequest("on_disconnect has keep_s, which only DETACH takes")
        return None
    if policy.action != inference_pb2.OnDisconnect.DETACH:
        raise InvalidRequest(f"on_disconnect is {policy.action}, must be CANCEL or DETACH")
    keep_s = policy.keep_s if policy.HasField("keep_s") else DEFAULT_KEEP_S
    if not 0 < keep_s <= MAX_KEEP_S:
        raise InvalidRequest(f"keep_s is {keep_s:g}, must be in (0, {MAX_KEEP_S:g}]")
    return keep_s


def _priority(request: inference_pb2.GenerateRequest) -> Priority:
    if (priority := PRIORITY_OF_MESSAGE.get(request.priority)) is None:
        raise InvalidRequest(f"priority is {request.priority}, must be LOW, NORMAL or HIGH")
    return priority


def _text_codec(model: ServedModel, possible: str, *, instead_of: str) -> TextCodec:
    if model.text is None:
        raise InvalidRequest(
            f"model {model.name} has no tokenizer: it can be given {possible}, not {instead_of}"
        )
    return model.text


def _bad_words(sampling: inference_pb2.SamplingParameters, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    if not sampling.bad_words:
        return ()
    check_bad_words(sampling)
    codec = _text_codec(model, "bad_word_ids", instead_of="bad_words")
    return tuple(each for word in sampling.bad_words for each in codec.spellings(word))


def _never_first(
    sampling: inference_pb2.SamplingParameters, model: ServedModel, bad_words: tuple[tuple[int, ...], ...]
) -> set[int]:
    """Tokens that an output cannot begin with."""
    words = (*bad_words, *(tuple(each.ids) for each in sampling.bad_word_ids))
    never = {word[0] for word in words if len(word) == 1}
    return never | {*sampling.stop_token_ids, *model.eos_token_ids} if sampling.min_tokens else never


def _grammar(
    sampling: inference_pb2.SamplingParameters, model: ServedModel, bad_words: tuple[tuple[int, ...], ...]
) -> GrammarSpec | None:
    field = sampling.WhichOneof("structured_output")
    if field is None:
        return None
    if sampling.ignore_eos:
        raise InvalidRequest(f"ignore_eos with {field}: structured output ends with an end-of-sequence token")
    if model.grammars is None:
        raise InvalidRequest(f"{field}: structured output is not served")
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
        raise InvalidRequest(str(error)) from error


def _encode(request: inference_pb2.GenerateRequest, codec: TextCodec) -> list[int]:
    try:
        if request.WhichOneof("prompt") == "text":
            return codec.encode(request.text)
        messages = [ChatMessage(each.role, each.content) for each in request.conversation.messages]
        return codec.encode_conversation(messages)
    except TokenizerError as error:
        raise InvalidRequest(str(error)) from error


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
            f"more than the {plan.max_sequence_tokens} that fit ({_limit_reason(model, plan)})"
        )
    return wanted


def _limit_reason(model: ServedModel, plan: Plan) -> str:
    model_limit = model.config.max_position_embeddings
    limits = f"model: {model_limit}, configured: {plan.limits.max_sequence_tokens}"
    if plan.holds_any_length:
        return limits
    return f"{limits}, KV cache: {plan.num_kv_tokens} = {plan.num_blocks} blocks of {plan.block_size}"
